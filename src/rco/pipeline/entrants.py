"""Who takes part in a comparison: labels such as ``rco@0.1`` or ``evopress+prior``, and what each may spend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rco import tables
from rco.baselines.evolution import Evolution
from rco.baselines.sensitivity import Fisher
from rco.core.search import GumbelSearch
from rco.pipeline.configs import PLAIN, CompressConfig
from rco.pipeline.searchers import make_searcher, search_settings

__all__ = ["FIXED", "POOLED", "Allowance", "Entrant"]

POOLED = "fisher-pooled"
# Rules that no seed changes: they run once.
FIXED = ("uniform", "uniform-fill", "output-error")
Start = Literal["zeros", "weight-error", "prior"]
_STARTS: dict[str, Start] = {"": "zeros", "weight-error": "weight-error", "prior": "prior"}


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
                f"`allowance` takes tokens=NUMBER, seconds=NUMBER or both with a comma between them, got {text!r}."
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
        start: Initial logits: ``zeros``; ``weight-error``, those of the paper's own code; ``prior``, those of RCO,
            and with them its curvature, its choice and its exchanges.
        pooled: Of the Fisher losses: pooled over options, as RCO's prior has them.
    """

    method: str
    start: Start
    pooled: bool = False

    @classmethod
    def parse(cls, label: str) -> Entrant:
        """Read a label; an error for one that names no method."""
        name, _, start = label.partition("@")[0].partition("+")
        if start not in _STARTS:
            raise ValueError(
                f"{label!r}: after + comes where a method starts, weight-error or prior, got {start!r}."
            )
        method = "fisher" if name == POOLED else name
        if method not in tables.METHODS:
            raise tables.unknown_name("method", method, [*tables.METHODS, POOLED])
        return cls(method, "prior" if name == "rco" and not start else _STARTS[start], name == POOLED)

    @property
    def prior(self) -> bool:
        """Whether RCO's prior is measured for it."""
        return self.start == "prior"

    @property
    def searcher(self) -> Any:
        """The class."""
        return tables.load(tables.METHODS, self.method, "method")

    @property
    def measures_fisher(self) -> bool:
        """Whether the Fisher losses are the method itself rather than a start for it."""
        return not self.prior and issubclass(self.searcher, Fisher)

    def make(
        self, evaluations: int | None, seconds: float | None, seed: int, config: CompressConfig, **own: Any
    ) -> Any:
        """The searcher within an allowance.

        Args:
            evaluations: Batches it may forward, a backward counted as two more.
            seconds: Time it may take.
            seed: Of all that is drawn.
            config: Has the settings of RCO and its kin.
            own: Settings for whichever method has them.
        """
        cls = self.searcher
        given: dict[str, Any] = {"generations": config.generations, **own}
        if issubclass(cls, GumbelSearch):
            given |= search_settings(config, plain=not self.prior or self.method == PLAIN)
            given["refine"] = None if given["refine"] else 0
        elif issubclass(cls, Evolution) and evaluations is not None:
            given |= cls.scaled_to(evaluations)
        given |= {"seed": seed, "steps": None, "max_evaluations": evaluations, "max_seconds": seconds}
        if evaluations is None and seconds is None:
            given = {name: value for name, value in given.items() if value is not None}
        return make_searcher(self.method, given)
