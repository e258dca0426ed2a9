"""The damped Hessian of a layer, factored once for every grid, and errors measured in its norm.

With ``H + damp I = R R^T`` (R upper triangular) the factor that GPTQ needs is ``U = R^-1``, since
``(H + damp I)^-1 = U^T U``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Factors", "exact_errors", "exact_place", "factorize", "root_losses"]

log = logging.getLogger(__name__)

_DAMP_GROWTH, _DAMP_ATTEMPTS = 10.0, 8


@dataclass(frozen=True)
class Factors:
    """A layer's Hessian and its factors."""

    hessian: Tensor  # float64, dead columns made independent, not damped
    root: Tensor  # R, upper, in the working type
    inverse_root: Tensor  # U = R^-1
    order: Tensor | None  # column taken at each position, None for the natural order
    shift: float  # what was added to the diagonal
    damp: float


def factorize(hessian: Tensor, values: Tensor, damp: float, act_order: bool) -> Factors:
    """Factor the Hessian of a weight with these ``values``, dampened by as much as it takes.

    Args:
        hessian: (in, in).
        values: (out, in), which says type and device.
        damp: Part of the mean of the diagonal to add to it at least.
        act_order: Whether columns are taken by falling diagonal.
    """
    cols = values.shape[1]
    if hessian.shape != (cols, cols):
        raise ValueError(
            f"A weight of {cols} columns needs a ({cols}, {cols}) Hessian, got {tuple(hessian.shape)}."
        )
    # Factors are taken in float64 whatever the weights are in; a device without it leaves that to the CPU.
    place = exact_place(values)
    matrix = hessian.detach().to(device=place, dtype=torch.float64, copy=True)
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("The Hessian has NaN or infinite values; check the layer's calibration inputs.")
    diagonal = matrix.diagonal()
    if bool((diagonal < 0).any()):
        raise ValueError(
            "The Hessian has a negative diagonal entry, so it is not a sum of squares of inputs."
        )
    dead = diagonal == 0
    mean = float(diagonal.mean()) or 1.0
    order = None
    if act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
        matrix = matrix[order][:, order]
        dead = dead[order]
    shift, used = damp * mean, damp
    for _ in range(_DAMP_ATTEMPTS):
        damped = matrix.clone()
        # An input that was always zero tells nothing: its column is rounded to nearest, alone.
        damped.diagonal().add_(shift + mean * dead.to(torch.float64))
        # The flipped matrix has a lower factor where this one has an upper.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not bool(failed):
            break
        used = max(used, 1e-3) * _DAMP_GROWTH
        shift = used * mean
        log.warning(
            "The damped Hessian (%d columns) has no Cholesky factor; dampening raised to %g.", cols, used
        )
    else:
        raise ValueError(
            f"The Hessian has no Cholesky factor even with {used:g} times its mean diagonal added; "
            f"it is not symmetric and positive."
        )
    root = lower.flip(0, 1)
    identity = torch.eye(cols, dtype=root.dtype, device=place)
    inverse_root = torch.linalg.solve_triangular(root, identity, upper=True)
    natural = hessian.detach().to(device=place, dtype=torch.float64)
    return Factors(
        hessian=natural,
        root=root.to(dtype=values.dtype, device=values.device).contiguous(),
        inverse_root=inverse_root.to(dtype=values.dtype, device=values.device).contiguous(),
        order=None if order is None else order.to(values.device),
        shift=shift,
        damp=used,
    )


def root_losses(difference: Tensor, factors: Factors, width: int = 256) -> Tensor:
    """Row sums of ``(D R)^2``, skipping the half of R that is zero; float64."""
    if factors.order is not None:
        difference = difference[:, factors.order]
    total = torch.zeros(difference.shape[0], dtype=torch.float64, device=exact_place(difference))
    for start in range(0, difference.shape[1], width):
        # Column block of R: rows below its end are zero.
        end = min(start + width, difference.shape[1])
        part = difference[:, :end] @ factors.root[:end, start:end]
        total += part.square().sum(dim=1).to(total)
    return total


def exact_errors(difference: Tensor, factors: Factors, rows: Tensor) -> Tensor:
    """``tr(D H D^T)`` of chosen rows of D, in float64 and without dampening."""
    chosen = difference[rows.to(difference.device)].to(device=factors.hessian.device, dtype=torch.float64)
    return ((chosen @ factors.hessian) * chosen).sum(dim=1).clamp_min(0)


def exact_place(values: Tensor) -> torch.device:
    """Where float64 can be had: a weight's own device, or the CPU."""
    return torch.device("cpu") if values.device.type == "mps" else values.device
