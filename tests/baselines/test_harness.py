"""Allowances are obeyed, interrupted searches end where uninterrupted ones do, bad settings fail at once."""

import numpy as np
import pytest
import torch

from rco.testing import random_problem

from .conftest import ErrorsObjective, TableObjective, make, methods

LABELS = [f"layers.{i // 2}.experts.{i % 2}" for i in range(8)]
PROBLEM = random_problem(3, 8, 3, sense="<=", monotone=True, groups=LABELS)


class Watched(ErrorsObjective):
    """Counts for itself."""

    def __init__(self):
        super().__init__(8, 3, seed=3, num_batches=5, batch_noise=0.2)
        self.forwards = self.backwards = 0

    def loss(self, gates, batch):
        self.forwards += 1
        self.backwards += gates.requires_grad
        return super().loss(gates, batch)


def without_time(result):
    described = result.to_dict()
    for part in [described, *described["history"]]:
        part.pop("seconds")
    return described


ITERATIVE = [
    name
    for name in methods()
    if name not in ("uniform", "uniform-fill", "uniform-random-fill", "top-global", "top-per-block")
    and name not in ("random-pick", "output-error", "mxmoe")
]


@pytest.mark.parametrize("name", methods())
def test_counts_are_true_and_the_allowance_holds(name):
    objective = Watched()
    free = make(name).search(PROBLEM, objective)
    assert (free.forwards, free.backwards) == (objective.forwards, objective.backwards)
    spent = free.forwards + 2 * free.backwards
    if name not in ITERATIVE:
        return
    shorter = 0
    for allowance in (spent, spent - 1, (3 * spent) // 4, spent // 2):
        objective = Watched()
        try:
            limited = make(name, max_evaluations=allowance).search(PROBLEM, objective)
        except ValueError as refused:  # right for an allowance that no step fits into
            if "is too little for" not in str(refused):
                raise
            assert (objective.forwards, objective.backwards) == (0, 0)
            continue
        assert limited.forwards + 2 * limited.backwards <= allowance
        assert PROBLEM.is_feasible(limited.allocation)
        shorter += len(limited.history) <= len(free.history)
    assert shorter >= 1


@pytest.mark.parametrize("name", ITERATIVE)
def test_no_time_means_no_steps(name):
    result = make(name, max_seconds=1e-9).search(PROBLEM, Watched())
    assert result.history == []
    assert PROBLEM.is_feasible(result.allocation)
    assert result.settings["steps_taken"] == 0


@pytest.mark.parametrize("name", ITERATIVE)
def test_resumed_equals_uninterrupted(name, tmp_path):
    prior = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states, records = [], []
    whole = make(name).search(
        PROBLEM, Watched(), prior=prior, on_checkpoint=states.append, on_step=records.append
    )
    assert [record.step for record in records] == list(range(1, len(states) + 1))
    assert len(states) >= 2
    for stop in (0, len(states) // 2, len(states) - 1):
        torch.save(states[stop], tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        resumed = make(name).search(PROBLEM, Watched(), prior=prior, resume=state)
        assert without_time(resumed) == without_time(whole)


@pytest.mark.parametrize("name", ITERATIVE)
def test_what_a_search_would_answer_on_its_way(name):
    """Every method has an any-time answer within the budget, and asking for it changes nothing."""
    answers = []
    whole = make(name).search(PROBLEM, Watched())
    asked = make(name).search(
        PROBLEM, Watched(), on_incumbent=lambda record, incumbent: answers.append((record.step, incumbent()))
    )
    assert without_time(asked) == without_time(whole)
    assert [step for step, _ in answers] == list(range(1, len(whole.history) + 1))
    assert all(PROBLEM.is_feasible(choices) for _, choices in answers)
    first = next(iter(whole.candidates))
    if whole.chosen_from == first:
        assert answers[-1][1].tolist() == whole.allocation.tolist()


def test_resume_refuses_another_search():
    states = []
    make("random").search(PROBLEM, Watched(), on_checkpoint=states.append)
    with pytest.raises(ValueError, match="keep=4, this search has keep=2"):
        make("random", keep=2).search(PROBLEM, Watched(), resume=states[0])
    with pytest.raises(ValueError, match="from random"):
        make("evopress").search(PROBLEM, Watched(), resume=states[0])
    with pytest.raises(ValueError, match="another prior"):
        make("random").search(PROBLEM, Watched(), resume=states[0], prior=torch.ones(8, 3))
    with pytest.raises(ValueError, match="another problem"):
        make("random").search(random_problem(4, 8, 3), Watched(), resume=states[0])
    longer = make("random", max_evaluations=10_000).search(PROBLEM, Watched(), resume=states[0])
    assert longer.settings["steps_taken"] == 6  # a new allowance is welcome


@pytest.mark.parametrize("name", [n for n in ITERATIVE if n not in ("greedy", "greedy-down")])
def test_seed_decides(name):
    losses = [
        [r.loss for r in make(name, seed=seed).search(PROBLEM, Watched()).history] for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize(
    ("name", "steps"), [("random", "steps"), ("frank-wolfe", "steps"), ("evopress", "generations")]
)
def test_open_ended_searches_use_the_allowance(name, steps):
    with pytest.raises(ValueError, match=f"{steps}=None goes on until"):
        make(name, **{steps: None})
    result = make(name, **{steps: None}, max_evaluations=600).search(PROBLEM, Watched())
    assert 450 < result.forwards + 2 * result.backwards <= 600
    timed = make(name, **{steps: None}, max_seconds=0.2).search(PROBLEM, Watched())
    assert timed.history
    assert 0.2 < timed.seconds < 5.0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("random", {"seed": -1}, "seed must be at least 0"),
        ("random", {"max_evaluations": 0}, "max_evaluations must be positive"),
        ("evopress", {"survivors": (4, 2)}, "end with 1"),
        ("evopress", {"survivors": (1,), "batches_per_stage": (1, 2)}, "each of the 1 stages"),
        ("evopress", {"partners": "all"}, "partners must be"),
        ("evoesap", {"fitness": "luck"}, "fitness must be"),
        ("impq", {"shrinkage": 0.0}, "shrinkage must lie"),
        ("frank-wolfe", {"gates": "soft"}, "gates must be"),
        ("higgs", {"base": "middle"}, "base must be"),
        ("higgs-noise", {"levels": 0}, "levels must be at least 1"),
        ("uniform-fill", {"fill": "sideways"}, "fill must be"),
    ],
)
def test_bad_settings_fail_at_construction(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make(name, **settings)


@pytest.mark.parametrize("name", ["higgs", "output-error"])
def test_missing_tables_are_named(name):
    with pytest.raises(ValueError, match="option_errors"):
        make(name).search(PROBLEM, TableObjective(np.zeros((8, 3))))


def test_noise_must_be_offered():
    with pytest.raises(ValueError, match="has no noisy_loss; add it, or use higgs"):
        make("higgs-noise").search(PROBLEM, TableObjective(np.zeros((8, 3))))


def test_prior_of_the_wrong_shape_or_not_finite():
    with pytest.raises(ValueError, match=r"prior must have shape \(8, 3\)"):
        make("random").search(PROBLEM, Watched(), prior=torch.zeros(3, 8))
    with pytest.raises(ValueError, match="prior must be finite"):
        make("random").search(PROBLEM, Watched(), prior=torch.full((8, 3), float("nan")))


def test_a_loss_that_is_not_a_number_is_an_error():
    with pytest.raises(FloatingPointError, match="returned nan"):
        make("one-at-a-time").search(PROBLEM, TableObjective(np.full((8, 3), np.nan)))
