"""The nine sweeps of the paper's appendix E, around any centre: one setting of the loop varies, the rest stays.

A point of a sweep is a :class:`Loop`. Sweeps share points, since the centre is in every one; equal loops run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["SWEEPS", "Loop", "Point", "Sweep", "make_sweeps"]

SWEEPS = (
    "samples", "steps", "equal-compute", "temperature", "learning-rate", "antithetic", "seeds", "grouping",
    "calibration",
)  # fmt: skip
# Sweeps whose values can be given: the field of a loop that they vary, and what a value is.
_VALUES: dict[str, tuple[str, type[int] | type[float]]] = {
    "samples": ("samples", int), "steps": ("steps", int), "temperature": ("tau", float),
    "learning-rate": ("lr", float), "calibration": ("sequences", int),
}  # fmt: skip
_SEEDS = 5  # of the sweep over seeds, where the others have fewer


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What the sweeps vary of a search.

    Attributes:
        steps: Optimizer steps T.
        samples: Gumbel samples g per step.
        lr: Learning rate.
        tau: Last temperature; the first is 1.
        antithetic: Whether noise is drawn in mirrored pairs.
        grouped: Whether linears that engines fuse share a width.
        sequences: Calibration sequences that gradients use.
    """

    steps: int
    samples: int
    lr: float
    tau: float
    antithetic: bool = False
    grouped: bool = False
    sequences: int

    @property
    def key(self) -> str:
        """A name for files."""
        marks = "-antithetic" * self.antithetic + "-grouped" * self.grouped
        return f"T{self.steps}-g{self.samples}-lr{self.lr:g}-tau{self.tau:g}-n{self.sequences}{marks}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return asdict(self)


@dataclass(frozen=True)
class Point:
    """One row of a sweep's table: its label, the loop, and the seeds it is run with."""

    label: str
    loop: Loop
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Sweep:
    """One table and one plot.

    Attributes:
        name: As in :data:`SWEEPS`.
        title: For people.
        varies: What the rows differ in.
        points: The rows.
        setting: Field of :class:`Loop` whose best value is worth recommending; None if there is none.
    """

    name: str
    title: str
    varies: str
    points: tuple[Point, ...]
    setting: str | None = None


def make_sweeps(
    centre: Loop, seeds: int, *, names: Sequence[str] = (), quick: bool = False, can_group: bool = True
) -> list[Sweep]:
    """The sweeps around a centre.

    Args:
        centre: The loop that every sweep passes through.
        seeds: Runs of each point, with seeds 0, 1, ...; the sweep over seeds has at least five.
        names: Which sweeps; all of them if empty. ``samples=1,4,16`` names the values, too, beside the centre's;
            ``equal-compute=8x100,32x50`` names pairs of samples and steps, which need not be of equal compute.
        quick: The ends of each range and the centre only, and no more seeds than asked for.
        can_group: Whether the model has linears that engines fuse; without any, ``grouping`` is left out.

    Raises:
        ValueError: A name is unknown, a value makes no sense, or the centre is too small to be halved twice.
    """
    given = dict(part.partition("=")[::2] for part in names)
    names = list(given)
    unknown = [name for name in names if name not in SWEEPS]
    if unknown:
        raise ValueError(f"Unknown sweeps {', '.join(unknown)}; there are {', '.join(SWEEPS)}.")
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1, got {seeds}.")
    if centre.steps < 4 or centre.samples < 4 or centre.samples % 4 or centre.steps % 4:
        raise ValueError(
            "The sweeps quarter the centre's steps and samples: both must be multiples of 4, got "
            f"{centre.steps} steps and {centre.samples} samples."
        )
    if centre.sequences < 16:
        raise ValueError(f"The sweeps need at least 16 calibration sequences, got {centre.sequences}.")
    if not can_group and "grouping" in names:
        raise ValueError("The sweep 'grouping' needs linears that engines fuse, and this model has none.")
    wanted = [name for name in SWEEPS if (not names or name in names) and (can_group or name != "grouping")]
    makers = {
        "samples": _samples, "steps": _steps, "equal-compute": _equal_compute, "temperature": _temperature,
        "learning-rate": _learning_rate, "antithetic": _antithetic, "seeds": _seeds, "grouping": _grouping,
        "calibration": _calibration,
    }  # fmt: skip
    made = [makers[name](centre, tuple(range(seeds)), quick) for name in wanted]
    made = [_revalued(sweep, given.get(sweep.name, ""), centre, tuple(range(seeds))) for sweep in made]
    return [replace(sweep, points=_ends(sweep.points, centre)) if quick else sweep for sweep in made]


