"""Experts that are trained: outputs and gradients of the model's own implementation."""

import pytest
import torch

from rco.models.moe.layers import moe_layers
from rco.models.moe.linears import stacked_parameters
from rco.models.moe.trained_experts import trained_experts
from rco.testing.tiny_models import TINY_MOE_NAMES, tiny_moe, tiny_tokens


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_outputs_and_gradients_are_those_of_the_model(name):
    model = tiny_moe(name)
    layers = [layer for layer in moe_layers(model) if layer.fused]
    model.requires_grad_(False)
    parameters = [parameter for layer in layers for parameter in stacked_parameters(layer)]
    for parameter in parameters:
        parameter.requires_grad_(True)
    tokens = tiny_tokens(0, 2, 9)
    factors = torch.randn(2, 9, 1, generator=torch.Generator().manual_seed(0))

    def run():
        logits = model(tokens).logits
        return logits.detach(), torch.autograd.grad((logits * factors).sum(), parameters)

    wanted, slopes = run()
    with trained_experts(layers):
        found, mine = run()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for gradient, slope in zip(mine, slopes, strict=True):
        torch.testing.assert_close(gradient, slope, rtol=1e-3, atol=1e-4 * float(slope.abs().max()))
    again, _ = run()
    assert torch.equal(again, wanted)
