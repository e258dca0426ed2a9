"""A researcher's own assignment problem: a small network chooses a width for each of its layers.

No language model: the loss is any differentiable function of the gates.
"""

import torch

import rco

torch.manual_seed(0)
widths = [2, 4, 8]
layers = [torch.randn(24, 24) / 24**0.5 for _ in range(6)]
inputs = torch.randn(64, 24)


def rounded(weight, bits):
    step = weight.abs().max() / (2 ** (bits - 1) - 0.5)
    return (weight / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step


options = torch.stack([torch.stack([rounded(w, b) for b in widths]) for w in layers]).double()


def network(weights):
    x = inputs.double()
    for weight in weights:
        x = torch.tanh(x @ weight.T)
    return x


target = network([w.double() for w in layers])


def loss(gates):  # (6, 3), one-hot rows
    return (network(torch.einsum("nk,nkij->nij", gates, options)) - target).square().mean()


problem = rco.AllocationProblem(
    widths, budget=3.5 * 6, weights=[1] * 6, options=[f"{w} bits" for w in widths], monotone=True
)
result = rco.minimize(loss, problem, steps=80, samples=8, seed=0)
uniform = loss(problem.allocation([0] * 6).one_hot(3))
print(f"budget {problem.budget}, used {result.cost}, chosen from {result.chosen_from!r}")
print(f"loss {result.loss:.5f} against {float(uniform):.5f} with every layer at {widths[0]} bits")
print(result.allocation.to_dict())
