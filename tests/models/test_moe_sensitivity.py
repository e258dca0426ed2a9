"""Sensitivities of experts: squares token by token, and the KL that leaving an expert out really costs."""

import pytest
import torch

from rco.losses import Head
from rco.models.loading import wrap_model
from rco.models.moe.expert_statistics import expert_sensitivity
from rco.models.moe.gates import expert_gates
from rco.testing.tiny_models import TINY_MOE_NAMES, tiny_moe


def head_of(loaded):
    spec = loaded.layout.head(loaded.model)
    return Head(spec.weight.detach(), spec.bias, spec.softcap, spec.scale)


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_squares_are_the_squares_of_single_tokens_gradients(name):
    """Sequences of one token each do not see each other, so every row alone has its own gradient."""
    model = tiny_moe(name).double()
    tokens = torch.arange(5)[:, None]
    direction = torch.randn(97, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with expert_gates(model) as gates:
        keep = torch.ones(gates.num_gates, dtype=torch.float64, requires_grad=True)

        def gradient(rows):
            gates.set_gates(keep)
            loss = (model(tokens[rows]).logits.log_softmax(-1) @ direction).sum()
            return torch.autograd.grad(loss, keep)[0]

        alone = torch.stack([gradient(slice(i, i + 1)) for i in range(5)])
        together = gradient(slice(None))
        gates.use_squares(True)
        squares = gradient(slice(None))
    torch.testing.assert_close(together, alone.sum(dim=0))
    torch.testing.assert_close(squares, alone.square().sum(dim=0))
    assert squares.max() > 0


def test_sensitivity_predicts_the_kl_of_leaving_one_expert_out():
    """Where experts matter little, the second-order prediction is the KL itself, up to the draw of the tokens."""
    model = tiny_moe("qwen3_moe")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("down_proj"):
                weight *= 0.02
    loaded = wrap_model(model)
    tokens = torch.randint(97, (300, 2), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with expert_gates(model) as gates:
        predicted = torch.cat(expert_sensitivity(loaded, gates, head_of(loaded), tokens, mask))
        with torch.no_grad():
            full = model(tokens).logits[:, 0].double().log_softmax(-1)
            found = []
            for expert in range(gates.num_gates):
                keep = torch.ones(gates.num_gates)
                keep[expert] = 0
                gates.set_gates(keep)
                pruned = model(tokens).logits[:, 0].double().log_softmax(-1)
                found.append((full.exp() * (full - pruned)).sum(-1).mean())
        gates.clear()
    measured = torch.stack(found)
    assert torch.corrcoef(torch.stack([predicted, measured]))[0, 1] > 0.95
    assert 0.8 < float(predicted.sum() / measured.sum()) < 1.25


def test_positions_that_do_not_count_add_nothing():
    loaded = wrap_model(tiny_moe("olmoe"))
    tokens = torch.randint(97, (3, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1:] = False
    with expert_gates(loaded.model) as gates:
        part = expert_sensitivity(loaded, gates, head_of(loaded), tokens, mask)
        alone = expert_sensitivity(loaded, gates, head_of(loaded), tokens[:1], mask[:1])
    for mine, theirs in zip(part, alone, strict=True):
        torch.testing.assert_close(mine, theirs)
