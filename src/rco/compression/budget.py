"""Budgets as a user writes them: an amount and its kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rco.compression.file_size import parse_size
from rco.core.exact import exact_number

__all__ = ["Budget"]


_MIXES = ("llama-", "pure-")


@dataclass(frozen=True)
class Budget:
    """An amount and its kind.

    Kinds: ``bits`` (average width of the quantized weights), ``bpw`` (the same with scales and zero points),
    ``size`` (bytes of all safetensors files), ``active_bits`` (average width of the weights that a token reads),
    ``experts`` (number or fraction to prune) and ``parameters`` (number that stays).
    """

    kind: str
    amount: Fraction
    mix: str | None = (
        None  # a mixture of llama.cpp whose size is meant; the amount is known once there is a plan
    )

    @classmethod
    def parse(cls, **given: Any) -> Budget:
        """The one budget that is not None, e.g. ``Budget.parse(bits="2.5", size=None)``."""
        named = {kind: value for kind, value in given.items() if value is not None}
        if len(named) != 1:
            raise ValueError(
                f"Give exactly one budget out of {_arguments(given)}; got {_arguments(sorted(named)) or 'none'}."
            )
        ((kind, value),) = named.items()
        if kind == "size" and str(value).startswith(_MIXES):
            return cls(kind, Fraction(0), str(value))
        if kind in ("size", "parameters"):
            amount = Fraction(parse_size(str(value)))
        else:
            amount = exact_number(value, _arguments([kind]))
        if amount <= 0:
            raise ValueError(f"{_arguments([kind])} must be positive, got {value}.")
        if kind == "experts" and amount >= 1 and not str(value).strip().isdigit():
            raise ValueError(
                f"`experts` is a fraction between 0 and 1 or a whole number of experts, got {value}."
            )
        return cls(kind, amount)

    @property
    def argument(self) -> str:
        """The budget as an argument, for messages."""
        if self.kind in ("size", "parameters"):
            return f"`{self.kind}={int(self.amount)}`"
        return f"`{self.kind}={float(self.amount):g}`"

    def __str__(self) -> str:
        if self.kind == "size":
            return f"{int(self.amount):,} bytes"
        return f"{float(self.amount):.6g} {self.kind}"


def _arguments(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)
