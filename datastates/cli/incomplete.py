"""``incomplete``: states of several ranks that are not whole; and the parts of those that are, for ``show``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from datastates.api.models import Replica, StateDetail
    from datastates.lineage.change.awaited import Waiting
    from datastates.lineage.search.incomplete import GivenUpState

    from .tables import Table

__all__ = ["part_facts", "register"]

LISTED = 16
"""A line a rank, for at most so many; of more ranks a line a place."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(incomplete)


def incomplete(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Show at most this many that were given up; 0 shows all.")] = 20,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show the states of several ranks that wait for the parts of some, and those that were given up, and why."""
    from datastates.lineage.search.incomplete import incomplete as ask

    shell = Shell(context, repo, as_json)
    with shell.reading() as session:
        found = ask(session, limit=limit or 2**31)
    if shell.as_json:
        shell.write_json(found)
        return
    if found.waiting:
        shell.write(_waiting_table(found.waiting))
    else:
        shell.hint("no state waits for parts of other ranks")
    if found.given_up:
        shell.write(*([""] if found.waiting else []), _given_up_table(found.given_up))
    if len(found.given_up) < found.total_given_up:
        shell.hint(f"these are the last {len(found.given_up)} of {found.total_given_up} that were given up: -n 0 shows all")


def part_facts(state: StateDetail) -> Iterator[tuple[str, str]]:
    """What ``show`` says of a state of several ranks: whose part is where."""
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


def _held(replica: Replica) -> str:
    from .render import size_text

    where = f"{replica.tier} on {replica.node or '?'}"
    return f"{where}, {size_text(replica.bytes)} added there" if replica.status == "ok" else f"{where}, {replica.status}"


def _waiting_table(found: tuple[Waiting, ...]) -> Table:
    from datastates.lineage.change.awaited import ranks_text

    from .render import age_text, clean, short
    from .styled import Text
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
        made.add(state, clean(each.branch or ""), str(each.step), missing, str(each.world_size), age_text(each.since), life)
    return made


def _given_up_table(found: tuple[GivenUpState, ...]) -> Table:
    from .render import age_text, clean, short
    from .styled import Text
    from .tables import Column, Table

    made = Table(
        [
            *(Column("given up", is_flexible=True), Column("branch", is_flexible=True), Column("step", is_number=True)),
            *(Column("rank", is_number=True), Column("of", is_number=True, rank=2), Column("what", rank=1)),
            *(Column("why", is_flexible=True), Column("when", rank=3)),
        ]
    )
    for each in found:
        what = (Text(short(each.uid), "yellow"), clean(each.branch or ""), str(each.step), str(each.rank), str(each.world_size))
        made.add(*what, each.why.value, clean(each.reason), age_text(each.given_up_at))
    return made
