"""Conversion of numbers to exact rationals: the only place where that happens.

A budget can only be met exactly if the costs are exact. Integers, Fractions, Decimals and strings
("2.5", "7/3") already are. A float is read as the shortest decimal that prints it in its own precision: 2.1
means 21/10, in float64 and in float32, whatever the other numbers of its array are. 1/3 as a float is
0.3333333333333333; write "1/3" where the fraction is meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Rational
from typing import Any

import numpy as np

__all__ = [
    "ExactArray",
    "exact_array",
    "exact_number",
    "exact_ratio",
    "integer_array",
    "json_number",
    "plain",
    "show",
]

_INT64_SAFE = 2**62


@dataclass(frozen=True)
class ExactArray:
    """An array of rationals over one denominator; numerators are int64 where they fit, else Python ints."""

    numerators: np.ndarray
    denominator: int

    def to_float(self) -> np.ndarray:
        """The nearest float64 of each entry."""
        if self.numerators.dtype != object and self.denominator < 2**53:
            return self.numerators.astype(np.float64) / self.denominator
        convert = np.vectorize(lambda n: float(Fraction(int(n), self.denominator)), otypes=[np.float64])
        return np.asarray(convert(self.numerators))

    def to_json(self) -> Any:
        """Nested lists of integers and "p/q" strings."""

        def cell(value: Any) -> Any:
            if isinstance(value, list):
                return [cell(entry) for entry in value]
            fraction = Fraction(int(value), self.denominator)
            return fraction.numerator if fraction.denominator == 1 else str(fraction)

        return cell(self.numerators.tolist())


def plain(value: Fraction) -> int | Fraction:
    """The fraction as an int if it is whole, else unchanged."""
    return value.numerator if value.denominator == 1 else value


def json_number(value: Fraction) -> int | str:
    """The fraction as an int if it is whole, else as a "p/q" string."""
    return value.numerator if value.denominator == 1 else str(value)


def show(value: Fraction) -> str:
    """The number as text for messages."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def integer_array(values: np.ndarray) -> np.ndarray:
    """Python integers as int64 if all of them fit with headroom for sums, else unchanged."""
    if values.dtype != object:
        return values.astype(np.int64)
    if values.size == 0 or max(abs(int(v)) for v in values.flat) < _INT64_SAFE:
        return values.astype(np.int64)
    return values


def exact_ratio(numerators: np.ndarray, denominators: Any) -> np.ndarray:
    """The float64 nearest to each quotient of two integers; equal quotients give equal floats."""
    numerators, denominators = np.asarray(numerators), np.asarray(denominators)
    divisor = math.gcd(int(np.gcd.reduce(numerators, axis=None)), int(np.gcd.reduce(denominators, axis=None)))
    top = integer_array(np.asarray(numerators // divisor))
    bottom = integer_array(np.asarray(denominators // divisor))
    largest = max(int(np.max(np.abs(top))), int(np.max(np.abs(bottom))))
    if largest < 2**53:  # both are floats without loss, and a division of floats is rounded once
        return np.asarray(top.astype(np.float64) / bottom.astype(np.float64))
    # Python divides integers of any size with one rounding.
    divide = np.frompyfunc(lambda n, d: int(n) / int(d), 2, 1)
    return np.asarray(divide(top.astype(object), bottom.astype(object)), dtype=np.float64)


def exact_number(value: Any, name: str) -> Fraction:
    """One number as a Fraction."""
    array = exact_array(value, name)
    if array.numerators.ndim != 0:
        raise ValueError(f"{name} must be one number, got an array of shape {array.numerators.shape}.")
    return Fraction(int(array.numerators), array.denominator)


def exact_array(values: Any, name: str) -> ExactArray:
    """An array of numbers of any exact or float type as rationals over one denominator."""
    if hasattr(values, "detach"):  # a torch tensor, without importing torch here
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:  # ragged lists
        raise ValueError(f"{name} must be a rectangular array of numbers: {error}") from None
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype.kind in "bi":
        return ExactArray(array.astype(np.int64), 1)
    if array.dtype.kind == "u":
        return ExactArray(integer_array(array.astype(object)), 1)
    if array.dtype.kind == "f":
        return _from_floats(array, name)
    if array.dtype == object:
        return _from_objects(array, name)
    raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}.")


def _from_floats(array: np.ndarray, name: str) -> ExactArray:
    if not np.isfinite(array).all():
        position = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"{name} must be finite, got {array[position]}{_at(position)}.")
    if (array == np.rint(array)).all() and (np.abs(array) < _INT64_SAFE).all():
        return ExactArray(array.astype(np.int64), 1)
    unique, inverse = np.unique(array, return_inverse=True)
    return _over_one_denominator([_decimal(v) for v in unique], inverse.reshape(array.shape))


def _decimal(value: float | np.floating) -> Fraction:
    """The shortest decimal that reads back as this float in its own precision."""
    return Fraction(str(value))


def _from_objects(array: np.ndarray, name: str) -> ExactArray:
    seen: dict[Any, int] = {}
    fractions: list[Fraction] = []
    index = np.empty(array.shape, dtype=np.int64)
    for position, value in np.ndenumerate(array):
        if not isinstance(value, float | Rational | Decimal | str | np.integer | np.floating):
            raise ValueError(
                f"{name} must hold numbers (integers, Fractions, Decimals, floats, or strings such as '7/3'), "
                f"got {value!r}{_at(position)}."
            )
        key = (type(value), value)
        if key not in seen:
            seen[key] = len(fractions)
            fractions.append(_fraction(value, name, position))
        index[position] = seen[key]
    if not fractions:
        return ExactArray(index, 1)
    return _over_one_denominator(fractions, index)


def _fraction(value: Any, name: str, position: tuple[int, ...]) -> Fraction:
    convert: Callable[[Any], Fraction]
    if isinstance(value, float | np.floating):
        convert = _decimal
    else:
        convert = lambda v: Fraction(int(v)) if isinstance(v, np.integer) else Fraction(v)  # noqa: E731
    try:
        return convert(value)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise ValueError(
            f"{name} must hold finite numbers, such as 2.5 or '7/3', got {value!r}{_at(position)}."
        ) from None


def _at(position: tuple[int, ...]) -> str:
    return f" at {position}" if position else ""


def _over_one_denominator(fractions: list[Fraction], index: np.ndarray) -> ExactArray:
    denominator = math.lcm(*(f.denominator for f in fractions))
    scaled = np.array([f.numerator * (denominator // f.denominator) for f in fractions], dtype=object)
    return ExactArray(np.asarray(integer_array(scaled)[index]), denominator)
