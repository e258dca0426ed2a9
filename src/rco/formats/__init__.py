"""Storage formats of one tensor, independent of any model.

A format is a value (:class:`rco.formats.base.Format`), named such as ``int3-g64``, ``original`` or ``removed``. Its
family is one file here and one line in :data:`rco.registry.FORMATS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rco import registry

if TYPE_CHECKING:
    from torch import Tensor

    from rco.formats.base import Encoded, EncodeSettings, Format

__all__ = ["encode_all", "listed", "parse"]


def _families() -> Iterator[type[Format]]:
    for family in registry.FORMATS:
        yield registry.load(registry.FORMATS, family, "format family")


def listed() -> dict[str, str]:
    """Names of the formats that users choose by name, those of all families, with a line on each."""
    return {name: line for family in _families() for name, line in family.listed().items()}


def parse(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: No family has a format of that name.
    """
    for family in _families():
        found = family.parse(name)
        if found is not None:
            return found
    raise ValueError(
        f"Unknown format {name!r}. Known families: {', '.join(registry.FORMATS)}; examples: 'int3-g64' "
        "(3 bits, groups of 64), 'int4-channel-sym' (one scale per row, no zero points), 'original', 'removed'."
    )


def encode_all(
    formats: Sequence[Format],
    weight: Tensor,
    statistics: Tensor | None = None,
    *,
    settings: EncodeSettings | None = None,
) -> list[Encoded]:
    """Store a weight in each of several formats; those of one family share their work.

    Args:
        formats: Formats of any families, in the order of the result.
        weight: (out, in) of any floating-point type.
        statistics: (in, in) second moments of the layer's inputs; None if there are none.
        settings: Settings of the encoders; defaults if None.
    """
    found: dict[int, Encoded] = {}
    for kind in dict.fromkeys(type(each) for each in formats):
        places = [k for k, each in enumerate(formats) if type(each) is kind]
        members = [formats[k] for k in places]
        encoded = kind.encode_all(members, weight, statistics, settings=settings)
        found.update(zip(places, encoded, strict=True))
    return [found[k] for k in range(len(formats))]
