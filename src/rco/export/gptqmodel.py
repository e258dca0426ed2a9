"""A recipe for GPTQModel: the arguments of its ``QuantizeConfig``, one ``dynamic`` rule per linear.

Rules are regular expressions tried in order from the start of a module's name; ``-:`` excludes a module. Every
rule here is one exact name. Checkpoints with 5, 6 or 7 bits need GPTQModel 7, which stores them in planes.

GPTQModel quantizes only the linears in its own list for an architecture, whatever the rules.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from rco.export.exporter import ExportError
from rco.export.recipes import Choice, Recipe, RecipeExporter, as_json
from rco.formats.integer import IntegerGrid

__all__ = ["GPTQModelExporter"]

# Linears missing from GPTQModel's list for an architecture (7.7), as paths inside a block: those of dense layers
# among sparse ones, and a small one of linear attention.
_DENSE_LAYER = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_UNLISTED = {
    "qwen2_moe": _DENSE_LAYER,
    "qwen3_moe": _DENSE_LAYER,
    "qwen3_next": (*_DENSE_LAYER, "linear_attn.in_proj_ba"),
}
_USAGE = """\
    import json
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(**json.load(open("quantize_config.json")))
    model = GPTQModel.load(MODEL, config)
    model.quantize(CALIBRATION_TEXTS)
    model.save(OUT)
"""


class GPTQModelExporter(RecipeExporter):
    """Writes GPTQModel's quantization config with a dynamic rule for every linear."""

    name: ClassVar[str] = "gptqmodel"

    def recipe(self, choice: Choice) -> Recipe:
        """``quantize_config.json``: the commonest scheme as the default, a rule for each linear."""
        choice.require("GPTQModel", set(range(2, 9)))
        dynamic: dict[str, dict[str, Any]] = {}
        head = False
        for name, info in choice.linears.items():
            scheme = choice.schemes[name]
            exact = f"^{re.escape(choice.called(name))}$"
            if isinstance(scheme, IntegerGrid):
                if info.path in _UNLISTED.get(choice.loaded.layout.model_type, ()):
                    left = "|".join(re.escape(path) for path in _UNLISTED[choice.loaded.layout.model_type])
                    raise ExportError(
                        f"{name} has {scheme.bits} bits, but GPTQModel does not quantize such linears. Search "
                        f"again without them: `skip='\\d\\.({left})$'`."
                    )
                dynamic[exact] = _arguments(scheme)
                head = head or info.role == "head"
            elif info.role != "head":  # an output layer is quantized only if it has a rule
                dynamic[f"-:{exact}"] = {}
        config = {**_arguments(choice.commonest), "desc_act": False, "lm_head": head, "dynamic": dynamic}
        return Recipe({"quantize_config.json": as_json(config)}, _USAGE)


def _arguments(scheme: IntegerGrid) -> dict[str, Any]:
    size = -1 if scheme.group_size is None else scheme.group_size
    return {"bits": scheme.bits, "group_size": size, "sym": scheme.symmetric}
