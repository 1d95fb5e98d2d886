"""Branches, runs and the whole repository as a person sees them in a terminal: pure functions that return rich renderables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from datastates.api.models import RunInfo, Stats
from datastates.lineage.endings import Ending, How
from datastates.lineage.show.branches import Branch, Branches, Life, Point
from datastates.lineage.show.by_rank import ranks_of
from datastates.lineage.show.colours import colour_of

from .render import age_text, clean, facts_table, plural, short, size_text, table, time_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["branches_table", "duration_text", "rows_of", "runs_table", "spark_text", "stats_table"]

_BARS = "▁▂▃▄▅▆▇█"
_GAP = 2  # blanks between columns
_NAME = 24  # of a branch, if not everything fits
_MARKS = {Life.RUNNING: ("●", "green"), Life.ENDED: ("○", "bright_black"), Life.UNKNOWN: ("?", "yellow")}
_ENDS = {How.FAILED: ("✗", "red"), How.KILLED: ("✗", "red"), How.INTERRUPTED: ("◌", "yellow")}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column; ``weight`` says which columns give way first if not all fit: the heaviest."""

    head: str
    cells: tuple[Text, ...]
    weight: int

    @property
    def width(self) -> int:
        return max(len(self.head), *(cell.cell_len for cell in self.cells), 0)


def branches_table(found: Branches, width: int, *, now: datetime | None = None) -> Table:
    """A table with one row for each branch; what matters most if not everything fits into ``width``."""
    items, metric = found.items, found.metric or "metric"
    columns = [
        _column("", [_mark(item.life, item.ending) for item in items], 0),
        _column("branch", [_name(item.name, width) for item in items], 0),
        _column("group", [Text(_value(item.group)) for item in items] if found.groups else [], 1),
        _column("step", [Text(str(item.step), justify="right") for item in items], 2),
        _column(metric, [Text(spark_text(item.line.values, 12)) for item in items] if found.metric else [], 3),
        _column("best", [_point(item.best) for item in items] if found.metric else [], 1),
        _column("at step", [Text("" if item.best is None else str(item.best.step)) for item in items] if found.metric else [], 6),
        _column("restorable best", [_restorable(item) for item in items] if found.metric else [], 5),
        _column("last", [_point(item.last) for item in items] if found.metric else [], 4),
        _column("forked at", [_fork(item) for item in items], 4),
        _column("changed", [Text(age_text(item.changed_at, now)) for item in items], 7),
        _column("ended", [Text("" if item.ending is None else _unwell(item.ending)) for item in items], 6),
        _column("states", [Text(str(item.states)) for item in items], 8),
        _column("restorable", [Text(f"{item.restorable}, {item.durable} durable") for item in items], 9),
        _column("lost", [Text("" if item.lost_step is None else f"to step {item.lost_step}", style="red") for item in items], 8),
        _column("new bytes", [Text(size_text(item.bytes)) for item in items], 10),
        _column("steps/s", [Text("" if item.steps_per_s is None else f"{item.steps_per_s:.3g}") for item in items], 10),
        _column("took", [Text(duration_text(item.took_s)) for item in items], 11),
        _column("configured", [_settings(item) for item in items], 6),
    ]
    return _fitted([column for column in columns if any(cell.plain for cell in column.cells)], width)


def runs_table(found: Sequence[RunInfo], width: int, *, now: datetime | None = None) -> Table:
    """A table with one row for each run, the latest first."""
    columns = [
        _column("", [_mark(run.life, run.ending) for run in found], 0),
        _column("run", [Text(short(run.uid), style="yellow") for run in found], 0),
        _column("branches", [_names(run.branches) for run in found], 1),
        _column("began", [Text(age_text(run.started_at, now)) for run in found], 1),
        _column("ran", [Text(_ran(run, now)) for run in found], 3),
        _column("host", [Text(clean(run.host)) for run in found], 2),
        _column("process", [Text("imported" if run.is_imported else str(run.pid)) for run in found], 5),
        _column("user", [Text(clean(run.user)) for run in found], 6),
        _column("commit", [Text((run.git_commit or "")[:10] + ("*" if run.git_dirty else "")) for run in found], 4),
        _column("command", [Text(clean(" ".join(run.argv))) for run in found], 7),
        _column("error", [Text(clean(run.ending.error or "") if run.ending else "") for run in found], 8),
    ]
    return _fitted([column for column in columns if any(cell.plain for cell in column.cells)], width)


