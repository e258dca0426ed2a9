"""Rules of the serving engines, for checking plans before a search and checkpoints after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rco.compression.llama_quantize import GGUF_WIDTHS
from rco.formats.base import Format
from rco.formats.floating import FloatingPoint
from rco.formats.integer import IntegerGrid
from rco.models.layout import DENSE_HEADS, PACKED_EMBEDDINGS

__all__ = ["ENGINES", "Engine", "ExpertGroups", "find_engine"]

ExpertGroups = Literal["expert", "projection", "layer", "layer-projection", "model"]
"""Matrices that share a width: an expert's three; its gate and up (down by itself); all experts of a layer; one
projection of all experts of a layer; all experts."""

_PACKED = frozenset(range(1, 9))  # widths of the format
_FLOATING = frozenset(FloatingPoint.listed())
# vLLM has one scheme for MXFP4 and one for MXFP8, which round inputs on GPUs that can: weights alone are no option.
# E4M3 blocks with unrounded inputs fail an assertion at loading (0.32). Of 8-bit integers it reads packed ones.
_VLLM_FLOATING = _FLOATING - {"mxfp4", "mxfp8", "fp8-block", "int8"}
# Its fused experts have no scheme for E4M3 weights with unrounded inputs.
_VLLM_FLOATING_EXPERTS = _VLLM_FLOATING - {"fp8"}
# Marlin kernels never round inputs.
_MARLIN_FLOATING = frozenset({"fp8", "nvfp4", "mxfp4"})
# transformers reads the weight of an embedding before it loads it, so it must be stored under that name.
_BYTES = frozenset({"int8", "fp8", "fp8-block", "mxfp8"})


@dataclass(frozen=True)
class Engine:
    """Supported compressed-tensors checkpoints (weights only) or GGUF files of an engine.

    Attributes:
        name: Name on the command line.
        note: The rules in one line.
        symmetric_bits: Supported widths without zero points.
        asymmetric_bits: Supported widths with zero points.
        group_sizes: Supported group sizes, None for one scale per channel; empty for any.
        fused: Whether some linears are merged into one matrix, which then needs one scheme.
        experts: The finest supported grouping of experts.
        asymmetric_experts: Whether experts may have zero points.
        floating: Supported floating-point formats by name (:mod:`rco.formats.floating`).
        floating_experts: Those of them that experts may have.
        floating_embeddings: Those of them that an embedding may have.
        packed_embeddings: Widths that an embedding may have, without zero points.
        gguf: Whether the engine reads GGUF files, whose types have their own grids: only widths are chosen.
        method: Rounding method of candidates that is closest to the engine's weights.
        format: Default export format.
    """

    name: str
    note: str
    symmetric_bits: frozenset[int] = _PACKED
    asymmetric_bits: frozenset[int] = _PACKED
    group_sizes: frozenset[int | None] = frozenset()
    fused: bool = False
    experts: ExpertGroups = "expert"
    asymmetric_experts: bool = True
    floating: frozenset[str] = frozenset()
    floating_experts: frozenset[str] = frozenset()
    floating_embeddings: frozenset[str] = frozenset()
    packed_embeddings: frozenset[int] = frozenset()
    gguf: bool = False
    method: Literal["gptq", "rtn", "imatrix"] = "gptq"
    format: str = "compressed-tensors"

    @property
    def widths(self) -> tuple[int, ...]:
        """Default widths: all supported ones from 2 bits."""
        return tuple(sorted(width for width in self.symmetric_bits | self.asymmetric_bits if width > 1))

    def embedding_options(
        self, model_type: str, widths: Iterable[int], formats: Iterable[Format], group_size: int | None
    ) -> set[Format]:
        """Formats that the engine reads an embedding in: the given ones, or else all; none if it reads none.

        Args:
            model_type: The architecture.
            widths: Widths of the linears.
            formats: Further formats of the linears.
            group_size: Columns that share a scale.
        """
        if self.packed_embeddings:
            if model_type not in PACKED_EMBEDDINGS:
                return set()
            fitting = self.packed_embeddings & set(widths) or self.packed_embeddings
            return {IntegerGrid(width, group_size, True) for width in fitting}
        given: set[Format] = {each for each in formats if each.name in self.floating_embeddings}
        return given | {FloatingPoint(name) for name in self.floating_embeddings & {"int8"}}

    def reads_packed_head(self, model_type: str) -> bool:
        """Whether the engine reads the packed output layer of an architecture."""
        return not self.fused or model_type not in DENSE_HEADS

    def refusal(self, scheme: Format) -> str | None:
        """Reason why a scheme is unsupported; None if it is supported."""
        if not isinstance(scheme, IntegerGrid):
            if self.name == "any" or scheme.name in self.floating:
                return None
            known = ", ".join(sorted(self.floating)) or "of integer grids alone"
            return f"{self.name} takes the formats {known}, not {scheme.name}"
        widths = self.symmetric_bits if scheme.symmetric else self.asymmetric_bits
        grid = "symmetric" if scheme.symmetric else "asymmetric"
        if scheme.bits not in widths:
            return f"{self.name} takes {grid} widths {_listed(widths)}, not {scheme.bits}"
        if self.group_sizes and scheme.group_size not in self.group_sizes:
            shown = _listed([scheme.group_size])
            return f"{self.name} takes group sizes {_listed(self.group_sizes)}, not {shown}"
        return None


def _listed(values: Iterable[int | None]) -> str:
    ordered = sorted(values, key=lambda value: value or 0)
    return ", ".join("channel" if value is None else str(value) for value in ordered)


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "any",
            "no restrictions: all widths that can be packed",
            floating=_FLOATING,
            floating_experts=_FLOATING,
            floating_embeddings=_BYTES,
        ),
        Engine(
            "transformers",
            "unpacked at load, any width; all experts share a scheme, without zero points",
            experts="model",
            asymmetric_experts=False,
            floating=_FLOATING,
            floating_embeddings=_BYTES,
        ),
        Engine(
            "vllm",
            "q/k/v, gate/up and all experts of a layer share a scheme; asymmetric grids at 4 and 8 bits only, and "
            "not in experts",
            symmetric_bits=frozenset(range(2, 9)),
            asymmetric_bits=frozenset({4, 8}),
            fused=True,
            experts="layer",
            asymmetric_experts=False,
            floating=_VLLM_FLOATING,
            floating_experts=_VLLM_FLOATING_EXPERTS,
            packed_embeddings=frozenset({2, 4, 8}),
        ),
        Engine(
            "vllm-marlin",
            "Marlin kernels: 4 or 8 bits, group sizes 32, 64, 128 or one scale per channel",
            symmetric_bits=frozenset({4, 8}),
            asymmetric_bits=frozenset({4}),
            group_sizes=frozenset({None, 32, 64, 128}),
            fused=True,
            experts="layer",
            asymmetric_experts=False,
            floating=_MARLIN_FLOATING,
            floating_experts=_MARLIN_FLOATING - {"fp8"},
            packed_embeddings=frozenset({4, 8}),
        ),
        Engine(
            "llamacpp",
            "GGUF block types, by the length of a row; one type for each projection of a layer's experts",
            symmetric_bits=frozenset(GGUF_WIDTHS),
            asymmetric_bits=frozenset(GGUF_WIDTHS),
            experts="layer-projection",
            gguf=True,
            method="rtn",
            format="llama.cpp",
        ),
        Engine(
            "gguf",
            "a GGUF file in ggml's types, those that fit a row; one type for each projection of a layer's experts",
            experts="layer-projection",
            method="imatrix",
            format="gguf",
        ),
    )
}


def find_engine(name: str) -> Engine:
    """The engine of a name.

    Raises:
        ValueError: The name is unknown; the message lists the known ones.
    """
    if name not in ENGINES:
        raise ValueError(f"Unknown engine {name!r}; `serve` takes {', '.join(ENGINES)}.")
    return ENGINES[name]
