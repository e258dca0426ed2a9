"""The token embedding as a group of a compression: its description, and its switchable replacement.

A tied embedding is also the output layer's weight: one group, whose loss counts both uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rco.formats.base import Stored
from rco.formats.streaming import OptionStream
from rco.formats.switchable import SwitchableLinear
from rco.formats.switchable_embedding import SwitchableEmbedding
from rco.models.layout import Layout, LinearInfo
from rco.models.switchable_model import make_switchable
from rco.models.zoo import ModelError

__all__ = ["EMBEDDING_ROLE", "embedding_info", "embedding_obstacle", "switchable_ends"]

EMBEDDING_ROLE = "embedding"


def embedding_info(layout: Layout, model: nn.Module) -> LinearInfo:
    """The token embedding as a matrix of one row per token; ``tied`` if it is the output layer's weight, too."""
    module = layout.embedding(model)
    name = next(name for name, each in model.named_modules() if each is module)
    rows, columns = module.weight.shape
    kind, head = name.rpartition(".")[2], layout.head(model)
    twin = head.name if head.tied else None
    return LinearInfo(
        name, module, kind, EMBEDDING_ROLE, None, name, columns, rows, False, False, head.tied, twin
    )


def embedding_obstacle(info: LinearInfo) -> str | None:
    """Reason why an embedding cannot be replaced by compressed versions of itself; None if it can."""
    module: Any = info.module
    if type(module).forward is nn.Embedding.forward or getattr(module, "embed_scale", None) is not None:
        return None
    return f"{info.name} is a {type(module).__name__}, whose computation is not known"


def switchable_ends(
    layout: Layout,
    model: nn.Module,
    info: LinearInfo,
    options: Sequence[Stored | None],
    stream: OptionStream | None = None,
) -> dict[str, SwitchableEmbedding | SwitchableLinear]:
    """Switchable replacements by name: of the embedding and, if it is tied, of the output layer.

    Raises:
        ModelError: The embedding is not a plain table, perhaps with a factor.
    """
    module: Any = info.module
    obstacle = embedding_obstacle(info)
    if obstacle is not None:
        raise ModelError(f"{obstacle}; leave it out (`skip`).")
    found: dict[str, SwitchableEmbedding | SwitchableLinear] = {
        info.name: SwitchableEmbedding(options, module.weight, getattr(module, "embed_scale", None))
    }
    if info.twin is not None:
        found[info.twin] = make_switchable(model.get_submodule(info.twin), options, stream)
    return found
