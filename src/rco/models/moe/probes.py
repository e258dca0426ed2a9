"""The straight-through gradient of deployed routing: the effect of flipping one expert on a layer's output.

Pruning an expert is discrete: it leaves the router, the next survivor replaces it and the weights are
normalised anew. For every expert ``e`` this module gives the first-order change of the loss between the layer
with ``e`` and the layer without it, all other experts unchanged:

    dL/dkeep_e  :=  sum over tokens of  < dL/dy,  y(e kept) - y(e pruned) >

Re-picking and renormalising are followed exactly; only the loss is linearised, at the layer's output under the
present mask. It is defined for kept and for pruned experts alike. A kept expert is compared with the runner-up
that would replace it, a pruned one with the selected expert that it would push out. Both need an expert's
output on a token that did not visit it: the *probes*.

One thing is held fixed: flipping an expert may change which groups a group-limited router picks. A pruned
expert counts as entering when its group would be picked with it, but no other expert of the group moves.

The number of probes depends on the tokens, and reading it would make the host wait for the device in every layer.
:class:`ProbeBuffer` therefore reserves slots for a likely number; the device counts the probes, and a sample that
needed more slots is repeated with the exact number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rco.models.moe.routing import Routing, RoutingRule, choose_groups, group_scores

__all__ = ["ProbeBuffer", "RoutingProbes", "UsedBuffer"]

# Spare slots cost little, a repeated sample a whole sample: sizes shrink slowly, over hundreds of samples.
_FIRST = 2.0  # slots in the first samples, relative to the need of a router without preferences
_MARGIN = 1.3  # relative to the most needed recently
_FORGET = 0.998  # decay per sample of the most needed
_OTHERS = 0.7  # share of the most needed by any layer that a recorded sample reserves in all of them
_MULTIPLE = 128


@dataclass(frozen=True)
class RoutingProbes:
    """The routing with one expert flipped, for every token and expert.

    Attributes:
        rule: The router's decision.
        keep: (experts,) booleans.
        indices: (tokens, top_k) chosen experts.
        mass: (tokens, experts) scores of all experts.
        missing: (tokens, top_k) True for slots that a token's groups could not fill.
        weakest: (tokens,) slot that an entering expert pushes out.
        runners: (tokens,) best survivor beyond a token's choice.
        without_runner: (tokens,) True where no survivor is left; the runner-up is then an arbitrary expert.
        enter_tokens: (P,) tokens that a pruned expert would enter.
        enter_experts: (P,) that pruned expert.
        enter_counts: (P,) False for padding of the list; None: there is none.
    """

    rule: RoutingRule
    keep: Tensor
    indices: Tensor
    mass: Tensor
    missing: Tensor
    weakest: Tensor
    runners: Tensor
    without_runner: Tensor
    enter_tokens: Tensor
    enter_experts: Tensor
    enter_counts: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def find(
        cls,
        rule: RoutingRule,
        routing: Routing,
        correction: Tensor | None,
        keep: Tensor,
        reserve: Callable[[Tensor], int] | None = None,
    ) -> RoutingProbes:
        """Find runner-ups and entering experts of a routing under ``keep``.

        With ``reserve`` the host does not wait for the number of entering experts: ``reserve`` gets it as a tensor
        and returns the length of the list.
        """
        indices, choice, mass = routing.indices, routing.choice, routing.mass
        nothing = -torch.inf if rule.score in ("sigmoid", "logit") else 0.0
        picked = choice.gather(-1, indices)
        missing = picked <= nothing
        runner_values, runners = choice.scatter(-1, indices, nothing).max(dim=-1)

        rank = mass if correction is None else mass + correction
        chosen_rank = rank.gather(-1, indices).masked_fill(missing, -torch.inf)
        lowest, weakest = chosen_rank.min(dim=-1)
        enters = (rank > lowest.unsqueeze(-1)) & ~keep
        if rule.grouped:
            enters &= _group_opens(rule, rank, keep)
        places, enter_counts = _places(enters.flatten(), None if reserve is None else reserve(enters.sum()))
        count = enters.shape[1]
        enter_tokens, enter_experts = places.div(count, rounding_mode="floor"), places % count
        return cls(
            rule, keep, indices, mass, missing, weakest,
            runners, runner_values <= nothing, enter_tokens, enter_experts, enter_counts,
        )  # fmt: skip

    @property
    def tokens(self) -> Tensor:
        """Tokens of all probes, runner-ups first."""
        everyone = torch.arange(len(self.runners), device=self.runners.device)
        return torch.cat([everyone, self.enter_tokens])

    @property
    def experts(self) -> Tensor:
        """Experts of all probes, runner-ups first."""
        return torch.cat([self.runners, self.enter_experts])

    def changes(self, real: Tensor, probes: Tensor) -> Tensor:
        """(tokens, experts) from ``<dL/dy, f>`` of the routing slots (tokens, top_k) and of the probes.

        With masses r, a = <dL/dy, f> and N, D the sums over the chosen experts, the layer contributes
        ``c N / D`` to the linearised loss; flipping an expert exchanges one term of N and of D.
        """
        rule, mass = self.rule, self.mass
        real, probes = real.to(mass.dtype), probes.to(mass.dtype)
        tokens = self.indices.shape[0]
        r = mass.gather(-1, self.indices).masked_fill(self.missing, 0.0)
        terms = r * real
        n = terms.sum(dim=-1, keepdim=True)
        survivors = rule.denominator == "survivors"
        if rule.denominator == "selected":
            d = r.sum(dim=-1, keepdim=True)
        elif survivors:
            d = (mass * self.keep).sum(dim=-1, keepdim=True)
        else:
            d = torch.ones_like(n)
        now = _ratio(n, d)

        # Kept and chosen: without it, the runner-up replaces it.
        without_runner = self.without_runner.unsqueeze(-1)
        stepping = mass.gather(-1, self.runners.unsqueeze(-1)).masked_fill(without_runner, 0.0)
        # A product with zero is not enough: the output of an expert that is not computed may be infinite.
        added = (stepping * probes[:tokens].unsqueeze(-1)).masked_fill(without_runner, 0.0)
        without = _ratio(n - terms + added, self._denominator(d, r, stepping))
        change = (now - without).masked_fill(self.missing, 0.0)
        if survivors:
            # A softmax over all survivors also depends on experts that it does not choose: they share its mass.
            shift = _ratio(n, torch.where(self.keep, d - mass, d + mass)) - now
            changes = torch.where(self.keep, -shift, shift)
        else:
            changes = torch.zeros_like(mass)
        # Every (token, expert) is written once, so that the sum has one order whatever the device.
        changes.scatter_(-1, self.indices, change)

        # Pruned and entering: with it, the weakest of the chosen leaves.
        at, who = self.enter_tokens, self.enter_experts
        leaving = self.weakest.unsqueeze(-1)
        remaining = d - r.gather(-1, leaving) if rule.denominator == "selected" else d
        per_token = torch.cat([n - terms.gather(-1, leaving), remaining, now], dim=1)
        n_left, d_left, before = per_token[at].unbind(1)
        r_new = mass[at, who]
        d_with = d_left if rule.denominator == "none" else d_left + r_new
        entering = _ratio(n_left + r_new * probes[tokens:], d_with) - before
        if self.enter_counts is not None:  # padding of the list changes nothing
            entering = entering.where(self.enter_counts, changes[at, who])
        changes[at, who] = entering
        return changes if rule.scale == 1.0 else changes * rule.scale

    def _denominator(self, d: Tensor, leaves: Tensor, comes: Tensor) -> Tensor:
        if self.rule.denominator == "selected":
            return d - leaves + comes
        return d - leaves if self.rule.denominator == "survivors" else d


def _places(flags: Tensor, count: int | None) -> tuple[Tensor, Tensor | None]:
    """Positions at which flags (n,) are set, in order.

    With a ``count``, that many positions, padded with others, and flags of those that are set.
    """
    if count is None:
        return flags.nonzero().squeeze(-1), None
    found = torch.sort(flags, descending=True, stable=True).indices[:count]
    return found, flags[found]


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient, and zero where the denominator is zero."""
    return (numerator / denominator).masked_fill(denominator <= torch.finfo(denominator.dtype).tiny, 0.0)


