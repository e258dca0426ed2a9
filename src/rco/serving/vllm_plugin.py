"""vLLM plugin: serve checkpoints whose layers keep different numbers of experts.

vLLM calls :func:`register` in every process through the entry point group ``vllm.general_plugins``:

    [project.entry-points."vllm.general_plugins"]
    rco_pruned_experts = "rco.serving.vllm_plugin:register"

vLLM's sparse blocks read the number of experts from the configuration while they are built. The plugin maps the
``Pruned...`` architectures to vLLM's own classes and wraps the constructors of those blocks: while the block of
layer ``l`` is built, the configuration holds the number of experts of layer ``l``. Weight loading needs no change:
vLLM's loaders iterate over the names in the checkpoint. A configuration without ``num_experts_per_layer`` passes
through untouched.

Not supported, and refused with an error: expert parallelism (ranks would split layers unevenly) and routers
whose groups were pruned to different sizes (vLLM's kernels support one size).

vLLM is imported only inside functions. The plugin has been tested against stand-ins for vLLM's classes, not yet
against an installed vLLM; a class that a version of vLLM names differently is skipped with a warning.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["SERVED", "ServedArchitecture", "expert_counts", "layer_config", "register", "wrap_block"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedArchitecture:
    """vLLM's counterpart of one architecture.

    Attributes:
        module: vLLM module of the model.
        causal_lm: Name of the causal language model there and in transformers.
        block: Name of the sparse block, whose constructor reads the count.
        count_field: Configuration field that it reads.
    """

    module: str
    causal_lm: str
    block: str
    count_field: str


_MODELS = "vllm.model_executor.models."

SERVED: tuple[ServedArchitecture, ...] = (
    ServedArchitecture(_MODELS + "olmoe", "OlmoeForCausalLM", "OlmoeDecoderLayer", "num_experts"),
    ServedArchitecture(_MODELS + "qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeSparseMoeBlock", "num_experts"),
    ServedArchitecture(_MODELS + "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeSparseMoeBlock", "num_experts"),
    ServedArchitecture(
        _MODELS + "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextSparseMoeBlock", "num_experts"
    ),
    ServedArchitecture(_MODELS + "mixtral", "MixtralForCausalLM", "MixtralDecoderLayer", "num_local_experts"),
    ServedArchitecture(_MODELS + "deepseek_v2", "DeepseekV2ForCausalLM", "DeepseekV2MoE", "n_routed_experts"),
    ServedArchitecture(_MODELS + "deepseek_v2", "DeepseekV3ForCausalLM", "DeepseekV2MoE", "n_routed_experts"),
    ServedArchitecture(_MODELS + "glm4_moe", "Glm4MoeForCausalLM", "Glm4MoE", "n_routed_experts"),
    ServedArchitecture(_MODELS + "gpt_oss", "GptOssForCausalLM", "MLPBlock", "num_local_experts"),
)


def register() -> None:
    """Register the architectures in :data:`SERVED`; those that this vLLM lacks are skipped with a warning."""
    registry = importlib.import_module("vllm").ModelRegistry
    for served in SERVED:
        try:
            module = importlib.import_module(served.module)
        except ImportError as error:
            logger.warning("pruned %s cannot be served by this vLLM: %s", served.causal_lm, error)
            continue
        block = getattr(module, served.block, None)
        if block is None or not hasattr(module, served.causal_lm):
            logger.warning("%s of this vLLM has no %s or %s", served.module, served.block, served.causal_lm)
            continue
        wrap_block(block, served.count_field)
        # By name: vLLM inspects models in a subprocess before it has a GPU.
        registry.register_model(f"Pruned{served.causal_lm}", f"{served.module}:{served.causal_lm}")


def expert_counts(config: Any) -> tuple[int, ...] | None:
    """Experts of every decoder layer (0 for dense ones), or None for a model that is not pruned per layer.

    Args:
        config: A Hugging Face configuration (or the mapping in ``config.json``).

    Raises:
        ValueError: The field is malformed, or groups were pruned to different sizes.
    """
    config = _text_config(config)
    counts = _field(config, "num_experts_per_layer")
    if counts is None:
        return None
    layers = _field(config, "num_hidden_layers")
    if (
        not isinstance(counts, (list, tuple))
        or len(counts) != layers
        or any(type(c) is not int or c < 0 for c in counts)
    ):
        raise ValueError(
            f"num_experts_per_layer must list one count for each of {layers} layers, got {counts!r}"
        )
    sizes = _field(config, "expert_group_sizes")
    if sizes and any(layer and len(set(layer)) > 1 for layer in sizes):
        raise ValueError(
            "this checkpoint keeps different numbers of experts in the groups of a group-limited router, which "
            "vLLM cannot express; export it padded, or serve it with transformers"
        )
    return tuple(counts)


@contextmanager
def layer_config(config: Any, count_field: str, prefix: str) -> Iterator[None]:
    """Context in which ``config`` holds the number of experts of the layer that ``prefix`` names."""
    counts = expert_counts(config)
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", prefix)
    if counts is None or not numbers:
        yield
        return
    layer = int(numbers[0])
    if layer >= len(counts) or not counts[layer]:
        # A dense layer, or one beyond the model (speculative heads): no change.
        yield
        return
    text = _text_config(config)
    before = getattr(text, count_field)
    setattr(text, count_field, counts[layer])
    try:
        yield
    finally:
        setattr(text, count_field, before)


def wrap_block(block: type, count_field: str) -> None:
    """Make the constructor of a sparse block read its own layer's count; a second call changes nothing."""
    original: Callable[..., None] = block.__init__  # type: ignore[misc]
    if hasattr(original, "_rco_count_field"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        prefix = given.get("prefix", "")
        vllm_config = given.get("vllm_config")
        config = given.get("config")
        if config is None and vllm_config is not None:
            config = vllm_config.model_config.hf_config
        if config is None:
            original(self, *args, **kwargs)
            return
        if expert_counts(config) is not None and _expert_parallel(vllm_config):
            raise ValueError(
                "layers with different numbers of experts cannot be split by expert parallelism; "
                "start vLLM without --enable-expert-parallel (tensor parallelism works)"
            )
        with layer_config(config, count_field, prefix):
            original(self, *args, **kwargs)

    build._rco_count_field = count_field  # type: ignore[attr-defined]
    block.__init__ = build  # type: ignore[misc]


def _expert_parallel(vllm_config: Any) -> bool:
    if vllm_config is None:
        try:
            current = importlib.import_module("vllm.config").get_current_vllm_config
        except (ImportError, AttributeError):
            return False
        vllm_config = current()
    parallel = getattr(vllm_config, "parallel_config", None)
    return bool(getattr(parallel, "enable_expert_parallel", False))


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
