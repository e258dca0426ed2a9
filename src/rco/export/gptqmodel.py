"""A recipe for GPTQModel: the arguments of its ``QuantizeConfig``, one ``dynamic`` rule per linear.

Rules are regular expressions tried in order from the start of a module's name; ``-:`` leaves a module alone. Every
rule here is one exact name. Checkpoints with 5, 6 or 7 bits need GPTQModel 7, which stores them in planes.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from rco.backends.accounting import Scheme
from rco.export.recipes import Choice, Recipe, RecipeExporter, as_json

__all__ = ["GPTQModelExporter"]

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
            exact = f"^{re.escape(name)}$"
            if not scheme.dense:
                dynamic[exact] = _arguments(scheme)
                head = head or info.role == "head"
            elif info.role != "head":  # an output layer is left alone unless it is asked for
                dynamic[f"-:{exact}"] = {}
        config = {**_arguments(choice.commonest), "desc_act": False, "lm_head": head, "dynamic": dynamic}
        return Recipe({"quantize_config.json": as_json(config)}, _USAGE)


def _arguments(scheme: Scheme) -> dict[str, Any]:
    size = -1 if scheme.group_size is None else scheme.group_size
    return {"bits": scheme.bits, "group_size": size, "sym": scheme.symmetric}
