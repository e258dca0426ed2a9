"""Evolution: operators that keep the budget, selection in stages, counts per block in the order of the score."""

import numpy as np
import pytest
import torch

from rco import AllocationProblem
from rco.baselines.evoesap import EvoESAP, Sequences
from rco.baselines.evopress import EvoPress, LevelSwitch
from rco.core.evaluator import Evaluator
from rco.core.moves import uniform_allocation
from rco.core.searcher import SearchRun
from rco.testing import QuadraticObjective, random_problem, true_optimum

from .conftest import TableObjective, make


def quantization(seed=0, groups=40):
    """Widths 2 to 8 on groups of a few sizes, as the layers of a model have."""
    rng = np.random.default_rng(seed)
    weights = rng.choice([16, 16, 44, 128], size=groups)
    return AllocationProblem(range(2, 9), int(2.7 * weights.sum()), weights=weights, monotone=True)


def switch_problems():
    rng = np.random.default_rng(1)
    both = np.cumsum(rng.integers(1, 9, size=(2, 12, 4)), axis=2)
    locked = np.ones((12, 4), dtype=bool)
    locked[::3, 1:3] = False
    return {
        "sizes": quantization(),
        "unequal": random_problem(2, 30, 4, sense="<="),
        "blocks": AllocationProblem([0, 1], [3, 7, 1], blocks=[0] * 9 + [1] * 9 + [2] * 4, monotone=True),
        "joint": AllocationProblem(both, [int(c[:, 1].sum()) for c in both], sense="<="),
        "locks": random_problem(5, 12, 4, allowed=locked, monotone=True),
    }


@pytest.mark.parametrize("kind", sorted(switch_problems()))
@pytest.mark.parametrize("partners", ["size", "any"])
def test_mutations_keep_the_budget(kind, partners):
    """10,000 mutations in all, each of the mutant before it."""
    problem = switch_problems()[kind]
    switch = LevelSwitch(problem, partners)
    rng = np.random.default_rng(0)
    choices = uniform_allocation(problem)
    moved = 0
    for _ in range(1000):
        mutant = switch(choices, rng)
        if mutant is None:
            continue
        assert problem.is_feasible(mutant)
        changed = np.flatnonzero(mutant != choices)
        assert changed.size
        moved += 1
        choices = mutant
    assert moved > 500


def test_switches_between_equal_sizes_are_swaps_of_two_levels():
    problem = AllocationProblem(range(2, 9), 30, weights=[1] * 10, monotone=True)
    switch = LevelSwitch(problem, "size")
    rng = np.random.default_rng(3)
    choices = np.full(10, 1)
    for _ in range(500):
        mutant = switch(choices, rng)
        if mutant is None:
            continue
        assert sorted((mutant - choices)[mutant != choices].tolist()) == [-1, 1]
        assert problem.cost(mutant) == 30
        choices = mutant


def test_unequal_sizes_leave_little_unspent():
    problem = quantization()
    switch = LevelSwitch(problem, "any")
    rng = np.random.default_rng(0)
    choices = uniform_allocation(problem)
    for _ in range(300):
        mutant = switch(choices, rng)
        choices = choices if mutant is None else mutant
    assert (
        problem.unit_budgets[0] - problem.units(choices)[0] < 128
    )  # less than one step of the largest group


def test_finds_small_optima():
    """A local search: most of them, not all."""
    settings = {"generations": 20, "offspring": 12, "survivors": (4, 1), "batches_per_stage": (1, 1)}
    found = 0
    for seed in range(8):
        problem = random_problem(seed, 6, 3, sense="<=")
        objective = QuadraticObjective(6, 3, seed=seed)
        result = EvoPress(**settings, initial=8).search(problem, objective)
        found += result.loss <= true_optimum(problem, objective)[1] + 1e-9
    assert found >= 5


def test_the_parent_is_never_lost_where_the_last_stage_sees_everything():
    problem = quantization(groups=12)
    objective = QuadraticObjective(12, 7, seed=1, num_batches=4, batch_noise=0.5)
    settings = {"generations": 12, "offspring": 5, "survivors": (2, 1), "batches_per_stage": (1, 99)}
    losses = [r.loss for r in EvoPress(**settings, initial=3).search(problem, objective).history[1:]]
    assert (np.diff(losses) <= 1e-9).all()  # the batches come in another order every time
    assert losses[0] > losses[-1]


def test_stages_in_tokens():
    objective = QuadraticObjective(6, 3, num_batches=20)
    problem = random_problem(0, 6, 3)
    settings = {"generations": 1, "offspring": 4, "initial": 2, "survivors": (2, 1)}
    searcher = EvoPress(**settings, tokens_per_stage=(512, 2049))
    assert searcher.search(problem, objective).settings["stage_batches"] == [1, 2]  # batches of 2,048
    objective.tokens_per_batch = 512
    assert searcher.search(problem, objective).settings["stage_batches"] == [1, 5]
    counted = EvoPress(**settings, batches_per_stage=(2, 3))
    assert counted.search(problem, objective).settings["stage_batches"] == [2, 3]


@pytest.mark.parametrize(("length", "batches"), [(2048, [1, 8, 64]), (512, [4, 32, 256]), (4096, [1, 4, 32])])
def test_stages_are_the_published_tokens_whatever_a_batch_holds(length, batches):
    objective = QuadraticObjective(6, 3, num_batches=300)
    objective.tokens_per_batch = length
    assert EvoPress().stage_batches(Evaluator(objective)) == batches