def stats_table(found: Stats) -> Table:
    """The whole repository in numbers."""
    statuses = ", ".join(f"{number:,} {status}" for status, number in found.statuses.items())
    facts: list[tuple[str, object]] = [
        ("states", f"{found.states:,}" + (f": {statuses}" if statuses else "")),
        ("names", f"{plural(found.branches, 'branch')}, {plural(found.tags, 'tag')}"),
        ("runs", f"{found.runs:,}"),
        ("packs", size_text(found.bytes_stored)),
        *(("tier", f"{held.tier}, {held.node}: {plural(held.replicas, 'replica')}, {size_text(held.bytes)}") for held in found.tiers),
        ("newest", "" if found.newest is None else f"{short(found.newest.uid)}, {age_text(found.newest.created_at)}"),
    ]
    ranks = ranks_of(key.key for key in found.metrics)
    of_ranks = {f"{name}@{rank}" for name, those in ranks.items() for rank in those}
    for key in found.metrics:
        if key.key not in of_ranks:
            own = f", and {len(ranks[key.key]):,} ranks have their own" if key.key in ranks else ""
            facts.append(("metric", f"{key.key}: {_range(key.least, key.most)}, {key.count:,} states{own}"))
    facts += [("attributes", ", ".join(found.attributes)), ("settings", ", ".join(found.config))]
    return facts_table(facts)


def rows_of(found: Branches) -> list[dict[str, object]]:
    """The branches as flat rows, for a spreadsheet."""
    return [
        {
            "branch": item.name,
            "life": item.life.value,
            "ending": None if item.ending is None else item.ending.how.value,
            "error": None if item.ending is None else item.ending.error,
            "head": item.head,
            "step": item.step,
            "status": item.status.value,
            "fork_branch": item.fork.branch if item.fork else None,
            "fork_state": item.fork.state if item.fork else None,
            "fork_step": item.fork.step if item.fork else None,
            "states": item.states,
            "restorable": item.restorable,
            "durable": item.durable,
            "lost_step": item.lost_step,
            "bytes": item.bytes,
            "metric": found.metric,
            "last": item.last.value if item.last else None,
            "best": item.best.value if item.best else None,
            "best_step": item.best.step if item.best else None,
            "best_state": item.best.state if item.best else None,
            "best_restorable": item.best_restorable.value if item.best_restorable else None,
            "best_restorable_state": item.best_restorable.state if item.best_restorable else None,
            "began_at": None if item.began_at is None else item.began_at.isoformat(),
            "changed_at": item.changed_at.isoformat(),
            "took_s": item.took_s,
            "steps_per_s": item.steps_per_s,
            "study": item.study,
            "variant": item.variant,
            "config": " ".join(f"{setting.key}={_value(setting.value)}" for setting in item.config),
        }
        for item in found
    ]


