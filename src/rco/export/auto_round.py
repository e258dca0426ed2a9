"""A recipe for AutoRound: its ``layer_config``, one entry per linear.

AutoRound uses its default scheme for every linear of a block without an entry, so routers and other linears that
are not searched are listed with 16 bits.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rco.export.exporter import ExportError
from rco.export.recipes import Choice, Recipe, RecipeExporter, as_json
from rco.formats.integer import IntegerGrid

__all__ = ["AutoRoundExporter"]

_MULTIPLE = 32  # AutoRound does not quantize matrices whose rows or columns are not a multiple of it
_LEFT_ALONE = {"bits": 16, "data_type": "float", "act_bits": 16}
_USAGE = """\
    import json
    from auto_round import AutoRound

    settings = json.load(open("auto_round.json"))
    rounding = AutoRound(MODEL, scheme=settings["scheme"], layer_config=settings["layer_config"])
    rounding.quantize_and_save(OUT, format="{format}")
"""


class AutoRoundExporter(RecipeExporter):
    """Writes AutoRound's layer configuration."""

    name: ClassVar[str] = "auto-round"

    def recipe(self, choice: Choice) -> Recipe:
        """``auto_round.json``: the default scheme and an entry for each linear."""
        choice.require("AutoRound", set(range(2, 9)))
        config: dict[str, dict[str, Any]] = {name: dict(_LEFT_ALONE) for name in choice.other_linears()}
        for name, info in choice.linears.items():
            scheme = choice.schemes[name]
            if not isinstance(scheme, IntegerGrid):
                if info.role != "head":  # outside the blocks only listed linears are quantized
                    config[choice.called(name)] = dict(_LEFT_ALONE)
                continue
            if info.out_features % _MULTIPLE or info.in_features % _MULTIPLE:
                raise ExportError(
                    f"{name} is {info.out_features}x{info.in_features}; AutoRound quantizes a matrix only if "
                    f"both sides are multiples of {_MULTIPLE}. Search again without it (`skip`)."
                )
            config[choice.called(name)] = _entry(scheme)
        # AutoRound's other formats do not allow zero points at 8 bits, because no kernel reads them.
        wide = any(scheme.bits == 8 and not scheme.symmetric for scheme in choice.quantized.values())
        usage = _USAGE.format(format="llm_compressor" if wide else "auto_round")
        content = {"scheme": _entry(choice.commonest), "layer_config": config}
        return Recipe({"auto_round.json": as_json(content)}, usage)


def _entry(scheme: IntegerGrid) -> dict[str, Any]:
    size = -1 if scheme.group_size is None else scheme.group_size
    entry = {"bits": scheme.bits, "group_size": size, "sym": scheme.symmetric, "data_type": "int"}
    return entry | {"act_bits": 16}
