"""The colour of a branch, from its name alone: the same in the graph, in chips, in curves, in the terminal and in reports.

docs/design/012-first-view.md has the definition, with examples that every implementation must give.
"""

from __future__ import annotations

__all__ = ["DARK", "LIGHT", "TRUNK", "colour_of", "number_of"]

TRUNK = "main"
"""The branch that alone has the first colour."""

LIGHT = ("#2563cc", "#b64f0d", "#1b7540", "#ab2f8a", "#09747b", "#6d49cc", "#bf3535", "#6d6b0a", "#8a5a2b", "#52637c")
DARK = ("#6ea8ff", "#ff9d5c", "#62cf8c", "#ef86d2", "#4fc9cf", "#b199ff", "#ff8080", "#cfcb4c", "#d3a273", "#9db1cc")
"""The palette of the page, ``--lane-0`` to ``--lane-9`` in its two themes."""

_OFFSET, _PRIME, _BITS = 0x811C9DC5, 0x01000193, 0xFFFFFFFF


def number_of(branch: str) -> int:
    """The place of a branch's colour in the palette: 0 for ``main``, else 1 to 9 by 32-bit FNV-1a over the name in UTF-8."""
    if branch == TRUNK:
        return 0
    digest = _OFFSET
    for byte in branch.encode():
        digest = (digest ^ byte) * _PRIME & _BITS
    return 1 + digest % (len(LIGHT) - 1)


def colour_of(branch: str, *, is_dark: bool = True) -> str:
    """The colour of a branch as ``#rrggbb``."""
    return (DARK if is_dark else LIGHT)[number_of(branch)]