def _group_opens(rule: RoutingRule, rank: Tensor, keep: Tensor) -> Tensor:
    """(tokens, experts): whether the group of a pruned expert would be picked with that expert restored."""
    held = rank.masked_fill(~keep, -torch.inf)
    scores = group_scores(rule, held, keep)
    chosen = choose_groups(rule, scores)
    bar = scores.masked_fill(~chosen, torch.inf).amin(dim=-1, keepdim=True)
    member = rule.group_of(rank.device)
    if rule.score == "softmax":
        score = torch.maximum(scores[:, member], rank)
    else:
        best = group_scores(_best_only(rule), held, keep)[:, member]
        # Two best of {first, second, newcomer}: the newcomer joins the first, or the pair stays as it is.
        alone = best.isneginf()
        score = torch.where(alone, rank, torch.maximum(scores[:, member], best + rank))
    return chosen[:, member] | (score > bar)


def _best_only(rule: RoutingRule) -> RoutingRule:
    """The same groups, ranked by their best expert."""
    return RoutingRule(
        rule.top_k, "softmax", rule.denominator, rule.scale, rule.group_sizes, rule.chosen_groups
    )


# ------------------------------------------------------- slots for the probes


@dataclass
class UsedBuffer:
    """Slots that one sample reserved.

    Attributes:
        recorded: Whether the sample is recorded, to be replayed with other gates.
        layers: Layer, slots and expected number of probes, None in a recorded sample.
        needed: The numbers needed, on the device: one tensor per layer, or all in one.
    """

    recorded: bool = False
    layers: list[tuple[int, int, float | None]] = field(default_factory=list)
    needed: list[Tensor] = field(default_factory=list)

    def counts(self) -> Tensor:
        """(layers,) the numbers needed, in one tensor."""
        place = self.needed[0].device
        return torch.cat([numbers.reshape(-1).to(place, non_blocking=True) for numbers in self.needed])

    def replayed(self, counts: Tensor) -> UsedBuffer:
        """The same slots with the counts of another sample."""
        return UsedBuffer(True, self.layers, [counts])


