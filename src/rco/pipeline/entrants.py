"""Methods as a comparison names them (``rco@0.1``, ``evopress+prior``, ``reap-global``), and their allowance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rco import registry
from rco.baselines.evolution import Evolution
from rco.baselines.fisher_information import Fisher
from rco.compression.compression import SCORES
from rco.compression.llama_mixes import MIXES, is_mix
from rco.core.search import GumbelSearch
from rco.pipeline.configs import PLAIN, CompressConfig
from rco.pipeline.searchers import make_searcher, search_settings

__all__ = ["POOLED", "Allowance", "Entrant", "ExpertEntrant", "is_fixed", "parse_methods"]

POOLED = "fisher-pooled"
_FIXED = ("uniform", "uniform-fill", "output-error")
Start = Literal["zeros", "weight-error", "prior"]
# Pruning starts from all experts; starting from none would be below the router's top-k.
_ALIASES = {"greedy": "greedy-down"}
_BY_ACCEPTANCE = "evoesap-acceptance"
_STARTS: dict[str, Start] = {"": "zeros", "weight-error": "weight-error", "prior": "prior"}


def is_fixed(name: str) -> bool:
    """Whether a method is a deterministic rule, which runs once."""
    return name in _FIXED or is_mix(name)


def parse_methods(text: str) -> list[tuple[str, str, float]]:
    """(label, method, share of the tokens) of a list such as ``rco,rco@0.1,evoesap``."""
    found = []
    for label in (part.strip() for part in text.split(",")):
        if not label:
            continue
        name, _, share = label.partition("@")
        try:
            value = float(share) if share else 1.0
        except ValueError:
            value = 0.0
        if not 0 < value <= 1:
            raise ValueError(
                f"{label!r}: @ must be followed by a share of the tokens between 0 and 1, as in rco@0.1."
            )
        found.append((label, name, value))
    if not found:
        raise ValueError("`methods` is empty; give a list such as rco,evoesap,random.")
    if len({label for label, _, _ in found}) < len(found):
        raise ValueError(f"`methods` names a method twice: {text}.")
    return found


@dataclass(frozen=True)
class Allowance:
    """Limits of every search; None is no limit."""

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

    The Lagrangian methods use the estimator of Algorithm 1 as printed, so that they differ from ``rco-plain`` only
    in the handling of the constraint; with ``+prior`` they have everything that RCO has.

    Attributes:
        method: Name in the table of methods.
        start: Initial logits: ``zeros``; ``weight-error``, those of the paper's own code; ``prior``, those of RCO
            with its curvature, choice and exchanges.
        pooled: Whether Fisher losses are pooled over options, as in RCO's prior.
    """

    method: str
    start: Start
    pooled: bool = False

    @classmethod
    def parse(cls, label: str) -> Entrant:
        """Read a label; raises for an unknown method."""
        if is_mix(label):
            return cls(label, "zeros")
        name, _, start = label.partition("@")[0].partition("+")
        if start not in _STARTS:
            raise ValueError(
                f"{label!r}: + must be followed by initial logits, weight-error or prior, got {start!r}."
            )
        method = "fisher" if name == POOLED else name
        if method not in registry.METHODS:
            raise registry.unknown_name("method", method, [*registry.METHODS, POOLED, *MIXES])
        return cls(method, "prior" if name == "rco" and not start else _STARTS[start], name == POOLED)

    @property
    def mix(self) -> bool:
        """Whether it is a mixture of llama.cpp, which is measured as it is."""
        return is_mix(self.method)

    @property
    def prior(self) -> bool:
        """Whether RCO's prior is needed."""
        return self.start == "prior"

    @property
    def searcher(self) -> Any:
        """The class."""
        return registry.load(registry.METHODS, self.method, "method")

    @property
    def measures_fisher(self) -> bool:
        """Whether the method chooses by Fisher losses alone, instead of starting from them."""
        return not self.prior and issubclass(self.searcher, Fisher)

    def make(
        self, evaluations: int | None, seconds: float | None, seed: int, config: CompressConfig, **own: Any
    ) -> Any:
        """The searcher with an allowance.

        Args:
            evaluations: Most batches to forward, a backward counted as two more.
            seconds: Most time.
            seed: Seed of the search.
            config: Settings of RCO and other gradient searches.
            own: Further settings, ignored by methods that do not have them.
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


@dataclass(frozen=True)
class ExpertEntrant:
    """A method as a pruning comparison runs it.

    Attributes:
        method: Name in the table of methods.
        score: Score that the method picks, orders or starts by; None for its default, which is no prior for
            Algorithm 1 as printed.
        settings: Further settings from the name.
    """

    method: str
    score: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str) -> ExpertEntrant:
        """A method of the table, or a score (``reap``, ``reap-global``).

        ``evoesap-SCORE`` orders by another score; ``evoesap-acceptance`` maximises expected acceptance.

        Raises:
            ValueError: The name is unknown.
        """
        score, _, tail = name.partition("-")
        if score in SCORES and tail in ("", "global"):
            return cls("top-global" if tail else "top-per-block", score)
        if name == _BY_ACCEPTANCE:
            return cls("evoesap", settings={"fitness": "acceptance"})
        method, _, score = name.rpartition("-")
        if score in SCORES and method in registry.METHODS:
            return cls(_ALIASES.get(method, method), score)
        if name not in registry.METHODS:
            derived = [f"{s}-global" for s in SCORES] + [f"evoesap-{s}" for s in SCORES]
            raise registry.unknown_name(
                "method", name, [*registry.METHODS, *SCORES, *derived, _BY_ACCEPTANCE]
            )
        return cls(_ALIASES.get(name, name))

    @property
    def searcher(self) -> Any:
        """The class."""
        return registry.load(registry.METHODS, self.method, "method")

    @property
    def gradient_search(self) -> bool:
        """Whether the method is a gradient search, which starts from logits instead of scores."""
        return issubclass(self.searcher, GumbelSearch)

    def make(self, evaluations: int, seed: int, config: CompressConfig) -> Any:
        """The searcher with an allowance; gradient searches get the settings of the configuration."""
        cls = self.searcher
        known = {entry.name for entry in dataclasses.fields(cls)}
        given: dict[str, Any] = {"generations": config.generations}
        if self.gradient_search:
            given |= search_settings(config, plain=self.method == PLAIN)
            given["refine"] = None if given["refine"] else 0
        given |= {"steps": None, "seed": seed}
        if known & {"generations", "steps", "lazy"}:  # rules have nothing to limit
            given["max_evaluations"] = evaluations
        return make_searcher(self.method, {**given, **self.settings})
