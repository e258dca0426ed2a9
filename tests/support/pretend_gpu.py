"""A GPU that is not there: its tensors are in host memory, but CUDA's rules hold for them.

Operations that mix them with tensors of the host fail, and what would make the host wait for a device is noted:
reading a number, a choice by a mask, a copy that blocks or that does not come from pinned memory, a grouped
multiplication that torch has no kernel for. While a graph is captured these fail, and so does every other copy
between host and GPU: a replay would read memory that holds something else by then.
"""

import traceback
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda", 0)

aten = torch.ops.aten
_ASKS = {
    aten._local_scalar_dense.default,
    aten.bincount.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
}
_GROUPED = aten._grouped_mm.default  # looks at the ends of its groups in all types but one
_INDEXING = {
    aten._index_put_impl_.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
}


class _OnGPU(torch.Tensor):
    """Tells Python that it is on the GPU, and torch's own code that it is on ``meta``, which exists everywhere."""

    @staticmethod
    def __new__(cls, held):
        self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device="meta",
        )  # fmt: skip
        self.held = held
        return self

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def data_ptr(self):
        return self.held.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError("can't convert a tensor on the GPU to numpy")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("a pretended tensor is used outside of pretend_gpu()")

    __torch_function__ = torch._C._disabled_torch_function_impl


class PretendedGPU(TorchDispatchMode):
    """The device; see :func:`pretend_gpu`."""

    def __init__(self):
        super().__init__()
        self.waits = []
        self.pinned = {}
        self._watching = False
        self._capturing = False

    def captured(self, work, device):
        """In place of :func:`rco.compression.cuda_graphs.captured`: a graph that runs the work again."""
        work()
        outputs = self._capture(work)
        return PretendedGraph(lambda: self._capture(work), outputs), outputs

    def _capture(self, work):
        self._capturing = True
        try:
            return work()
        finally:
            self._capturing = False

    @contextmanager
    def watched(self):
        """Note every wait inside, with the place in rco that it comes from."""
        self._watching = True
        try:
            yield self.waits
        finally:
            self._watching = False

    def pin(self, tensor):
        """The tensor in memory that counts as pinned."""
        if tensor.untyped_storage().data_ptr() not in self.pinned:
            tensor = tensor.detach().clone()
            self.pinned[tensor.untyped_storage().data_ptr()] = (
                tensor  # kept, so that its address stays its own
            )
        return tensor

    def _wait(self, what):
        if self._capturing:
            raise RuntimeError(f"operation not permitted when a graph is captured: {what}")
        if self._watching:
            places = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if "/rco/" in f.filename]
            self.waits.append((str(what), places[-2:]))

    def _check(self, func, args, kwargs, there, here):
        """CUDA's rules for one call with tensors ``there`` and ``here``."""
        if func in (aten._to_copy.default, aten.copy_.default):
            source, target_there = args[0], func is aten.copy_.default and isinstance(args[0], _OnGPU)
            if func is aten.copy_.default:
                source = args[1]
            else:
                target_there = _wants_gpu(kwargs, isinstance(source, _OnGPU))
            if target_there == isinstance(source, _OnGPU):
                return
            if self._capturing:
                self._wait(f"copy between host and GPU, {tuple(source.shape)}")
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self._wait(func)
            elif target_there and source.untyped_storage().data_ptr() not in self.pinned:
                self._wait(f"copy from memory that is not pinned, {tuple(source.shape)}")
            return
        if func in _INDEXING:
            if here and not isinstance(args[0], _OnGPU):
                raise RuntimeError(
                    f"{func}: a tensor of the host is indexed with, or given, tensors of the GPU"
                )
            chosen = [index for index in args[1] if index is not None]
            if any(
                not isinstance(index, _OnGPU) or index.dtype in (torch.bool, torch.uint8) for index in chosen
            ):
                self._wait(func)
        elif any(tensor.ndim for tensor in here):
            shapes = [(type(t).__name__, tuple(t.shape)) for t in (*there, *here)]
            raise RuntimeError(f"{func} mixes tensors of the host and of the GPU: {shapes}")
        if func in _ASKS or (func is _GROUPED and args[0].dtype != torch.bfloat16):
            self._wait(func)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        there = [t for t in tensors if isinstance(t, _OnGPU)]
        if there or func is aten._to_copy.default:
            self._check(func, args, kwargs, there, [t for t in tensors if not isinstance(t, _OnGPU)])
        on_gpu = _wants_gpu(kwargs, bool(there))
        if func is aten.copy_.default:
            on_gpu = isinstance(args[0], _OnGPU)
        pin = bool(kwargs.pop("pin_memory", False))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        arguments = tree_map(_held, args)
        if func is aten.histc.default:  # a CPU has none of integers
            arguments = (arguments[0].float(), *arguments[1:])
        found = func(*arguments, **tree_map(_held, kwargs))
        if func is aten.histc.default:
            found = found.to(args[0].dtype)
        known = {id(_held(tensor)): tensor for tensor in tensors}
        if pin:
            found = self.pin(found)

        def placed(value):
            if not isinstance(value, torch.Tensor):
                return value
            return known.get(id(value), _OnGPU(value) if on_gpu else value)

        return tree_map(placed, found)


class PretendedGraph:
    """A captured graph: every replay overwrites the outputs."""

    def __init__(self, work, outputs):
        self._work, self._outputs = work, outputs

    def replay(self):
        for kept, found in zip(self._outputs, self._work(), strict=True):
            kept.copy_(found)


def _held(value):
    return value.held if isinstance(value, _OnGPU) else value


def _wants_gpu(kwargs, otherwise):
    device = kwargs.get("device")
    return otherwise if device is None else torch.device(device).type in ("cuda", "meta")


@contextmanager
def pretend_gpu(monkeypatch):
    """Inside, tensors may be moved to :data:`GPU`."""
    gpu = PretendedGPU()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: gpu.pin(self))
    with gpu:
        yield gpu
