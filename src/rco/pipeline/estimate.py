"""What a run will take, said before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from rco.backends.accounting import Scheme, stored_bits
from rco.backends.plan import LEAVE_ALONE, QuantizationPlan
from rco.models.loading import LoadedModel

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds; seconds are scaled from a matrix product timed on this machine."""

    model_bytes: int
    candidate_bytes: int
    reference_bytes: int
    activation_bytes: int
    seconds: float

    @property
    def memory(self) -> int:
        """Peak while searching."""
        return self.model_bytes + self.candidate_bytes + self.reference_bytes + self.activation_bytes

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return {
            "memory_bytes": self.memory,
            "model_bytes": self.model_bytes,
            "candidate_bytes": self.candidate_bytes,
            "reference_bytes": self.reference_bytes,
            "activation_bytes": self.activation_bytes,
            "seconds": self.seconds,
        }


def estimate(loaded: LoadedModel, plan: QuantizationPlan, config: Any) -> Estimate:
    """Memory from shapes, time from the multiplications of each stage and this machine's measured rate."""
    width = 4 if loaded.device.type == "cpu" else loaded.dtype.itemsize
    parameters = sum(p.numel() for p in loaded.model.parameters())
    packed = [w for w in plan.widths if w != LEAVE_ALONE]
    candidates = sum(
        stored_bits(info, Scheme(w, plan.group_size, plan.symmetric)) // 8
        for info in plan.linears
        for w in packed
    )
    head = loaded.layout.head(loaded.model).weight
    hidden = head.shape[1]
    tokens = config.length * config.batch_size
    blocks = len(loaded.layout.blocks(loaded.model))
    linear_width = sum(info.in_features + info.out_features for info in plan.linears)
    activations = tokens * (
        (linear_width // max(blocks, 1) + blocks * hidden) if config.checkpointing else linear_width
    )
    sequences = config.sequences + config.selection
    per_token = 2 * (sum(info.parameters for info in plan.linears) + head.numel())
    forward = per_token * config.length
    passes = (
        3 * config.steps * config.samples * config.batch_size
        + config.selection * (5 + config.refine)
        + 3 * config.sequences
        + 2 * sequences
        + 12 * config.evaluation
    )
    # Quantization itself: a Hessian and a column loop per linear, for all widths.
    gptq = sum(
        2 * info.in_features**2 * config.length * config.sequences / 3
        + len(packed) * info.out_features * info.in_features**2
        for info in plan.linears
    )
    return Estimate(
        parameters * width,
        candidates,
        sequences * config.length * hidden * width,
        activations * width * 2,
        (passes * forward * 1.3 + (gptq if config.method == "gptq" else 0)) / _rate(loaded.device),
    )


def _rate(device: torch.device) -> float:
    """Multiply-adds per second, twice, of a product like the model's."""
    a = torch.randn(512, 512, device=device)
    b = torch.randn(512, 1024, device=device)
    for _ in range(2):
        a @ b
    began = time.perf_counter()
    repeats = 10
    for _ in range(repeats):
        c = a @ b
    float(c.sum())  # waits for the device
    # A model's small operations keep it below the rate of a plain product.
    return 0.5 * repeats * 2 * 512 * 512 * 1024 / (time.perf_counter() - began)