class ProbeBuffer:
    """Number of probe slots of every layer.

    Outside :meth:`sample` probes are counted, and the host waits for their number.

    Args:
        layers: Sparse layers.
        always_counted: Count them in samples as well, which is best on a CPU.

    Attributes:
        always_counted: As given.
        too_small: Samples so far that needed more slots than they had.
    """

    def __init__(self, layers: int, *, always_counted: bool) -> None:
        self.always_counted = always_counted
        self._factors = [_FIRST] * layers
        self._most = [0] * layers
        self._used: UsedBuffer | None = None
        self.too_small = 0

    @property
    def counted(self) -> bool:
        """Whether probes are counted at the moment."""
        return self._used is None

    @contextmanager
    def sample(self, recorded: bool = False) -> Iterator[UsedBuffer | None]:
        """Context for the forward and backward pass of a sample; pass the result to :meth:`settle`.

        A ``recorded`` sample will be replayed with other gates: it reserves for the most that was needed so far.
        """
        self._used = None if self.always_counted else UsedBuffer(recorded)
        try:
            yield self._used
        finally:
            self._used = None

    def reserve(self, layer: int, tokens: int, top_k: int, kept: int, pruned: int, needed: Tensor) -> int:
        """Number of slots for the ``needed`` pairs of tokens and pruned experts that enter them."""
        assert self._used is not None
        expected: float | None = None
        if self._used.recorded:
            most = tokens * (kept + pruned)
            likely = _MARGIN * max(self._most[layer], _OTHERS * max(self._most), 1)
        else:
            most = tokens * pruned
            # Expected number of pruned experts before the top_k-th kept one in a random order.
            expected = tokens * top_k * pruned / (kept + 1)
            likely = self._factors[layer] * expected
        places = min(-(-int(likely) // _MULTIPLE) * _MULTIPLE, most)
        if most:
            self._used.layers.append((layer, places, expected))
            self._used.needed.append(needed)
        return places

    def settle(self, used: UsedBuffer) -> bool:
        """Whether a sample had enough slots; waits for the device, and updates the sizes."""
        if not used.layers:
            return True
        enough = True
        for (layer, places, expected), number in zip(used.layers, used.counts().tolist(), strict=True):
            enough &= number <= places
            self._most[layer] = max(number, self._most[layer])
            if expected is not None:
                self._factors[layer] = max(_MARGIN * number / expected, _FORGET * self._factors[layer])
        self.too_small += not enough
        return enough
