import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rco.models.moe.gates import expert_gates
from rco.models.moe.layers import moe_layers
from rco.models.moe.routing import route
from rco.testing.tiny_models import TINY_MOE_NAMES, random_keep, tiny_moe, tiny_tokens

UNGROUPED = [name for name in TINY_MOE_NAMES if name not in ("deepseek_v2-grouped", "deepseek_v3")]
GROUPED = ["deepseek_v2-grouped", "deepseek_v3"]


def expert_output(layer, expert, hidden):
    """One expert on all tokens, from the raw parameters."""
    m = layer.experts
    if layer.architecture.model_type == "gpt_oss":
        both = hidden @ m.gate_up_proj[expert] + m.gate_up_proj_bias[expert]
        gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
        return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ m.down_proj[expert] + m.down_proj_bias[
            expert
        ]
    gate, up = F.linear(hidden, m.gate_up_proj[expert]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, m.down_proj[expert])


def slow_layer(layer, hidden, keep=None, scale=None):
    """Routed part of a block: a loop over tokens' experts with plain autograd."""
    routing = route(layer.rule, layer.logits(hidden), layer.correction, keep)
    out = torch.zeros_like(hidden)
    for expert in range(layer.num_experts):
        weight = (routing.weights * (routing.indices == expert)).sum(dim=-1, keepdim=True)
        if scale is not None:
            weight = weight * scale[expert]
        out = out + weight * expert_output(layer, expert, hidden)
    return out


def run_block(layer, hidden):
    """Routed part of a block through the model's own modules (under whatever gates are set)."""
    _, weights, indices = layer.router(hidden)
    return layer.experts(hidden, indices, weights)


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_mask_over_nothing_changes_no_logit(name):
    model, tokens = tiny_moe(name), tiny_tokens()
    with torch.no_grad():
        full = model(tokens).logits
        with expert_gates(model) as gates:
            torch.testing.assert_close(model(tokens).logits, full, rtol=0, atol=1e-5)
            gates.set_gates(torch.ones(gates.num_gates))
            torch.testing.assert_close(model(tokens).logits, full, rtol=0, atol=1e-5)
    keep = torch.ones(sum(layer.num_experts for layer in moe_layers(model)), requires_grad=True)
    for mode in ("deployed", "scale"):
        with expert_gates(model, mode) as gates:
            gates.set_gates(keep)
            logits = model(tokens).logits
        torch.testing.assert_close(logits.detach(), full, rtol=0, atol=2e-5 * float(full.abs().max()))


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_forward_with_gradient_is_the_deployed_forward(name):
    model, tokens = tiny_moe(name), tiny_tokens()
    keep = torch.cat(random_keep(moe_layers(model), 3)).float()
    with expert_gates(model) as gates:
        gates.set_gates(keep)
        with torch.no_grad():
            plain = model(tokens).logits
        gates.set_gates(keep.requires_grad_())
        logits = model(tokens).logits
    torch.testing.assert_close(logits.detach(), plain, rtol=0, atol=2e-5 * float(plain.abs().max()))
    logits.square().mean().backward()
    assert keep.grad is not None
    assert bool((keep.grad[keep.detach() == 0] != 0).any())
    assert bool((keep.grad[keep.detach() == 1] != 0).any())


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_scale_gradient_matches_autograd_of_a_slow_reference(name):
    model = tiny_moe(name, dtype=torch.float64)
    with expert_gates(model, "scale") as gates:
        for index, layer in enumerate(gates.layers):
            torch.manual_seed(index)
            hidden = torch.randn(24, 32, dtype=torch.float64, requires_grad=True)
            seed = torch.randn(24, 32, dtype=torch.float64)
            scale = torch.rand(layer.num_experts, dtype=torch.float64).requires_grad_()
            expected = torch.autograd.grad(
                (slow_layer(layer, hidden, scale=scale) * seed).sum(), [hidden, scale]
            )
            gates.set_gates([scale if i == index else torch.ones(n) for i, n in enumerate(gates.counts)])
            out = run_block(layer, hidden)
            torch.testing.assert_close(out, slow_layer(layer, hidden, scale=scale))
            torch.testing.assert_close(torch.autograd.grad((out * seed).sum(), [hidden, scale]), expected)


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_deployed_gradient_in_the_hidden_state_is_exact(name):
    model = tiny_moe(name, dtype=torch.float64)
    masks = random_keep(moe_layers(model), 5)
    with expert_gates(model) as gates:
        gates.set_gates([mask.double().requires_grad_() for mask in masks])
        for layer, mask in zip(gates.layers, masks, strict=True):
            hidden = torch.randn(24, 32, dtype=torch.float64, requires_grad=True)
            seed = torch.randn(24, 32, dtype=torch.float64)
            out, slow = run_block(layer, hidden), slow_layer(layer, hidden, mask)
            torch.testing.assert_close(out, slow)
            (mine,) = torch.autograd.grad((out * seed).sum(), hidden)
            (theirs,) = torch.autograd.grad((slow * seed).sum(), hidden)
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", UNGROUPED)
@pytest.mark.parametrize("seed", [0, 1])
def test_straight_through_gradient_is_the_change_of_the_layer_under_each_flip(name, seed):
    model = tiny_moe(name, dtype=torch.float64)
    masks = random_keep(moe_layers(model), seed)
    with expert_gates(model) as gates:
        layer, mask = gates.layers[-1], masks[-1]
        torch.manual_seed(seed)
        hidden, g = torch.randn(2, 20, 32, dtype=torch.float64)
        keep = mask.double().requires_grad_()
        gates.set_gates([*masks[:-1], keep])
        (gradient,) = torch.autograd.grad((run_block(layer, hidden) * g).sum(), keep)
    for expert in range(layer.num_experts):
        on, off = mask.clone(), mask.clone()
        on[expert], off[expert] = True, False
        with torch.no_grad():
            change = ((slow_layer(layer, hidden, on) - slow_layer(layer, hidden, off)) * g).sum()
        torch.testing.assert_close(gradient[expert], change, rtol=1e-9, atol=1e-9)


