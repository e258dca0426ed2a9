"""Colours of the report, for light and dark screens; figures, maps and the style sheet share them.

They differ in lightness as well as hue, so that they are distinct for any colour vision; text on them has a
contrast of 4.5 or more.
"""

from __future__ import annotations

__all__ = ["DARK", "LIGHT", "WIDTHS", "level"]

LIGHT = {
    "page": "#fbfbfa",
    "raised": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#59616c",
    "line": "#e2e4e8",
    "grid": "#eceef1",
    "band": "#f3ede4",
    "accent": "#1f5f9e",
    "c0": "#2f6fae",
    "c1": "#c04f00",
    "c2": "#00806a",
    "c3": "#84459b",
    "pruned": "#e4e7ec",
    "lost": "#f3c08c",
    "good": "#0a6b4f",
    "bad": "#b3261e",
}
DARK = {
    "page": "#13161a",
    "raised": "#1a1e24",
    "ink": "#e6e8eb",
    "muted": "#a0a8b3",
    "line": "#2e343c",
    "grid": "#252a31",
    "band": "#2a2620",
    "accent": "#7cb8f2",
    "c0": "#6fb1ee",
    "c1": "#f5a259",
    "c2": "#4fc7ab",
    "c3": "#cf97e6",
    "pruned": "#2b3139",
    "lost": "#7d552c",
    "good": "#5fd0a8",
    "bad": "#ff8f84",
}
# Width: (fill, text) in light, then in dark. More bits, more contrast with the page; pruned experts (0) and 16 bits
# are off the scale, since neither is a quantization.
WIDTHS = {
    0: ("#f3c08c", "#1b1f24", "#7d552c", "#ffffff"),
    2: ("#e6eff7", "#1b1f24", "#202b37", "#e6e8eb"),
    3: ("#bcd7ec", "#1b1f24", "#234464", "#e6e8eb"),
    4: ("#86b8de", "#1b1f24", "#28618f", "#ffffff"),
    5: ("#3a78b0", "#ffffff", "#5a9fd4", "#0d1116"),
    6: ("#265f98", "#ffffff", "#82b9e2", "#0d1116"),
    7: ("#17477b", "#ffffff", "#abd0ec", "#0d1116"),
    8: ("#0b2f59", "#ffffff", "#d6e8f6", "#0d1116"),
    16: ("#4c2a5e", "#ffffff", "#dcc4ec", "#0d1116"),
}


def level(width: float) -> int:
    """The width whose colour is used for this one: the nearest; 0 (pruned) only for 0."""
    if width == 0:
        return 0
    return min((known for known in WIDTHS if known), key=lambda known: (abs(known - width), known))
