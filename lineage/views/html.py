"""States as HTML for notebooks: a table of many, and a small graph. Pure functions.

Text that others wrote (names, messages, keys) is escaped here and nowhere else. Text takes the
notebook's own colour and lines have a medium lightness, so that both look right on light and on
dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape

from datastates.lineage.states import Ref, RefKind, State

from .cards import MONO, code, status_html, table_html, text
from .graph import Row, lanes
from .text import (
    age_text,
    clean,
    first_line,
    metrics_text,
    relevant_keys,
    short,
    step_text,
    time_text,
)

_ROWS = 50
"""How many states a table shows: a notebook stores what it shows, in its file too."""

_METRIC_COLUMNS = 6
_LANES = 12
_MESSAGE = 80
_ROW_PX = 22
_LANE_PX = 14
_DOT_PX = 4
_STROKES = ("#3b8eea", "#d2691e", "#2e9e5b", "#b05ac8", "#c08a00", "#d0486a")


def states_html(states: Sequence[State], *, now: datetime | None = None) -> str:
    """A table of the first fifty states, one in each row; their metrics are columns, by
    relevance."""
    shown = states[:_ROWS]
    keys = relevant_keys((state.metrics for state in shown), _METRIC_COLUMNS)
    rows = [
        (
            code(short(state.uid)),
            text(step_text(state)),
            *(text(f"{state.metrics[key]:.6g}") if key in state.metrics else "" for key in keys),
            status_html(state.status),
            (
                "<span"
                f' title="{escape(time_text(state.created_at))}">'
                f"{escape(age_text(state.created_at, now))}</span>"
            ),
            text(first_line(state.message or ""), most=_MESSAGE),
        )
        for state in shown
    ]
    made = table_html(("state", "step", *keys, "status", "captured", "message"), rows)
    if len(states) > len(shown):
        made += (
            f"<p>the first {len(shown)} of {len(states):,} states: <code>.frame()</code> has them"
            " all</p>"
        )
    return made


def graph_html(states: Sequence[State], refs: Iterable[Ref]) -> str:
    """States with the lines between them, as ``datastates log --graph`` draws them; ``states``
    come newest first."""
    if not states:
        return ""
    rows = list(lanes(states))
    columns = min(_LANES, 1 + max(max((row.lane, *row.above, *row.below)) for row in rows))
    left = columns * _LANE_PX + 6
    names: dict[str, list[Ref]] = {}
    for ref in refs:
        names.setdefault(ref.state, []).append(ref)
    drawn = [line for index, row in enumerate(rows) for line in _lines(row, index, columns)]
    for index, (row, state) in enumerate(zip(rows, states, strict=True)):
        drawn.append(_dot(row, index, state, columns))
        drawn.append(_label(state, names.get(state.uid, ()), left, index))
    size = f'width="{left + 640}" height="{len(rows) * _ROW_PX}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="the newest'
        f' {len(rows)} states" style="{MONO};font-size:12px;max-width:none"'
        f' fill="currentColor">{"".join(drawn)}</svg>'
    )


def _lines(row: Row, index: int, columns: int) -> Iterator[str]:
    """The upper and the lower halves of the lines that pass, end or begin in one row."""
    top, middle, bottom = index * _ROW_PX, index * _ROW_PX + _ROW_PX // 2, (index + 1) * _ROW_PX
    for lane in row.above:
        yield _line(lane, top, row.lane if lane in row.joins else lane, middle, columns)
    for lane in row.below:
        if lane in row.above and lane != row.lane and lane not in row.joins:
            yield _line(lane, middle, lane, bottom, columns)
    for lane in row.parents:
        yield _line(row.lane, middle, lane, bottom, columns)


def _line(one: int, top: int, other: int, bottom: int, columns: int) -> str:
    """A line between two columns, in the colour of the outer one.

    Columns beyond the last are drawn as the last."""
    stroke = _STROKES[max(one, other) % len(_STROKES)]
    from_x, to_x, between = _x(one, columns), _x(other, columns), (top + bottom) // 2
    way = (
        f"V{bottom}" if from_x == to_x else f"C{from_x} {between} {to_x} {between} {to_x} {bottom}"
    )
    return f'<path d="M{from_x} {top}{way}" stroke="{stroke}" stroke-width="2" fill="none"/>'


def _dot(row: Row, index: int, state: State, columns: int) -> str:
    """The dot of a state: full if its bytes are somewhere, hollow if they are gone."""
    stroke = _STROKES[row.lane % len(_STROKES)]
    fill = stroke if state.status.is_restorable else "none"
    at = f'cx="{_x(row.lane, columns)}" cy="{index * _ROW_PX + _ROW_PX // 2}" r="{_DOT_PX}"'
    return f'<circle {at} fill="{fill}" stroke="{stroke}" stroke-width="2"/>'


def _label(state: State, refs: Sequence[Ref], left: int, index: int) -> str:
    """A state on one line; hovering shows its whole message."""
    names = "".join(
        f" [{'tag: ' if ref.kind is RefKind.TAG else ''}{clean(ref.name)}]" for ref in refs
    )
    rest = f" step {step_text(state)}  {metrics_text(state.metrics, state.world_size)}"
    if not state.status.is_restorable:
        rest += f"  {state.status.value}"
    message = map(clean, (state.message or "").splitlines())
    hover = escape("\n".join((state.uid, *message)))
    y = index * _ROW_PX + _ROW_PX // 2 + 4
    return (
        f'<text x="{left}" y="{y}"'
        f' xml:space="preserve"><title>{hover}</title>{escape(short(state.uid))}<tspan'
        f' font-weight="bold">{escape(names)}</tspan>{escape(rest)}</text>'
    )


def _x(lane: int, columns: int) -> int:
    return min(lane, columns - 1) * _LANE_PX + _LANE_PX // 2
