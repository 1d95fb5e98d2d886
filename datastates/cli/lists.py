"""The commands ``branches`` and ``runs``; for ``log`` and ``show``, the states that wait for parts
and the numbers of a repository."""

from __future__ import annotations

import csv
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count, groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.style import Style
from rich.text import Text

from datastates.api.models import RunInfo, Stats, run_infos
from datastates.lineage.query.fields import check_names, written
from datastates.lineage.query.grammar import Field, Kind
from datastates.lineage.query.incomplete import incomplete as ask
from datastates.lineage.query.incomplete import ranks_text
from datastates.lineage.states import Ending, How, Life
from datastates.lineage.views import branches as overview
from datastates.lineage.views.branch_rows import Branch, Branches, Point, bytes_of_runs
from datastates.lineage.views.cards import colour_of
from datastates.lineage.views.text import (
    Direction,
    age_text,
    by_rank,
    clean,
    plural,
    ranks_of,
    short,
    size_text,
    time_text,
)
from datastates.maintenance.lease import life_of, read_only_folder

from .app import MOST, AsJson, Limit, Repo, Shell, group_names, metric_names
from .interrupt import orderly
from .tables import Column, TextTable, facts_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from datastates.api.models import StateDetail
    from datastates.lineage.query.incomplete import GivenUpState, Waiting
    from datastates.lineage.query.names import Replica
    from datastates.lineage.session import Session
    from datastates.maintenance.lease import PackFolder


NOTHING = (
    "nothing is captured here yet: run.capture() in a training makes the first state,"
    " `datastates demo` makes a repository to look at"
)

Query = Annotated[
    str,
    typer.Argument(
        metavar="QUERY",
        help="A condition on the newest state of each branch, such as 'metrics.val_loss < 0.2'.",
        show_default=False,
    ),
]
AsCsv = Annotated[
    bool, typer.Option("--csv", help="Write a table for a spreadsheet.", show_default=False)
]
_BARS = "▁▂▃▄▅▆▇█"
_NAME = 24  # of a branch, if not everything fits
_MARKS = {
    Life.RUNNING: ("●", "green"),
    Life.ENDED: ("○", "bright_black"),
    Life.UNKNOWN: ("?", "yellow"),
}
_ENDS = {How.FAILED: ("✗", "red"), How.KILLED: ("✗", "red"), How.INTERRUPTED: ("◌", "yellow")}
LISTED = 16
"""The most ranks with a line each; with more ranks there is a line for each place."""

LATE_S = 5.0
"""How many seconds a state may wait for parts before ``log`` reports it: ranks are never quite
at once."""

_WHAT_TO_DO = {
    Life.RUNNING: (
        "which runs: its log says why it is late, or `py-spy dump --pid {pid}` there; what waits is"
        " given up after the job's group_patience_s"
    ),
    Life.ENDED: (
        "which has ended: start the job again, which resumes from its newest whole state;"
        " `datastates gc` removes what waits"
    ),
    Life.UNKNOWN: "of which nothing is to be seen from here: look on {host}",
}


