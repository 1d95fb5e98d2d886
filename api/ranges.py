"""The range of bytes that a request asks for (RFC 9110, 14)."""

from __future__ import annotations

import re

__all__ = ["range_of"]

_RANGE = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.ASCII | re.IGNORECASE)


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """``[start, end)`` of something of ``size`` bytes. None means the whole: no range was asked for, or several, or the header is no range.

    An empty range (``start == end``) cannot be satisfied: 416.
    """
    found = _RANGE.fullmatch(header or "")
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return max(size - int(last), 0), size
    if last and int(last) < int(first):
        return None
    start = min(int(first), size)
    return start, max(min(int(last) + 1, size) if last else size, start)
