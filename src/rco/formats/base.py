"""The interface of storage formats: :class:`Format`, and :class:`Stored`, one tensor in a format.

A format states its exact size in the checkpoint, encodes a weight, decodes it bit for bit as the serving engine
does, and gives a search the inner product of a gradient with the decoded weight. A new format is one file with a
subclass of :class:`Format` and one line in :data:`rco.registry.FORMATS`; see ``docs/add_a_format.md``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor, nn

__all__ = [
    "ActivationRule",
    "AdamState",
    "AdamStep",
    "EncodeSettings",
    "Encoded",
    "Format",
    "Stored",
    "TensorLayout",
    "Tunable",
    "TunableKernels",
]

Shape = tuple[int, int]
ActivationRule = Callable[[Tensor], Tensor]
"""Rounding that an engine applies to the inputs of a layer, as a function of the same shape and type."""

_CHUNK_ELEMENTS = 1 << 22


class TensorLayout(NamedTuple):
    """Type and shape of one tensor of a checkpoint file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """Settings of the encoders; a family ignores those that do not concern it.

    Attributes:
        storage_dtype: Type of scales and of decoded values; that of the weight if None.
        clip: Range of every group: fitted by search, or its extremes.
        damp: GPTQ's dampening, as a part of the mean of the Hessian's diagonal.
        act_order: GPTQ's order of the columns: by falling diagonal instead of from left to right.
        sweeps: Passes of coordinate descent over the codes after GPTQ.
        weight_peak: Largest size of a weight that an engine keeps in one tensor with this one; that of the weight
            itself if None.
        input_peak: Largest size of the layer's inputs, for formats that round them with a fixed scale.
    """

    storage_dtype: torch.dtype | None = None
    clip: Literal["search", "minmax"] = "search"
    damp: float = 0.01
    act_order: bool = False
    sweeps: int = 0
    weight_peak: float | None = None
    input_peak: float | None = None


