"""``incomplete``: states of several ranks that are not whole; and for ``show``, the parts of those that are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.lineage.show.branches import Life

from .shell import MOST, AsJson, Repo, Shell

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.api.models import Replica, StateDetail
    from datastates.lineage.change.awaited import Waiting
    from datastates.lineage.search.incomplete import GivenUpState
    from datastates.opening.home import Home

    from .tables import Table

__all__ = ["late_text", "part_facts", "register"]

LISTED = 16
"""The most ranks with a line each; with more ranks there is a line for each place."""


LATE_S = 5.0
"""How many seconds a state may wait for parts before ``log`` reports it: ranks are never quite at once."""

_WHAT_TO_DO = {
    Life.RUNNING: (
        "which runs: its log says why it is late, or 'py-spy dump --pid {pid}' there; what waits is given up after the job's "
        "group_patience_s"
    ),
    Life.ENDED: "which has ended: start the job again, which goes on from its newest whole state; 'datastates gc' removes what waits",
    Life.UNKNOWN: "of which nothing is to be seen from here: look on {host}",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(incomplete)


def incomplete(
    context: typer.Context,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, max=MOST, help="Show at most this many that were given up; 0 shows all.")
    ] = 20,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show the states of several ranks that still wait for parts, and those that were given up, and why."""
    from datastates.lineage.search.incomplete import incomplete as ask
    from datastates.opening.home import look_at

    shell = Shell(context, repo, as_json)
    home = look_at(shell.location())
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
        shell.hint(f"these are the last {len(found.given_up)} of {found.total_given_up} that were given up: -n 0 shows all")


def late_text(found: Sequence[Waiting]) -> str | None:
    """The line of ``log`` about states that wait; None if none has waited for long."""
    from datetime import UTC, datetime

    from .render import age_text

    late = [each for each in found if (datetime.now(UTC) - each.since).total_seconds() > LATE_S]
    if not late:
        return None
    more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    return f"{late[0]}, {age_text(late[0].since)}{more}: 'datastates incomplete' says whose process that is, and what to do"


def part_facts(state: StateDetail) -> Iterator[tuple[str, str]]:
    """The facts for ``show`` about a state of several ranks: whose part is where."""
    from datastates.lineage.change.awaited import ranks_text
    from datastates.lineage.show.by_rank import by_rank

    from .render import short, size_text

    if state.world_size <= LISTED:
        runs = {part.rank: part.run for part in state.parts}
        sizes = {part.rank: part.bytes_total for part in state.parts}
        measured = by_rank(state.metrics, state.world_size)[1]
        for rank in range(state.world_size):
            held = [_held(one) for one in state.replicas if one.rank == rank]
            size = f", {size_text(sizes[rank])}" if rank in sizes else ""
            size += "".join(f", {name}={values[rank]:.6g}" for name, values in sorted(measured.items()) if rank in values)
            run = runs.get(rank)
            yield "part", f"rank {rank}{size}: {'; '.join(held) or 'nowhere'}{f' (run {short(run)})' if run else ''}"
        return
    by_place = sorted(state.replicas, key=lambda one: (one.tier, one.node, one.status, one.rank))
    for (tier, node, status), group in groupby(by_place, key=lambda one: (one.tier, one.node, one.status)):
        found = list(group)
        ranks = ranks_text(dict.fromkeys(one.rank for one in found))
        gone = "" if status == "ok" else f", {status}"
        yield "parts", f"{tier} on {node or '?'}: rank {ranks}, {size_text(sum(one.bytes for one in found))} added there{gone}"


def _advice(session: Session, home: Home, found: Sequence[Waiting]) -> list[str]:
    """A line for each of at most ``LISTED`` late processes: which process it is, and what to do."""
    from datastates.lineage.change.runs import of_ranks
    from datastates.opening.life import life_of

    lines: dict[str, None] = {}
    for each in found[:LISTED]:
        runs = of_ranks(session, each.uid, each.missing[:LISTED])
        for rank in each.missing[:LISTED]:
            named, run = f"rank {rank} of {each.world_size}", runs.get(rank)
            if run is None:
                lines[f"{named} tracks nothing here: start all ranks of the job; 'datastates gc' removes what waits"] = None
            else:
                what = _WHAT_TO_DO[life_of(run, home)].format(pid=run.pid, host=run.host)
                lines[f"{named} is process {run.pid} on {run.host}, {what}"] = None
    return list(lines)[:LISTED]


def _held(replica: Replica) -> str:
    from .render import size_text

    where = f"{replica.tier} on {replica.node or '?'}"
    return f"{where}, {size_text(replica.bytes)} added there" if replica.status == "ok" else f"{where}, {replica.status}"


def _waiting_table(found: tuple[Waiting, ...]) -> Table:
    from rich.text import Text

    from datastates.lineage.change.awaited import ranks_text

    from .render import age_text, short
    from .tables import Column, Table

    made = Table(
        [
            *(Column("waiting", is_flexible=True), Column("branch", is_flexible=True), Column("step", is_number=True)),
            *(Column("for ranks", is_flexible=True), Column("of", is_number=True), Column("since", rank=2)),
            Column("its runs", rank=1),
        ]
    )
    for each in found:
        missing = ranks_text(each.missing) or "none: for the state before it"
        life = Text("have ended", "red") if each.has_ended else Text("not ended")
        state = Text(short(each.uid), "yellow")
        made.add(state, each.branch or "", str(each.step), missing, str(each.world_size), age_text(each.since), life)
    return made


def _given_up_table(found: tuple[GivenUpState, ...]) -> Table:
    from rich.text import Text

    from .render import age_text, short
    from .tables import Column, Table

    made = Table(
        [
            *(Column("given up", is_flexible=True), Column("branch", is_flexible=True), Column("step", is_number=True)),
            *(Column("rank", is_number=True), Column("of", is_number=True, rank=2), Column("what", rank=1)),
            *(Column("why", is_flexible=True), Column("when", rank=3)),
        ]
    )
    for each in found:
        what = (Text(short(each.uid), "yellow"), each.branch or "", str(each.step), str(each.rank), str(each.world_size))
        made.add(*what, each.why.value, each.reason, age_text(each.given_up_at))
    return made
