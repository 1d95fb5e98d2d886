"""How states, refs and their parts look to a person: pure functions that return texts and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from datastates.lineage.show.texts import age_text, clean, first_line, metrics_text, plural, short, size_text, step_text, time_text
from datastates.lineage.states import Ref, RefEvent, RefKind, State, Status

from .tables import Column, Table

if TYPE_CHECKING:
    import rich.table

__all__ = [
    "age_text",
    "by_state",
    "clean",
    "events_table",
    "facts_table",
    "metrics_text",
    "plural",
    "refs_table",
    "refs_text",
    "short",
    "size_text",
    "state_text",
    "status_text",
    "step_text",
    "stored_text",
    "table",
    "time_text",
]

_STATUS_STYLES = {
    Status.CAPTURED: "cyan",
    Status.DURABLE: "green",
    Status.REPLICATED: "green",
    Status.EXTERNAL: "green",
    Status.EVICTED: "bright_black",
    Status.LOST: "red",
}
_REF_STYLES = {RefKind.BRANCH: "bold green", RefKind.TAG: "bold yellow"}


def status_text(status: Status) -> Text:
    """The status in its colour."""
    return Text(status.value, _STATUS_STYLES[status])


def stored_text(state: State) -> Text:
    """Where the state is stored, such as ``durable, 11.9 MiB``; if its bytes are gone, how much it was."""
    size = size_text(state.bytes_total)
    return Text.assemble(status_text(state.status), f", {size}" if state.status.is_restorable else f" (was {size})")


def by_state(refs: Iterable[Ref]) -> dict[str, list[Ref]]:
    """The refs of each state, by uid."""
    found: dict[str, list[Ref]] = {}
    for ref in refs:
        found.setdefault(ref.state, []).append(ref)
    return found


def refs_text(refs: Sequence[Ref]) -> Text:
    """The refs as text such as `` (main, tag: warm)`` in colours; empty if there are none."""
    if not refs:
        return Text()
    names = [Text(clean(f"tag: {ref.name}" if ref.kind is RefKind.TAG else ref.name), _REF_STYLES[ref.kind]) for ref in refs]
    return Text.assemble(" (", Text(", ").join(names), ")")


def state_text(state: State, refs: Sequence[Ref] = ()) -> Text:
    """A state on one line, as in the log."""
    line = Text.assemble((short(state.uid), "yellow"), refs_text(refs), " step ", (step_text(state), "bold"))
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


def refs_table(refs: Sequence[Ref], states: Mapping[str, State]) -> Table:
    """A table with one row for each branch or tag, and what it names."""
    made = Table(
        [
            *(Column("name", is_flexible=True), Column("kind", rank=2), Column("state"), Column("step", is_number=True)),
            *(Column("status", rank=1), Column("captured", rank=3), Column("message", is_flexible=True, rank=4)),
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


def events_table(events: Sequence[RefEvent]) -> Table:
    """A table with one row for each move of a ref, newest first, as ``NAME@{n}`` counts them."""
    made = Table([Column("event"), Column("from"), Column("to"), Column("why", is_flexible=True), Column("when", rank=1)])
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
    """A table of names and values, one below the other; values that are None or empty are left out."""
    from rich.table import Table as RichTable

    made = RichTable.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in facts:
        if value is not None and value != "":
            made.add_row(name, value if isinstance(value, Text) else Text(clean(str(value))))
    return made
