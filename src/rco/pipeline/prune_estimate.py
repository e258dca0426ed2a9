"""What a pruning run will take, said before it starts."""

from __future__ import annotations

from rco.compression.expert_pruning import ExpertPruningBackend
from rco.compression.memory import pruning_memory
from rco.pipeline.configs import PruneConfig
from rco.pipeline.estimate import Estimate, forward_seconds

__all__ = ["estimate_pruning"]


def estimate_pruning(backend: ExpertPruningBackend, config: PruneConfig) -> Estimate:
    """Memory as counted, time from the forward passes of each stage and what one takes on this machine."""
    loaded = backend.loaded
    memory = pruning_memory(
        loaded,
        tokens=config.length * config.batch_size,
        dtype=backend.compute_dtype,
        checkpointing=config.checkpointing,
    )
    hidden = loaded.layout.head(loaded.model).weight.shape[1]
    sequences = config.sequences + config.selection
    passes = (
        3 * config.steps * config.samples * config.batch_size
        + config.selection * (6 + config.refine_passes)
        + 3 * sequences
        + 3 * config.sensitivity * (config.start == "fisher")
        + 7 * config.evaluation
    )
    searches = 1 + 3 * config.by_domain
    return Estimate(
        model_bytes=memory.weights,
        candidate_bytes=0,
        reference_bytes=sequences * config.length * hidden * backend.compute_dtype.itemsize,
        activation_bytes=memory.activations,
        workspace_bytes=memory.workspace,
        seconds=searches * passes * forward_seconds(loaded, backend.compute_dtype, config.length),
        on_gpu=loaded.device.type == "cuda",
    )