class Stored:
    """One (out, in) weight in one format, as written by a candidate store and read by a switchable layer.

    Args:
        format: The format.
        shape: (out, in) of the decoded matrix.
        tensors: Everything that is stored, by name, all on one device.
    """

    def __init__(self, format: Format, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        self.format, self.shape, self.tensors = format, shape, dict(tensors)

    @property
    def device(self) -> torch.device:
        """Device of the tensors; the CPU if there are none."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the decoded values: that of the first floating-point tensor, float32 if there is none."""
        kinds = (tensor.dtype for tensor in self.tensors.values() if tensor.dtype.is_floating_point)
        return next(kinds, torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as held in memory."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def over(self, tensors: Mapping[str, Tensor], shape: Shape | None = None) -> Self:
        """The same format over other tensors of the same names."""
        return cast(Self, self.format.restore(shape or self.shape, tensors))

    def to(self, device: torch.device | str) -> Self:
        """The same weight on another device."""
        return self.over({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def clone(self) -> Self:
        """A copy that shares no memory."""
        return self.over({name: tensor.clone() for name, tensor in self.tensors.items()})

    def codes(self) -> Tensor | None:
        """The codes, integers (out, in); None for a format without codes."""
        return None

    def rows(self, start: int, stop: int) -> Self:
        """Some rows, sharing memory: one matrix of several that were stacked."""
        return cast(Self, self.format.rows(self, start, stop))

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The decoded matrix (see :meth:`Format.decode`).

        Args:
            dtype: Type of the result; that of the decoded values (or of ``out``) if not given.
            out: Write here instead of allocating.
        """
        if out is None:
            return self.format.decode(self, dtype or self.dtype)
        if (
            tuple(out.shape) != tuple(self.shape)
            or out.device != self.device
            or dtype not in (None, out.dtype)
        ):
            raise ValueError(
                f"out must be {self.shape} on {self.device}" + (f" of {dtype}" if dtype else "")
                + f", got {tuple(out.shape)} on {out.device} of {out.dtype}."
            )  # fmt: skip
        self.decode(out)
        return out

    def decode(self, out: Tensor) -> None:
        """Write the decoded matrix to ``out``, a matrix of its shape."""
        self.format.decode_into(self, out)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.format.name}, {self.shape[0]}x{self.shape[1]}, {self.device})"


class AdamState(NamedTuple):
    """Adam's state of one parameter: the first and second moments, and the learning rate."""

    moments: tuple[Tensor, Tensor]
    rate: float


class AdamStep(NamedTuple):
    """Numbers of one step of Adam; those that change from step to step are on the device.

    Attributes:
        numbers: Float32: share of the learning rate over the correction of the first moments, and one over the
            correction of the second ones.
        step: Number of the step, int64.
        betas: Decay of the moments.
        epsilon: Added to the root of the second moments.
    """

    numbers: Tensor
    step: Tensor
    betas: tuple[float, float]
    epsilon: float


class TunableKernels(Protocol):
    """Kernels for the training of one tunable, instead of its differentiable decoding. Matrices are contiguous."""

    def gradients(self, gradient: Tensor) -> dict[str, Tensor]:
        """Gradients of the parameters from that of the decoded matrix, if codes are not trained."""
        ...

    def decode(self, out: Tensor) -> None:
        """Write the decoded matrix to ``out``."""
        ...

    def adam(self, gradient: Tensor, out: Tensor, state: Mapping[str, AdamState], step: AdamStep) -> None:
        """One step of Adam if codes are trained, from the gradient of the decoded matrix; writes the new one."""
        ...


class Tunable(nn.Module, ABC):
    """A stored weight as a differentiable function of its trainable parts; ``forward()`` is the decoded matrix.

    ``format.decode(tunable.stored(), dtype)`` equals ``forward()`` bit for bit at any value of the parameters; a
    tunable that relaxes its grid while it is trained does so in training mode alone.

    Attributes:
        spacing: Parameter name -> change that moves the stored value by one step of its grid, where the gradient is
            that of straight-through rounding. Parameters that are not named are continuous up to their type.
    """

    spacing: ClassVar[Mapping[str, float]] = {}

    @abstractmethod
    def forward(self) -> Tensor:
        """The decoded matrix in the type of the decoded values."""

    @abstractmethod
    def stored(self) -> Stored:
        """The stored weight of the present parameters."""

    def kernels(self) -> TunableKernels | None:
        """Kernels of a training step on the present device; None: it is made of torch operations."""
        return None

    def anneal(self, progress: float) -> bool:
        """Adapt to the finished share of the training, from 0 to 1; called before every step.

        Returns:
            Whether the decoded matrix changed.
        """
        return False


class Encoded(NamedTuple):
    """A weight in one format, with its error.

    Attributes:
        stored: The weight.
        error: ``tr(D H D^T)`` of the difference D from the original, H the second moments of the inputs; without
            them the sum of squared differences.
        relative_error: The same as a part of that of the original weight.
    """

    stored: Stored
    error: float
    relative_error: float


class Format(ABC):
    """Storage format of a tensor. Subclasses are frozen dataclasses: hashable and equal by value.

    Attributes:
        family: Name of the subclass, its key in :data:`rco.registry.FORMATS`.
        bits: Nominal bits per weight, as averaged by a budget: 0 for a removed one, 16 for the original.
        rows_per_scale: Rows that share a scale.
        rounds_inputs: Whether the inputs of the layer are rounded, too.
        calibrates_inputs: Whether inputs are rounded by a fixed scale, which depends on their largest size.
    """

    family: ClassVar[str]
    bits: int
    rows_per_scale: ClassVar[int] = 1
    rounds_inputs: ClassVar[bool] = False
    calibrates_inputs: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique name, such as ``int3-g64``; :meth:`parse` reads it."""

    @classmethod
    @abstractmethod
    def parse(cls, name: str) -> Format | None:
        """The format of that name; None if it is not of this family."""

    @classmethod
    def listed(cls) -> dict[str, str]:
        """Names that users choose formats of this family by, with a line on each; empty: not chosen by name."""
        return {}

    @abstractmethod
    def layout(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorLayout]:
        """The tensors of a weight in the checkpoint file, by the last part of their names.

        Args:
            shape: (out, in) of the weight.
            dtype: Type of the model: that of scales and of unchanged weights.
        """

    @abstractmethod
    def encode(
        self, weight: Tensor, statistics: Tensor | None = None, *, settings: EncodeSettings | None = None
    ) -> Stored:
        """Store a weight.

        Args:
            weight: (out, in) of any floating-point type.
            statistics: (in, in) second moments of the layer's inputs, as
                :class:`~rco.formats.hessian.HessianAccumulator` gives them, or their diagonal (in,) for
                families that use no more; None if there are none.
            settings: Further settings; defaults if None.
        """

    @abstractmethod
    def decode(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The dense matrix in ``dtype``: bit for bit the one that the serving engine computes with, then cast."""

    def dense(self, stored: Stored) -> Tensor | None:
        """The stored tensor that is the weight itself, of any floating-point type; None if it must be decoded."""
        return None

    def decode_into(self, stored: Stored, out: Tensor) -> None:
        """Write the decoded matrix to ``out``, which may be on another device."""
        out.copy_(self.decode(stored, out.dtype))

    def on(self, columns: int) -> Format:
        """The equivalent format that is written for rows of that length."""
        return self

    def fits(self, columns: int) -> bool:
        """Whether rows of that length can be stored."""
        return True

    def nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Exact bytes of a weight's tensors in the checkpoint file."""
        return sum(tensor.nbytes for tensor in self.layout(shape, dtype).values())

    def memory_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes of a weight in memory during a search; by default those of the file, without its shape."""
        layout = self.on(shape[1]).layout(shape, dtype)
        return sum(tensor.nbytes for name, tensor in layout.items() if name != "weight_shape")

    def file_tensors(self, stored: Stored) -> dict[str, Tensor]:
        """The tensors of the checkpoint file, by the names that :meth:`layout` gives them."""
        return dict(stored.tensors)

    def restore(self, shape: Shape, tensors: Mapping[str, Tensor]) -> Stored:
        """The stored weight of these tensors: the inverse of ``stored.tensors``."""
        return Stored(self, shape, tensors)

    @classmethod
    def encode_all(
        cls,
        formats: Sequence[Format],
        weight: Tensor,
        statistics: Tensor | None = None,
        *,
        settings: EncodeSettings | None = None,
    ) -> list[Encoded]:
        """Store a weight in several formats of this family; some families share work among them."""
        found = (each.encode(weight, statistics, settings=settings) for each in formats)
        return [measured(stored, weight, statistics) for stored in found]

    def inner_products(self, stored: Stored, gradient: Tensor, segments: int = 1) -> Tensor:
        """``<gradient, W>`` with the decoded matrix W, for each of ``segments`` parts of the rows: (segments,).

        In float64, or float32 where the device has no float64.
        """
        return dense_products(gradient, self.decode(stored, stored.dtype), segments)

    def tunable(
        self, stored: Stored, original: Tensor | None = None, *, codes: bool = True
    ) -> Tunable | None:
        """The weight with its trainable parts; None if it has none.

        Untrained, it decodes to the stored weight bit for bit.

        Args:
            stored: The weight.
            original: The weight before it was stored, (out, in), if at hand: codes can start at its fractional part
                on the grid.
            codes: Whether codes are trained as well; if not, only what is shared by many weights, such as scales.
        """
        return None

    def input_rule(self, stored: Stored) -> ActivationRule | None:
        """Rounding that the engine applies to the inputs of the layer; None if there is none."""
        return None

    def rows(self, stored: Stored, start: int, stop: int) -> Stored:
        """Some rows of a weight, sharing memory; for formats whose tensors have one row per row of the weight."""
        rows, columns = stored.shape
        self._check_rowwise(stored)
        parts = {name: tensor[start:stop] for name, tensor in stored.tensors.items()}
        return stored.over(parts, (len(range(rows)[start:stop]), columns))

    def stack(self, weights: Sequence[Stored]) -> Stored:
        """Weights of one format and row length as one, the rows of the first on top."""
        first = weights[0]
        if len({(each.format, each.shape[1]) for each in weights}) > 1:
            raise ValueError("Only weights of one format and row length can be stacked.")
        self._check_rowwise(first)
        parts = {name: torch.cat([each.tensors[name] for each in weights]) for name in first.tensors}
        return first.over(parts, (sum(each.shape[0] for each in weights), first.shape[1]))

    def _check_rowwise(self, stored: Stored) -> None:
        for name, tensor in stored.tensors.items():
            if not tensor.ndim or tensor.shape[0] != stored.shape[0]:
                raise ValueError(
                    f"{self.name} keeps {name!r} as {tuple(tensor.shape)} for a weight of {stored.shape[0]} rows; "
                    f"a format whose tensors are not cut along the rows must define `rows` and `stack` itself."
                )


def dense_products(gradient: Tensor, weight: Tensor, segments: int = 1) -> Tensor:
    """(segments,) inner products of a gradient with a dense matrix, summed in float64 where the device has it."""
    rows, columns = gradient.shape
    exact = torch.float32 if gradient.device.type == "mps" else torch.float64
    total = torch.empty(rows, dtype=exact, device=gradient.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    work = torch.promote_types(torch.promote_types(gradient.dtype, weight.dtype), torch.float32)
    for start in range(0, rows, step):
        part, value = gradient[start : start + step], weight.detach()[start : start + step]
        total[start : start + step] = torch.linalg.vecdot(part.to(work), value.to(work))
    return total.view(segments, -1).sum(dim=1)


def measured(stored: Stored, weight: Tensor, statistics: Tensor | None) -> Encoded:
    """A stored weight with its error."""
    original = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    difference = stored.dequantize(original.dtype).to(weight.device) - original

    def size(matrix: Tensor) -> float:
        matrix = matrix.double()
        if statistics is None:
            return float(matrix.square().sum())
        if statistics.ndim == 1:
            return float((matrix.square() * statistics.to(matrix)).sum())
        return float(((matrix @ statistics.to(matrix)) * matrix).sum())

    error = size(difference)
    return Encoded(stored, error, error / (size(original) or 1.0))
