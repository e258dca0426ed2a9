"""Tuning of chosen weights: what is trained is what is stored, never worse, and the same result after a stop."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tuning_cases import QUICK, Case

from rco.compression.deployment import decode_into
from rco.compression.tunable_model import tunable_model
from rco.compression.tuning import (
    TuningText,
    _Measured,
    _rounded_at_random,
    batches_of,
    moved_codes,
    rate_at,
    tune,
)
from rco.formats.base import EncodeSettings
from rco.formats.integer import IntegerGrid, TunableGrid
from rco.models.moe.linears import model_linears
from rco.testing.tiny_models import tiny_model, tiny_moe


def llama(**changes):
    return tiny_model("llama", num_hidden_layers=2, **changes)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path, llama())


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("mode", ["scales", "blocks", "full"])
def test_the_result_is_better_has_the_same_formats_and_is_what_is_applied_and_deployed(case, mode):
    before = state_of(case.loaded.model)
    found = case.run(replace(QUICK, mode=mode))
    assert all(torch.equal(value, before[name]) for name, value in case.loaded.model.state_dict().items())
    assert found.after < found.before
    assert found.curve[-1]["selection"] >= found.after
    for name, stored in case.weights.items():
        tuned = found.weights[name]
        assert tuned.format == stored.format
        assert tuned.nbytes == stored.nbytes
        assert tuned.dtype == stored.dtype
        if stored.zeros is not None:
            assert torch.equal(tuned.zeros, stored.zeros)
        assert int(tuned.codes().max()) < 1 << stored.format.bits
    compression = case.compression.tuned(case.allocation, found.weights)
    assert case.loss(compression) == pytest.approx(found.after, rel=1e-5)
    assert case.loss(case.compression) == pytest.approx(found.before, rel=1e-5)
    source, written = compression.deployed(case.allocation)
    for name, tuned in found.weights.items():
        for part, tensor in tuned.tensors.items():
            assert torch.equal(written[name].tensors[part], tensor)
    # Decoded into the model, as a checkpoint is loaded, it computes the same logits bit for bit.
    tokens = case.selection.tokens[:1]
    with compression.apply(case.allocation), torch.no_grad():
        wanted = case.loaded.model(tokens).logits
    decode_into(source, written)
    assert torch.equal(source.model(tokens).logits, wanted)


def test_scales_alone_move_no_code_and_full_moves_some(case):
    scales, full = (case.run(replace(QUICK, mode=mode)).weights for mode in ("scales", "full"))
    assert moved_codes(case.weights, scales)["moved"] == 0
    moved = moved_codes(case.weights, full)
    assert moved["moved"] > 0
    by_hand = sum(int((full[name].codes() != stored.codes()).sum()) for name, stored in case.weights.items())
    assert (moved["moved"], moved["codes"]) == (
        by_hand, sum(stored.shape[0] * stored.shape[1] for stored in case.weights.values())
    )  # fmt: skip


def test_codes_of_wider_formats_than_asked_stay(case):
    found = case.run(replace(QUICK, code_bits=2))
    moved = {
        stored.format.bits
        for name, stored in case.weights.items()
        if not torch.equal(found.weights[name].codes(), stored.codes())
    }
    assert moved == {2}


@pytest.mark.parametrize("mode", ["scales", "blocks", "full"])
def test_tuning_that_only_does_harm_leaves_the_weights_as_they_were(case, mode):
    found = case.run(replace(QUICK, mode=mode, code_rate=30.0, scale_rate=30.0, patience=2))
    assert found.after == found.before
    assert not found.improved
    for name, stored in case.weights.items():
        for part, tensor in stored.tensors.items():
            assert torch.equal(found.weights[name].tensors[part], tensor)


class Relaxed(TunableGrid):
    """A grid that is trained far from what is stored."""

    def forward(self):
        return super().forward() + (1.0 if self.training else 0.0)


@pytest.mark.parametrize("mode", ["blocks", "full"])
def test_the_start_is_measured_as_stored_if_training_relaxes_the_grid(case, mode):
    plain = case.run(replace(QUICK, mode=mode))
    found = case.run(
        replace(QUICK, mode=mode), make=lambda stored, original, codes: Relaxed(stored, original)
    )
    assert found.before == plain.before
    assert found.after <= found.before
    assert found.curve[0].get("before") == plain.curve[0].get("before")


@pytest.mark.parametrize("mode", ["scales", "full"])
def test_training_stops_when_its_own_measurements_no_longer_improve(case, mode):
    """In the first half a worse measurement is no reason to stop: the falling rate may win it back."""
    settings = replace(QUICK, mode=mode, code_rate=30.0, scale_rate=60.0, patience=1, evaluations=6)
    values = [entry["selection"] for entry in case.run(settings).curve[1:]]
    worse = [number for number in range(1, len(values)) if values[number] >= min(values[:number])]
    assert [number for number in worse if number >= 3] in ([], [len(values) - 1])
    assert len(values) >= 4


def assert_same(first, second):
    assert (first.before, first.after, first.curve) == (second.before, second.after, second.curve)
    for name, stored in first.weights.items():
        for part, tensor in stored.tensors.items():
            assert torch.equal(second.weights[name].tensors[part], tensor)


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "full"},
        {"mode": "full", "half": True},
        {"mode": "blocks"},
        {"mode": "full", "update": "sign"},
    ],
)
def test_the_same_seed_gives_the_same_result_also_from_any_checkpoint(case, change):
    settings, states = replace(QUICK, **change), []
    whole = case.run(settings, on_checkpoint=lambda make: states.append(make()))
    assert len(states) >= 3
    # States are saved as they were: the training goes on with other tensors.
    for state in states[:-1]:
        assert_same(case.run(settings, resume=state), whole)
    other = case.run(replace(settings, seed=5))
    assert other.curve != whole.curve


def test_gradients_of_several_passes_sum_to_those_of_one(case):
    apart = case.run(QUICK)
    together = case.run(replace(QUICK, at_once=2))
    again = case.run(replace(QUICK, checkpointing=True))
    assert together.curve[1]["training"] == pytest.approx(apart.curve[1]["training"], rel=1e-5)
    assert_same(again, apart)


def test_sixteen_bits_of_state_train_about_as_well(case):
    exact, short = case.run(QUICK), case.run(replace(QUICK, half=True))
    gained = [1 - found.after / found.before for found in (exact, short)]
    assert gained[1] > 0.8 * gained[0]


def test_rounding_at_random_keeps_the_mean_and_gives_neighbours():
    values = torch.full((20000,), 0.1234567)
    rounded = _rounded_at_random(values, torch.tensor(3))
    below = values[:1].half().float()
    assert torch.equal(rounded, rounded.half().float())
    assert (rounded - values).abs().max() <= 2**-13
    assert len(rounded.unique()) == 2
    assert float(rounded.mean()) == pytest.approx(0.1234567, abs=2e-6)
    assert abs(float(below) - 0.1234567) > 1e-5  # rounding to nearest would not keep it
    assert not torch.equal(rounded, _rounded_at_random(values, torch.tensor(4)))


def test_learning_rates_rise_and_fall_and_all_text_is_read_before_any_twice():
    rates = [rate_at(step, 100, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] < 0.01
    rows = torch.cat(batches_of(7, 3, 7, seed=1)).tolist()
    assert [sorted(rows[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert rows[:7] != rows[7:14]


@pytest.mark.parametrize("symmetric", [False, True])
def test_offsets_start_at_the_original_weight_and_round_to_the_stored_codes(symmetric):
    weight = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    grid = IntegerGrid(3, 8, symmetric)
    stored = grid.encode(weight, settings=EncodeSettings(storage_dtype=torch.bfloat16))
    made = grid.tunable(stored, weight)
    again = made.stored()
    assert all(torch.equal(again.tensors[part], tensor) for part, tensor in stored.tensors.items())
    assert torch.equal(made().detach(), stored.dequantize())
    scales = stored.scales.float().repeat_interleave(8, dim=1)[:, :20]
    zeros = 4 if symmetric else stored.zeros.float().repeat_interleave(8, dim=1)[:, :20]
    offsets = made.offsets.detach()
    assert bool((offsets.abs() < 0.5).all())
    nearest = (offsets.abs() < 0.499) & ((weight / scales + zeros).round() == stored.codes())
    place = (stored.codes() + offsets - zeros) * scales
    assert nearest.float().mean() > 0.8
    torch.testing.assert_close(place[nearest], weight[nearest], rtol=1e-4, atol=1e-5)
    assert grid.tunable(stored, weight, codes=False).offsets is None


def test_a_positive_scale_never_becomes_negative():
    grid = IntegerGrid(3, 8)
    stored = grid.encode(torch.randn(4, 16, generator=torch.Generator().manual_seed(0)))
    made = grid.tunable(stored)
    with torch.no_grad():
        made.scales.fill_(-1.0)
    assert bool((made.stored().scales == 0).all())
    assert torch.equal(made().detach(), made.stored().dequantize())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("mode", ["full", "blocks"])
def test_experts_of_any_architecture_are_tuned(tmp_path, name, mode):
    case = Case(tmp_path, tiny_moe(name), symmetric=True, widths=(3, 4))
    case.selection = case.text.select([0, 1, 2])  # of many experts, few tokens are too little for other text
    found = case.run(replace(QUICK, mode=mode))
    assert found.after < found.before
    compression = case.compression.tuned(case.allocation, found.weights)
    assert case.loss(compression) == pytest.approx(found.after, rel=1e-4)
    experts = [info.name for info in case.compression.plan.experts if info.name in case.weights]
    changed = sum(
        not torch.equal(found.weights[each].codes(), case.weights[each].codes()) for each in experts
    )
    assert changed > len(experts) // 4


def test_gradients_of_stacked_experts_reach_their_own_codes_and_scales(tmp_path):
    case = Case(tmp_path, tiny_moe("gpt_oss"), symmetric=True, group_size=None)
    with tunable_model(case.source, case.weights, codes=lambda _: True) as model:
        dense = {name: stored.dequantize(torch.float32) for name, stored in case.weights.items()}
        linears = {info.name: info for info in model_linears(case.loaded.layout, case.loaded.model)}
        for name, value in dense.items():
            assert torch.equal(linears[name].weight, value), name
        generator = torch.Generator().manual_seed(0)
        for weight in model.weights:
            if weight.parameter.grad is None:
                weight.parameter.grad = torch.randn(weight.parameter.shape, generator=generator)
        for weight in model.weights:
            places = [linears[name] for name in weight.names]
            given = torch.cat(
                [
                    info.place(weight.parameter.grad) if hasattr(info, "place") else weight.parameter.grad
                    for info in places
                ]
            )
            found, tunable = weight.gradients(), weight.tunable
            wanted = torch.autograd.grad(tunable(), [tunable.scales, tunable.offsets], given)
            assert torch.equal(found["scales"], wanted[0])
            assert torch.equal(found["offsets"], wanted[1])


def test_models_without_some_experts_are_tuned_as_deployed(tmp_path):
    case = Case(tmp_path, tiny_moe("qwen3_moe"), symmetric=True, widths=(3, 4), allow_prune=True)
    assert case.source is not case.loaded
    found = case.run(QUICK)
    assert found.after < found.before
    compression = case.compression.tuned(case.allocation, found.weights)
    assert case.loss(compression) == pytest.approx(found.after, rel=1e-4)


def test_a_quantized_output_layer_is_tuned_too(tmp_path):
    case = Case(tmp_path, llama(tie_word_embeddings=False), locks=["lm_head=3"])
    assert "lm_head" in case.weights
    found = case.run(QUICK)
    assert found.after < found.before
    assert not torch.equal(found.weights["lm_head"].codes(), case.weights["lm_head"].codes())


def test_transposed_linears_and_stored_bfloat16_computed_in_float32(tmp_path):
    case = Case(tmp_path, tiny_model("gpt2", num_hidden_layers=1, dtype=torch.bfloat16), dtype=torch.float32)
    found = case.run(QUICK)
    assert found.after < found.before
    assert {stored.dtype for stored in found.weights.values()} == {torch.bfloat16}
    compression = case.compression.tuned(case.allocation, found.weights)
    assert case.loss(compression) == pytest.approx(found.after, rel=1e-3)


def test_cross_entropy_is_tuned_without_a_reference(case):
    texts = [TuningText(each, None) for each in (case.text, case.text.select([0, 1]))]
    head = case.compression.full_head()
    found = tune(case.loaded, case.weights, head, *texts, QUICK)
    assert found.after < found.before
    measured = _Measured(case.loaded, head, None)
    assert measured.stored(found.weights, texts[1]) == pytest.approx(found.after)


def test_forgotten_candidates_are_read_again_with_the_tuned_ones(case):
    found = case.run(QUICK)
    compression = case.compression.tuned(case.allocation, found.weights)
    kept = case.loss(compression)
    compression.forget_candidates()
    assert case.loss(compression) == kept
