"""Matrix products in half precision on a CPU, which many CPUs compute slowly or not at all, are errors inside."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HALF = (torch.bfloat16, torch.float16)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "matmul", "linear", "einsum",
            "grouped_mm", "convolution")  # fmt: skip


class NoHalfProducts(TorchDispatchMode):
    """Refuses them by name; counts the products that it lets pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::").lstrip("_")
        if name in PRODUCTS or "scaled_dot_product" in name or "convolution" in name:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            half = [leaf.dtype for leaf in given if leaf.device.type == "cpu" and leaf.dtype in HALF]
            assert not half, f"{func} was given {half[0]} on a CPU"
            self.passed += 1
        return func(*args, **(kwargs or {}))
