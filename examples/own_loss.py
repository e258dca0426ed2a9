"""Your own assignment problem: a bit width for each layer of a small network, within a budget of bits.

No language model is involved; the loss may be any differentiable function of the gates.

Run: python examples/own_loss.py
"""

import torch

import rco

torch.manual_seed(0)
widths = [2, 4, 8]
layers = [torch.randn(24, 24) / 24**0.5 for _ in range(6)]
inputs = torch.randn(64, 24)


def rounded(weight, bits):
    """The weights rounded to a symmetric grid of that width."""
    step = weight.abs().max() / (2 ** (bits - 1) - 0.5)
    return (weight / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step


# Every layer at every width: (6 layers, 3 widths, 24, 24).
options = torch.stack([torch.stack([rounded(w, b) for b in widths]) for w in layers]).double()


def network(weights):
    x = inputs.double()
    for weight in weights:
        x = torch.tanh(x @ weight.T)
    return x


# The unquantized network, which the choice should stay close to.
target = network([w.double() for w in layers])


def loss(gates):  # (6, 3): one row per layer, 1 at the chosen width
    return (network(torch.einsum("nk,nkij->nij", gates, options)) - target).square().mean()


# 3.5 bits per layer on average; monotone: a wider option is never worse, so leftover budget is spent.
problem = rco.AllocationProblem(
    widths, budget=3.5 * 6, weights=[1] * 6, options=[f"{w} bits" for w in widths], monotone=True
)
result = rco.minimize(loss, problem, steps=80, samples=8, seed=0)
uniform = loss(problem.allocation([0] * 6).one_hot(3))
print(f"budget {problem.budget} bits, used {result.cost}; best candidate: {result.chosen_from}")
print(f"loss {result.loss:.5f}; with every layer at {widths[0]} bits: {float(uniform):.5f}")
print(result.allocation.to_dict())
