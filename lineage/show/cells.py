"""Texts as HTML for notebooks: escaped, in tables, in colours. Pure functions that know nothing of the lineage.

What others wrote (names, messages, keys) is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .texts import clean

__all__ = ["MONO", "code", "facts_html", "status_html", "table_html", "text"]

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


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    """A list of names, which are escaped here, and values, which are already HTML."""
    cell = "text-align:left;vertical-align:top"
    rows = (f'<tr><th style="{cell}">{text(name)}</th><td style="{cell}">{value}</td></tr>' for name, value in facts)
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def table_html(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose header is escaped here and whose cells are already HTML."""
    head = "".join(f'<th style="text-align:left">{text(name)}</th>' for name in header)
    body = ("<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def status_html(status: str) -> str:
    """A status in its colour."""
    return f'<span style="color:{_STATUS_COLOURS.get(status, _DURABLE)}">{escape(status)}</span>'
