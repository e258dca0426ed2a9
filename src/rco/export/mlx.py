"""A recipe for MLX: a table from module paths to widths, and a script that converts with it.

``mlx_lm.convert`` calls a predicate for every module that can be quantized; the predicate here looks up the path.
Modules outside the table, including embeddings, are not quantized. MLX has affine grids with a scale and a bias in
16 bits each, so a symmetric choice becomes an affine one of the same width.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from rco.export.exporter import ExportError
from rco.export.recipes import Choice, Recipe, RecipeExporter, as_json
from rco.models.layout import Layout

__all__ = ["MLXExporter", "mlx_paths"]

_WIDTHS, _GROUP_SIZES = {2, 3, 4, 5, 6, 8}, {32, 64, 128}
_SCRIPT = '''"""Convert a model with the widths in quantization.json: python convert.py MODEL OUT"""

import json
import sys
from pathlib import Path

from mlx_lm import convert

TABLE = json.loads(Path(__file__).with_name("quantization.json").read_text())


def predicate(path, module, *_):
    """Width and group size of a module; False leaves it alone."""
    return TABLE["modules"].get(path, False)


if __name__ == "__main__":
    convert(
        sys.argv[1],
        mlx_path=sys.argv[2],
        quantize=True,
        q_group_size=TABLE["group_size"],
        q_bits=TABLE["bits"],
        quant_predicate=predicate,
    )
'''
# Path of the blocks in mlx-lm, if different from transformers.
_BLOCKS = {
    "transformer.h": "model.h",
    "gpt_neox.layers": "model.h",
    "model.language_model.layers": "language_model.model.layers",
}
_EXPERT = re.compile(r"(?<=\.experts\.)(?:\d+\.)?(\w+)$")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MLXExporter(RecipeExporter):
    """Writes a table of widths by module path and a script that converts with it."""

    name: ClassVar[str] = "mlx"

    def recipe(self, choice: Choice) -> Recipe:
        """``quantization.json`` with paths as mlx-lm names modules, and ``convert.py``."""
        choice.require("MLX", _WIDTHS, _GROUP_SIZES)
        modules: dict[str, dict[str, Any]] = {}
        for name, scheme in choice.quantized.items():
            columns = choice.linears[name].in_features
            size = scheme.group_size or columns
            if columns % size:
                raise ExportError(
                    f"{name} has rows of {columns}, which groups of {size} do not divide, so MLX would not "
                    "quantize it. Search with another `group_size`."
                )
            entry = {"group_size": size, "bits": scheme.bits, "mode": "affine"}
            for path in mlx_paths(choice.loaded.layout, name):
                if modules.setdefault(path, entry) != entry:
                    raise ExportError(
                        f"{path} holds all experts of a layer, and {name} differs from the others: search with one "
                        "width for each projection of a layer's experts (`expert_groups='layer-projection'`)."
                    )
        # No module uses the defaults, but MLX calls the predicate only if the default group size divides a row.
        smallest = min(entry["group_size"] for entry in modules.values())
        table = {"group_size": smallest, "bits": choice.commonest.bits, "modules": modules}
        files = {"quantization.json": as_json(table), "convert.py": _SCRIPT}
        return Recipe(files, "    python convert.py MODEL OUT\n")


def mlx_paths(layout: Layout, name: str) -> tuple[str, ...]:
    """Names of a linear in mlx-lm: usually as in transformers, but a layer's experts are one module."""
    if layout.model_type == "gpt_neox" and name in ("lm_head", "embed_out"):
        return ("model.embed_out",)
    blocks = layout.prefix
    if name.startswith(f"{blocks}."):
        name = _BLOCKS.get(blocks, blocks) + name.removeprefix(blocks)
    if layout.model_type == "deepseek_v3" and name.endswith(".kv_b_proj"):
        stem = name.removesuffix("kv_b_proj")
        return f"{stem}embed_q", f"{stem}unembed_out"
    name = _EXPERT.sub(lambda found: _MIXTRAL.get(found[1], found[1]), name)
    if layout.model_type == "mixtral":
        name = name.replace(".mlp.experts.", ".block_sparse_moe.switch_mlp.")
    elif layout.model_type != "gpt_oss":
        name = name.replace(".experts.", ".switch_mlp.")
    return (name,)
