"""Code for loading the checkpoint, and the command that reproduces it."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rco.report.data import RunData, expert_width_layers, moe_layers, section

__all__ = ["Loading", "loading", "reproduce_command"]

_VERBS = {"quantization": "quantize", "expert-pruning": "prune"}


@dataclass(frozen=True)
class Loading:
    """Loading of a checkpoint with stock tools.

    Attributes:
        path: The checkpoint.
        format: Its format.
        recipe: Instructions, if it is a recipe for another tool, which makes the checkpoint.
        uneven: Whether layers keep different numbers of experts, so that the checkpoint has its own model code.
        separate: Whether experts have their own widths, so that the checkpoint has its own model code.
        vllm: Whether vLLM can serve it.
    """

    path: str
    format: str
    recipe: str | None
    uneven: bool
    separate: bool
    vllm: bool

    @property
    def quoted_path(self) -> str:
        """The path as a Python string."""
        return json.dumps(self.path, ensure_ascii=False)

    @property
    def shell_path(self) -> str:
        """The path quoted for a shell."""
        return shlex.quote(self.path)


def loading(run: RunData) -> Loading | None:
    """Loading of the checkpoint; None without one."""
    export = section(run.metrics, "export")
    if not export.get("path"):
        return None
    form, files = str(export.get("format", "")), [str(name) for name in export.get("files") or {}]
    counts = {len(layer.kept) for layer in moe_layers(run)}
    pruned = any(parts == (0, 0, 0) for layer in expert_width_layers(run) for parts in layer.widths)
    engine = section(run.metrics, "engine")
    return Loading(
        path=str(export["path"]),
        format=form,
        recipe=textwrap.dedent(str(export["usage"])) if export.get("usage") else None,
        uneven=(len(counts) > 1 and "padded" not in form)
        or (pruned and any(name.endswith(".py") for name in files)),
        separate="modeling_unfused_experts.py" in files,
        vllm=str(engine.get("preset", "")).startswith("vllm") and not engine.get("violations"),
    )


def reproduce_command(run: RunData) -> str | None:
    """The command line of the run: as recorded, else with every setting of its configuration."""
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
