"""Routing rules of architectures without a table row, found by replaying the decisions of their routers.

A sparse block is copied without its experts, with random weights in place of its own, and run on random states. The
experts and weights that it decides on are compared with those of every rule that :mod:`rco.models.moe.routing` can
express, and the rule that reproduces all of them is taken. Then the copy is cut to fewer experts, as a pruned
checkpoint is, and its decisions must be those of the rule without the removed experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rco.models.moe.layers import CHOSEN_GROUPS, GROUP_COUNTS, merge_groups
from rco.models.moe.routing import RoutingRule, route
from rco.models.remote_code.modeling_pruned_experts import ROUTER_NAMES, RaggedGroupsMixin, fit_layer

__all__ = ["FoundRule", "find_rule"]

_TOKENS = 48
_TOLERANCE = 1e-5  # of weights in float32, relative to the largest
_DENOMINATORS = {
    "softmax": ("selected", "survivors"),
    "sigmoid": ("selected", "none"),
    "logit": ("selected",),
}


@dataclass(frozen=True)
class FoundRule:
    """A router's rule and where its tensors are.

    Attributes:
        rule: The rule.
        router: Path in the block of the module that holds the weight.
        correction: Path in the block of the bias of the choice; None if there is none.
        float32: Logits are computed in float32 for any dtype of the model.
        casts: Weights are cast to the type of the hidden states.
    """

    rule: RoutingRule
    router: str
    correction: str | None
    float32: bool = False
    casts: bool = True


_found: dict[str, FoundRule | str] = {}


def find_rule(block: nn.Module, experts: str, count: int, config: Any) -> FoundRule | str:
    """The rule of a sparse block, or the reason why it is not known; found once for blocks that are alike.

    Args:
        block: The block; it is copied, and may be on the meta device.
        experts: Name of the experts in it.
        count: Number of experts.
        config: The model's text configuration, which may hold numbers of groups and factors.
    """
    gate = next((name for name in ROUTER_NAMES if isinstance(getattr(block, name, None), nn.Module)), None)
    if gate is None:
        return f"{type(block).__name__} has no child named {' or '.join(ROUTER_NAMES)}"
    key = _described(block, gate, count, config)
    if key not in _found:
        _found[key] = _find(block, experts, gate, count, config)
    return _found[key]


def _described(block: nn.Module, gate: str, count: int, config: Any) -> str:
    """Everything that the decisions of a block with given weights depend on."""
    router = block.get_submodule(gate)
    shapes = {name: tuple(value.shape) for name, value in block.named_parameters()}
    settings = [
        {name: v for name, v in vars(module).items() if isinstance(v, int | float | str | tuple)}
        for module in (block, *router.modules())
    ]
    kinds = [type(module).__qualname__ for module in (block, *router.modules())]
    return f"{kinds} {count} {shapes} {settings} {config.to_dict()}"


def _find(block: nn.Module, experts: str, gate: str, count: int, config: Any) -> FoundRule | str:
    try:
        trial = _Trial.of(block, experts, gate, count, torch.float32)
    except Exception as error:  # noqa: BLE001 - any failure means that the block cannot be replayed
        return f"{type(block).__name__} cannot be run by itself ({type(error).__name__}: {error})"
    if trial is None:
        return f"{type(block).__name__} does not give the states of its router to its experts"
    found = next((rule for rule in _candidates(trial, config) if _agrees(trial, rule)), None)
    if found is None:
        return f"the decisions of {type(trial.block.get_submodule(gate)).__name__} follow none of the known rules"
    settled = _scaled(trial, found, config)
    if settled is None:
        return (
            f"the weights of {type(trial.block.get_submodule(gate)).__name__} have a factor of unknown origin"
        )
    found = _types(block, experts, gate, count, settled)
    return _obstacle_to_removal(trial, found) or found


class _Recorder(nn.Module):
    """Stand-in for experts, which notes what it is called with."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        # Its rows tell the number of experts.
        self.rows = nn.Parameter(torch.zeros(count, 1, 1), requires_grad=False)
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Zeros in the shape of the states."""
        names = ("hidden_states", "top_k_index", "top_k_weights")
        hidden, indices, weights = (
            args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)
        )
        self.calls.append((hidden, indices, weights))
        return torch.zeros_like(hidden)


@dataclass
class _Trial:
    """A copy of a block with random weights and without experts, and what it decided on random states."""

    block: nn.Module
    experts: str
    gate: str
    count: int
    hidden: Tensor
    indices: Tensor
    weights: Tensor

    @classmethod
    def of(cls, block: nn.Module, experts: str, gate: str, count: int, dtype: torch.dtype) -> _Trial | None:
        generator = torch.Generator().manual_seed(0)
        original = getattr(block, experts)
        memo: dict[int, Any] = {id(original): _Recorder(count)}
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            if not name.startswith(f"{experts}."):
                drawn = _drawn(tensor, dtype, generator)
                as_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(drawn, requires_grad=False) if as_parameter else drawn
        twin = copy.deepcopy(block, memo).eval()
        for module in twin.modules():  # hooks of devices belong to the original
            vars(module).pop("_hf_hook", None)
            old = vars(module).pop("_old_forward", None)
            if old is not None:
                vars(module).pop("forward", None)
        width = _width(twin.get_submodule(gate), count)
        if width is None:
            return None
        hidden = torch.randn(_TOKENS, width, generator=generator).to(dtype)
        made = cls(twin, experts, gate, count, hidden, torch.zeros(0), torch.zeros(0))
        return made if made.run() else None

    @torch.no_grad()
    def run(self) -> bool:
        """Note the block's decisions; whether its experts get the states that it was given."""
        recorder: Any = getattr(self.block, self.experts)
        recorder.calls.clear()
        self.block(self.hidden[None].clone())
        (given, self.indices, self.weights), *more = recorder.calls
        alike = given.shape == self.hidden.shape and torch.equal(given, self.hidden)
        return not more and alike and self.indices.shape == self.weights.shape

    def logits(self, router: str, *, float32: bool = False) -> Tensor:
        module = self.block.get_submodule(router)
        bias: Any = getattr(module, "bias", None)
        tensors = [self.hidden, module.weight, *([] if bias is None else [bias])]
        return F.linear(*[value.float() if float32 else value for value in tensors])

    def tensor(self, path: str | None) -> Tensor | None:
        if path is None:
            return None
        owner, _, name = path.rpartition(".")
        found: Tensor = getattr(self.block.get_submodule(owner), name)
        return found

    def decided(self) -> Tensor:
        """(tokens, experts) weights of the decisions; NaN for experts that were not chosen."""
        return _spread(self.indices, self.weights, self.count)


