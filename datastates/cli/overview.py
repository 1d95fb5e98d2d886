"""``branches``, ``best``, ``runs``, ``stats`` and ``watch``: the answers to what a person asks first."""

from __future__ import annotations

import csv
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Annotated, Unpack

import typer
from rich.text import Text

from .interrupt import orderly
from .shell import MOST, AsJson, Limit, Repo, Shell

if TYPE_CHECKING:
    from rich.console import RenderableType
    from sqlalchemy.orm import Session

    from datastates.lineage.show.branches import Branches
    from datastates.lineage.show.overview import Choice
    from datastates.opening.home import Home

__all__ = ["register"]

NOTHING = "nothing is captured here yet: run.capture() in a training makes the first state, 'datastates demo' a repository to look at"

Query = Annotated[
    str,
    typer.Argument(
        metavar="QUERY", help="A condition on the newest state of each branch, such as 'metrics.val_loss < 0.2'.", show_default=False
    ),
]
Metric = Annotated[
    str | None, typer.Option("--metric", "-m", metavar="KEY", help="The metric of the values and curves (default: the most relevant one).")
]
Rising = Annotated[
    bool | None, typer.Option("--max/--min", help="Whether larger or smaller values are better (default: by the metric's name).")
]
Sorted = Annotated[
    str,
    typer.Option(
        "--sort",
        metavar="BY",
        help="changed, name, began, best, last, step, states, restorable, durable, bytes or took; -BY: the other way.",
    ),
]
Grouped = Annotated[
    str | None,
    typer.Option(
        "--group", metavar="BY", help="Put branches with the same value together: study, config.KEY or attr.KEY.", show_default=False
    ),
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Write a table for a spreadsheet.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (branches, best, runs, stats, watch):
        app.command()(command)


def branches(
    context: typer.Context,
    query: Query = "",
    name: Annotated[str, typer.Option("--name", metavar="PART", help="Only branches whose name contains this.", show_default=False)] = "",
    metric: Metric = None,
    rising: Rising = None,
    sort: Sorted = "changed",
    group: Grouped = None,
    limit: Limit = 50,
    as_csv: AsCsv = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show each branch: its curve, its best, what can be restored, where it forked, what was configured, whether it runs."""
    shell = Shell(context, repo, as_json)
    with _looking(shell) as (session, home):
        found = _ask((session, home), query, rising, name=name, metric=metric, sort=sort, group=group, limit=limit or None)
    _write(shell, found, as_csv=as_csv)


def best(
    context: typer.Context,
    metric: Annotated[str, typer.Argument(metavar="METRIC", help="Such as val_loss.")],
    query: Query = "",
    rising: Rising = None,
    limit: Limit = 10,
    as_csv: AsCsv = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show the branches with the best values of a metric, and how to get the best that can be restored."""
    from datastates.lineage.search.names import check_names

    shell = Shell(context, repo, as_json)
    with _looking(shell) as (session, home):
        check_names(session, f"metrics.{_quoted(metric)} > 0")
        found = _ask((session, home), query, rising, metric=metric, sort="best", limit=limit or None)
    found = replace(found, items=tuple(item for item in found if item.best is not None))
    _write(shell, found, as_csv=as_csv)
    points = [item.best_restorable for item in found if item.best_restorable is not None]
    if points and not shell.as_json and not as_csv:
        sign = 1 if found.direction == "min" else -1
        point = min(points, key=lambda each: sign * (each.value or 0.0))
        shell.hint(f"the best that can be restored: datastates restore {point.state[:10]} --into best.safetensors")


def runs(
    context: typer.Context,
    limit: Limit = 20,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the trainings, the newest first, and say which of them still run."""
    from datastates.api.processes import infos
    from datastates.lineage.change import runs as lineage_runs

    from .glance import runs_table

    shell = Shell(context, repo, as_json)
    with _looking(shell) as (session, home):
        known, more = lineage_runs.listing(session, limit=limit or sys.maxsize >> 1)
        found = infos(session, known, home)
    if shell.as_json:
        shell.write_lines(found)
    elif not found:
        shell.hint(NOTHING)
    else:
        shell.write(runs_table(found, shell.console.width))
        if more:
            shell.hint(f"these are the last {limit}: -n 0 shows all")


def stats(context: typer.Context, repo: Repo = None, as_json: AsJson = False) -> None:
    """Show how much there is: states by status, names, runs, bytes, and the range of each metric."""
    from datastates.api.models import Stats
    from datastates.lineage.show import stats as numbers
    from datastates.store.naming import bytes_of_packs

    from .glance import stats_table

    shell = Shell(context, repo, as_json)
    stored = bytes_of_packs(shell.location().packs)
    with shell.reading() as session:
        counts = numbers.count(session)
        known = {field.name: getattr(counts, field.name) for field in fields(counts)}
        found = Stats(**known, bytes_stored=stored, newest=numbers.newest(session))
    if shell.as_json:
        shell.write_json(found)
        return
    shell.write(stats_table(found))
    if not found.states:
        shell.hint(NOTHING)


def watch(
    context: typer.Context,
    query: Query = "",
    metric: Metric = None,
    rising: Rising = None,
    sort: Sorted = "changed",
    group: Grouped = None,
    limit: Limit = 20,
    every: Annotated[float, typer.Option("--every", min=0.1, max=86_400.0, metavar="SECONDS", help="How often to look.")] = 2.0,
    times: Annotated[int, typer.Option("--times", min=0, max=MOST, help="How often in all; 0: until Ctrl-C.")] = 0,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show the branches while they are trained; Ctrl-C ends it. In a pipe they are written again whenever something changed."""
    shell = Shell(context, repo, as_json)

    def look() -> Branches:
        with _looking(shell) as where:
            return _ask(where, query, rising, metric=metric, sort=sort, group=group, limit=limit or None)

    _watch(shell, look, every, times)


def _watch(shell: Shell, look: Callable[[], Branches], every_s: float, times: int) -> None:
    """Look again and again. In a terminal one table is redrawn; elsewhere each table that differs is written below the previous one."""
    from rich.live import Live

    from .glance import branches_table

    orderly()  # what moves hides the cursor, and shows it again when it ends
    waiting, before = threading.Event(), None
    numbers = range(times) if times else count()
    if shell.console.is_terminal and not shell.as_json:
        with Live(console=shell.console, auto_refresh=False) as live:
            for number in numbers:
                waiting.wait(every_s if number else 0)
                live.update(_said(look(), shell.console.width), refresh=True)
        return
    for number in numbers:
        waiting.wait(every_s if number else 0)
        found = look()
        if found == before:
            continue
        before = found
        if shell.as_json:
            shell.write_json(found)
        elif not found.total:
            shell.hint(NOTHING)
        else:
            shell.write(branches_table(found, shell.console.width), Text())
        sys.stdout.flush()


def _said(found: Branches, width: int) -> RenderableType:
    from rich.console import Group

    from .glance import branches_table

    running = sum(item.life == "running" for item in found)
    line = f"{running} running of {found.matching} branches, {datetime.now():%H:%M:%S}; Ctrl-C ends this"
    return Group(branches_table(found, width), Text(line if found.total else NOTHING, style="dim"))


def _write(shell: Shell, found: Branches, *, as_csv: bool) -> None:
    from .glance import branches_table, rows_of

    if as_csv:
        rows = rows_of(found)
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else ["branch"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif shell.as_json:
        shell.write_lines(found)
    elif not found.total:
        shell.hint(NOTHING)
    elif not len(found):
        shell.hint(f"none of {found.total} branches is so: leave out the condition")
    else:
        shell.write(branches_table(found, shell.console.width))
        if len(found) < found.matching:
            shell.hint(f"these are {len(found)} of {found.matching}: -n 0 shows all")


def _quoted(key: str) -> str:
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def _looking(shell: Shell) -> Iterator[tuple[Session, Home]]:
    """A transaction that reads the lineage, and the folder whose leases show which processes live."""
    from datastates.opening.home import look_at

    home = look_at(shell.location())
    with shell.reading() as session:
        yield session, home


def _ask(where: tuple[Session, Home], query: str, rising: bool | None, **choice: Unpack[Choice]) -> Branches:
    from datastates.lineage.show import overview
    from datastates.lineage.show.goals import Direction
    from datastates.opening.life import life_of

    session, home = where
    choice["direction"] = None if rising is None else Direction.MAX if rising else Direction.MIN
    choice["living"] = partial(life_of, home=home)
    return overview.branches(session, query, **choice)
