"""How states, refs and their parts look to a person; pure functions to rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from datastates.lineage import Ref, RefEvent, RefKind, State, Status
from datastates.lineage.show.relevance import relevant_keys
from datastates.lineage.show.texts import age_text, clean, first_line, metrics_text, short, size_text, step_text, time_text

__all__ = [
    "age_text",
    "by_state",
    "clean",
    "events_table",
    "facts_table",
    "metrics_text",
    "refs_table",
    "refs_text",
    "short",
    "size_text",
    "state_text",
    "states_table",
    "status_text",
    "step_text",
    "table",
    "time_text",
]

_METRIC_COLUMNS = 6
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
    return Text(status.value, style=_STATUS_STYLES[status])


def by_state(refs: Iterable[Ref]) -> dict[str, list[Ref]]:
    """The refs of each state, by uid."""
    found: dict[str, list[Ref]] = {}
    for ref in refs:
        found.setdefault(ref.state, []).append(ref)
    return found


def refs_text(refs: Sequence[Ref]) -> Text:
    """`` (main, tag: warm)`` in colours; empty when there are none."""
    if not refs:
        return Text()
    names = [Text(f"tag: {ref.name}" if ref.kind is RefKind.TAG else ref.name, style=_REF_STYLES[ref.kind]) for ref in refs]
    return Text.assemble(" (", Text(", ").join(names), ")")


def state_text(state: State, refs: Sequence[Ref] = ()) -> Text:
    """A state on one line, as in the log."""
    line = Text.assemble((short(state.uid), "yellow"), refs_text(refs), " step ", (step_text(state), "bold"))
    if state.metrics:
        line.append(f"  {metrics_text(state.metrics)}")
    if not state.status.is_restorable:
        line.append("  ").append(status_text(state.status))
    if state.message:
        line.append(f"  {first_line(state.message)}", style="italic")
    return line


def table(*columns: str) -> Table:
    """An empty table in the one look that they all have."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        made.add_column(Text(clean(column)), no_wrap=True, overflow="fold")
    return made


def states_table(states: Sequence[State], refs: Mapping[str, Sequence[Ref]]) -> Table:
    """One state a row; the metrics that most of them have are columns."""
    keys = relevant_keys((state.metrics for state in states), _METRIC_COLUMNS)
    made = table("state", "step", *keys, "status", "captured", "refs", "message")
    for state in states:
        made.add_row(
            Text(short(state.uid), style="yellow"),
            step_text(state),
            *(f"{state.metrics[key]:.6g}" if key in state.metrics else "" for key in keys),
            status_text(state.status),
            age_text(state.created_at),
            Text(str(refs_text(refs.get(state.uid, ()))).strip(" ()")),
            Text(first_line(state.message or "")),
        )
    return made


def refs_table(refs: Sequence[Ref], states: Mapping[str, State]) -> Table:
    """One branch or tag a row, with what it names."""
    made = table("name", "kind", "state", "step", "status", "captured", "message")
    for ref in refs:
        state = states[ref.state]
        made.add_row(
            Text(ref.name, style=_REF_STYLES[ref.kind]),
            ref.kind.value,
            Text(short(ref.state), style="yellow"),
            step_text(state),
            status_text(state.status),
            age_text(state.created_at),
            Text(first_line(ref.message or "")),
        )
    return made


def events_table(events: Sequence[RefEvent]) -> Table:
    """One move of a ref a row, newest first, as ``NAME@{n}`` counts them."""
    made = table("event", "from", "to", "why", "when")
    for index, event in enumerate(events):
        made.add_row(
            Text(f"{event.name}@{{{index}}}", style=_REF_STYLES[event.kind]),
            Text(short(event.old), style="yellow"),
            Text(short(event.new), style="yellow"),
            Text(clean(event.reason)),
            time_text(event.created_at),
        )
    return made


def facts_table(facts: Iterable[tuple[str, object]]) -> Table:
    """Names and values below each other; values that are None or empty are left out."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in facts:
        if value is not None and value != "":
            made.add_row(name, value if isinstance(value, Text) else Text(clean(str(value))))
    return made
