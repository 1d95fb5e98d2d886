"""``cadence``: how often states of a branch should become durable, by the measured costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .complete import branch_names
from .shell import AsJson, Repo, Shell
from .tables import Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from datastates.policy.advice import Advice

__all__ = ["register"]

Branch = Annotated[
    str | None,
    typer.Argument(metavar="BRANCH", help="Its trainings (default: whatever was trained last).", autocompletion=branch_names),
]
Mtbf = Annotated[
    str | None,
    typer.Option("--mtbf", metavar="TIME", help="The time between failures of a process: 90m, 6h, 2d (default: as observed here)."),
]
NodeMtbf = Annotated[
    str, typer.Option("--node-mtbf", metavar="TIME", help="The time between losses of a node with its disk, for two levels.")
]
Overhead = Annotated[str, typer.Option("--overhead", metavar="SHARE", help="The share of the time that CheckFreq may take.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(cadence)


def cadence(
    context: typer.Context,
    branch: Branch = None,
    mtbf: Mtbf = None,
    node_mtbf: NodeMtbf = "30d",
    overhead: Overhead = "3.5%",
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Say how often states became durable and why, what that cost, and what each computed cadence would choose."""
    from datastates.policy.advice import advise
    from datastates.policy.checkfreq import CheckFreq
    from datastates.policy.mtbf import TwoLevel
    from datastates.policy.spelling import read_duration, read_percent

    shell = Shell(context, repo, as_json)
    asked = TwoLevel(None if mtbf is None else read_duration(mtbf), read_duration(node_mtbf))
    share = CheckFreq(read_percent(overhead)).overhead
    with shell.reading() as session:
        found = advise(session, branch, mtbf_s=asked.mtbf_s, node_mtbf_s=asked.node_mtbf_s, overhead=share)
    if shell.as_json:
        shell.write_json(found)
        return
    shell.write(*_facts(found))
    if found.alternatives:
        shell.write("", _table(found))
        shell.hint('waste is what writes and failures are expected to cost; say one of these as track(cadence="…") or DATASTATES_CADENCE')
    else:
        shell.hint(
            "no training here has measured what writing costs: a cadence is learnt from three writes of a training with this version"
        )


def _facts(found: Advice) -> Iterator[str]:
    from datastates.lineage.show.texts import short, time_text
    from datastates.policy.contract import span

    if found.run is not None and found.started_at is not None:
        yield f"branch {found.branch or '-'}, training {short(found.run)} of {time_text(found.started_at)}"
    if found.chosen is not None:
        yield f"it went by {found.chosen.cadence}: {found.chosen.why}"
    costs = found.costs
    if costs is not None:
        yield (
            f"a capture came every {span(costs.interval_s)} and held the training for {span(costs.held_s)}; a write took "
            f"{span(costs.write_s)} and delayed by {span(costs.overhead_s)} ({costs.captures} captures, {costs.writes} writes)"
        )
    seen = found.failures
    why = "as given" if found.is_given else "with one in 24 h added"
    died = f"{seen.died} of {seen.processes} processes died in {span(seen.ran_s)}"
    yield f"{died}: reckoned with is a failure every {span(found.mtbf_s)}, {why}"


def _table(found: Advice) -> Table:
    from datastates.policy.contract import span

    table = Table(
        [Column("cadence"), Column("a state every", is_number=True), Column("waste", is_number=True), Column("why", is_flexible=True)]
    )
    for each in found.alternatives:
        table.add(each.choice.cadence, span(each.interval_s), f"{100 * each.waste:.3g}%", each.choice.why)
    return table