def branches(
    context: typer.Context,
    query: Query = "",
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="PART",
            help="Only branches whose name contains this.",
            show_default=False,
        ),
    ] = "",
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            "-m",
            metavar="KEY",
            help="The metric of the values and curves (default: a validation metric, or the loss).",
            autocompletion=metric_names,
        ),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            "--best",
            metavar="KEY",
            help="The best branches by this metric, and how to get the best state.",
            autocompletion=metric_names,
        ),
    ] = None,
    rising: Annotated[
        bool | None,
        typer.Option(
            "--max/--min",
            help="Whether larger or smaller values are better (default: by the metric's name).",
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="BY",
            help=(
                "changed, name, began, best, last, step, states, restorable, durable, bytes or"
                " took; -BY: the other way."
            ),
        ),
    ] = "changed",
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="BY",
            help="Put branches with the same value together: study, config.KEY or attr.KEY.",
            show_default=False,
            autocompletion=group_names,
        ),
    ] = None,
    limit: Limit = 50,
    is_watching: Annotated[
        bool, typer.Option("--watch", "-w", help="Show them again while they are trained.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(
            "--every", min=0.1, max=86_400.0, metavar="SECONDS", help="How often --watch looks."
        ),
    ] = 2.0,
    times: Annotated[
        int,
        typer.Option(
            "--times", min=0, max=MOST, help="How often in all. 0 continues until Ctrl-C."
        ),
    ] = 0,
    as_csv: AsCsv = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show each branch: its curve, its best value, its fork, its configuration, whether it runs."""
    shell = Shell(context, repo, as_json)
    if best is not None and metric not in (None, best):
        raise typer.BadParameter("it names the metric: leave out --metric", param_hint="--best")
    if is_watching and as_csv:
        raise typer.BadParameter("it writes no CSV: leave out --csv", param_hint="--watch")
    choice = {"name": name, "metric": best or metric, "group": group, "limit": limit or None}
    choice["sort"] = sort if best is None else "best"
    ask = partial(_ask, shell, query, rising, **choice)
    if is_watching:
        return _watch(shell, ask, every, times)
    if best is not None:
        with shell.reading() as session:
            check_names(session, f"{written(Field('metrics', Kind.METRIC, best))} > 0")
    found = ask()
    if best is not None:
        found = replace(found, items=tuple(item for item in found if item.best is not None))
    _write(shell, found, as_csv=as_csv)
    points = [item.best_restorable for item in found if item.best_restorable is not None]
    if best is not None and points and not as_csv:
        sign = 1 if found.direction == "min" else -1
        point = min(points, key=lambda each: sign * (each.value or 0.0))
        shell.hint(
            "the best that can be restored:"
            f" `datastates restore {short(point.state)} --into best.safetensors`"
        )
    return None


def runs(
    context: typer.Context,
    limit: Limit = 20,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the trainings, the newest first: their branches, and how each ended."""
    from datastates.lineage.write import runs as lineage_runs

    shell = Shell(context, repo, as_json)
    home = read_only_folder(shell.location())
    with shell.reading() as session:
        known, more = lineage_runs.listing(session, limit=limit or sys.maxsize >> 1)
        found = run_infos(session, known, home)
        sizes = bytes_of_runs(session, [run.uid for run in found], home.uid or "")
    if shell.as_json:
        for run in found:
            shell.write_json(run, bytes=sizes.get(run.uid, 0))
    elif not found:
        shell.hint(NOTHING)
    else:
        shell.write(runs_table(found, sizes))
        if more:
            shell.hint(f"these are the last {limit}: -n 0 shows all")


def _watch(shell: Shell, ask: Callable[[], Branches], every: float, times: int) -> None:
    """Show the branches again and again. In a pipe they are written whenever something changed."""
    from rich.live import Live

    orderly()  # what moves hides the cursor, and shows it again when it ends
    waiting, before = threading.Event(), None
    with ExitStack() as stack:
        live: Live | None = None
        if shell.console.is_terminal and not shell.as_json:
            live = stack.enter_context(Live(console=shell.console, auto_refresh=False))
        for number in range(times) if times else count():
            waiting.wait(every if number else 0)
            found = ask()
            if live is not None:
                live.update(_said(found, shell.console.width), refresh=True)
            elif found != before:  # below the table before
                before = found
                if shell.as_json:
                    shell.write_json(found)
                else:
                    _write(shell, found, as_csv=False)
                    shell.write(Text())
                sys.stdout.flush()


def _said(found: Branches, width: int) -> RenderableType:
    from rich.console import Group

    running = sum(item.life == "running" for item in found)
    line = (
        f"{running} running of {found.matching} branches, {datetime.now():%H:%M:%S}; Ctrl-C ends"
        " this"
    )
    table = branches_table(found)
    return Group(*table.lines(width), Text(line if found.total else NOTHING, style="dim"))


