"""From the settings of a job to the searcher that it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rco import tables
from rco.core.plain import PRINTED
from rco.pipeline.configs import PLAIN, TAU, CompressConfig

__all__ = ["configured_searcher", "make_searcher", "search_settings"]


def search_settings(config: CompressConfig, *, plain: bool | None = None) -> dict[str, Any]:
    """What a searcher may be told.

    Args:
        config: Flags of the command.
        plain: Whether what was not asked for is as Algorithm 1 prints it; None: if the searcher is ``rco-plain``.
    """
    given = {
        "steps": config.steps,
        "samples": config.samples,
        "lr": config.lr,
        "antithetic": config.antithetic,
        "seed": config.seed,
        "tau": TAU,
        "refine": config.refine_passes,
    }
    if config.searcher == PLAIN if plain is None else plain:
        given |= PRINTED
    if config.tau is not None:
        given["tau"] = tuple(config.tau)
    if config.generations is not None:
        given["generations"] = config.generations
    return given


def make_searcher(method: str, settings: Mapping[str, Any]) -> Any:
    """A method of the table with those of the settings that it has."""
    cls = tables.load(tables.METHODS, method, "method")
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    return cls(**{name: value for name, value in settings.items() if name in known})


def configured_searcher(config: CompressConfig, own: Mapping[str, Any] | None = None) -> Any:
    """The searcher that a job asks for; ``own`` are settings for whichever method has them.

    Raises:
        ValueError: The method is unknown, or a setting is none that it takes.
    """
    return make_searcher(config.searcher, {**search_settings(config), **(own or {})})
