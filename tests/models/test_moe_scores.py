import pytest
import torch

from rco.models.moe.expert_scores import collect_expert_scores
from rco.models.moe.layers import moe_layers
from rco.testing.tiny_models import TINY_MOE_NAMES, tiny_moe, tiny_tokens


def slow_scores(model, tokens, mask):
    """REAP and frequency from the experts' own forward, one expert and one token at a time."""
    seen = {}

    def remember(layer):
        def hook(_, args, out):
            _, weights, indices = layer.router(args[0].reshape(-1, 32))
            seen[layer.index] = (args[0].reshape(-1, 32), weights, indices)

        return hook

    handles = [layer.block.register_forward_hook(remember(layer)) for layer in moe_layers(model)]
    model(tokens)
    for handle in handles:
        handle.remove()
    result = []
    for layer in moe_layers(model):
        hidden, weights, indices = seen[layer.index]
        total, visits = torch.zeros(layer.num_experts), torch.zeros(layer.num_experts)
        for t in mask.reshape(-1).nonzero().squeeze(-1):
            for w, e in zip(weights[t], indices[t], strict=True):
                output = layer.experts(hidden[t : t + 1], e.view(1, 1), torch.ones(1, 1))
                total[e] += float(w * output.norm())
                visits[e] += 1
        result.append((torch.where(visits > 0, total / visits.clamp(min=1), 0.0), visits / int(mask.sum())))
    return result


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
@torch.no_grad()
def test_scores_match_a_loop_over_tokens_and_experts(name):
    model, tokens = tiny_moe(name), tiny_tokens(length=8)
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    before = {key: value.clone() for key, value in model.state_dict().items()}
    scores = collect_expert_scores(model, [(tokens[:1], mask[:1]), (tokens[1:], mask[1:])])
    for layer, (reap, frequency) in enumerate(slow_scores(model, tokens, mask)):
        torch.testing.assert_close(scores.score("reap")[layer].float(), reap, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scores.score("frequency")[layer].float(), frequency)
        torch.testing.assert_close(scores.score("mass")[layer].sum(), torch.tensor(1.0, dtype=torch.float64))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_masks_must_fit_their_tokens():
    with pytest.raises(ValueError, match="mask has shape"):
        collect_expert_scores(tiny_moe("mixtral"), [(tiny_tokens(), torch.ones(3).bool())])
