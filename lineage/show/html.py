"""States as HTML for notebooks: one state, a table of many, and a small graph. Pure functions.

Text that others wrote (names, messages, keys) is escaped here and nowhere else. Text takes the notebook's own colour, lines are of
middling lightness, so that both look right on light and on dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape

from datastates.lineage.states import Ref, RefKind, State, Status

from .lanes import Row, lanes
from .texts import age_text, clean, common_keys, first_line, metrics_text, short, size_text, step_text, time_text

__all__ = ["code", "facts_html", "graph_html", "state_html", "states_html", "table_html", "text"]

_ROWS = 50
"""How many states a table shows: a notebook keeps what it shows, in the file too."""

_METRIC_COLUMNS = 6
_LANES = 12
_MESSAGE = 80
_ROW_PX, _LANE_PX, _DOT_PX = 22, 14, 4
_STROKES = ("#3b8eea", "#d2691e", "#2e9e5b", "#b05ac8", "#c08a00", "#d0486a")
_STATUS_COLOURS = {Status.CAPTURED: "#2a9fb5", Status.EVICTED: "#8a8a8a", Status.LOST: "#d9534f"}
_DURABLE = "#2e9e5b"
_MONO = "font-family:ui-monospace,monospace"


def text(value: object, *, most: int | None = None) -> str:
    """Escape a text, on one line; cut after ``most`` letters, with the whole of it to be seen on hovering."""
    shown = clean(str(value))
    if most is None or len(shown) <= most:
        return escape(shown)
    return f'<span title="{escape(shown)}">{escape(shown[: most - 1])}…</span>'


def code(value: object) -> str:
    """A uid, a command: escaped, in letters of one width."""
    return f'<code style="{_MONO}">{escape(clean(str(value)))}</code>'


def state_html(state: State, *, now: datetime | None = None) -> str:
    """Everything that a state says of itself."""
    facts = [("state", code(state.uid)), ("step", text(step_text(state))), ("status", _status(state.status))]
    facts.append(("captured", text(f"{time_text(state.created_at)}, {age_text(state.created_at, now)}")))
    facts += [("message", "<br>".join(map(text, state.message.splitlines())))] if state.message else []
    facts += [(f"metrics.{key}", text(f"{value:.9g}")) for key, value in sorted(state.metrics.items())]
    facts += [(f"attr.{key}", text(repr(value), most=_MESSAGE)) for key, value in sorted(state.attributes.items())]
    kinds = {edge.parent: f" {edge.kind.value}, weight {edge.weight:g}" for edge in state.edges}
    facts += [("parent", code(short(parent)) + text(kinds.get(parent, ""))) for parent in state.parents]
    facts.append(("size", text(f"{size_text(state.bytes_total)}, {size_text(state.bytes_new)} of it new")))
    facts += [("ranks", text(state.world_size))] if state.world_size > 1 else []
    facts += [("run", code(short(state.run)))] if state.run else []
    return facts_html(facts)


def states_html(states: Sequence[State], *, now: datetime | None = None) -> str:
    """One state a row, the first fifty; the metrics that most of those have are columns."""
    shown = states[:_ROWS]
    keys = common_keys((state.metrics for state in shown), _METRIC_COLUMNS)
    rows = [
        (
            code(short(state.uid)),
            text(step_text(state)),
            *(text(f"{state.metrics[key]:.6g}") if key in state.metrics else "" for key in keys),
            _status(state.status),
            f'<span title="{escape(time_text(state.created_at))}">{escape(age_text(state.created_at, now))}</span>',
            text(first_line(state.message or ""), most=_MESSAGE),
        )
        for state in shown
    ]
    made = table_html(("state", "step", *keys, "status", "captured", "message"), rows)
    if len(states) > len(shown):
        made += f"<p>the first {len(shown)} of {len(states):,} states: <code>.frame()</code> has them all</p>"
    return made


def graph_html(states: Sequence[State], refs: Iterable[Ref]) -> str:
    """States with the lines between them, as ``datastates log --graph`` draws them; they come newest first."""
    if not states:
        return ""
    rows = list(lanes(states))
    columns = min(_LANES, 1 + max(max((row.lane, *row.above, *row.below)) for row in rows))
    left = columns * _LANE_PX + 6
    names: dict[str, list[Ref]] = {}
    for ref in refs:
        names.setdefault(ref.state, []).append(ref)
    lines = [line for index, row in enumerate(rows) for line in _lines(row, index, columns)]
    dots = [_dot(row, index, state, columns) for index, (row, state) in enumerate(zip(rows, states, strict=True))]
    said = [_label(state, names.get(state.uid, ()), left, index) for index, state in enumerate(states)]
    size = f'width="{left + 640}" height="{len(rows) * _ROW_PX}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="the newest {len(rows)} states" '
        f'style="{_MONO};font-size:12px;max-width:none" fill="currentColor">{"".join([*lines, *dots, *said])}</svg>'
    )


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    """Names, which are escaped here, and values, which are HTML already, below each other."""
    cell = "text-align:left;vertical-align:top"
    rows = (f'<tr><th style="{cell}">{text(name)}</th><td style="{cell}">{value}</td></tr>' for name, value in facts)
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def table_html(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose header is escaped here and whose cells are HTML already."""
    head = "".join(f'<th style="text-align:left">{text(name)}</th>' for name in header)
    body = ("<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _status(status: Status) -> str:
    return f'<span style="color:{_STATUS_COLOURS.get(status, _DURABLE)}">{status.value}</span>'


def _lines(row: Row, index: int, columns: int) -> Iterator[str]:
    """The upper and the lower half of what passes, ends and begins in one row."""
    top, middle, bottom = index * _ROW_PX, index * _ROW_PX + _ROW_PX // 2, (index + 1) * _ROW_PX
    for lane in row.above:
        yield _line(lane, top, row.lane if lane in row.joins else lane, middle, columns)
    for lane in row.below:
        if lane in row.above and lane != row.lane and lane not in row.joins:
            yield _line(lane, middle, lane, bottom, columns)
    for lane in row.parents:
        yield _line(row.lane, middle, lane, bottom, columns)


def _line(one: int, top: int, other: int, bottom: int, columns: int) -> str:
    """Between two columns; the colour is that of the outer one. Columns beyond the last fall together in it."""
    stroke = _STROKES[max(one, other) % len(_STROKES)]
    from_x, to_x, between = _x(one, columns), _x(other, columns), (top + bottom) // 2
    way = f"V{bottom}" if from_x == to_x else f"C{from_x} {between} {to_x} {between} {to_x} {bottom}"
    return f'<path d="M{from_x} {top}{way}" stroke="{stroke}" stroke-width="2" fill="none"/>'


def _dot(row: Row, index: int, state: State, columns: int) -> str:
    """Full where the bytes are somewhere, hollow where they are gone."""
    stroke = _STROKES[row.lane % len(_STROKES)]
    fill = stroke if state.status.is_restorable else "none"
    at = f'cx="{_x(row.lane, columns)}" cy="{index * _ROW_PX + _ROW_PX // 2}" r="{_DOT_PX}"'
    return f'<circle {at} fill="{fill}" stroke="{stroke}" stroke-width="2"/>'


def _label(state: State, refs: Sequence[Ref], left: int, index: int) -> str:
    """A state on one line, its whole message on hovering."""
    names = "".join(f" [{'tag: ' if ref.kind is RefKind.TAG else ''}{clean(ref.name)}]" for ref in refs)
    rest = f" step {step_text(state)}  {metrics_text(state.metrics)}"
    if not state.status.is_restorable:
        rest += f"  {state.status.value}"
    hover = escape("\n".join(filter(None, (state.uid, _clean_lines(state.message or "")))))
    y = index * _ROW_PX + _ROW_PX // 2 + 4
    return (
        f'<text x="{left}" y="{y}" xml:space="preserve"><title>{hover}</title>{escape(short(state.uid))}'
        f'<tspan font-weight="bold">{escape(names)}</tspan>{escape(rest)}</text>'
    )


def _clean_lines(text: str) -> str:
    """``clean`` for each line."""
    return "\n".join(map(clean, text.splitlines()))


def _x(lane: int, columns: int) -> int:
    return min(lane, columns - 1) * _LANE_PX + _LANE_PX // 2
