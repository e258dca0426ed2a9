"""Checks of a written config against the rules of an engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rco.compression.engines import find_engine
from rco.export.schemes import scheme_of
from rco.formats.base import Format
from rco.formats.original import ORIGINAL
from rco.models.layout import FUSED

__all__ = ["validate_for_engine"]


def validate_for_engine(
    config: Mapping[str, Any], engine: str, linears: Sequence[str] | None = None
) -> list[str]:
    """Check an exported ``config.json`` against the rules of an engine.

    Args:
        config: The whole config, or its ``quantization_config`` alone (then ``q_proj, k_proj, v_proj`` and
            ``gate_proj, up_proj`` are assumed to be merged).
        engine: ``"transformers"``, ``"vllm"``, ``"vllm-marlin"``, or ``"any"`` for no rule.
        linears: Names of the model's linears; None: those in the config.

    Returns:
        One sentence for each violation; empty if the engine loads the checkpoint.
    """
    rules = find_engine(engine)
    if engine == "any":
        return []
    quantization = config if "config_groups" in config else config.get("quantization_config")
    if quantization is None:
        return []
    violations = _format_violations(quantization)
    known = {key: scheme_of(group) for key, group in quantization["config_groups"].items()}
    groups = [
        (key, quantization["config_groups"][key]["targets"], scheme)
        for key, scheme in known.items()
        if scheme is not None
    ]
    for key, _, scheme in groups:
        reason = rules.refusal(scheme)
        if reason:
            violations.append(f"{key}: {reason}.")
    ignore = quantization.get("ignore") or []
    names = list(linears) if linears is not None else _exact_names(groups, ignore)
    schemes: dict[str, Format] = {}
    for name in names:
        matched = [(key, scheme) for key, targets, scheme in groups if _matches(name, targets)]
        if _matches(name, ignore):
            matched = []
        elif not matched:
            violations.append(f"{name}: neither a target nor on the ignore list.")
        if len({scheme for _, scheme in matched}) > 1:
            # transformers uses the most specific target, vLLM the first one.
            violations.append(
                f"{name}: matched by {' and '.join(key for key, _ in matched)} with different schemes."
            )
        schemes[name] = matched[0][1] if matched else ORIGINAL
    if rules.fused:
        violations += _fused_violations(schemes, config, engine)
    return violations


def _format_violations(quantization: Mapping[str, Any]) -> list[str]:
    found = []
    if quantization.get("quant_method") != "compressed-tensors":
        found.append(f"quant_method is {quantization.get('quant_method')!r}, not 'compressed-tensors'.")
    formats = {group.get("format") for group in quantization["config_groups"].values()}
    whole = formats.pop() if len(formats) == 1 else "mixed-precision"
    if quantization.get("format") not in (whole, "mixed-precision"):
        found.append(f"format is {quantization.get('format')!r}, its groups need {whole!r}.")
    found += [
        f"{key}: weights and inputs are of no known scheme."
        for key, group in quantization["config_groups"].items()
        if scheme_of(group) is None
    ]
    return found


def _matches(name: str, targets: Iterable[str]) -> bool:
    return any(
        re.match(target[3:], name) is not None if target.startswith("re:") else target == name
        for target in targets
    )


def _exact_names(groups: Iterable[tuple[str, list[str], Format]], ignore: Iterable[str]) -> list[str]:
    named = [target for _, targets, _ in groups for target in targets] + list(ignore)
    return list(dict.fromkeys(name for name in named if not name.startswith("re:") and "." in name))


def _fused_violations(schemes: Mapping[str, Format], config: Mapping[str, Any], engine: str) -> list[str]:
    merged = FUSED.get(str(config.get("model_type", "llama")), ())
    sets: dict[str, dict[str, Format]] = {}
    for name, scheme in schemes.items():
        parent, _, kind = name.rpartition(".")
        for kinds in merged:
            if kind in kinds:
                sets.setdefault(f"{parent}.{'|'.join(kinds)}", {})[name] = scheme
        layer, inside, _ = name.partition(".experts.")
        if inside:
            sets.setdefault(f"{layer}.experts", {})[name] = scheme
    return [
        f"{', '.join(members)}: {engine} merges them into one matrix, but their schemes differ "
        f"({'; '.join(sorted({str(scheme) for scheme in members.values()}))})."
        for members in sets.values()
        if len(set(members.values())) > 1
    ]
