import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rco.compression.priors import logits_from_ranks
from rco.models.moe.expert_scores import ExpertScores


def batch(seed, tokens=30, experts=6, top_k=2):
    g = torch.Generator().manual_seed(seed)
    mass = torch.softmax(torch.randn(tokens, experts, generator=g), -1)
    weights, indices = mass.topk(top_k)
    return indices, weights, torch.rand(tokens, top_k, generator=g), mass


def slow(batches, experts=6):
    saliency = [[] for _ in range(experts)]
    tokens, mass = 0, torch.zeros(experts)
    for indices, weights, norms, shares in batches:
        for t in range(indices.shape[0]):
            tokens += 1
            mass += shares[t]
            for s in range(indices.shape[1]):
                saliency[int(indices[t, s])].append(float(weights[t, s] * norms[t, s]))
    reap = torch.tensor([sum(s) / len(s) if s else 0.0 for s in saliency], dtype=torch.float64)
    frequency = torch.tensor([len(s) / tokens for s in saliency], dtype=torch.float64)
    return reap, frequency, mass.double() / tokens


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_streamed_scores_equal_a_loop_over_tokens(seeds):
    scores = ExpertScores([6])
    batches = [batch(seed) for seed in seeds]
    for each in batches:
        scores.update(0, *each)
    for name, expected in zip(("reap", "frequency", "mass"), slow(batches), strict=True):
        torch.testing.assert_close(scores.score(name)[0], expected, rtol=1e-5, atol=1e-7)


def test_masked_tokens_do_not_count_and_merging_is_one_pass():
    one, two, both = ExpertScores([6]), ExpertScores([6]), ExpertScores([6])
    indices, weights, norms, mass = batch(3)
    mask = torch.arange(30) % 3 == 0
    one.update(0, indices, weights, norms, mass, mask)
    both.update(0, indices[mask], weights[mask], norms[mask], mass[mask])
    two.update(0, *batch(4))
    both.update(0, *batch(4))
    one.merge(two)
    for name in ("reap", "frequency", "mass"):
        torch.testing.assert_close(one.score(name), both.score(name))
    with pytest.raises(ValueError, match="cannot merge"):
        one.merge(ExpertScores([7]))


def test_experts_that_nobody_visits_score_zero():
    scores = ExpertScores([4])
    scores.update(
        0, torch.tensor([[1]]), torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.full((1, 4), 0.25)
    )
    assert scores.score("reap")[0].tolist() == [0, 2, 0, 0]
    assert scores.score("frequency")[0].tolist() == [0, 1, 0, 0]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="at least one expert"):
        ExpertScores([])
    scores = ExpertScores([6])
    with pytest.raises(ValueError, match="no token was scored"):
        scores.score("reap")
    with pytest.raises(ValueError, match="allowed are reap, frequency, mass"):
        scores.score("norm")
    with pytest.raises(ValueError, match="layer 0 has 6 experts"):
        scores.update(0, *batch(0, experts=5))
    with pytest.raises(ValueError, match="negative"):
        logits_from_ranks([torch.ones(2)], -1.0)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=4), st.floats(0.0, 8.0)
)
def test_prior_follows_the_order_within_each_layer(rows, strength):
    layers = [torch.tensor(row, dtype=torch.float64) for row in rows]
    logits = logits_from_ranks(layers, strength).split([len(row) for row in rows])
    for values, prior in zip(layers, logits, strict=True):
        assert float(prior.abs().max()) <= strength + 1e-12
        assert abs(float(prior.sum())) <= 1e-9 * (1 + strength)
        gap_values, gap_prior = values[:, None] - values, prior[:, None] - prior
        assert bool((gap_prior.abs()[gap_values == 0] <= 1e-12).all())
        if strength > 1e-6:
            assert bool((gap_prior[gap_values > 0] > 0).all())
