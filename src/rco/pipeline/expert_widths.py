"""What a quantization did to a model's experts, for the report: widths beside routing frequency."""

from __future__ import annotations

from typing import Any

from rco.compression.candidates import option_label
from rco.compression.quantization import QuantizationBackend
from rco.core.problem import Allocation

__all__ = ["describe_experts"]


def describe_experts(backend: QuantizationBackend, allocation: Allocation) -> dict[str, Any]:
    """The ``expert_widths`` section of the metrics; empty for a model without experts."""
    plan, store, visits = backend.plan, backend.store, backend.visits
    if not plan.experts or store is None or visits is None:
        return {}
    choices = backend.choice_of(allocation)
    layers: dict[int, dict[str, Any]] = {}
    for info in plan.experts:
        count = info.layer.num_experts
        layer = layers.setdefault(
            info.layer.index,
            {
                "layer": info.layer.decoder_index,
                "widths": [[0, 0, 0] for _ in range(count)],
                "frequency": [seen / max(visits.tokens, 1) for seen in visits.experts[info.layer.index]],
            },
        )
        layer["widths"][info.expert][("gate", "up", "down").index(info.projection)] = choices[info.name]
    return {
        "expert_widths": {
            "layers": list(layers.values()),
            **_fitted(backend),
            "experts": sum(len(layer["widths"]) for layer in layers.values()),
        }
    }


def _fitted(backend: QuantizationBackend) -> dict[str, Any]:
    """How many tokens the candidates of experts were fitted to, and what was done where few visit one."""
    plan, store = backend.plan, backend.store
    assert store is not None
    if backend.settings.method != "gptq":  # plain rounding looks at no tokens
        return {"minimum_tokens": None, "topped_up": 0, "added_tokens": 0}
    label = option_label(plan.packed_widths[0])
    tensors = dict.fromkeys(info.stored_in for info in plan.experts if info.projection == "down")
    visits, added = [], []
    for name in tensors:
        statistics = store.statistics(name, label)
        visits += statistics["tokens"]
        added += statistics["added_tokens"]
    return {
        "minimum_tokens": backend.settings.expert_tokens,
        "fewest_tokens": min(seen + more for seen, more in zip(visits, added, strict=True)),
        "unvisited": sum(seen == 0 for seen in visits),
        "topped_up": sum(more > 0 for more in added),
        "added_tokens": sum(added),
    }