def grouped_flip(layer, hidden, g, mask, expert):
    """The stated definition for group-limited routers, token by token: only the flipped expert and the one
    that it trades places with move; the weights follow."""
    rule, total = layer.rule, 0.0
    logits = layer.logits(hidden)
    sigmoid = rule.score == "sigmoid"
    members = [[e for e in range(layer.num_experts) if int(rule.group_of(hidden.device)[e]) == group]
               for group in range(len(rule.group_sizes))]  # fmt: skip
    outputs = torch.stack([expert_output(layer, e, hidden) for e in range(layer.num_experts)])
    for t in range(hidden.shape[0]):
        mass = torch.sigmoid(logits[t]) if sigmoid else torch.exp(logits[t])
        rank = mass + layer.correction if sigmoid else mass
        kept = {e for e in range(layer.num_experts) if mask[e]}

        def open_groups(kept, rank=rank):
            def score(which, kept=kept, rank=rank):
                values = sorted([float(rank[e]) for e in set(members[which]) & kept], reverse=True)
                return sum(values[: 2 if sigmoid else 1]) if values else -float("inf")

            return sorted(range(len(members)), key=score, reverse=True)[: rule.chosen_groups]

        allowed = [e for group in open_groups(kept) for e in members[group] if e in kept]
        order = sorted(allowed, key=lambda e, rank=rank: float(rank[e]), reverse=True)
        chosen, spare = order[: rule.top_k], order[rule.top_k :]

        def value(chosen, kept, t=t, mass=mass):
            if rule.denominator == "selected":
                below = sum(mass[e] for e in chosen)
            elif rule.denominator == "survivors":
                below = sum(mass[e] for e in kept)
            else:
                below = 1.0
            return rule.scale * sum(mass[e] / below * (outputs[e, t] @ g[t]) for e in chosen)

        if mask[expert]:
            other = [e for e in chosen if e != expert] + (spare[:1] if expert in chosen else [])
            total += value(chosen, kept) - value(other, kept - {expert})
        else:
            group = int(rule.group_of(hidden.device)[expert])
            enters = group in open_groups(kept | {expert}) and (
                len(chosen) < rule.top_k or rank[expert] > rank[chosen[-1]]
            )
            other = [*chosen[: rule.top_k - 1], expert] if enters else chosen
            total += value(other, kept | {expert}) - value(chosen, kept)
    return total


