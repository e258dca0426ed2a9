"""What a pruning run will take, said before it starts."""

from __future__ import annotations

import time

import torch

from rco.backends.expert_pruning import ExpertPruningBackend
from rco.backends.memory import pruning_memory
from rco.pipeline.configs import PruneConfig
from rco.pipeline.estimate import Estimate

__all__ = ["estimate_pruning"]


def estimate_pruning(backend: ExpertPruningBackend, config: PruneConfig) -> Estimate:
    """Memory from shapes, time from one short forward pass on this machine."""
    loaded = backend.loaded
    memory = pruning_memory(
        loaded,
        tokens=config.length * config.batch_size,
        dtype=backend.compute_dtype,
        checkpointing=config.checkpointing,
    )
    hidden = loaded.layout.head(loaded.model).weight.shape[1]
    sequences = config.sequences + config.selection
    forwards = (
        3 * config.steps * config.samples * config.batch_size
        + config.selection * (6 + config.refine_passes)
        + 3 * sequences
        + 3 * config.sensitivity * (config.start == "fisher")
        + 7 * config.evaluation
    ) * config.length
    searches = 1 + 3 * config.by_domain
    return Estimate(
        model_bytes=memory.weights,
        candidate_bytes=0,
        reference_bytes=sequences * config.length * hidden * backend.compute_dtype.itemsize,
        activation_bytes=memory.activations,
        workspace_bytes=memory.workspace,
        seconds=searches * forwards * _seconds_per_token(backend, config.length),
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
