"""One state as HTML for notebooks, and the colors of branches."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

from .text import age_text, clean, short, size_text, step_text, time_text

if TYPE_CHECKING:
    from datastates.lineage.states import State

MONO = "font-family:ui-monospace,monospace"
_STATUS_COLOURS = {"captured": "#2a9fb5", "evicted": "#8a8a8a", "lost": "#d9534f"}
_DURABLE = "#2e9e5b"


def text(value: object, *, most: int | None = None) -> str:
    """An escaped text on one line, cut after ``most`` letters; hovering shows the whole."""
    shown = clean(str(value))
    if most is None or len(shown) <= most:
        return escape(shown)
    return f'<span title="{escape(shown)}">{escape(shown[: most - 1])}…</span>'


def code(value: object) -> str:
    """A uid or a command: escaped, in a monospaced font."""
    return f'<code style="{MONO}">{escape(clean(str(value)))}</code>'


def table_html(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose header is escaped here and whose cells are already HTML."""
    head = "".join(f'<th style="text-align:left">{text(name)}</th>' for name in header)
    body = (
        "<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def status_html(status: str) -> str:
    """A status in its colour."""
    return f'<span style="color:{_STATUS_COLOURS.get(status, _DURABLE)}">{escape(status)}</span>'


_MESSAGE = 80


def state_html(state: State, *, now: datetime | None = None) -> str:
    """All fields of a state, as HTML."""
    kinds = {edge.parent: f" {edge.kind!s}, weight {edge.weight:g}" for edge in state.edges}
    message = "<br>".join(map(text, (state.message or "").splitlines()))
    facts = [
        ("state", code(state.uid)),
        ("step", text(step_text(state))),
        ("status", status_html(state.status)),
        ("captured", text(f"{time_text(state.created_at)}, {age_text(state.created_at, now)}")),
        *([("message", message)] if state.message else []),
        *((f"metrics.{key}", text(f"{value:.9g}")) for key, value in sorted(state.metrics.items())),
        *(
            (f"{kind}.{key}", text(repr(value), most=_MESSAGE))
            for kind, each in (("attr", state.attributes), ("config", state.config))
            for key, value in sorted(each.items())
        ),
        *(("parent", code(short(each)) + text(kinds.get(each, ""))) for each in state.parents),
        ("size", text(f"{size_text(state.bytes_total)}, {size_text(state.bytes_new)} of it new")),
        *([("ranks", text(state.world_size))] if state.world_size > 1 else []),
        *([("run", code(short(state.run)))] if state.run else []),
    ]
    cell = "text-align:left;vertical-align:top"
    rows = (
        f'<tr><th style="{cell}">{text(name)}</th><td style="{cell}">{value}</td></tr>'
        for name, value in facts
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


# The colour of a branch, from its name alone: the same in the graph, in chips, in curves, in the
# terminal and in reports.


TRUNK = "main"
"""The branch that alone has the first colour."""

LIGHT = (
    "#2563cc",
    "#b64f0d",
    "#1b7540",
    "#ab2f8a",
    "#09747b",
    "#6d49cc",
    "#bf3535",
    "#6d6b0a",
    "#8a5a2b",
    "#52637c",
)
DARK = (
    "#6ea8ff",
    "#ff9d5c",
    "#62cf8c",
    "#ef86d2",
    "#4fc9cf",
    "#b199ff",
    "#ff8080",
    "#cfcb4c",
    "#d3a273",
    "#9db1cc",
)
"""The palette of the page, ``--lane-0`` to ``--lane-9`` in its two themes."""

_OFFSET = 2166136261
_PRIME = 16777619
_BITS = 4294967295


def number_of(branch: str) -> int:
    """The place of a branch's colour in the palette: 0 for ``main``, else 1 to 9 by 32-bit
    FNV-1a over the name in UTF-8."""
    if branch == TRUNK:
        return 0
    digest = _OFFSET
    for byte in branch.encode():
        digest = (digest ^ byte) * _PRIME & _BITS
    return 1 + digest % (len(LIGHT) - 1)


def colour_of(branch: str, *, is_dark: bool = True) -> str:
    """The colour of a branch as ``#rrggbb``."""
    return (DARK if is_dark else LIGHT)[number_of(branch)]