def _drawn(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    scale = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
    values = torch.randn(tensor.shape, generator=generator) * scale
    # Corrections that are buffers stay in float32 in models of a narrower type.
    parameter = isinstance(tensor, nn.Parameter)
    return values.to(dtype if parameter else torch.float32)


def _width(gate: nn.Module, count: int) -> int | None:
    return next((p.shape[1] for p in gate.parameters() if p.ndim == 2 and p.shape[0] == count), None)


def _spread(indices: Tensor, weights: Tensor, count: int) -> Tensor:
    empty = torch.full((len(indices), count), torch.nan)
    return empty.scatter(1, indices, weights.float())


# ---------------------------------------------------------------------- rules


def _candidates(trial: _Trial, config: Any) -> Iterator[FoundRule]:
    block, count = trial.block, trial.count
    routers = [
        f"{trial.gate}.{name}" if name else trial.gate
        for name, module in block.get_submodule(trial.gate).named_modules()
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.shape[:1] == (count,)
    ]
    named = [*block.named_parameters(), *block.named_buffers()]
    apart = [f"{router}.bias" for router in routers]
    corrections = [
        name
        for name, value in named
        if value.shape == (count,) and name not in apart and "shared" not in name
    ]
    for router, score, groups, correction in product(
        routers, _DENOMINATORS, _groups(trial, config), [None, *corrections]
    ):
        if correction is not None and score != "sigmoid":
            continue  # such a choice depends on the number of experts, so that removal is not expressible
        for denominator in _DENOMINATORS[score]:
            rule = RoutingRule(
                top_k=int(trial.indices.shape[1]),
                score=score,  # type: ignore[arg-type]
                denominator=denominator,  # type: ignore[arg-type]
                group_sizes=groups[0],
                chosen_groups=groups[1],
            )
            yield FoundRule(rule, router, correction)


def _groups(trial: _Trial, config: Any) -> list[tuple[tuple[int, ...], int]]:
    """Sizes of groups, and the number of groups that a token may use, that the block or the configuration names."""
    gate = trial.block.get_submodule(trial.gate)
    sources = (gate, trial.block, config)
    chosen = _integers(sources, (CHOSEN_GROUPS,))
    ragged = [gate.group_sizes] if isinstance(gate, RaggedGroupsMixin) else []
    even = [(trial.count // g,) * g for g in _integers(sources, GROUP_COUNTS) if trial.count % g == 0]
    limited = [(sizes, t) for sizes in (*ragged, *even) for t in chosen if t < len(sizes)]
    return [((trial.count,), 1), *dict.fromkeys(limited)]


def _integers(sources: Sequence[Any], names: Sequence[str]) -> list[int]:
    values = (getattr(source, name, None) for source in sources for name in names)
    return list(dict.fromkeys(v for v in values if isinstance(v, int) and v > 0))


def _replayed(trial: _Trial, found: FoundRule, *, float32: bool = False) -> Tensor:
    logits = trial.logits(found.router, float32=float32)
    routing = route(found.rule, logits, trial.tensor(found.correction))
    return _spread(routing.indices, routing.weights, trial.count)


def _agrees(trial: _Trial, found: FoundRule) -> bool:
    """Whether a rule makes the same choices, with weights that differ by one factor at most."""
    mine, theirs = _replayed(trial, found), trial.decided()
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return False
    factor = _factor(mine, theirs)
    off = (mine * factor - theirs).abs().nan_to_num().max()
    return bool(off <= _TOLERANCE * theirs.nan_to_num().abs().max())


def _factor(mine: Tensor, theirs: Tensor) -> float:
    mine, theirs = mine.nan_to_num().double(), theirs.nan_to_num().double()
    return float((mine * theirs).sum() / mine.square().sum())


def _scaled(trial: _Trial, found: FoundRule, config: Any) -> FoundRule | None:
    """The rule with its factor, as the block or the configuration names it; None if nothing does."""
    factor = _factor(_replayed(trial, found), trial.decided())
    places = (vars(trial.block.get_submodule(trial.gate)), vars(trial.block), config.to_dict())
    numbers = (v for place in places for v in place.values() if isinstance(v, int | float))
    named = next((float(v) for v in (1.0, *numbers) if abs(v - factor) <= _TOLERANCE * abs(factor)), None)
    return None if named is None else replace(found, rule=replace(found.rule, scale=named))


def _types(block: nn.Module, experts: str, gate: str, count: int, found: FoundRule) -> FoundRule:
    """The rule with the types in which a model of 16 bits computes it."""
    trial = _Trial.of(block, experts, gate, count, torch.bfloat16)
    assert trial is not None  # as it was in float32
    theirs = trial.decided()

    def difference(float32: bool) -> float:
        mine = _replayed(trial, found, float32=float32)
        return float((mine.nan_to_num() - theirs.nan_to_num()).abs().sum())

    return replace(
        found, float32=difference(True) < difference(False), casts=trial.weights.dtype == torch.bfloat16
    )


# ---------------------------------------------------------------------- removal


def _obstacle_to_removal(trial: _Trial, found: FoundRule) -> str | None:
    """Cut the copy to fewer experts and compare its decisions with the rule's; the reason if they differ."""
    rule, count = found.rule, trial.count
    gate: Any = trial.block.get_submodule(trial.gate)
    name = type(gate).__name__
    if isinstance(gate, RaggedGroupsMixin):
        return None  # removed already, and checked before
    keep = torch.ones(count, dtype=torch.bool)
    sizes = None
    if rule.grouped:
        keep[-1] = False
        sizes = [*rule.group_sizes[:-1], rule.group_sizes[-1] - 1]
    else:
        keep[max(rule.top_k, count // 2) :] = False
        merge_groups(gate)
    kept = int(keep.sum())
    if kept < rule.top_k or kept == count:
        return None
    correction = trial.tensor(found.correction)
    expected = route(rule, trial.logits(found.router), correction, keep)
    wanted = _spread(expected.indices, expected.weights, count)[:, :kept]
    try:
        fit_layer(trial.block, gate, getattr(trial.block, trial.experts), kept, sizes)
        trial.run()
    except Exception as error:  # noqa: BLE001 - any failure means that experts cannot be removed
        return f"{name} does not run with fewer experts ({type(error).__name__}: {error})"
    theirs = _spread(trial.indices, trial.weights, kept)
    # A slot that a token's groups cannot fill has no weight, whichever expert it names.
    mine, theirs = (value.nan_to_num() for value in (wanted, theirs))
    if float((mine - theirs).abs().max()) > _TOLERANCE * float(theirs.abs().max()):
        return f"{name} decides otherwise than its rule when experts are removed"
    return None
