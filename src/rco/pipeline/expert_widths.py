"""What a quantization did to a model's experts, for the report: widths beside routing frequency."""

from __future__ import annotations

from typing import Any

from rco.backends.candidates import option_label
from rco.backends.quantization import QuantizationBackend
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
    label = option_label(plan.packed_widths[0])
    tensors = dict.fromkeys(info.stored_in for info in plan.experts if info.projection == "down")
    added = [store.statistics(name, label).get("added_tokens") for name in tensors]
    short = [count for layer in added if layer is not None for count in layer if count]
    return {
        "expert_widths": {
            "layers": list(layers.values()),
            # Plain rounding looks at no tokens.
            "minimum_tokens": backend.settings.expert_tokens if backend.settings.method == "gptq" else None,
            "topped_up": len(short),
            "added_tokens": sum(short),
            "experts": sum(len(layer["widths"]) for layer in layers.values()),
        }
    }
