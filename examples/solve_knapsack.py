"""Solve an exact knapsack: widths for eight layers at 2.5 bits on average, from a table of scores.

Run: python examples/solve_knapsack.py
"""

import numpy as np

import rco

layers = [f"layer{i // 2}.{name}" for i, name in enumerate(["attention", "mlp"] * 4)]
sizes = np.array([1_048_576, 2_883_584] * 4)  # weights per layer = cost of one more bit
widths = ["2", "3", "4"]

# The budget is an exact integer: 2.5 bits per weight, averaged over all weights.
problem = rco.AllocationProblem(
    [2, 3, 4], budget=int(sizes.sum() * 5 // 2), weights=sizes, groups=layers, options=widths
)

# Loss of each layer at each width. The knapsack maximises, so the losses are negated.
rng = np.random.default_rng(0)
loss = rng.lognormal(0.0, 1.0, (8, 1)) * np.array([4.0, 1.0, 0.25])
solution = rco.solve_mckp(-loss, problem)
for layer, width in problem.allocation(solution.allocation).to_dict().items():
    print(f"{layer:<18} {width} bits")
print(f"{solution.status}: loss {-solution.value:.3f}, cost {solution.cost} of {problem.budget} bits")

# Five noisy samples in one call; -inf forbids an option.
noisy = -loss + rng.gumbel(size=(5, 8, 3))
noisy[0, 0, 0] = -np.inf
batch = rco.solve_mckp(noisy, problem)
print("values", np.round(batch.value, 3), "all within budget:", all(c <= problem.budget for c in batch.cost))

# Two joint budgets, bits and microseconds: solved by HiGHS, then checked in integers.
bits = np.outer(sizes, [2, 3, 4])
microseconds = np.outer(np.array([40, 90] * 4), [10, 13, 16])
both = rco.AllocationProblem(
    np.stack([bits, microseconds]), [problem.budget, int(microseconds[:, 1].sum())], sense="<="
)
solution = rco.solve_mckp(-loss, both)
print(
    f"{solution.status} under two budgets: {solution.allocation.tolist()}, cost {solution.cost} of {both.budget}"
)