def _write(shell: Shell, found: Branches, *, as_csv: bool) -> None:

    if as_csv:
        rows = rows_of(found)
        writer = csv.DictWriter(
            sys.stdout, list(rows[0]) if rows else ["branch"], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
    elif shell.as_json:
        shell.write_lines(found)
    elif not found.total:
        shell.hint(NOTHING)
    elif not len(found):
        shell.hint(f"none of {plural(found.total, 'branch')} fits: leave out the condition")
    else:
        shell.write(branches_table(found, width=shell.width))
        if len(found) < found.matching:
            shell.hint(f"these are {len(found)} of {found.matching}: -n 0 shows all")


def _ask(shell: Shell, query: str, rising: bool | None, **choice: Any) -> Branches:
    choice["direction"] = None if rising is None else Direction.MAX if rising else Direction.MIN
    home = read_only_folder(shell.location())
    choice |= {"living": partial(life_of, home=home), "folder": home.uid}
    with shell.reading() as session:
        return overview.branches(session, query, **choice)


# --- Branches, runs and the repository as rich renderables: pure functions ---


def branches_table(
    found: Branches, *, width: int | None = None, now: datetime | None = None
) -> TextTable:
    """A row for each branch. Long names are cut if the table is to fit a narrow ``width``."""
    items, measured = found.items, found.items if found.metric else ()
    columns = [
        Column("", cells=[_mark(item.life, item.ending) for item in items]),
        Column("branch", cells=[_name(item.name, width) for item in items]),
        Column("group", rank=1, cells=[Text(_value(each.group)) for each in items if found.groups]),
        Column("step", is_number=True, rank=2, cells=[Text(str(item.step)) for item in items]),
        Column(
            found.metric or "metric",
            rank=3,
            cells=[Text(spark_text(item.line.values, 12)) for item in measured],
        ),
        Column("best", rank=1, cells=[_point(item.best) for item in measured]),
        Column(
            "at step",
            rank=6,
            cells=[Text("" if item.best is None else str(item.best.step)) for item in measured],
        ),
        Column("restorable best", rank=5, cells=[_restorable(item) for item in measured]),
        Column("last", rank=4, cells=[_point(item.last) for item in measured]),
        Column("forked at", rank=4, cells=[_fork(item) for item in items]),
        Column("changed", rank=7, cells=[Text(age_text(item.changed_at, now)) for item in items]),
        Column(
            "ended",
            rank=6,
            cells=[Text("" if item.ending is None else _unwell(item.ending)) for item in items],
        ),
        Column("states", rank=8, cells=[Text(str(item.states)) for item in items]),
        Column(
            "restorable",
            rank=9,
            cells=[Text(f"{item.restorable}, {item.durable} durable") for item in items],
        ),
        Column(
            "lost",
            rank=8,
            cells=[
                Text("" if item.lost_step is None else f"to step {item.lost_step}", style="red")
                for item in items
            ],
        ),
        Column("on disk", rank=8, cells=[Text(size_text(item.bytes)) for item in items]),
        Column(
            "steps/s",
            rank=10,
            cells=[
                Text("" if item.steps_per_s is None else f"{item.steps_per_s:.3g}")
                for item in items
            ],
        ),
        Column("took", rank=11, cells=[Text(duration_text(item.took_s)) for item in items]),
        Column("configured", rank=6, cells=[_settings(item) for item in items]),
    ]
    return _filled(columns)


def runs_table(
    found: Sequence[RunInfo], sizes: Mapping[str, int], *, now: datetime | None = None
) -> TextTable:
    """A row for each run, the latest first. ``sizes`` are the bytes on disk of its states."""
    columns = [
        Column("", cells=[_mark(run.life, run.ending) for run in found]),
        Column("run", cells=[Text(short(run.uid), style="yellow") for run in found]),
        Column("branch", rank=1, cells=[_names(_branches(run)) for run in found]),
        Column("began", rank=1, cells=[Text(age_text(run.started_at, now)) for run in found]),
        Column("ran", rank=3, cells=[Text(_ran(run, now)) for run in found]),
        Column("host", rank=2, cells=[Text(clean(run.host)) for run in found]),
        Column(
            "process",
            rank=5,
            cells=[Text("imported" if run.is_imported else str(run.pid)) for run in found],
        ),
        Column("user", rank=6, cells=[Text(clean(run.user)) for run in found]),
        Column(
            "commit",
            rank=4,
            cells=[Text((run.git_commit or "")[:10] + "*" * bool(run.git_dirty)) for run in found],
        ),
        Column("on disk", rank=3, cells=[Text(size_text(sizes.get(run.uid, 0))) for run in found]),
        Column("command", rank=7, cells=[Text(clean(" ".join(run.argv))) for run in found]),
        Column(
            "error",
            rank=8,
            cells=[Text(clean(run.ending.error or "") if run.ending else "") for run in found],
        ),
    ]
    return _filled(columns)


def _filled(columns: Sequence[Column]) -> TextTable:
    """A table of the columns that have any text."""
    return TextTable([each for each in columns if any(map(str, each.cells))])


def _branches(run: RunInfo) -> tuple[str, ...]:
    """The branch that a run trained, and others whose newest states it captured."""
    return tuple(dict.fromkeys((*([run.branch] if run.branch else ()), *run.branches)))


def stats_table(found: Stats) -> Table:
    statuses = ", ".join(f"{number:,} {status}" for status, number in found.statuses.items())
    facts: list[tuple[str, object]] = [
        ("states", f"{found.states:,}" + (f": {statuses}" if statuses else "")),
        ("names", f"{plural(found.branches, 'branch')}, {plural(found.tags, 'tag')}"),
        ("runs", f"{found.runs:,}"),
        ("packs", size_text(found.bytes_stored)),
        *(
            (
                "tier",
                (
                    f"{held.tier}, {held.node}: {plural(held.replicas, 'replica')},"
                    f" {size_text(held.bytes)}"
                ),
            )
            for held in found.tiers
        ),
        (
            "newest",
            (
                ""
                if found.newest is None
                else f"{short(found.newest.uid)}, {age_text(found.newest.created_at)}"
            ),
        ),
    ]
    ranks = ranks_of(key.key for key in found.metrics)
    of_ranks = {f"{name}@{rank}" for name, those in ranks.items() for rank in those}
    for key in found.metrics:
        if key.key not in of_ranks:
            own = f", and {len(ranks[key.key]):,} ranks have their own" if key.key in ranks else ""
            reach = "no numbers" if key.least is None else f"{key.least:.6g} to {key.most:.6g}"
            facts.append(("metric", f"{key.key}: {reach}, {key.count:,} states{own}"))
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
        height = (
            0.0
            if most == least or not known
            else (sum(known) / len(known) - least) / (most - least)
        )
        bars.append(_BARS[round(height * (len(_BARS) - 1))] if known else "·")
    return "".join(bars)


def duration_text(seconds: float) -> str:
    """A time span: ``4 s``, ``3 min``, ``2.5 h``, ``4.1 d``."""
    for unit, length in (("d", 86_400), ("h", 3600)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _name(name: str, width: int | None) -> Text:
    text = Text(clean(name), style=Style(color=colour_of(name), bold=True))
    if width is not None and width <= 100:
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
    """The best state that can be restored: value and step, or only the step if it is the best
    state, whose value stands there already."""
    if item.best_restorable is None:
        return Text("none" if item.best is not None else "", style="red")
    same = item.best is not None and item.best.state == item.best_restorable.state
    return Text(
        f"step {item.best_restorable.step}"
        if same
        else f"{_point(item.best_restorable)} at step {item.best_restorable.step}"
    )


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
    return (
        "" if value is None else f"{value:.6g}" if isinstance(value, float) else clean(str(value))
    )


def _mark(life: Life, ending: Ending | None) -> Text:
    return Text(*(_MARKS[life] if ending is None else _ENDS.get(ending.how, _MARKS[life])))


def _unwell(ending: Ending) -> str:
    """How a run ended, unless it ended normally, such as ``failed at step 7: RuntimeError``."""
    if ending.how is How.ENDED:
        return ""
    said = ending.how.value + ("" if ending.step is None else f" at step {ending.step}")
    return said if ending.error is None else f"{said}: {clean(ending.error).partition(':')[0]}"


def _ran(run: RunInfo, now: datetime | None) -> str:
    if run.life is Life.RUNNING:
        return (
            f"{duration_text(((now or datetime.now(UTC)) - run.started_at).total_seconds())},"
            " running"
        )
    if run.finished_at is None:
        return "killed" if run.life is Life.ENDED else "unknown"
    if run.ending is not None and run.ending.how is How.KILLED:
        return f"killed, found {time_text(run.finished_at)}"
    took = duration_text((run.finished_at - run.started_at).total_seconds())
    return (
        f"{took}, {(run.ending and _unwell(run.ending)) or f'until {time_text(run.finished_at)}'}"
    )


# --- For ``log``, states that lack parts of ranks; for ``show``, the parts of a state ---


def show_incomplete(shell: Shell, limit: int) -> None:
    """Show the states of several ranks that wait for parts, and at most ``limit`` (0: all) of those
    that were given up."""
    home = read_only_folder(shell.location())
    with shell.reading() as session:
        found = ask(session, limit=limit or 2**31)
        advice = [] if shell.as_json else _advice(session, home, found.waiting)
    if shell.as_json:
        shell.write_json(found)
        return
    if found.waiting:
        shell.write(_waiting_table(found.waiting))
        for line in advice:
            shell.hint(line)
    else:
        shell.hint("no state waits for parts of other ranks")
    if found.given_up:
        shell.write(*([""] if found.waiting else []), _given_up_table(found.given_up))
    if len(found.given_up) < found.total_given_up:
        shell.hint(
            f"these are the last {len(found.given_up)} of {found.total_given_up} that were given"
            " up: -n 0 shows all"
        )


def late_text(found: Sequence[Waiting]) -> str | None:
    """The line of ``log`` about states that wait; None if none has waited for long."""
    late = [each for each in found if (datetime.now(UTC) - each.since).total_seconds() > LATE_S]
    if not late:
        return None
    more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    return (
        f"{late[0]}, {age_text(late[0].since)}{more}: `datastates log --incomplete` shows whose"
        " process that is, and what to do"
    )


def part_facts(state: StateDetail) -> Iterator[tuple[str, str]]:
    """The facts for ``show`` about a state of several ranks: whose part is where."""
    if state.world_size <= LISTED:
        runs = {part.rank: part.run for part in state.parts}
        sizes = {part.rank: part.bytes_total for part in state.parts}
        measured = by_rank(state.metrics, state.world_size)[1]
        for rank in range(state.world_size):
            held = [_held(one) for one in state.replicas if one.rank == rank]
            size = f", {size_text(sizes[rank])}" if rank in sizes else ""
            size += "".join(
                f", {name}={values[rank]:.6g}"
                for name, values in sorted(measured.items())
                if rank in values
            )
            run = runs.get(rank)
            yield (
                "part",
                (
                    f"rank {rank}{size}:"
                    f" {'; '.join(held) or 'nowhere'}{f' (run {short(run)})' if run else ''}"
                ),
            )
        return
    by_place = sorted(state.replicas, key=lambda one: (one.tier, one.node, one.status, one.rank))
    for (tier, node, status), group in groupby(
        by_place, key=lambda one: (one.tier, one.node, one.status)
    ):
        found = list(group)
        ranks = ranks_text(dict.fromkeys(one.rank for one in found))
        gone = "" if status == "ok" else f", {status}"
        yield (
            "parts",
            (
                f"{tier} on {node or '?'}: rank {ranks},"
                f" {size_text(sum(one.bytes for one in found))} added there{gone}"
            ),
        )


def _advice(session: Session, home: PackFolder, found: Sequence[Waiting]) -> list[str]:
    """A line for each of at most ``LISTED`` late processes: which process it is, and what to do."""
    from datastates.lineage.write.runs import of_ranks

    lines: dict[str, None] = {}
    for each in found[:LISTED]:
        runs = of_ranks(session, each.uid, each.missing[:LISTED])
        for rank in each.missing[:LISTED]:
            named, run = f"rank {rank} of {each.world_size}", runs.get(rank)
            if run is None:
                lines[
                    f"{named} tracks nothing here: start all ranks of the job; `datastates gc`"
                    " removes what waits"
                ] = None
            else:
                what = _WHAT_TO_DO[life_of(run, home)].format(pid=run.pid, host=run.host)
                lines[f"{named} is process {run.pid} on {run.host}, {what}"] = None
    return list(lines)[:LISTED]


def _held(replica: Replica) -> str:
    where = f"{replica.tier} on {replica.node or '?'}"
    return (
        f"{where}, {size_text(replica.bytes)} added there"
        if replica.status == "ok"
        else f"{where}, {replica.status}"
    )


def _waiting_table(found: tuple[Waiting, ...]) -> TextTable:
    made = TextTable(
        [
            *(
                Column("waiting", is_flexible=True),
                Column("branch", is_flexible=True),
                Column("step", is_number=True),
            ),
            *(
                Column("for ranks", is_flexible=True),
                Column("of", is_number=True),
                Column("since", rank=2),
            ),
            Column("its runs", rank=1),
        ]
    )
    for each in found:
        missing = ranks_text(each.missing) or "none: for the state before it"
        life = Text("have ended", "red") if each.has_ended else Text("not ended")
        state = Text(short(each.uid), "yellow")
        made.add(
            state,
            each.branch or "",
            str(each.step),
            missing,
            str(each.world_size),
            age_text(each.since),
            life,
        )
    return made


def _given_up_table(found: tuple[GivenUpState, ...]) -> TextTable:
    made = TextTable(
        [
            *(
                Column("given up", is_flexible=True),
                Column("branch", is_flexible=True),
                Column("step", is_number=True),
            ),
            *(
                Column("rank", is_number=True),
                Column("of", is_number=True, rank=2),
                Column("what", rank=1),
            ),
            *(Column("why", is_flexible=True), Column("when", rank=3)),
        ]
    )
    for each in found:
        what = (
            Text(short(each.uid), "yellow"),
            each.branch or "",
            str(each.step),
            str(each.rank),
            str(each.world_size),
        )
        made.add(*what, each.why.value, each.reason, age_text(each.given_up_at))
    return made
