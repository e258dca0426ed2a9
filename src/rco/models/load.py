"""``rco.load``: any model that this package knows or has written, whatever kind of checkpoint it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rco.models.loading import LoadedModel, load_model
from rco.models.zoo import ModelError

__all__ = ["checkpoint_of", "load"]


def checkpoint_of(path: str | Path) -> str | Path:
    """The checkpoint inside a run's folder; anything else is taken as it is.

    Raises:
        ModelError: The folder is a run that has written no checkpoint.
    """
    folder = Path(path).expanduser()
    if not (folder / "problem.json").is_file():
        return path
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    raise ModelError(
        f"{folder} is a run without a checkpoint: continue it with `resume=True`, or export it with `rco export`."
    )


def load(name: str | Path, **settings: Any) -> LoadedModel:
    """Load a model: a run's folder, a built-in name, a local folder or a Hub id; stock, quantized or pruned.

    Checkpoints whose layers keep different numbers of experts load without running the code that they carry.

    Args:
        name: What to load.
        settings: As for :func:`rco.models.loading.load_model`: ``dtype``, ``device``, ``attention``,
            ``trust_remote_code``.

    Returns:
        The model with its tokenizer; ``.model`` is the torch module.
    """
    return load_model(checkpoint_of(name), **settings)
