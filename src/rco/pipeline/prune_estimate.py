"""What a pruning run will take, said before it starts."""

from __future__ import annotations

import time

import torch

from rco.backends.expert_pruning import ExpertPruningBackend
from rco.pipeline.configs import PruneConfig
from rco.pipeline.estimate import Estimate

__all__ = ["estimate_pruning"]


def estimate_pruning(backend: ExpertPruningBackend, config: PruneConfig) -> Estimate:
    """Memory from shapes, time from one short forward pass on this machine."""
    loaded = backend.loaded
    width = backend.compute_dtype.itemsize
    parameters = sum(p.numel() for p in loaded.model.parameters())
    hidden = loaded.layout.head(loaded.model).weight.shape[1]
    tokens = config.length * config.batch_size
    # Per layer and token: attention and residual states, and for every chosen or probed expert its inner states.
    inner = sum(4 * hidden * (2 + layer.top_k) for layer in backend.layers)
    activations = tokens * (inner if not config.checkpointing else inner // max(len(backend.layers), 1))
    sequences = config.sequences + config.selection
    forwards = (
        3 * config.steps * config.samples * config.batch_size
        + config.selection * (6 + config.refine)
        + 3 * sequences
        + 3 * config.sensitivity * (config.prior == "fisher")
        + 7 * config.evaluation
    ) * config.length
    searches = 1 + 3 * config.by_domain
    return Estimate(
        parameters * width,
        0,
        sequences * config.length * hidden * width,
        activations * width,
        searches * forwards * _seconds_per_token(backend, config.length),
        on_gpu=loaded.device.type == "cuda",
    )


@torch.no_grad()
def _seconds_per_token(backend: ExpertPruningBackend, length: int) -> float:
    ids = torch.zeros(1, length, dtype=torch.int64, device=backend.loaded.device)
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        float(backend.loaded.layout.final_hidden(backend.loaded.model, ids).sum())  # waits for the device
        best = min(best, time.perf_counter() - began)
    return best / length
