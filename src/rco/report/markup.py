"""HTML and SVG from Python, with everything that is not markup already escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

__all__ = ["Markup", "element", "fragment", "text"]

_VOID = frozenset({"br", "hr", "meta", "wbr"})
_CLOSED = frozenset({"circle", "line", "path", "rect"})  # SVG shapes without content
# Control characters are not allowed in HTML, lone surrogates not in UTF-8, and direction overrides could make a
# name read as another one.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


class Markup(str):
    """A string that is markup and is inserted as it is; every other string is escaped."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """Any value as escaped text, safe as content and within quoted attributes."""
    return Markup(html.escape(_UNSAFE.sub("\ufffd", str(value)), quote=True))


def fragment(*children: Any) -> Markup:
    """Children one after the other; None is passed over and iterables are flattened."""
    return Markup("".join(_pieces(children)))


def _pieces(children: Iterable[Any]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            yield child
        elif isinstance(child, str | int | float):
            yield text(child)
        else:
            yield from _pieces(child)


def element(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """One element.

    Args:
        name: Tag name.
        children: Markup, text, iterables of both, or None.
        attributes: ``class_`` is ``class``, other underscores are hyphens. None and False leave an attribute out,
            True gives one without a value, and numbers are written short.
    """
    pieces = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        if value is True:
            pieces.append(f" {label}")
        elif isinstance(value, float):
            pieces.append(f' {label}="{value:.6g}"')
        else:
            pieces.append(f' {label}="{text(value)}"')
    if name in _CLOSED and not children:
        return Markup("".join(pieces) + "/>")
    if name in _VOID:
        return Markup("".join(pieces) + ">")
    return Markup("".join([*pieces, ">", *_pieces(children), f"</{name}>"]))