@pytest.mark.parametrize("name", GROUPED)
def test_straight_through_gradient_of_group_limited_routers(name):
    model = tiny_moe(name, dtype=torch.float64)
    masks = random_keep(moe_layers(model), 2)
    with expert_gates(model) as gates:
        layer, mask = gates.layers[-1], masks[-1]
        hidden, g = torch.randn(2, 16, 32, dtype=torch.float64)
        keep = mask.double().requires_grad_()
        gates.set_gates([*masks[:-1], keep])
        (gradient,) = torch.autograd.grad((run_block(layer, hidden) * g).sum(), keep)
    with torch.no_grad():
        expected = torch.stack([grouped_flip(layer, hidden, g, mask, e) for e in range(layer.num_experts)])
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_leaving_restores_everything_even_after_an_error(name):
    model, tokens = tiny_moe(name), tiny_tokens()
    next(model.parameters()).requires_grad_(False)
    wanted = [p.requires_grad for p in model.parameters()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    full = model(tokens).logits.detach()

    def break_off():
        with expert_gates(model) as gates:
            assert not any(p.requires_grad for p in model.parameters())
            gates.set_gates(torch.cat(random_keep(gates.layers)).float().requires_grad_())
            model(tokens).logits.sum().backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(tokens).logits, full)


def test_bad_gates_are_refused_and_leave_the_old_ones():
    model, tokens = tiny_moe("qwen3_moe"), tiny_tokens()
    with torch.no_grad(), expert_gates(model) as gates:
        good = torch.cat(random_keep(gates.layers))
        gates.set_gates(good)
        masked = model(tokens).logits
        with pytest.raises(ValueError, match=r"must be \(16,\)"):
            gates.set_gates(torch.ones(3))
        with pytest.raises(ValueError, match="expected lengths"):
            gates.set_gates([torch.ones(8)])
        with pytest.raises(ValueError, match=r"expert 5 in model\.layers\.0\.mlp is 0\.4.*'scale'"):
            gates.set_gates(torch.ones(16).index_fill(0, torch.tensor([5]), 0.4))
        with pytest.raises(ValueError, match="nan"):
            gates.set_gates(torch.ones(16).index_fill(0, torch.tensor([5]), float("nan")))
        with pytest.raises(ValueError, match="keep 2 of 8 experts, but its router picks 3"):
            gates.set_gates(torch.cat([torch.ones(8), torch.ones(2), torch.zeros(6)]))
        assert torch.equal(model(tokens).logits, masked)
        gates.clear()
        assert not torch.equal(model(tokens).logits, masked)
    with pytest.raises(ValueError, match="allowed are deployed, scale"), expert_gates(model, "soft"):
        pass


class UnfusedExpert(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        inner = up.shape[0] // 2
        self.gate_proj, self.up_proj = (
            nn.Linear(up.shape[1], inner, False),
            nn.Linear(up.shape[1], inner, False),
        )
        self.down_proj = nn.Linear(inner, down.shape[0], False)
        self.act_fn = nn.SiLU()
        for linear, value in (
            (self.gate_proj, up[:inner]),
            (self.up_proj, up[inner:]),
            (self.down_proj, down),
        ):
            linear.weight = nn.Parameter(value.detach().clone())

    def forward(self, hidden):
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class UnfusedBlock(nn.Module):
    """A block as remote code of older models writes it: a linear router and a loop over separate experts."""

    def __init__(self, block):
        super().__init__()
        weight = block.gate.weight
        self.gate = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.gate.weight = nn.Parameter(weight.detach().clone())
        self.experts = nn.ModuleList(
            UnfusedExpert(up, down)
            for up, down in zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)
        )
        self.shared_expert, self.shared_expert_gate = block.shared_expert, block.shared_expert_gate

    def forward(self, hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights, indices = torch.topk(torch.softmax(self.gate(flat), -1), 2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            out = out + (weights * (indices == number)).sum(-1, keepdim=True) * expert(flat)
        out = out + torch.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return out.reshape(hidden.shape)


def test_unfused_experts_behave_as_fused_ones():
    model, tokens = tiny_moe("qwen2_moe"), tiny_tokens()
    unfused = tiny_moe("qwen2_moe")
    for layer in unfused.model.layers:
        layer.mlp = UnfusedBlock(layer.mlp)
    before = {key: value.clone() for key, value in unfused.state_dict().items()}
    masks = torch.cat(random_keep(moe_layers(model), 1)).float()
    results = []
    for each in (model, unfused):
        keep = masks.clone().requires_grad_()
        with expert_gates(each) as gates:
            gates.set_gates(keep)
            logits = each(tokens).logits
            logits.log_softmax(-1)[..., 0].mean().backward()
        results.append((logits.detach(), keep.grad))
    assert not moe_layers(unfused)[0].fused
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in unfused.state_dict().items())
