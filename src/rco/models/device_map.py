"""A model larger than one GPU, divided among several by accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from rco.models.zoo import ModelError
from rco.requirements import require

__all__ = ["DeviceMap", "Strategy", "on_one_gpu"]

Strategy = Literal["auto", "balanced", "sequential"]


@dataclass(frozen=True)
class DeviceMap:
    """Division of a model among GPUs.

    Args:
        strategy: As in accelerate: ``auto`` and ``balanced`` fill GPUs evenly, ``sequential`` one after another.
        gpus: Numbers of the GPUs to use.

    Raises:
        ModelError: The machine has no such GPUs, or accelerate is not installed.
    """

    strategy: Strategy
    gpus: Sequence[int]

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ModelError(
                f"Unknown device map {self.strategy!r}; use one of {', '.join(get_args(Strategy))}."
            )
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not self.gpus or max(self.gpus) >= there:
            raise ModelError(
                f"A device map divides a model among GPUs: this machine has {there}, and {list(self.gpus)} were "
                "requested. Leave out `device_map`."
            )
        require("accelerate", "A device map")

    def free_memory(self) -> dict[int, int]:
        """Free bytes of every GPU; other devices are not used."""
        return {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in self.gpus}

    def check(self, model: nn.Module, label: str) -> None:
        """Raise an error if a part of a model is not on a GPU, where its weights could not be switched."""
        places: dict[str, Any] = getattr(model, "hf_device_map", {})
        outside = [name for name, place in places.items() if place in ("cpu", "disk", "meta")]
        if outside:
            raise ModelError(
                f"{label} does not fit the GPUs {list(self.gpus)}: {outside[0]} and {len(outside) - 1} more parts "
                "are left over. Use fewer ranks per machine, so that each has more GPUs."
            )


def on_one_gpu(model: nn.Module) -> bool:
    """Whether all parameters are on the same GPU."""
    places = {parameter.device for parameter in model.parameters()}
    return len(places) == 1 and places.pop().type == "cuda"
