"""Uniform assignments and picks by score, against what they say they are."""

import numpy as np
import pytest
import torch

from rco import AllocationProblem
from rco.baselines.picks import RandomPick, TopGlobal, TopPerBlock, share_budget
from rco.baselines.uniform import RandomFill, Uniform, UniformFill
from rco.testing import QuadraticObjective

from .conftest import TableObjective

WIDTHS = AllocationProblem(
    [2, 3, 4], 29, weights=[1] * 8 + [2], monotone=True
)  # uniform 2 costs 20, 3 costs 30
# Dearer is better, the more so the later the group.
TABLE = -np.arange(1, 10)[:, None] * np.arange(3)[None, :].astype(float)


def test_uniform_is_uniform_and_leaves_the_rest():
    result = Uniform().search(WIDTHS, TableObjective(TABLE))
    assert np.asarray(result.allocation).tolist() == [0] * 9
    assert result.cost == 20
    assert (result.forwards, result.backwards, list(result.candidates)) == (1, 0, ["uniform"])


def test_fill_in_order_from_the_end_and_at_random():
    first, last = (UniformFill(fill=f).search(WIDTHS, TableObjective(TABLE)) for f in ("first", "last"))
    assert np.asarray(first.allocation).tolist() == [1] * 8 + [0]
    assert np.asarray(last.allocation).tolist() == [0] + [1] * 8
    assert last.cost == 29
    drawn = {str(RandomFill(seed=s).search(WIDTHS, TableObjective(TABLE)).allocation) for s in range(8)}
    assert len(drawn) > 1


def experts(layers=5, per_layer=8, keep=23, cost=1000):
    blocks = np.repeat(np.arange(layers), per_layer)
    labels = [f"layers.{b}.experts.{e}" for b in range(layers) for e in range(per_layer)]
    problem = AllocationProblem([0, cost], keep * cost, groups=labels, monotone=True)
    score = np.random.default_rng(2).normal(size=layers * per_layer) + blocks
    return problem, blocks, score, torch.from_numpy(np.stack([np.zeros_like(score), score], axis=1))


class Keeping(QuadraticObjective):
    """Every kept expert helps, so that the picks beat keeping none."""

    def loss(self, gates, batch):
        return 100.0 - gates[:, 1].sum()


def test_top_global_keeps_the_highest_scores():
    problem, _, score, prior = experts()
    result = TopGlobal().search(problem, Keeping(40, 2), prior=prior)
    kept = np.flatnonzero(np.asarray(result.allocation))
    assert set(kept) == set(np.argsort(-score)[:23])


def test_top_global_of_negative_scores_still_fills_the_budget():
    problem, _, score, prior = experts()
    result = TopGlobal().search(problem, Keeping(40, 2), prior=prior - 50 * torch.tensor([0.0, 1.0]))
    assert set(np.flatnonzero(np.asarray(result.allocation))) == set(np.argsort(-score)[:23])


def test_top_per_block_keeps_equal_counts():
    problem, blocks, score, prior = experts(keep=25)
    result = TopPerBlock().search(problem, Keeping(40, 2), prior=prior)
    kept = np.asarray(result.allocation)
    for block in range(5):
        inside = np.flatnonzero(blocks == block)
        chosen = inside[kept[inside] == 1]
        assert set(chosen) == set(inside[np.argsort(-score[inside])[:5]])


@pytest.mark.parametrize("keep", range(1, 40))
def test_counts_that_do_not_divide_differ_by_one_and_sum_up(keep):
    problem, blocks, _, _ = experts(keep=keep)
    shared = share_budget(problem, blocks)
    counts = [b // 1000 for b in shared.unit_budgets]
    assert sum(counts) == keep
    assert max(counts) - min(counts) <= 1


def test_shares_respect_locks_and_other_budgets():
    allowed = np.ones((6, 2), dtype=bool)
    allowed[0, 0] = False  # always kept
    problem = AllocationProblem([0, 1], 4, allowed=allowed)
    shared = share_budget(problem, np.array([0, 0, 0, 1, 1, 1]))
    assert sum(shared.unit_budgets) == 4
    both = np.stack([np.tile([0, 1], (6, 1)), np.tile([0, 5], (6, 1))])
    joint = AllocationProblem(both, [4, 11], sense="<=", monotone=True)
    score = torch.from_numpy(np.stack([np.zeros(6), np.arange(6.0) + 1], axis=1))
    result = TopPerBlock(blocks=(0, 0, 0, 1, 1, 1)).search(joint, Keeping(6, 2), prior=score)
    kept = np.asarray(result.allocation)
    assert joint.is_feasible(kept)
    assert kept.sum() == 2  # the second budget binds


@pytest.mark.parametrize("per_block", [False, True])
def test_random_picks_use_the_budget_and_the_seed(per_block):
    problem, blocks, _, _ = experts(keep=25)
    picks = []
    for seed in range(5):
        result = RandomPick(seed=seed, per_block=per_block).search(problem, Keeping(40, 2))
        kept = np.asarray(result.allocation)
        assert kept.sum() == 25
        if per_block:
            assert all(kept[blocks == b].sum() == 5 for b in range(5))
        picks.append(kept.tobytes())
    assert len(set(picks)) == 5


def test_no_score_is_said(caplog):
    problem, _, _, _ = experts()
    TopGlobal().search(problem, Keeping(40, 2))
    assert "has no prior" in caplog.text
