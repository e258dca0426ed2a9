"""Six families of assignment problems without language models, from 10 x 4 to 2000 x 8.

Every loss takes gates (..., N, K) and returns (...,): one call evaluates a whole batch. A family is a function of
(groups, options, seed) and returns an :class:`Instance`. Losses are not separable, except for ``correlated``, whose
optimum the exact knapsack gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import rco

__all__ = ["FAMILIES", "Instance", "make"]


@dataclass(frozen=True)
class Instance:
    """A problem, its batched loss, and what is known of it."""

    problem: rco.AllocationProblem
    loss: Callable[[Tensor], Tensor]
    quadratic: tuple[np.ndarray, np.ndarray] | None = (
        None  # (NK,) linear, (NK, NK) pairs, where exact solvers apply
    )
    values: np.ndarray | None = None  # (N, K) of an additive loss


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))


def _single(array: np.ndarray) -> Tensor:
    """For the networks, whose losses take most of the time."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _problem(costs: np.ndarray, share: float) -> rco.AllocationProblem:
    """At most that share of the range between the cheapest and the dearest assignment."""
    low, high = int(costs.min(axis=1).sum()), int(costs.max(axis=1).sum())
    return rco.AllocationProblem(costs, low + int(share * (high - low)), sense="<=")


def quadratic(groups: int, options: int, seed: int) -> Instance:
    """Quadratic multiple-choice knapsack: random values, and interactions of either sign between all pairs."""
    rng = np.random.default_rng([1, groups, options, seed])
    costs = rng.integers(1, 31, (groups, options))
    linear = -rng.gamma(2.0, 1.0, (groups, options))
    rank = max(8, min(64, groups))
    factors = rng.normal(size=(groups * options, rank)) / rank**0.25
    signs = rng.choice([-1.0, 1.0], rank)
    scale = 1.5 / groups**0.5
    weights, plain, signed = _tensor(linear.reshape(-1)), _tensor(factors), _tensor(signs * scale)
    own = scale * np.einsum("ir,r,ir->i", factors, signs, factors)  # a group does not interact with itself
    weights = weights - 0.5 * _tensor(own)

    def loss(gates: Tensor) -> Tensor:
        flat = gates.flatten(-2)
        return flat @ weights + 0.5 * ((flat @ plain).square() @ signed)

    pairs = None
    if groups * options <= 64:
        full = scale * (factors * signs) @ factors.T
        block = np.kron(np.eye(groups), np.ones((options, options)))
        pairs = linear.reshape(-1), full * (1 - block)
    return Instance(_problem(costs, 0.4), loss, pairs)


