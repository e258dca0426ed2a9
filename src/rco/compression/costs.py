"""Exact integer costs of every option of every group under a kind of budget, and the budget in the same units.

Kinds where weights are packed: ``bits`` (parameters times width), ``bpw`` (scales and zero points too), ``size``
(bytes of the checkpoint) and ``active_bits`` (parameters times width times the tokens that visit them). Bits may
be counted over all quantized weights or over experts alone, as papers on mixtures of experts do. Kinds where
experts are only kept or removed: ``experts``, ``parameters`` and ``size``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import ceil, floor
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rco.compression.file_size import (
    FileLayout,
    distinct_state,
    fixed_bytes,
    option_bytes,
    stored_bits,
    weight_bits,
)
from rco.compression.gguf_target import GGUFTarget
from rco.compression.plan import CompressionPlan, Group
from rco.data.calibration import CalibrationSet
from rco.formats.base import Format
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.expert_scores import count_visits
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import EXPERT_ROLE, ExpertLinear, sparse_layers
from rco.models.precision import computing_in, default_compute_dtype

__all__ = [
    "EXPERT_ROLES",
    "Costs",
    "Count",
    "ExpertShares",
    "Visits",
    "routing_visits",
]

Count = Literal["all", "experts"]
_ROUTING_BATCH = 8  # sequences at a time
_KINDS = ("bits", "bpw", "size", "active_bits")
_REMOVAL_KINDS = ("experts", "parameters", "size")
# Most bytes of a tensor's entry in a safetensors header beside its name: type, shape and offsets.
_HEADER_ENTRY = 120
# transformers may write a stacked tensor as this many tensors per expert (gate and up).
_TENSORS_PER_PARAMETER = 2
EXPERT_ROLES = (EXPERT_ROLE, "shared_expert")


@dataclass(frozen=True)
class Visits:
    """Routing counts of experts.

    Attributes:
        tokens: Tokens of the text.
        experts: Tokens routed to each expert, by position of the sparse layer.
    """

    tokens: int
    experts: Mapping[int, Sequence[int]]

    def of(self, info: LinearInfo) -> int:
        """Tokens that read a linear. An unvisited expert counts as visited once, so that no option is free."""
        if isinstance(info, ExpertLinear):
            return max(int(self.experts[info.layer.index][info.expert]), 1)
        return self.tokens


def routing_visits(
    loaded: LoadedModel, calibration: CalibrationSet, compute_dtype: torch.dtype | None = None
) -> Visits | None:
    """Tokens routed to every expert; None for a model without experts."""
    if not sparse_layers(loaded.model):
        return None
    dtype = compute_dtype or default_compute_dtype(loaded.device, loaded.dtype)
    with computing_in(loaded.model, dtype):
        counts = count_visits(
            loaded.model, ((part.tokens, part.mask) for part in calibration.batches(_ROUTING_BATCH))
        )
    return Visits(int(calibration.mask.sum()), dict(enumerate(counts)))


@dataclass(frozen=True)
class ExpertShares:
    """Costs of keeping experts.

    Attributes:
        per_expert: Cost of one expert, for every layer.
        fixed: Cost of the model without any expert.
    """

    per_expert: tuple[int, ...]
    fixed: int

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[MoELayer], kind: str) -> ExpertShares:
        """Shares in experts, parameters, or bytes of all safetensors files (an upper bound on headers)."""
        if kind == "experts":
            return cls((1,) * len(layers), 0)
        state = distinct_state(model)
        header = kind == "size"

        def weigh(value: Tensor) -> int:
            return value.numel() * (value.element_size() if header else 1)

        def entry(name: str) -> int:
            return len(name) + _HEADER_ENTRY if header else 0

        total = sum(weigh(value) + entry(name) for name, value in state.items())
        total += 4096 if header else 0  # alignment, header lengths and metadata
        per_expert = []
        for layer in layers:
            share = 0
            for part in (layer.router, layer.experts):
                for name, value in [*part.named_parameters(), *part.named_buffers()]:
                    if not value.ndim or value.shape[0] != layer.num_experts:
                        continue
                    share += weigh(value) // layer.num_experts
                    if part is layer.experts:
                        path = f"{layer.name}.{layer.architecture.experts}.{layer.num_experts}.{name}.weight"
                        share += _TENSORS_PER_PARAMETER * entry(path)
                        total += _TENSORS_PER_PARAMETER * entry(path) * layer.num_experts
            per_expert.append(share)
        experts = sum(share * layer.num_experts for share, layer in zip(per_expert, layers, strict=True))
        return cls(tuple(per_expert), total - experts)


@dataclass(frozen=True)
class Costs:
    """Costs of one plan under one kind of budget.

    Args:
        model: The model.
        plan: Groups, widths and grid.
        kind: Kind of the budget.
        count: Linears that bits are averaged over.
        visits: Routing counts of experts; for ``active_bits``.
        linears: All linears of the model, for ``size``.
    """

    model: nn.Module
    plan: CompressionPlan
    kind: str
    count: Count = "all"
    visits: Visits | None = None
    linears: Sequence[LinearInfo] = field(default=())

    def __post_init__(self) -> None:
        if self.plan.removes_only:
            if self.kind not in _REMOVAL_KINDS:
                raise ValueError(
                    f"Expert pruning takes a budget of {', '.join(_REMOVAL_KINDS)}, got {self.kind}."
                )
            return
        if self.kind not in _KINDS:
            raise ValueError(f"Quantization takes a budget of {', '.join(_KINDS)}, got {self.kind}.")
        if self.kind == "active_bits" and self.visits is None:
            raise ValueError(
                "`active_bits` weighs experts by the tokens routed to them, but there are no routing counts: use "
                "`bits` for a model without experts, or count the visits of experts first."
            )
        if self.count == "all":
            return
        if self.kind == "size":
            raise ValueError(
                "`size` counts the whole checkpoint; leave out `count='experts'`, which is for bits."
            )
        if not self.plan.experts:
            raise ValueError("`count='experts'` needs a model with experts.")
        free = [group for group in self.plan.groups if not self.counts(group) and len(group.options) > 1]
        if free:
            raise ValueError(
                f"Bits are counted over experts alone, so {len(free)} other groups, such as {free[0].name}, would "
                "cost nothing: lock them (`lock='attention=16'`), or count everything (`count='all'`)."
            )

    def counts(self, group: Group) -> bool:
        """Whether a group is counted."""
        return self.counts_linear(group.members[0])

    def counts_linear(self, info: LinearInfo) -> bool:
        """Whether a linear is counted."""
        return self.count == "all" or info.role in EXPERT_ROLES

    @cached_property
    def shares(self) -> ExpertShares:
        """Costs of keeping experts, for plans that only keep or remove them."""
        return ExpertShares.of(self.model, self.plan.sparse_layers, self.kind)

    @cached_property
    def _layout(self) -> FileLayout:
        return FileLayout.of(self.model)

    def of(self, info: LinearInfo, option: Format) -> int:
        """Cost of one linear at one width; an expert that is pruned costs nothing."""
        if option == REMOVED:
            return 0
        stored_as, file = self.plan.format_of(info, option), self.plan.gguf
        if file is not None and self.kind in ("bpw", "size"):
            return file.linear_bytes(info, option.bits) * (8 if self.kind == "bpw" else 1)
        if file is not None and stored_as == ORIGINAL:  # 16 bits in the file, for any type of the model
            return 8 * file.linear_bytes(info, option.bits) * self.weight(info)
        if self.kind == "size":
            return option_bytes(info, stored_as, self._layout)
        if self.kind == "bpw":
            return stored_bits(info, stored_as)
        return weight_bits(info, stored_as) * self.weight(info)

    def weight(self, info: LinearInfo) -> int:
        """Multiplier of a linear's cost: 1, or the tokens that read it."""
        return self.visits.of(info) if self.kind == "active_bits" and self.visits is not None else 1

    @cached_property
    def matrix(self) -> np.ndarray:
        """(N, K) costs; groups that are not counted cost nothing."""
        if self.plan.removes_only:
            kept = np.array(self.shares.per_expert, dtype=np.int64)[self.plan.layer_of_group]
            return np.stack([np.zeros_like(kept), kept], axis=1)
        target = self.plan.target
        if target is not None and self.kind in ("bpw", "size"):
            return np.array([self._tensor_costs(target, group) for group in self.plan.groups], dtype=np.int64)
        rows = []
        for group in self.plan.groups:
            if not self.counts(group):
                rows.append([0] * len(self.plan.options))
                continue
            # Experts of a group have few shapes: compute each once.
            shapes: dict[tuple[object, ...], int] = {}
            members: list[LinearInfo] = []
            for member in group.members:
                name = member.name if self.kind == "size" else ""
                key = (member.in_features, member.out_features, len(name), self.weight(member))
                shapes[key] = shapes.get(key, 0) + 1
                if shapes[key] == 1:
                    members.append(member)
            rows.append(
                [
                    sum(n * self.of(m, option) for m, n in zip(members, shapes.values(), strict=True))
                    for option in self.plan.options
                ]
            )
        return np.array(rows, dtype=np.int64)

    def _tensor_costs(self, target: GGUFTarget, group: Group) -> list[int]:
        """Bytes, or bits, of a group's tensors in a GGUF file; types that do not fit cost as much as the first."""
        size = self.kind == "size"
        options = [option if option in group.options else group.options[0] for option in self.plan.options]
        return [(1 if size else 8) * target.option_bytes(group.members, o, aligned=size) for o in options]

    @cached_property
    def parameters(self) -> int:
        """Divisor of an average: number of weights, for active bits each times the tokens that read it.

        Bits per weight of a GGUF file are averaged over all its tensors, as llama.cpp does.
        """
        if self.plan.target is not None and self.kind == "bpw":
            return self.plan.target.elements
        return self._unread_weights + sum(
            member.parameters * self.weight(member)
            for group in self.plan.groups
            if self.counts(group)
            for member in group.members
        )

    @property
    def _unread_weights(self) -> int:
        """Weights of experts that are left unchanged; for active bits as if every token read them."""
        tokens = self.visits.tokens if self.kind == "active_bits" and self.visits is not None else 1
        return tokens * sum(each.weight.numel() for each in self.plan.unread)

    @cached_property
    def fixed(self) -> int:
        """Bytes, parameters or bits that no choice changes."""
        if self.plan.removes_only:
            return self.shares.fixed
        target = self.plan.target
        if target is not None and self.kind in ("bpw", "size"):
            size = self.kind == "size"
            return (1 if size else 8) * target.other_bytes(self.plan.linears, aligned=size)
        if self.kind != "size":
            widths = {each.weight.dtype.itemsize * 8 for each in self.plan.unread}
            return self._unread_weights * max(widths, default=0)
        if self.plan.gguf is not None:
            return self.plan.gguf.fixed_bytes(self.plan.linears)
        names = [info.name for info in self.plan.linears]
        return fixed_bytes(self.model, names, self._layout, self.linears)

    def total(self, amount: Fraction) -> Fraction:
        """A user's budget of packed weights in the units of the matrix."""
        return (amount if self.kind == "size" else amount * self.parameters) - self.fixed

    def describe(self, units: float) -> str:
        """A number of units of the matrix in the user's terms."""
        if self.plan.removes_only:
            return f"{units:.1f} experts kept" if self.kind == "experts" else f"{units:,.0f} units"
        if self.kind == "size":
            return f"{units + self.fixed:,.0f} bytes"
        return f"{(units + self.fixed) / self.parameters:.4f} {self.kind.replace('_', ' ')}"

    def _least(self, allowed: np.ndarray) -> np.ndarray:
        """(N,) costs of the cheapest assignment that keeps each router's top-k experts."""
        plan, costs = self.plan, self.matrix
        most = costs.max(initial=0) + 1
        cheapest = np.where(allowed, costs, most).min(axis=1)
        if REMOVED not in plan.options:
            return np.asarray(cheapest)
        stays = allowed & np.array([option != REMOVED for option in plan.options])
        kept = np.where(stays, costs, most).min(axis=1)
        layer_of_group = plan.layer_of_group
        for number, layer in enumerate(plan.sparse_layers):
            members = np.flatnonzero(layer_of_group == number)
            order = members[np.argsort((kept - cheapest)[members], kind="stable")]
            cheapest[order[: layer.top_k]] = kept[order[: layer.top_k]]
        return np.asarray(cheapest)

    @property
    def unit(self) -> str:
        """Name of a unit of the matrix."""
        names = {
            "size": "bytes",
            "active_bits": "bits x tokens",
            "experts": "experts kept",
            "parameters": "parameters",
        }
        return names.get(self.kind, "bits")

    @property
    def range(self) -> tuple[str, str]:
        """Lowest and highest feasible budget, as a user would write them."""
        allowed, costs = self.plan.allowed, self.matrix
        low = int(self._least(allowed).sum())
        high = int(np.where(allowed, costs, 0).max(axis=1).sum())
        if self.plan.removes_only:
            return f"{low + self.fixed:,} {self.unit}", f"{high + self.fixed:,} {self.unit}"
        if self.kind == "size":
            return f"{low + self.fixed:,} bytes", f"{high + self.fixed:,} bytes"
        # Rounded inwards, so that both printed ends are feasible.
        low, high = low + self.fixed, high + self.fixed
        ends = ceil(Fraction(low, self.parameters) * 10**5), floor(Fraction(high, self.parameters) * 10**5)
        return f"{ends[0] / 10**5:g}", f"{ends[1] / 10**5:g}"
