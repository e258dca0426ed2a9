"""Probes that nobody counts: the same gradient as counted ones, and no gradient where the room was too small."""

import numpy as np
import pytest
import torch

from rco.models.moe import moe_layers
from rco.models.moe_gates import expert_gates
from rco.models.moe_room import ProbeRoom
from rco.models.moe_tiny import TINY_MOE_NAMES, random_keep, tiny_moe, tiny_tokens


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
        gates.room = ProbeRoom(len(gates.layers), always_counted=False)
        for layer in gates._gates:
            layer.room = gates.room
        settled = []
        for _ in range(3):
            with gates.room.sample() as used:
                found = gradient_of(model, gates, keep)
            settled.append(gates.room.settle(used))
            if settled[-1]:
                torch.testing.assert_close(found, counted, rtol=1e-10, atol=1e-14)
        assert settled[1:] == [True, True]  # a sample that did not fit tells how much it needs
        assert gates.room.counted  # outside of a sample
        torch.testing.assert_close(gradient_of(model, gates, keep), counted, rtol=0, atol=0)


def test_room_follows_the_need():
    room = ProbeRoom(1, always_counted=False)

    def sample(needed):
        with room.sample() as used:
            places = room.reserve(0, 1000, 4, 40, 20, torch.tensor(needed))
        return places, room.settle(used)

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


def test_samples_of_a_router_with_strong_preferences_are_seldom_done_twice():
    """All tokens rank the experts alike, as in an untrained model: what a sample needs differs the most then."""
    rng = np.random.default_rng(0)
    layers, experts, pruned, top_k, tokens = 16, 64, 16, 8, 256
    room = ProbeRoom(layers, always_counted=False)

    def launch():
        with room.sample() as used:
            for layer in range(layers):
                kept = np.sort(rng.permutation(experts)[pruned:])  # places in the common order
                needed = torch.tensor(tokens * int(kept[top_k - 1] + 1 - top_k))
                room.reserve(layer, tokens, top_k, experts - pruned, pruned, needed)
        return used

    redone = []
    for _ in range(40):
        launched = [launch() for _ in range(16)]
        redone.append(sum(not room.settle(used) for used in launched))
    assert redone[0] > 0  # nothing is known yet
    assert sum(redone[5:]) <= 0.05 * 16 * 35
    assert room.too_small == sum(redone)


def test_a_layer_that_keeps_all_experts_needs_no_room():
    room = ProbeRoom(1, always_counted=False)
    with room.sample() as used:
        assert room.reserve(0, 1000, 4, 60, 0, torch.tensor(0)) == 0
    assert room.settle(used)
    with ProbeRoom(1, always_counted=True).sample() as used:
        assert used is None
