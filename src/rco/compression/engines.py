"""What each serving engine loads: its rules stated once, for plans beforehand and checkpoints afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rco.compression.gguf import GGUF_WIDTHS
from rco.formats.base import Format
from rco.formats.integer import IntegerGrid

__all__ = ["ENGINES", "Engine", "ExpertGroups", "find_engine"]

ExpertGroups = Literal["expert", "projection", "layer", "layer-projection", "model"]
"""What shares a width: an expert's three matrices; its gate and up (down by itself); all experts of a layer; one
projection of all experts of a layer; all experts."""

_PACKED = frozenset(range(1, 9))  # what the format can hold


@dataclass(frozen=True)
class Engine:
    """What an engine takes: of compressed-tensors checkpoints (weights only), or of GGUF files.

    Attributes:
        name: What the user types.
        note: The rules in a line.
        symmetric_bits: Widths it takes on a symmetric grid.
        asymmetric_bits: Widths it takes with zero points.
        group_sizes: Group sizes it takes, None standing for one scale per channel; empty for any.
        fused: It merges some linears into one matrix, which then needs one scheme.
        experts: The finest grouping of experts that it loads.
        asymmetric_experts: It takes zero points in experts.
        gguf: It reads GGUF files, whose types bring their own grids: widths alone are chosen.
        method: How candidates come nearest to what it runs.
        format: What is written for it.
    """

    name: str
    note: str
    symmetric_bits: frozenset[int] = _PACKED
    asymmetric_bits: frozenset[int] = _PACKED
    group_sizes: frozenset[int | None] = frozenset()
    fused: bool = False
    experts: ExpertGroups = "expert"
    asymmetric_experts: bool = True
    gguf: bool = False
    method: Literal["gptq", "rtn"] = "gptq"
    format: str = "compressed-tensors"

    @property
    def widths(self) -> tuple[int, ...]:
        """What is on offer unless something else is asked for: from 2 bits, all that it takes on some grid."""
        return tuple(sorted(width for width in self.symmetric_bits | self.asymmetric_bits if width > 1))

    def refusal(self, scheme: Format) -> str | None:
        """Why it does not take a scheme; None if it does."""
        if not isinstance(scheme, IntegerGrid):
            return None
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
        Engine("any", "no engine's rules: whatever can be packed"),
        Engine(
            "transformers",
            "unpacked at load, any width; all experts share a scheme, without zero points",
            experts="model",
            asymmetric_experts=False,
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
    )
}


def find_engine(name: str) -> Engine:
    """The engine of that name.

    Raises:
        ValueError: There is none; the message lists them.
    """
    if name not in ENGINES:
        raise ValueError(f"Unknown engine {name!r}; `serve` takes {', '.join(ENGINES)}.")
    return ENGINES[name]
