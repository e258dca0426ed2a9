"""Who takes part in a comparison: labels such as ``rco@0.1`` or ``evopress+prior``, and what each may spend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rco import tables
from rco.baselines.evolution import Evolution
from rco.baselines.sensitivity import Fisher
from rco.core.search import GumbelSearch

__all__ = ["FIXED", "PLAIN", "POOLED", "Allowance", "Entrant"]

# Algorithm 1 as printed: no correction for curvature, no choice, no exchanges, and budget may stay unspent.
_PRINTED = {"refine": 0, "curvature": False, "choose": False, "monotone": False, "tau": (1.0, 0.01)}
PLAIN, POOLED = "rco-plain", "fisher-pooled"
# Rules that no seed changes: they run once.
FIXED = ("uniform", "uniform-fill", "output-error")
_WITH_PRIOR = "+prior"


@dataclass(frozen=True)
class Allowance:
    """What every search may spend; None is no limit."""

    tokens: int | None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str | None, default_tokens: int) -> Allowance:
        """Read ``tokens=500000``, ``seconds=60``, or both with a comma; None is ``default_tokens``."""
        if text is None:
            return cls(default_tokens)
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                found[name.strip()] = float(value)
            except ValueError:
                found[name.strip()] = 0.0
        if not set(found) <= {"tokens", "seconds"} or min(found.values()) <= 0:
            raise ValueError(
                f"--allowance takes tokens=NUMBER, seconds=NUMBER or both with a comma between them, got {text!r}."
            )
        tokens = found.get("tokens")
        return cls(int(tokens) if tokens is not None else None, found.get("seconds"))


@dataclass(frozen=True)
class Entrant:
    """A method as a comparison runs it.

    The Lagrangians take part with the printed algorithm's estimator, so that beside ``rco-plain`` the handling of
    the constraint is the only difference; with ``+prior`` they have all that RCO has.

    Attributes:
        method: Name in the table of methods.
        prior: Starts from RCO's prior, knows its curvature, and ends with its choice and exchanges.
        pooled: Of the Fisher losses: pooled over options, as RCO's prior has them.
    """

    method: str
    prior: bool
    pooled: bool = False

    @classmethod
    def parse(cls, label: str) -> Entrant:
        """Read a label; an error for one that names no method."""
        name = label.partition("@")[0]
        method = {PLAIN: "rco", POOLED: "fisher"}.get(name, name.removesuffix(_WITH_PRIOR))
        if method not in tables.METHODS:
            raise tables.unknown_name("method", method, [*tables.METHODS, PLAIN, POOLED])
        return cls(method, name == "rco" or name.endswith(_WITH_PRIOR), name == POOLED)

    @property
    def searcher(self) -> Any:
        """The class."""
        return tables.load(tables.METHODS, self.method, "method")

    @property
    def measures_fisher(self) -> bool:
        """Whether the Fisher losses are the method itself rather than a start for it."""
        return not self.prior and issubclass(self.searcher, Fisher)

    def make(
        self, evaluations: int | None, seconds: float | None, seed: int, rco: Mapping[str, Any], **own: Any
    ) -> Any:
        """The searcher within an allowance.

        Args:
            evaluations: Batches it may forward, a backward counted as two more.
            seconds: Time it may take.
            seed: Of all that is drawn.
            rco: Settings of RCO and its kin.
            own: Settings for whichever method has them.
        """
        cls = self.searcher
        given: dict[str, Any] = {"seed": seed, "steps": None, "generations": None, **own}
        given |= {"max_evaluations": evaluations, "max_seconds": seconds}
        if issubclass(cls, GumbelSearch):
            given |= rco if self.prior else {**rco, **_PRINTED}
        elif issubclass(cls, Evolution) and evaluations is not None:
            given |= cls.scaled_to(evaluations)
        known = {field.name for field in dataclasses.fields(cls)}
        if evaluations is None and seconds is None:
            given = {name: value for name, value in given.items() if value is not None}
        return cls(**{name: value for name, value in given.items() if name in known})
