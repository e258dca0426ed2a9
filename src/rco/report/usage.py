"""How to load what was written, and how to make it again."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from rco.report.data import RunData, moe_layers, section
from rco.report.expert_widths import expert_width_layers
from rco.report.markup import Markup, element, fragment

__all__ = ["loading", "reproduce_command"]

_VERBS = {"quantization": "quantize", "expert-pruning": "prune"}
_TRANSFORMERS = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {path}
model = AutoModelForCausalLM.from_pretrained(path{extra})
tokenizer = AutoTokenizer.from_pretrained(path)"""


def loading(run: RunData) -> Markup | None:
    """Code that loads the checkpoint with stock tools, as far as the export is known to allow it."""
    export = section(run.metrics, "export")
    path = export.get("path")
    if not path:
        return None
    form = str(export.get("format", ""))
    if export.get("usage"):  # a recipe: there is nothing to load yet
        return fragment([element("h4", form), code(textwrap.dedent(str(export["usage"])))])
    layers = moe_layers(run)
    uneven = len({len(layer.kept) for layer in layers}) > 1 and "padded" not in form
    separate = "modeling_unfused_experts.py" in (export.get("files") or {})
    pruned = any(widths[0] == 0 for layer in expert_width_layers(run) for widths in layer.widths)
    uneven = uneven or (pruned and any(str(name).endswith(".py") for name in export.get("files") or {}))
    pieces = [
        element("h4", "transformers"),
        code(
            _TRANSFORMERS.format(
                path=json.dumps(str(path), ensure_ascii=False),
                extra=', dtype="auto"' + (", trust_remote_code=True" if uneven or separate else ""),
            )
        ),
    ]
    if uneven:
        pieces.append(
            element(
                "p",
                "Layers keep different numbers of experts, which stock model code does not know: the checkpoint "
                "carries the code that does. ",
                element("code", "rco.load(path)"),
                " loads it too.",
                class_="small",
            )
        )
    if separate:
        pieces.append(
            element(
                "p",
                "Experts have widths of their own, and stock model code loads packed experts with one width for "
                "all: the checkpoint carries the code that builds them separately.",
                class_="small",
            )
        )
    if form == "compressed-tensors":
        pieces.append(
            element(
                "p",
                "Needs ",
                element("code", "compressed-tensors>=0.18"),
                " to be installed.",
                class_="small",
            )
        )
    engine = section(run.metrics, "engine")
    if str(engine.get("preset", "")).startswith("vllm") and not engine.get("violations"):
        pieces += [element("h4", "vLLM"), code(f"vllm serve {shlex.quote(str(path))}")]
    return fragment(pieces)


def code(words: str) -> Markup:
    """A block of code that scrolls by itself."""
    return element("pre", element("code", words), tabindex="0")


def reproduce_command(run: RunData) -> str | None:
    """The command line of the run: as recorded, or else with every setting of its configuration spelled out."""
    for document in (run.metrics, run.environment, run.config):
        recorded = document.get("command")
        if recorded:
            return recorded if isinstance(recorded, str) else shlex.join(str(word) for word in recorded)
    verb = _VERBS.get(str(run.metrics.get("kind")))
    if verb is None or not run.config.get("model"):
        return None
    lines = [f"rco {verb} {shlex.quote(str(run.config['model']))}", *_flags(run.config)]
    return " \\\n    ".join(lines)


def _flags(config: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in config.items():
        flag = "--" + str(key).replace("_", "-")
        if key == "model" or value is None or isinstance(value, Mapping):
            continue
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            if all(isinstance(entry, int | float) for entry in value):
                found += [f"{flag} {' '.join(map(str, value))}"] if value else []
            else:
                found += [f"{flag} {shlex.quote(str(entry))}" for entry in value]
        else:
            found.append(f"{flag} {shlex.quote(str(value))}")
    return found