@pytest.mark.parametrize("evaluations", [300, 1000, 5000, 60_000])
def test_scaled_settings_leave_room_for_generations(evaluations):
    objective = QuadraticObjective(6, 3, seed=0, num_batches=80, batch_noise=0.1)
    settings = EvoPress.scaled_to(evaluations)
    searcher = EvoPress(**settings)
    population = searcher.population(SearchRun(searcher, random_problem(0), objective))
    assert population.cost(1) * 50 <= evaluations or settings["offspring"] == 4
    assert settings["offspring"] >= 4
    assert list(settings["survivors"]) == sorted(settings["survivors"], reverse=True)
    assert list(settings["batches_per_stage"]) == sorted(settings["batches_per_stage"])
    if evaluations >= 50 * 576:
        assert settings["offspring"] == EvoPress().offspring


def test_the_prior_is_a_parent_to_be():
    problem = quantization(groups=10)
    table = np.random.default_rng(0).normal(size=(10, 7))
    result = make("evopress", generations=0).search(
        problem.replace(monotone=False), TableObjective(table), prior=torch.from_numpy(-table)
    )
    assert result.candidates["fittest"] == pytest.approx(result.candidates["prior"])


# ------------------------------------------------------------------------------ counts per block


def experts(layers=4, per_layer=6, keep=13, **arguments):
    blocks = np.repeat(np.arange(layers), per_layer)
    labels = [f"layers.{b}.experts.{e}" for b in range(layers) for e in range(per_layer)]
    problem = AllocationProblem([0, 1], keep, groups=labels, monotone=True, **arguments)
    score = np.random.default_rng(4).normal(size=layers * per_layer)
    return problem, blocks, score, torch.from_numpy(np.stack([np.zeros_like(score), score], axis=1))


def follows_the_order(kept, blocks, score):
    return all(
        not ((kept == 0) & (blocks == b)).any()
        or not ((kept == 1) & (blocks == b)).any()
        or score[(kept == 1) & (blocks == b)].min() > score[(kept == 0) & (blocks == b)].max()
        for b in np.unique(blocks)
    )


@pytest.mark.parametrize("fitness", ["loss", "acceptance"])
def test_keeps_the_count_and_the_order(fitness):
    problem, blocks, score, prior = experts()
    objective = QuadraticObjective(24, 2, seed=3, num_batches=3, batch_noise=0.2)
    objective.acceptance = lambda gates, batch: torch.sigmoid(30.0 - objective.loss(gates, batch))
    searcher = EvoESAP(generations=15, offspring=8, initial=4, fitness=fitness)
    seen = []
    process_losses = searcher.search(problem, objective, prior=prior, on_checkpoint=seen.append).history
    sequences = Sequences(problem, prior.numpy(), blocks)
    for state in seen:
        counts = state["process"]["parent"]["array"].numpy()
        kept = sequences.express(counts)
        assert counts.sum() == kept.sum() == 13
        assert follows_the_order(kept, blocks, score)
        assert [int(kept[blocks == b].sum()) for b in range(4)] == counts.tolist()
    assert len(process_losses) == 16
    if fitness == "acceptance":
        assert all(-1 <= record.loss <= 0 for record in process_losses)


def test_acceptance_must_be_offered():
    problem, _, _, prior = experts()
    with pytest.raises(ValueError, match="acceptance"):
        EvoESAP(fitness="acceptance").search(problem, QuadraticObjective(24, 2), prior=prior)


def test_finds_the_best_counts():
    """A loss of the counts alone, whose optimum is known."""
    problem, blocks, _, prior = experts()
    wanted = torch.tensor([6.0, 1.0, 4.0, 2.0], dtype=torch.float64)
    per_block = torch.nn.functional.one_hot(torch.from_numpy(blocks), 4).double()

    class Counts:
        num_batches = 1

        def loss(self, gates, batch):
            return ((per_block.T @ gates[:, 1] - wanted) ** 2).sum()

    result = EvoESAP(generations=30, offspring=12, initial=4).search(problem, Counts(), prior=prior)
    assert result.loss == 0.0
    kept = np.asarray(result.allocation)
    assert [int(kept[blocks == b].sum()) for b in range(4)] == [6, 1, 4, 2]


def test_floors_as_joint_budgets_hold():
    _, blocks, _, prior = experts()
    keep = np.tile([0, 1], (24, 1))
    pruned = [np.where((blocks == b)[:, None], [[1, 0]] * 24, 0) for b in range(4)]
    problem = AllocationProblem(np.stack([keep, *pruned]), [13, 4, 4, 4, 4], sense="<=", monotone=True)
    searcher = EvoESAP(generations=8, offspring=6, initial=3, blocks=tuple(blocks.tolist()))
    result = searcher.search(problem, QuadraticObjective(24, 2, seed=8), prior=prior)
    kept = np.asarray(result.allocation)
    assert kept.sum() <= 13
    assert all(kept[blocks == b].sum() >= 2 for b in range(4))


def test_budgets_per_block_leave_nothing_to_search():
    blocks = [0, 0, 0, 1, 1, 1]
    problem = AllocationProblem([0, 1], [1, 2], blocks=blocks)
    score = torch.tensor([[0, 1], [0, 3], [0, 2], [0, 1], [0, 0.5], [0, 2]], dtype=torch.float64)
    result = make("evoesap").search(problem, QuadraticObjective(6, 2), prior=score)
    assert len(result.history) <= 2
    assert result.candidates["fittest"] <= result.candidates["prior"] + 1e-12