def spark_text(values: Sequence[float | None], width: int) -> str:
    """A curve as a line of bars, the largest value the tallest; a gap is a dot."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "·" * min(len(values), width)
    least, most = min(finite), max(finite)
    cells = min(width, len(values))
    bars = []
    for cell in range(cells):
        part = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
        known = [value for value in part if value is not None and math.isfinite(value)]
        height = 0.0 if most == least or not known else (sum(known) / len(known) - least) / (most - least)
        bars.append(_BARS[round(height * (len(_BARS) - 1))] if known else "·")
    return "".join(bars)


def duration_text(seconds: float) -> str:
    """A time span: ``4 s``, ``3 min``, ``2.5 h``, ``4.1 d``."""
    for unit, length in (("d", 86_400), ("h", 3600)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _column(head: str, cells: Sequence[Text], weight: int) -> _Column:
    return _Column(head, tuple(cells), weight)


def _fitted(columns: list[_Column], width: int) -> Table:
    """A table of the columns that fit, the lightest first; of those that are left, the last is cut with an ellipsis."""
    kept = list(columns)
    while len(kept) > 2 and sum(column.width + _GAP for column in kept) - _GAP > width:
        heaviest = max(reversed(kept), key=lambda column: column.weight)
        if not heaviest.weight:
            break
        kept.remove(heaviest)
    made = table(*(column.head for column in kept))
    for column in made.columns:
        column.overflow, column.no_wrap = "ellipsis", True
    for row in zip(*(column.cells for column in kept), strict=True):
        made.add_row(*row)
    return made


def _name(name: str, width: int) -> Text:
    text = Text(clean(name), style=Style(color=colour_of(name), bold=True))
    if width <= 100:
        text.truncate(_NAME, overflow="ellipsis")
    return text


def _names(names: Sequence[str]) -> Text:
    shown = [Text(clean(name), style=Style(color=colour_of(name), bold=True)) for name in names[:3]]
    text = Text(", ").join(shown)
    return text.append(f" and {len(names) - 3} more") if len(names) > 3 else text


def _point(point: Point | None) -> Text:
    if point is None:
        return Text()
    return Text("nan" if point.value is None else f"{point.value:.5g}")


def _restorable(item: Branch) -> Text:
    """The best state that can be restored: value and step, or only the step if it is the best state, whose value stands there already."""
    if item.best_restorable is None:
        return Text("none" if item.best is not None else "", style="red")
    same = item.best is not None and item.best.state == item.best_restorable.state
    return Text(f"step {item.best_restorable.step}" if same else f"{_point(item.best_restorable)} at step {item.best_restorable.step}")


def _fork(item: Branch) -> Text:
    if item.fork is None:
        return Text()
    name = item.fork.branch or short(item.fork.state)
    style = Style(color=colour_of(name)) if item.fork.branch and not item.fork.is_gone else Style()
    return Text.assemble((clean(name), style), f" step {item.fork.step}")


def _settings(item: Branch) -> Text:
    shown = [f"{setting.key}={_value(setting.value)}" for setting in item.config[:4]]
    return Text(clean(", ".join(shown)) + (", …" if len(item.config) > 4 else ""))


def _value(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else clean(str(value))


def _mark(life: Life, ending: Ending | None) -> Text:
    return Text(*(_MARKS[life] if ending is None else _ENDS.get(ending.how, _MARKS[life])))


def _unwell(ending: Ending) -> str:
    """How it ended, unless it ended normally: ``failed at step 7: RuntimeError``."""
    if ending.how is How.ENDED:
        return ""
    said = ending.how.value + ("" if ending.step is None else f" at step {ending.step}")
    return said if ending.error is None else f"{said}: {clean(ending.error).partition(':')[0]}"


def _ran(run: RunInfo, now: datetime | None) -> str:
    if run.life is Life.RUNNING:
        return f"{duration_text(((now or datetime.now(UTC)) - run.started_at).total_seconds())}, running"
    if run.finished_at is None:
        return "killed" if run.life is Life.ENDED else "unknown"
    if run.ending is not None and run.ending.how is How.KILLED:
        return f"killed, found {time_text(run.finished_at)}"
    took = duration_text((run.finished_at - run.started_at).total_seconds())
    return f"{took}, {(run.ending and _unwell(run.ending)) or f'until {time_text(run.finished_at)}'}"


def _range(least: float | None, most: float | None) -> str:
    return "no numbers" if least is None or most is None else f"{least:.6g} to {most:.6g}"