def log_det(groups: int, options: int, seed: int) -> Instance:
    """Sensor placement: which precision each sensor gets, by the log-determinant of the information matrix."""
    rng = np.random.default_rng([2, groups, options, seed])
    dimension = int(np.clip(groups // 2, 4, 24))
    directions = rng.normal(size=(groups, dimension)) * rng.gamma(1.0, 1.0, (groups, 1))
    precision = np.cumsum(rng.gamma(1.0, 1.0, (groups, options)), axis=1)
    precision[:, 0] = 0.0  # not installed
    costs = np.cumsum(rng.integers(1, 12, (groups, options)), axis=1)
    costs[:, 0] = 0
    outer = _tensor(np.einsum("ia,ib->iab", directions, directions).reshape(groups, -1))
    levels = _tensor(precision)
    start = 0.1 * torch.eye(dimension, dtype=torch.float64)

    def loss(gates: Tensor) -> Tensor:
        weight = (gates * levels).sum(-1)
        matrix = start + (weight @ outer).unflatten(-1, (dimension, dimension))
        return -2.0 * torch.linalg.cholesky(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1)

    return Instance(_problem(costs, 0.25), loss)


def ranks(groups: int, options: int, seed: int) -> Instance:
    """Ranks of the tiles of a small residual network's weights, by the error of its outputs."""
    rng = np.random.default_rng([3, groups, options, seed])
    tile = 8
    across = max(1, min(8, int((groups / 4) ** 0.5)))  # tiles per side of a layer
    per_layer = across * across
    layers = -(-groups // per_layer)
    width = across * tile
    decay = rng.uniform(0.3, 1.5, (layers * per_layer, 1)) * np.arange(tile)
    left, _ = np.linalg.qr(rng.normal(size=(layers * per_layer, tile, tile)))
    right, _ = np.linalg.qr(rng.normal(size=(layers * per_layer, tile, tile)))
    size = rng.gamma(2.0, 0.5, (layers * per_layer, 1)) * np.exp(-0.5 * decay)
    kept = np.linspace(0, tile, options).round().astype(int)  # ranks on offer
    masks = np.arange(tile) < kept[:, None]  # (K, tile)
    weights = np.einsum("nia,nka,nja->nkij", left, size[:, None] * masks[None], right)
    weights *= 1.2 / (width * layers) ** 0.5
    sizes = rng.integers(1, 4, groups)
    costs = sizes[:, None] * kept[None, :]
    offered, inputs = _single(weights[:groups]), _single(rng.normal(size=(16, width)))
    fixed = _single(weights[groups:, -1])

    def network(tiles: Tensor) -> Tensor:  # (..., layers * per_layer, tile, tile)
        lead = tiles.shape[:-3]
        grid = tiles.reshape(*lead, layers, across, across, tile, tile).transpose(-3, -2)
        matrices = grid.reshape(*lead, layers, width, width)
        x = inputs.expand(*lead, *inputs.shape)
        for index in range(layers):
            x = x + torch.tanh(x @ matrices[..., index, :, :])
        return x

    full = torch.cat([offered[:, -1], fixed])
    target = network(full)
    unit = target.square().mean()

    def loss(gates: Tensor) -> Tensor:
        mixed = torch.einsum("...nk,nkab->...nab", gates.float(), offered)
        if len(fixed):
            mixed = torch.cat([mixed, fixed.expand(*mixed.shape[:-3], *fixed.shape)], dim=-3)
        return 100.0 * (network(mixed) - target).square().mean(dim=(-2, -1)) / unit

    return Instance(_problem(costs, 0.4), loss)


def layers(groups: int, options: int, seed: int) -> Instance:
    """Choice of an operator for each branch of a network, by its error on targets that a teacher made."""
    rng = np.random.default_rng([4, groups, options, seed])
    stages = max(2, min(8, groups // 5))
    per_stage = -(-groups // stages)
    width, hidden = 12, 4
    total = stages * per_stage
    first = rng.normal(size=(total, options, width, hidden)) / width**0.5
    second = rng.normal(size=(total, options, hidden, width)) / (hidden * per_stage) ** 0.5
    strength = np.cumsum(rng.gamma(1.0, 1.0, (total, options)), axis=1)
    second *= (strength / strength.mean())[:, :, None, None]
    costs = rng.integers(1, 10, (groups, options)) + 4 * np.arange(options)
    a, b = _single(first), _single(second)
    inputs = _single(rng.normal(size=(24, width)))
    teacher = rng.integers(0, options, total)
    rows = np.arange(total)

    def network(one: Tensor, two: Tensor) -> Tensor:
        lead = one.shape[:-3]
        one = one.reshape(*lead, stages, per_stage, width, hidden).transpose(-3, -2)
        one = one.reshape(*lead, stages, width, per_stage * hidden)
        two = two.reshape(*lead, stages, per_stage * hidden, width)
        x = inputs.expand(*lead, *inputs.shape)
        for index in range(stages):
            x = x + torch.tanh(x @ one[..., index, :, :]) @ two[..., index, :, :]
        return x

    target = network(a[rows, teacher], b[rows, teacher])
    unit = target.square().mean()
    spare_a, spare_b = a[groups:, 0], b[groups:, 0]

    def loss(gates: Tensor) -> Tensor:
        gates = gates.float()
        one = torch.einsum("...nk,nkab->...nab", gates, a[:groups])
        two = torch.einsum("...nk,nkab->...nab", gates, b[:groups])
        if len(spare_a):
            one = torch.cat([one, spare_a.expand(*one.shape[:-3], *spare_a.shape)], dim=-3)
            two = torch.cat([two, spare_b.expand(*two.shape[:-3], *spare_b.shape)], dim=-3)
        return 100.0 * (network(one, two) - target).square().mean(dim=(-2, -1)) / unit

    return Instance(_problem(costs, 0.45), loss)


def coverage(groups: int, options: int, seed: int) -> Instance:
    """Facilities of several sizes at sites in a square: expected demand that no open facility covers."""
    rng = np.random.default_rng([5, groups, options, seed])
    customers = int(np.clip(3 * groups, 60, 256))
    sites, places = rng.random((groups, 2)), rng.random((customers, 2))
    demand = rng.gamma(1.0, 1.0, customers)
    distance = np.linalg.norm(sites[:, None] - places[None], axis=2)  # (N, M)
    reach = np.sort(rng.uniform(0.3, 1.6, (groups, options)), axis=1) / max(groups, 10) ** 0.5
    reach[:, 0] = 0.0
    reached = np.zeros((groups, options, customers))
    reached[:, 1:] = 0.95 * np.exp(-((distance[:, None] / reach[:, 1:, None]) ** 2))
    costs = np.round(60 * reach * groups**0.5 * rng.uniform(0.8, 1.25, (groups, 1))).astype(int)
    missed = _tensor(np.log1p(-reached).reshape(groups * options, customers))
    share = _tensor(100.0 * demand / demand.sum())

    def loss(gates: Tensor) -> Tensor:
        return (gates.flatten(-2) @ missed).exp() @ share

    return Instance(_problem(costs, 0.35), loss)


def correlated(groups: int, options: int, seed: int) -> Instance:
    """A strongly correlated multiple-choice knapsack: value is cost plus a constant and a little noise."""
    rng = np.random.default_rng([6, groups, options, seed])
    costs = np.cumsum(rng.integers(1, 200, (groups, options)), axis=1)
    values = (costs + 50.0 * np.sqrt(np.arange(options)) + rng.normal(size=costs.shape) * 5.0) / 100.0
    table = _tensor(-values)

    def loss(gates: Tensor) -> Tensor:
        return (gates * table).sum(dim=(-2, -1))

    return Instance(_problem(costs, 0.45), loss, values=values)


FAMILIES: dict[str, Callable[[int, int, int], Instance]] = {
    "quadratic": quadratic,
    "log-det": log_det,
    "ranks": ranks,
    "layers": layers,
    "coverage": coverage,
    "correlated": correlated,
}


def make(family: str, groups: int, options: int, seed: int) -> Instance:
    """An instance of a family."""
    return FAMILIES[family](groups, options, seed)
