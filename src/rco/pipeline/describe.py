"""Metrics of a run for the report: the model, the budget and the option of every group."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from rco.compression.compression import Compression
from rco.compression.second_budget import SecondBudget
from rco.core.problem import Allocation
from rco.core.result import SearchResult
from rco.models.loading import LoadedModel
from rco.pipeline.configs import CompressConfig
from rco.pipeline.planning import Planned

__all__ = ["describe"]


def describe(
    config: CompressConfig, planned: Planned, result: SearchResult, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Sections of the metrics that do not need the evaluation; ``before`` are the metrics so far."""
    compression = planned.compression
    pruning = compression.plan.removes_only
    return {
        "kind": compression.kind,
        "model": _model(config.model, planned.loaded),
        "budget": _budget(config, planned, result),
        **(
            {"moe": {**before.get("moe", {}), **_kept_experts(compression, result.allocation)}}
            if pruning
            else _groups(compression, result.allocation)
        ),
        **({"unverified": left} if (left := {e.name: e.reason for e in compression.plan.unread}) else {}),
    }


def _model(name: str, loaded: LoadedModel) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "blocks": len(loaded.layout.blocks(loaded.model)),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "fingerprint": loaded.fingerprint,
    }


def _budget(config: CompressConfig, planned: Planned, result: SearchResult) -> dict[str, Any]:
    """Requested and used budget; a size counts the whole checkpoint, of which the search changes a part."""
    compression, problem = planned.compression, planned.problem
    counted = compression.costs(planned.budget.kind)
    budgets, units = problem.unit_budgets, problem.units(result.allocation)
    if compression.second is not None:  # the first is that of bits or bytes
        budgets, units = budgets[:1], units[:1]
    allowed, used = sum(budgets) + counted.fixed, sum(units) + counted.fixed
    found = {
        "kind": planned.budget.kind,
        "requested": config.requested,
        "effective": f"{allowed:,} {counted.unit}",
        "used": f"{used:,} {counted.unit}",
        "unit": counted.unit,
        "budget_units": allowed,
        "used_units": used,
    }
    if not compression.plan.removes_only:
        bits = compression.average_width(result.allocation)
        if compression.second is not None:
            found["second"] = _second_budget(compression, compression.second, result.allocation)
        own = {"average_bits": float(bits), "average_bits_exact": str(bits), "counted_over": counted.count}
        return {**found, "range": list(counted.range), **own}
    total = problem.num_groups
    pruned = total - int(compression.keep_of(result.allocation).sum())
    ends = [sum(end) if isinstance(end, tuple) else end for end in problem.feasible_range]
    return {
        **found,
        "used": f"{found['used']}; {pruned} of {total} experts pruned",
        "range": [f"{end + counted.fixed:,} {counted.unit}" for end in ends],
        "experts": total,
        "pruned": pruned,
    }


def _second_budget(compression: Compression, second: SecondBudget, allocation: Allocation) -> dict[str, Any]:
    """The second budget in the user's terms: exact numbers, and as decimals."""
    matrix, most, unit = second.costs(compression.plan)
    used = Fraction(int(matrix[np.arange(len(matrix)), np.asarray(allocation)].sum()), unit)
    return {
        "kind": second.name,
        "allowed": float(most / unit),
        "used": float(used),
        "allowed_exact": str(most / unit),
        "used_exact": str(used),
    }


def _groups(compression: Compression, allocation: Allocation) -> dict[str, Any]:
    """Every group with its width and the predicted losses of its options."""
    plan, store = compression.plan, compression.store
    losses, relative = compression.losses.numpy(), compression.relative_errors().numpy()
    return {
        "candidates": store.fingerprint if store is not None else None,
        **_expert_widths(compression, allocation),
        "groups": [
            {
                "name": group.name,
                "members": [member.name for member in group.members],
                "kind": "+".join(dict.fromkeys(member.kind for member in group.members)),
                "block": group.block,
                "parameters": group.parameters,
                "width": plan.widths[choice],
                "format": plan.options[choice].name,
                "sensitivity": dict(zip(plan.labels, losses[row].tolist(), strict=True)),
                "relative_error": dict(zip(plan.labels, relative[row].tolist(), strict=True)),
            }
            for row, (group, choice) in enumerate(zip(plan.groups, allocation, strict=True))
        ],
    }


def _kept_experts(compression: Compression, allocation: Allocation) -> dict[str, Any]:
    """Every sparse layer with the experts that stay and their scores."""
    kept, scores = compression.kept(allocation), compression.scores
    overlap = sum(
        len(set(layer) & set(torch.topk(score, len(layer)).indices.tolist()))
        for layer, score in zip(kept, scores["reap"], strict=True)
    )
    layers = [
        {
            "layer": layer.decoder_index,
            "name": layer.name,
            "experts": layer.num_experts,
            "top_k": layer.top_k,
            "kept": stay,
            "scores": {name: own[layer.index].tolist() for name, own in scores.items()},
        }
        for layer, stay in zip(compression.layers, kept, strict=True)
    ]
    return {"layers": layers, "overlap_with_reap": overlap / sum(map(len, kept))}


def _expert_widths(compression: Compression, allocation: Allocation) -> dict[str, Any]:
    """Widths and routing frequency of experts; empty for a model without experts."""
    plan, visits = compression.plan, compression.visits
    if not plan.experts or compression.store is None or visits is None:
        return {}
    choices = compression.choice_of(allocation)
    layers: dict[int, dict[str, Any]] = {}
    for info in plan.experts:
        layer = layers.setdefault(
            info.layer.index,
            {
                "layer": info.layer.decoder_index,
                "widths": [[0] * len(info.layer.architecture.kinds) for _ in range(info.layer.num_experts)],
                "frequency": [seen / max(visits.tokens, 1) for seen in visits.experts[info.layer.index]],
            },
        )
        layer["widths"][info.expert][info.layer.architecture.kinds.index(info.projection)] = choices[
            info.name
        ].bits
    return {
        "expert_widths": {
            "layers": list(layers.values()),
            **_fitted(compression),
            "experts": sum(len(layer["widths"]) for layer in layers.values()),
        }
    }


def _fitted(compression: Compression) -> dict[str, Any]:
    """Numbers of tokens that experts were fitted to, and of tokens added for rarely visited ones."""
    plan, store = compression.plan, compression.store
    assert store is not None
    if compression.settings.method != "gptq":  # rounding to nearest uses no tokens
        return {"minimum_tokens": None, "topped_up": 0, "added_tokens": 0}
    label = plan.label(plan.packed[0])
    tensors = dict.fromkeys(info.stored_in for info in plan.experts if info.projection == "down")
    visits, added = [], []
    for name in tensors:
        statistics = store.statistics(name, label)
        visits += statistics["tokens"]
        added += statistics["added_tokens"]
    return {
        "minimum_tokens": compression.settings.expert_tokens,
        "fewest_tokens": min(seen + more for seen, more in zip(visits, added, strict=True)),
        "unvisited": sum(seen == 0 for seen in visits),
        "topped_up": sum(more > 0 for more in added),
        "added_tokens": sum(added),
    }
