"""Names for users, each loaded on demand: ``name -> "module:Class"``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

__all__ = ["EXPORTERS", "FORMATS", "METHODS", "load", "unknown_name"]

METHODS: dict[str, str] = {
    "rco": "rco.core.search:RCO",
    "rco-plain": "rco.core.search:PlainRCO",
    "lagrangian": "rco.baselines.lagrangian:Lagrangian",
    "augmented-lagrangian": "rco.baselines.lagrangian:AugmentedLagrangian",
    "penalty": "rco.baselines.lagrangian:Penalty",
    "frank-wolfe": "rco.baselines.frank_wolfe:FrankWolfe",
    "annealing": "rco.baselines.annealing:Annealing",
    "evopress": "rco.baselines.evopress:EvoPress",
    "evoesap": "rco.baselines.evoesap:EvoESAP",
    "impq": "rco.baselines.impq:IMPQ",
    "mxmoe": "rco.baselines.mxmoe:MxMoE",
    "higgs": "rco.baselines.higgs:HIGGS",
    "higgs-noise": "rco.baselines.higgs:HIGGSNoise",
    "one-at-a-time": "rco.baselines.one_at_a_time:OneAtATime",
    "fisher": "rco.baselines.fisher_information:Fisher",
    "first-order": "rco.baselines.first_order:FirstOrder",
    "autoquantize": "rco.baselines.autoquantize:AutoQuantize",
    "autoscheme": "rco.baselines.autoscheme:AutoScheme",
    "output-error": "rco.baselines.output_error:OutputError",
    "greedy": "rco.baselines.greedy:Greedy",
    "greedy-down": "rco.baselines.greedy:GreedyDown",
    "random": "rco.baselines.random_search:RandomSearch",
    "uniform": "rco.baselines.uniform:Uniform",
    "uniform-fill": "rco.baselines.uniform:UniformFill",
    "uniform-random-fill": "rco.baselines.uniform:RandomFill",
    "top-global": "rco.baselines.picks:TopGlobal",
    "top-per-block": "rco.baselines.picks:TopPerBlock",
    "random-pick": "rco.baselines.picks:RandomPick",
}
FORMATS: dict[str, str] = {
    "integer": "rco.formats.integer:IntegerGrid",
    "ggml": "rco.formats.ggml.block_types:GGMLFormat",
    "ggml-float": "rco.formats.ggml.float_types:GGMLFloat",
    "floating": "rco.formats.floating:FloatingPoint",
    "original": "rco.formats.original:Original",
    "removed": "rco.formats.removed:Removed",
}
EXPORTERS: dict[str, str] = {
    "compressed-tensors": "rco.export.compressed_tensors:CompressedTensorsExporter",
    "dense": "rco.export.dense:DenseExporter",
    "gguf": "rco.export.gguf_container:GGUFExporter",
    "llama.cpp": "rco.export.llama_cpp:LlamaCppExporter",
    "gptqmodel": "rco.export.gptqmodel:GPTQModelExporter",
    "llm-compressor": "rco.export.llm_compressor:LLMCompressorExporter",
    "auto-round": "rco.export.auto_round:AutoRoundExporter",
    "mlx": "rco.export.mlx:MLXExporter",
    "pruned": "rco.export.pruned_experts:PrunedExporter",
    "pruned-padded": "rco.export.pruned_experts:PaddedExporter",
}


def unknown_name(kind: str, name: str, known: Mapping[str, Any] | list[str]) -> ValueError:
    """An error for an unknown name, with similar names as suggestions."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return ValueError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(names)}.")


def load(table: Mapping[str, str], name: str, kind: str) -> Any:
    """The class behind a name."""
    if name not in table:
        raise unknown_name(kind, name, dict(table))
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
