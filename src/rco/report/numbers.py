"""Numbers as text. A missing number is a dash, never a zero."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

from markupsafe import Markup, escape

__all__ = [
    "DASH",
    "bytes_text",
    "count",
    "duration",
    "exact",
    "measured",
    "percent",
    "plural",
    "short",
    "significant",
]

DASH = "–"
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def significant(value: float | None, digits: int = 4) -> str:
    """A few significant digits, in plain notation as long as that stays short."""
    if value is None:
        return DASH
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if -4 <= magnitude < 7:
        return _minus(f"{value:,.{max(0, digits - 1 - magnitude)}f}")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return _minus(f"{mantissa}e{int(exponent)}")


def short(value: float | None, digits: int = 5) -> str:
    """Like :func:`significant`, without zeros at the end: for settings and widths rather than measurements."""
    shown = significant(value, digits)
    mantissa, e, exponent = shown.partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}{e}{exponent}" if "." in mantissa else shown


def measured(value: float | None, error: float | None = None) -> Markup:
    """A measurement with its standard error, rounded to two digits of the error."""
    if value is None or error is None or not (math.isfinite(value) and math.isfinite(error)) or error <= 0:
        return escape(significant(value))
    decimals = 1 - math.floor(math.log10(error))
    if decimals > 8 or abs(value) >= 1e9:
        shown, deviation = significant(value), significant(error, 2)
    else:
        decimals = max(0, decimals)
        shown, deviation = _minus(f"{value:,.{decimals}f}"), f"{error:,.{decimals}f}"
    return Markup('{} <span class="error">± {}</span>').format(shown, deviation)


def count(value: int | None) -> str:
    """A whole number with thousands separated."""
    return DASH if value is None else _minus(f"{value:,}")


def exact(value: int | Fraction) -> str:
    """A number without rounding: whole, a short decimal, or numerator/denominator."""
    fraction = Fraction(value)
    if fraction.denominator == 1:
        return count(fraction.numerator)
    rest = fraction.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1 and fraction.denominator <= 10**6:
        with localcontext() as context:
            context.prec = len(str(abs(fraction.numerator))) + 24  # this fraction has at most 19 decimals
            return _minus(f"{Decimal(fraction.numerator) / fraction.denominator:,f}")
    return f"{count(fraction.numerator)}/{count(fraction.denominator)}"


def bytes_text(value: int | None) -> str:
    """Bytes in decimal units, as in ``--size 3.1GB``."""
    if value is None:
        return DASH
    scaled, unit = float(value), 0
    while scaled >= 999.5 and unit < len(_UNITS) - 1:
        scaled, unit = scaled / 1000, unit + 1
    return f"{count(value)} bytes" if unit == 0 else f"{scaled:.3g} {_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """A time span in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of one in per cent."""
    if share is None or not math.isfinite(share):
        return DASH
    return _minus(f"{100 * share:.{digits}f} %")


def plural(number: int, noun: str) -> str:
    """``1 group``, ``2 groups``."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def _minus(digits: str) -> str:
    return digits.replace("-", "−") if digits.startswith("-") else digits
