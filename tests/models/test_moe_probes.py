"""Probes that nobody counts: the same gradient as counted ones, and no gradient where the room was too small."""

import numpy as np
import pytest
import torch

from rco.models.moe.gates import expert_gates
from rco.models.moe.layers import moe_layers
from rco.models.moe.probes import ProbeBuffer
from rco.testing.tiny_models import TINY_MOE_NAMES, random_keep, tiny_moe, tiny_tokens


def gradient_of(model, gates, keep):
    leaf = keep.clone().requires_grad_()
    gates.set_gates(leaf, keep)
    (found,) = torch.autograd.grad(model(tiny_tokens()).logits.square().mean(), leaf)
    return found


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_gradients_are_those_of_counted_probes_whenever_the_room_was_enough(name):
    model = tiny_moe(name, dtype=torch.float64)
    keep = torch.cat(random_keep(moe_layers(model), 2)).double()
    with expert_gates(model) as gates:
        counted = gradient_of(model, gates, keep)
        gates.probe_buffer.always_counted = False  # as on a GPU
        settled = []
        for _ in range(3):
            with gates.probe_buffer.sample() as used:
                found = gradient_of(model, gates, keep)
            settled.append(gates.probe_buffer.settle(used))
            if settled[-1]:
                torch.testing.assert_close(found, counted, rtol=1e-10, atol=1e-14)
        assert settled[1:] == [True, True]  # a sample that did not fit tells how much it needs
        assert gates.probe_buffer.counted  # outside of a sample
        torch.testing.assert_close(gradient_of(model, gates, keep), counted, rtol=0, atol=0)


def test_room_follows_the_need():
    buffer = ProbeBuffer(1, always_counted=False)

    def sample(needed):
        with buffer.sample() as used:
            places = buffer.reserve(0, 1000, 4, 40, 20, torch.tensor(needed))
        return places, buffer.settle(used)

    expected = 1000 * 4 * 20 / 41
    places, enough = sample(int(expected))
    assert enough
    assert expected < places < 2.2 * expected
    assert not sample(5 * int(expected))[1]
    places, enough = sample(5 * int(expected))
    assert enough
    assert places <= 1000 * 20
    for _ in range(1000):
        places, enough = sample(int(expected))
        assert enough
    assert places < 1.5 * expected  # a sample that needed much is forgotten
    assert sample(1000 * 20) == (places, False)
    assert sample(1000 * 20) == (1000 * 20, True)  # never more than there can be


class StrongPreferences:
    """All tokens rank the experts alike, as in an untrained model: what a sample needs differs the most then."""

    layers, experts, pruned, top_k, tokens = 16, 64, 16, 8, 256

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.buffer = ProbeBuffer(self.layers, always_counted=False)

    def needed(self):
        kept = [
            np.sort(self.rng.permutation(self.experts)[self.pruned :])  # places in the common order
            for _ in range(self.layers)
        ]
        return [torch.tensor(self.tokens * int(places[self.top_k - 1] + 1 - self.top_k)) for places in kept]

    def launch(self, recorded=False):
        with self.buffer.sample(recorded) as used:
            for layer, number in enumerate(self.needed()):
                kept = self.experts - self.pruned
                self.buffer.reserve(layer, self.tokens, self.top_k, kept, self.pruned, number)
        return used


def test_samples_of_a_router_with_strong_preferences_are_seldom_done_twice():
    case = StrongPreferences()
    redone = []
    for _ in range(40):
        launched = [case.launch() for _ in range(16)]
        redone.append(sum(not case.buffer.settle(used) for used in launched))
    assert redone[0] > 0  # nothing is known yet
    assert sum(redone[5:]) <= 0.05 * 16 * 35
    assert case.buffer.too_small == sum(redone)


def test_a_recorded_sample_has_room_for_most_of_those_that_it_is_replayed_with():
    case = StrongPreferences()
    for used in [case.launch() for _ in range(16)]:
        case.buffer.settle(used)
    recording, redone = case.launch(recorded=True), []
    for _ in range(40):
        replayed = [recording.replayed(torch.stack(case.needed())) for _ in range(16)]
        redone.append(sum(not case.buffer.settle(used) for used in replayed))
        if redone[-1]:
            recording = case.launch(recorded=True)
    assert sum(redone) <= 0.02 * 16 * 40
    places = sum(places for _, places, _ in recording.layers)
    most = case.tokens * case.experts * case.layers
    assert places < 0.4 * most  # not by making room for everything


def test_a_layer_that_keeps_all_experts_needs_no_room():
    buffer = ProbeBuffer(1, always_counted=False)
    with buffer.sample() as used:
        assert buffer.reserve(0, 1000, 4, 60, 0, torch.tensor(0)) == 0
    assert buffer.settle(used)
    with ProbeBuffer(1, always_counted=True).sample() as used:
        assert used is None
