"""Elements of floating-point formats and 8-bit integers: their values, and the nearest one of a number."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

__all__ = ["TOP", "Element", "ascending", "levels_of", "nearest_codes", "power_of_two"]

Element = Literal["e2m1", "e4m3", "int8"]

TOP: dict[Element, float] = {"e2m1": 6.0, "e4m3": 448.0, "int8": 127.0}
"""Largest value of every kind of element."""


@cache
def levels_of(element: Element, device: torch.device) -> Tensor:
    """Value of every code, float32 (16,) or (256,); codes that stand for no number are zero."""
    if element == "e2m1":
        positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        return torch.cat([positive, -positive]).to(device)
    codes = torch.arange(256, dtype=torch.uint8)
    if element == "int8":
        return codes.view(torch.int8).float().to(device)
    return codes.view(torch.float8_e4m3fn).float().nan_to_num(0.0).to(device)


@cache
def ascending(element: Element, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes from the lowest to the highest value, and the place of every code among them (int64)."""
    levels = levels_of(element, torch.device("cpu"))
    count = len(levels)
    usable = [code for code in range(count) if not (element == "e4m3" and code & 0x7F == 0x7F)]
    if element == "int8":
        usable.remove(0x80)  # -128: the grid is symmetric
    # Minus zero is the same value as zero.
    usable = [code for code in usable if not (levels[code] == 0 and code)]
    order = sorted(usable, key=lambda code: float(levels[code]))
    places = torch.zeros(count, dtype=torch.int64)
    for place, code in enumerate(order):
        places[code] = place
    minus_zero = {"e2m1": 8, "e4m3": 0x80}.get(element)
    if minus_zero is not None:
        places[minus_zero] = places[0]
    return torch.tensor(order, dtype=torch.uint8, device=device), places.to(device)


def nearest_codes(values: Tensor, element: Element) -> Tensor:
    """Codes (uint8) of the elements nearest to ``values``, ties to even, values beyond the range to its end."""
    top = TOP[element]
    if element == "int8":
        return torch.round(values).clamp(-top, top).to(torch.int8).view(torch.uint8)
    if element == "e4m3":
        return values.float().clamp(-top, top).to(torch.float8_e4m3fn).view(torch.uint8)
    size = values.abs()
    # Thresholds between neighbours; a tie goes to the element with an even code.
    code = (size > 0.25).to(torch.uint8)
    for threshold, inclusive in (
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (size >= threshold) if inclusive else (size > threshold)
    return code | ((values < 0) & (code > 0)).to(torch.uint8) << 3


def power_of_two(biased: Tensor) -> Tensor:
    """``2^(biased - 127)`` of whole numbers from 0 to 254, float32, exact on every device."""
    normal = biased.to(torch.int32) << 23  # the bits of a float32 with this exponent
    return torch.where(normal > 0, normal, 1 << 22).view(torch.float32)
