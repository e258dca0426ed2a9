import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rco.data.calibration import CalibrationSet
from rco.evaluation import (
    EvaluationError,
    ReferenceStates,
    measure_divergence,
    measure_divergence_and_perplexity,
    measure_perplexity,
    recovery,
)
from rco.evaluation.statistics import mean_of_sequences
from rco.models.loading import wrap_model
from rco.testing.tiny_models import tiny_model

VOCABULARY = 96


def dataset(sequences=7, length=12, seed=0, domains=("a", "b")):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (sequences, length), generator=generator)
    mask = torch.rand(sequences, length, generator=generator) < 0.7
    mask[:, -1] = False
    mask[0] = False  # a sequence that counts nothing
    names = tuple(domains[i % len(domains)] for i in range(sequences))
    return CalibrationSet(tokens, mask, names, "test", 0, "all")


def full_log_probabilities(model, tokens):
    with torch.no_grad():
        return model(tokens).logits.double().log_softmax(-1)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_perplexity_is_that_of_the_whole_logits(model_type, batch_size):
    loaded = wrap_model(tiny_model(model_type))
    data = dataset()
    seen = []
    result = measure_perplexity(loaded, data, batch_size=batch_size, on_batch=lambda *x: seen.append(x))
    logs = full_log_probabilities(loaded.model, data.tokens)[:, :-1]
    losses = -logs.gather(-1, data.tokens[:, 1:, None])[..., 0]
    mask = data.mask[:, :-1]
    assert result["nll"] == pytest.approx(float(losses[mask].mean()), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"]))
    assert result["tokens"] == data.num_predictions
    assert result["sequences"] == 6
    rows = torch.tensor([name == "b" for name in data.domains])
    assert result["domains"]["b"]["nll"] == pytest.approx(float(losses[rows][mask[rows]].mean()), rel=1e-5)
    parts = result["domains"].values()
    assert math.fsum(p["nll"] * p["tokens"] for p in parts) / result["tokens"] == pytest.approx(result["nll"])
    assert seen[-1] == (-(-7 // batch_size), -(-7 // batch_size))


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_both_at_once_are_each_alone(model_type, batch_size):
    full, other = (wrap_model(tiny_model(model_type, seed=seed)) for seed in (0, 1))
    data = dataset()
    states = ReferenceStates.compute(full, data)
    divergence, perplexity = measure_divergence_and_perplexity(other, states, data, batch_size=batch_size)
    assert divergence == measure_divergence(other, states, data, batch_size=batch_size)
    assert perplexity == measure_perplexity(other, data, batch_size=batch_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_is_that_of_the_whole_logits(dtype):
    full = wrap_model(tiny_model("llama", dtype=dtype))
    other = wrap_model(tiny_model("llama", dtype=dtype, seed=1))
    data = dataset()
    result = measure_divergence(other, full, data, batch_size=2)
    p, q = (full_log_probabilities(m.model, data.tokens)[:, :-1] for m in (full, other))
    values = (p.exp() * (p - q)).sum(-1)[data.mask[:, :-1]]
    assert result["kl"] == pytest.approx(float(values.mean()), rel=1e-4 if dtype == torch.float32 else 0.05)
    assert result["stderr"] > 0
    states = ReferenceStates.compute(full, data, batch_size=3)
    assert measure_divergence(other, states, data, batch_size=2)["kl"] == pytest.approx(
        result["kl"], rel=1e-4
    )
    assert measure_divergence(full, states, data)["kl"] == pytest.approx(0, abs=1e-9)
    assert measure_divergence(other, states, data, top_k=4)["kl"] <= result["kl"] * (1 + 1e-6)


def test_reference_outlives_changes_of_the_model():
    loaded = wrap_model(tiny_model("llama", tie_word_embeddings=False))
    data = dataset()
    states = ReferenceStates.compute(loaded, data)
    loaded.model.lm_head.weight.mul_(0.5)
    assert measure_divergence(loaded, states, data)["kl"] > 1e-4


def test_divergence_refuses_what_cannot_be_compared():
    loaded = wrap_model(tiny_model("llama"))
    with pytest.raises(EvaluationError, match="one vocabulary"):
        measure_divergence(loaded, wrap_model(tiny_model("llama", vocab_size=90)), dataset())
    with pytest.raises(EvaluationError, match="other data"):
        measure_divergence(loaded, ReferenceStates.compute(loaded, dataset(seed=1)), dataset())
    nothing = dataset(sequences=1)
    for measure in (measure_perplexity, lambda m, d: measure_divergence(m, m, d)):
        with pytest.raises(EvaluationError, match="no prediction"):
            measure(loaded, nothing)
    with pytest.raises(EvaluationError, match="batch_size"):
        measure_perplexity(loaded, dataset(), batch_size=0)


def test_standard_error_matches_repeated_sampling():
    generator = torch.Generator().manual_seed(0)
    means, errors = [], []
    for _ in range(400):
        counts = torch.randint(5, 20, (40,), generator=generator)
        level = torch.randn(40, generator=generator, dtype=torch.float64)  # shared by a sequence's tokens
        mean, error = mean_of_sequences(level * counts, counts)
        means.append(mean)
        errors.append(error)
    spread = torch.tensor(means).std()
    assert float(torch.tensor(errors).mean()) == pytest.approx(float(spread), rel=0.1)


@given(st.lists(st.tuples(st.floats(-50, 50), st.integers(1, 50)), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_mean_of_sequences(pairs):
    sums = torch.tensor([value * count for value, count in pairs], dtype=torch.float64)
    counts = torch.tensor([count for _, count in pairs])
    mean, error = mean_of_sequences(sums, counts)
    values = [value for value, _ in pairs]
    assert min(values) - 1e-9 <= mean <= max(values) + 1e-9
    assert (error is None) == (len(pairs) == 1)
    if error is not None and max(values) == min(values):
        assert error == pytest.approx(0, abs=1e-9)
    if error is not None:  # twice the data, the same mean, about 1/sqrt(2) of the error
        twice, half = mean_of_sequences(sums.repeat(2), counts.repeat(2))
        assert twice == pytest.approx(mean)
        assert half <= error + 1e-12


def test_recovery():
    full = {"arc": {"acc": 0.5, "acc_norm": 0.4}, "lambada": {"acc": 0.8}, "zero": {"acc": 0.0}}
    ours = {
        "arc": {"acc": 0.4, "acc_norm": 0.3},
        "lambada": {"acc": 0.6},
        "zero": {"acc": 0.1},
        "new": {"acc": 1},
    }
    result = recovery(ours, full)
    assert result["tasks"] == {"arc": pytest.approx(75), "lambada": pytest.approx(75), "zero": None}
    assert result["average"] == pytest.approx(100 * 1.0 / 1.2)
    assert recovery(ours, full, ("acc",))["tasks"]["arc"] == pytest.approx(80)
    assert recovery({}, full) == {"tasks": {}, "average": None}
