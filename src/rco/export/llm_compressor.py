"""A recipe for llm-compressor: one GPTQ modifier whose config groups name every linear.

The groups are those of rco's own compressed-tensors checkpoints, so both have the same format.
"""

from __future__ import annotations

from typing import ClassVar

from rco.export.compressed_tensors import check_exportable, quantization_config
from rco.export.recipes import Choice, Recipe, RecipeExporter, as_json

__all__ = ["LLMCompressorExporter"]

_USAGE = """\
    from llmcompressor import oneshot

    oneshot(model=MODEL, dataset=DATASET, recipe="recipe.json", output_dir=OUT)
"""


class LLMCompressorExporter(RecipeExporter):
    """Writes an llm-compressor recipe with one config group per scheme."""

    name: ClassVar[str] = "llm-compressor"

    def recipe(self, choice: Choice) -> Recipe:
        """``recipe.json``: a stage with a ``GPTQModifier``; only named targets are quantized."""
        check_exportable(choice.linears.values(), choice.schemes)
        config = quantization_config(choice.loaded, choice.schemes)
        assert config is not None  # something is quantized
        groups = {
            key: {"targets": [choice.called(name) for name in group["targets"]], "weights": group["weights"]}
            for key, group in config["config_groups"].items()
        }
        modifier = {"config_groups": groups, "ignore": []}
        content = {"quantization_stage": {"quantization_modifiers": {"GPTQModifier": modifier}}}
        return Recipe({"recipe.json": as_json(content)}, _USAGE)