def _revalued(sweep: Sweep, text: str, centre: Loop, seeds: tuple[int, ...]) -> Sweep:
    """The sweep at the values of a list such as 1,4,16, with the centre among them."""
    if not text:
        return sweep
    loops = {centre}
    try:
        for part in text.split(","):
            if sweep.name == "equal-compute":
                samples, steps = map(int, part.split("x"))
                loops.add(replace(centre, samples=samples, steps=steps))
            else:
                field, kind = _VALUES[sweep.name]
                changed: dict[str, Any] = {field: kind(part)}
                loops.add(replace(centre, **changed))
    except (KeyError, ValueError):
        raise ValueError(
            f"{sweep.name}={text}: {', '.join(_VALUES)} take a list of numbers, as in samples=1,4,16, and "
            "equal-compute samples x steps, as in equal-compute=8x100,32x50; the other sweeps take no values."
        ) from None
    if any(min(loop.samples, loop.steps, loop.lr, loop.tau, loop.sequences) <= 0 for loop in loops):
        raise ValueError(f"{sweep.name}={text}: all values must be positive.")
    if any(loop.sequences > centre.sequences for loop in loops):
        raise ValueError(f"{sweep.name}={text}: there are {centre.sequences} sequences; raise `sequences`.")
    if sweep.name == "equal-compute":
        ordered = sorted(loops, key=lambda loop: (loop.samples, loop.steps))
        labels = [f"g={loop.samples}, T={loop.steps}" for loop in ordered]
    else:
        field = _VALUES[sweep.name][0]
        ordered = sorted(loops, key=lambda loop: float(getattr(loop, field)), reverse=field == "tau")
        labels = [f"{getattr(loop, field):g}" for loop in ordered]
    points = tuple(Point(label, loop, seeds) for label, loop in zip(labels, ordered, strict=True))
    return replace(sweep, points=points)


def _ends(points: tuple[Point, ...], centre: Loop) -> tuple[Point, ...]:
    """First, centre and last of a range of loops."""
    if len(points) < 4:
        return points
    return tuple(p for i, p in enumerate(points) if i in (0, len(points) - 1) or p.loop == centre)


def _samples(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    g = centre.samples
    values = (g // 4, g // 2, g, 2 * g)
    points = tuple(Point(str(v), replace(centre, samples=v), seeds) for v in values)
    return Sweep("samples", "Gumbel samples per step", "samples g", points, "samples")


def _steps(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    t = centre.steps
    values = (t // 4, t // 2, t, 2 * t)
    points = tuple(Point(str(v), replace(centre, steps=v), seeds) for v in values)
    return Sweep("steps", "Optimization steps", "steps T", points, "steps")


def _equal_compute(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    g, t = centre.samples, centre.steps
    pairs = ((g // 4, 4 * t), (g, t), (4 * g, t // 4))
    points = tuple(Point(f"g={a}, T={b}", replace(centre, samples=a, steps=b), seeds) for a, b in pairs)
    return Sweep("equal-compute", "Samples against steps at equal compute", "samples and steps", points)


def _temperature(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    values = sorted({0.3, 0.1, 0.03, 0.01, centre.tau}, reverse=True)
    points = tuple(Point(f"{v:g}", replace(centre, tau=v), seeds) for v in values)
    return Sweep("temperature", "Final temperature", "last temperature", points, "tau")


def _learning_rate(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    values = (centre.lr * 0.3, centre.lr, centre.lr * 3)
    points = tuple(Point(f"{v:g}", replace(centre, lr=v), seeds) for v in values)
    return Sweep("learning-rate", "Learning rate", "learning rate", points, "lr")


def _antithetic(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    points = tuple(Point("yes" if v else "no", replace(centre, antithetic=v), seeds) for v in (False, True))
    return Sweep("antithetic", "Antithetic sampling", "antithetic", points, "antithetic")


def _seeds(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    listed = seeds if quick else tuple(range(max(_SEEDS, len(seeds))))
    points = tuple(Point(str(seed), centre, (seed,)) for seed in listed)
    return Sweep("seeds", "Spread over seeds", "seed", points)


def _grouping(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    n = centre.sequences
    points = tuple(
        Point(
            f"{'grouped' if grouped else 'none'}, {count}",
            replace(centre, grouped=grouped, sequences=count),
            seeds,
        )
        for count in (n // 4, n)
        for grouped in (False, True)
    )
    return Sweep("grouping", "Layer grouping", "grouping, calibration sequences", points, "grouped")


def _calibration(centre: Loop, seeds: tuple[int, ...], quick: bool) -> Sweep:
    n = centre.sequences
    points = tuple(Point(str(v), replace(centre, sequences=v), seeds) for v in (n // 16, n // 4, n))
    return Sweep("calibration", "Calibration size", "calibration sequences", points, "sequences")
