"""Tables and texts for the terminal: states, refs, CSV, and safe output of texts from others.

A table that is too wide shortens long texts first. Then it leaves out the least important columns
and reports that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from datastates.lineage.query import names as refs
from datastates.lineage.states import Ref, RefEvent, RefKind, State, Status
from datastates.lineage.views.text import (
    age_text,
    by_rank,
    clean,
    first_line,
    metrics_text,
    relevant_keys,
    short,
    size_text,
    step_text,
    time_text,
)

if TYPE_CHECKING:
    import rich.table

    from datastates.lineage.query.grammar import Field
    from datastates.lineage.session import Session
    from datastates.lineage.states import Run
    from datastates.values import Value

_GAP = 2
_LEAST = 8
"""The least width of a column that may be shortened, even if its header is shorter."""

_STATUS_STYLES = {
    Status.CAPTURED: "cyan",
    Status.DURABLE: "green",
    Status.REPLICATED: "green",
    Status.EXTERNAL: "green",
    Status.EVICTED: "bright_black",
    Status.LOST: "red",
}
_REF_STYLES = {RefKind.BRANCH: "bold green", RefKind.TAG: "bold yellow"}
_METRICS = 6
_NUMBERS = {"step", "micro_step", "metrics"}


def cut(text: Text, width: int) -> Text:
    """A copy of a text, at most this wide; an ellipsis shows that something is missing."""
    made = text.copy()
    made.truncate(width, overflow="ellipsis")
    return made


@dataclass(slots=True)
class Column:
    """A column.

    ``is_flexible``: its texts may be shortened. Columns with the highest ``rank`` are left out
    first.
    """

    name: str
    is_number: bool = False
    is_flexible: bool = False
    rank: int = 0
    cells: list[Text] = field(default_factory=list)

    @property
    def width(self) -> int:
        return max([cell_len(self.name), *(cell.cell_len for cell in self.cells)])

    @property
    def least(self) -> int:
        return min(self.width, max(_LEAST, cell_len(self.name))) if self.is_flexible else self.width


@dataclass(slots=True)
class TextTable:
    """Rows below a header; ``lines`` renders it."""

    columns: list[Column]

    def add(self, *cells: str | Text) -> None:
        for column, cell in zip(self.columns, cells, strict=True):
            column.cells.append(Text(cell) if isinstance(cell, str) else cell)

    def lines(self, width: int | None) -> list[Text]:
        """The header and the rows, at most this wide. None means no limit."""
        columns = self._kept(width)
        widths = _widths(columns, width)
        rows = [
            [Text(column.name, "bold") for column in columns],
            *map(list, zip(*(column.cells for column in columns), strict=True)),
        ]
        return [_line(row, columns, widths) for row in rows]

    def left_out(self, width: int | None) -> list[str]:
        kept = self._kept(width)
        return [
            column.name for column in self.columns if column not in kept and not _is_blank(column)
        ]

    def _kept(self, width: int | None) -> list[Column]:
        kept = [column for column in self.columns if not _is_blank(column)] or self.columns[:1]
        while (
            width is not None
            and len(kept) > 1
            and sum(column.least for column in kept) + _GAP * (len(kept) - 1) > width
        ):
            last = max(kept, key=lambda column: (column.rank, kept.index(column)))
            if last.rank == 0:
                break
            kept.remove(last)
        return kept


def _is_blank(column: Column) -> bool:
    return column.rank > 0 and bool(column.cells) and not any(column.cells)


def _widths(columns: Sequence[Column], width: int | None) -> list[int]:
    """The width of each column. Flexible ones shrink first, beginning with the widest. If that is
    not enough, the last columns are cut."""
    widths = [column.width for column in columns]
    over = 0 if width is None else sum(widths) + _GAP * (len(widths) - 1) - width
    while over > 0:
        able = [place for place, column in enumerate(columns) if widths[place] > column.least]
        if not able:
            break
        widest = max(able, key=lambda place: widths[place])
        widths[widest] -= 1
        over -= 1
    for place in reversed(range(len(widths))):
        given = min(max(0, over), max(0, widths[place] - 1))
        widths[place] -= given
        over -= given
    return widths


def _line(row: Sequence[Text], columns: Sequence[Column], widths: Sequence[int]) -> Text:
    cells = [cut(cell, wide) for cell, wide in zip(row, widths, strict=True)]
    for cell, column, wide in zip(cells, columns, widths, strict=True):
        cell.align("right" if column.is_number else "left", wide)
    return Text(" " * _GAP).join(cells)


# --- States, refs and parts as texts and tables: pure functions ---


def status_text(status: Status) -> Text:
    return Text(status.value, _STATUS_STYLES[status])


def stored_text(state: State) -> Text:
    """The tier and size of the state, such as ``durable, 11.9 MiB``. If its bytes are gone, their
    former size."""
    size = size_text(state.bytes_total)
    return Text.assemble(
        status_text(state.status), f", {size}" if state.status.is_restorable else f" (was {size})"
    )


def by_state(refs: Iterable[Ref]) -> dict[str, list[Ref]]:
    found: dict[str, list[Ref]] = {}
    for ref in refs:
        found.setdefault(ref.state, []).append(ref)
    return found


def refs_text(refs: Sequence[Ref]) -> Text:
    """The refs as text such as `` (main, tag: warm)`` in colours. Empty without refs."""
    if not refs:
        return Text()
    names = [
        Text(
            clean(f"tag: {ref.name}" if ref.kind is RefKind.TAG else ref.name),
            _REF_STYLES[ref.kind],
        )
        for ref in refs
    ]
    return Text.assemble(" (", Text(", ").join(names), ")")


def state_text(state: State, refs: Sequence[Ref] = ()) -> Text:
    """A state on one line, as in the log."""
    line = Text.assemble(
        (short(state.uid), "yellow"), refs_text(refs), " step ", (step_text(state), "bold")
    )
    if state.metrics:
        line.append(f"  {metrics_text(state.metrics, state.world_size)}")
    if not state.status.is_restorable:
        line.append("  ").append(status_text(state.status))
    if state.message:
        line.append(f"  {first_line(state.message)}", "italic")
    return line


def table(*columns: str) -> rich.table.Table:
    """An empty rich table, for long texts that fold."""
    from rich.table import Table as RichTable

    made = RichTable(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        made.add_column(Text(clean(column)), no_wrap=True, overflow="ellipsis")
    return made


def refs_table(refs: Sequence[Ref], states: Mapping[str, State]) -> TextTable:
    """A table with one row for each branch or tag, and what it names."""
    made = TextTable(
        [
            *(
                Column("name", is_flexible=True),
                Column("kind", rank=2),
                Column("state"),
                Column("step", is_number=True),
            ),
            *(
                Column("status", rank=1),
                Column("captured", rank=3),
                Column("message", is_flexible=True, rank=4),
            ),
        ]
    )
    for ref in refs:
        state = states[ref.state]
        made.add(
            Text(ref.name, _REF_STYLES[ref.kind]),
            ref.kind.value,
            Text(short(ref.state), "yellow"),
            step_text(state),
            status_text(state.status),
            age_text(state.created_at),
            first_line(ref.message or ""),
        )
    return made


def events_table(events: Sequence[RefEvent]) -> TextTable:
    """A table with one row for each move of a ref, newest first, as ``NAME@{n}`` counts them."""
    made = TextTable(
        [
            Column("event"),
            Column("from"),
            Column("to"),
            Column("why", is_flexible=True),
            Column("when", rank=1),
        ]
    )
    for index, event in enumerate(events):
        made.add(
            Text(f"{event.name}@{{{index}}}", _REF_STYLES[event.kind]),
            Text(short(event.old), "yellow"),
            Text(short(event.new), "yellow"),
            event.reason,
            time_text(event.created_at),
        )
    return made


def facts_table(facts: Iterable[tuple[str, object]]) -> rich.table.Table:
    """A table of names and values, one below the other; values that are None or empty are left
    out."""
    from rich.table import Table as RichTable

    made = RichTable.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in facts:
        if value is not None and value != "":
            made.add_row(name, value if isinstance(value, Text) else Text(clean(str(value))))
    return made


def change_lines(changes: Mapping[str, tuple[object, object]]) -> list[str]:
    """A line for each changed value, such as ``lr: 0.1 -> 0.2``."""
    return [f"{key}: {_exact(old)} -> {_exact(new)}" for key, (old, new) in changes.items()]


def _exact(value: object) -> str:
    return "nothing" if value is None else repr(value) if isinstance(value, str) else str(value)


# --- States as a table or as CSV: the columns, and their contents ---


@dataclass(frozen=True, slots=True)
class Known:
    """Data next to the states: their branches by uid, the refs, and the runs by uid."""

    branches: Mapping[str, str]
    refs: Sequence[Ref]
    runs: Mapping[str, Run]

    @classmethod
    def of(cls, session: Session, states: Sequence[State], *, with_runs: bool) -> Known:
        from datastates.lineage.views.branch_rows import branches_of

        found: dict[str, Run] = {}
        if with_runs:
            from datastates.lineage.write import runs  # imports what changes a lineage

            found = {
                run: runs.get(session, run)
                for run in {state.run for state in states}
                if run is not None
            }
        return cls(branches_of(session, [state.uid for state in states]), refs.refs(session), found)


def states_table(
    states: Sequence[State], known: Known, *, chosen: Sequence[Field] | None, asked: Sequence[Field]
) -> TextTable:
    """A table with one row for each state.

    The columns are the ``chosen`` ones. Without these, they are those in ``asked``, the metrics
    that matter, and all other columns.
    """
    names = by_state(known.refs)
    fields = (
        _usual(states, asked)
        if chosen is None
        else [("uid", ""), ("step", ""), *((one.name, one.key) for one in chosen)]
    )
    fields = list(dict.fromkeys(fields))
    made = TextTable(
        [
            _column(name, key, place, is_chosen=chosen is not None)
            for place, (name, key) in enumerate(fields)
        ]
    )
    for state in states:
        made.add(
            *(_cell(state, name, key, known, names.get(state.uid, ())) for name, key in fields)
        )
    return made


def csv_rows(
    states: Sequence[State], known: Known, *, chosen: Sequence[Field] | None
) -> Iterator[list[Value]]:
    """A header, and a row for each state: the chosen columns, else all that exist. Names are as in
    a query, and values are exact."""
    fields = (
        [("uid", ""), *((one.name, one.key) for one in chosen)]
        if chosen is not None
        else _every(states)
    )
    fields = list(dict.fromkeys(fields))
    yield [f"{name}.{key}" if key else name for name, key in fields]
    for state in states:
        yield [_value(state, name, key, known) for name, key in fields]


def _usual(states: Sequence[State], asked: Sequence[Field]) -> list[tuple[str, str]]:
    first = [one.key for one in asked if one.name == "metrics"]
    # without the metrics of single ranks, unless they were asked for
    shown = [
        by_rank(state.metrics, state.world_size)[0]
        | {key: state.metrics[key] for key in first if key in state.metrics}
        for state in states
    ]
    metrics = [("metrics", key) for key in relevant_keys(shown, _METRICS, first)]
    others = [(one.name, one.key) for one in asked if one.name not in ("metrics", "tag", "uid")]
    order = [
        ("uid", ""),
        ("step", ""),
        ("branch", ""),
        *metrics,
        *others,
        ("status", ""),
        ("created", ""),
        ("refs", ""),
        ("message", ""),
    ]
    return list(dict.fromkeys(order))


def _every(states: Sequence[State]) -> list[tuple[str, str]]:
    plain = (
        "uid",
        "step",
        "branch",
        "status",
        "created",
        "message",
        "parent",
        "run.uid",
        "bytes_total",
        "bytes_new",
    )
    metrics = relevant_keys((state.metrics for state in states), 1_000_000)
    attributes = sorted({key for state in states for key in state.attributes})
    return [
        *((name, "") for name in plain),
        *(("metrics", key) for key in metrics),
        *(("attr", key) for key in attributes),
    ]


_HEADERS = {"uid": "state", "created": "captured"}
_RANKS = {"message": 900, "created": 800, "status": 500, "refs": 700, "branch": 100}
_FLEXIBLE = {"message": 20, "branch": 0, "refs": 0, "attr": 0, "config": 0, "tag": 0}


def _column(name: str, key: str, place: int, *, is_chosen: bool) -> Column:
    """The column of a field.

    Requested fields stay longest. A state and its step stay always.
    """
    rank = 0 if name in ("uid", "step") or is_chosen else _RANKS.get(name, 200 + place)
    return Column(key or _HEADERS.get(name, name), name in _NUMBERS, name in _FLEXIBLE, rank)


def _cell(state: State, name: str, key: str, known: Known, refs: Sequence[Ref]) -> Text:
    match name:
        case "uid":
            return Text(short(state.uid), "yellow")
        case "step":
            return Text(step_text(state))
        case "status":
            return status_text(state.status)
        case "created":
            return Text(age_text(state.created_at))
        case "refs" | "tag":
            return Text(str(refs_text(refs)).strip(" ()"))
        case "message":
            return Text(first_line(state.message or ""))
        case "bytes_total" | "bytes_new":
            return Text(size_text(int(getattr(state, name))))
    value = _value(state, name, key, known)
    return Text("" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value))


def _value(state: State, name: str, key: str, known: Known) -> Value:
    """The value of a field as a query compares it."""
    match name:
        case "metrics":
            return state.metrics.get(key)
        case "attr":
            return state.attributes.get(key)
        case "config":
            return state.config.get(key)
        case "created":
            return state.created_at.isoformat()
        case "branch":
            return known.branches.get(state.uid)
        case "tag" | "refs":
            return " ".join(ref.name for ref in known.refs if ref.state == state.uid)
        case "parent":
            return state.parents[0] if state.parents else None
        case "run.uid":
            return state.run
        case "uid" | "step" | "micro_step" | "message" | "bytes_total" | "bytes_new":
            found: Value = getattr(state, name)
            return found
        case "status":
            return state.status.value
    run = known.runs.get(state.run or "")
    if run is None:
        return None
    said: Value = getattr(run, name.removeprefix("run."), None)
    return said


# --- Texts from others, without the control sequences that a terminal would execute ---


def clean_line(line: Text) -> Text:
    """A line in its colours, without trailing blanks."""
    made = line.copy()
    made.plain = clean(line.plain)  # as long as before, so that the styles stay at their letters
    made.rstrip()
    return made


def clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))
