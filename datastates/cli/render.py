"""How states, refs and their parts look to a person; pure functions to rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from datastates.lineage import Ref, RefEvent, RefKind, State, Status

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
    "table",
    "time_text",
]

_SHORT = 10
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


def short(uid: str | None) -> str:
    """The beginning of a uid that people read and type."""
    return "-" if uid is None else uid[:_SHORT]


def clean(text: str) -> str:
    """What others wrote, without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def size_text(count: int) -> str:
    """A number of bytes in powers of 1024: ``1.2 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def time_text(moment: datetime) -> str:
    """A time in the local zone, to the second."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age_text(moment: datetime, now: datetime | None = None) -> str:
    """How long ago: ``3 minutes ago``."""
    seconds = max(0, int(((now or datetime.now(UTC)) - moment).total_seconds()))
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return f"{seconds} second{'s' if seconds != 1 else ''} ago"


def status_text(status: Status) -> Text:
    """The status in its colour."""
    return Text(status.value, style=_STATUS_STYLES[status])


def metrics_text(metrics: Mapping[str, float]) -> str:
    """``loss=0.31 val_loss=0.4``, by name."""
    return clean(" ".join(f"{key}={value:.6g}" for key, value in sorted(metrics.items())))


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
        line.append(f"  {_first_line(state.message)}", style="italic")
    return line


def step_text(state: State) -> str:
    """The step, with the batch of an accumulation that is not complete."""
    return f"{state.step}+{state.micro_step}" if state.micro_step else str(state.step)


def table(*columns: str) -> Table:
    """An empty table in the one look that they all have."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        made.add_column(Text(clean(column)), no_wrap=True, overflow="fold")
    return made


def states_table(states: Sequence[State], refs: Mapping[str, Sequence[Ref]]) -> Table:
    """One state a row; the metrics that most of them have are columns."""
    counts: dict[str, int] = {}
    for state in states:
        for key in state.metrics:
            counts[key] = counts.get(key, 0) + 1
    keys = sorted(sorted(counts, key=lambda key: (-counts[key], key))[:_METRIC_COLUMNS])
    made = table("state", "step", *keys, "status", "captured", "refs", "message")
    for state in states:
        made.add_row(
            Text(short(state.uid), style="yellow"),
            step_text(state),
            *(f"{state.metrics[key]:.6g}" if key in state.metrics else "" for key in keys),
            status_text(state.status),
            age_text(state.created_at),
            Text(str(refs_text(refs.get(state.uid, ()))).strip(" ()")),
            Text(_first_line(state.message or "")),
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
            Text(_first_line(ref.message or "")),
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


def _first_line(text: str) -> str:
    return clean(text.strip().partition("\n")[0])
