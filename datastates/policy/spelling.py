"""How the parts of a policy are spelled and read back: numbers, shares, time spans, names."""

from __future__ import annotations

import re

from datastates.errors import InvalidInput

__all__ = ["duration", "name", "percent", "plain", "read_duration", "read_name", "read_percent"]

_UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0, "": 1.0}
_PARTING, _ESCAPED = re.compile(r"[%:|]|^\s+|\s+\Z"), re.compile(r"%([0-9a-f]{1,6});")
_DURATION = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?|inf)\s*(d|h|min|m|s|)")


def plain(value: float) -> str:
    """A number without needless digits, exact."""
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(float(value))


def percent(share: float) -> str:
    """A share in percent if that is exact, else as it is."""
    text = f"{share * 100:.12g}%"
    return text if read_percent(text) == share else repr(share)


def read_percent(text: str) -> float:
    """The share for a text such as ``3.5%`` or ``0.035``.

    :raises InvalidInput: it is not a number.
    """
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no share: say it as 3.5% or 0.035") from None


def duration(seconds: float) -> str:
    """A time span in the largest unit in which it is a whole number."""
    for unit in ("d", "h", "m"):
        if seconds > 0 and seconds % _UNITS[unit] == 0:
            return f"{plain(seconds / _UNITS[unit])}{unit}"
    return plain(seconds)


def read_duration(text: str) -> float:
    """The seconds for a text such as ``90``, ``90s``, ``2m``, ``6h`` or ``1.5d``.

    :raises InvalidInput: it is not a time span.
    """
    found = _DURATION.fullmatch(text.strip())
    try:
        if found is not None:
            return float(found[1]) * _UNITS[found[2]]
    except ValueError:
        pass
    raise InvalidInput(f"{text!r} is no time span: say it as 90, 90s, 2m, 6h or 1.5d")


def name(key: str) -> str:
    """The name of a metric, with the characters that separate policies escaped."""
    return _PARTING.sub(lambda found: "".join(f"%{ord(letter):x};" for letter in found[0]), key)


def read_name(text: str) -> str:
    """The name that ``name`` spelled."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
