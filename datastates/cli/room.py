"""``du`` and ``prune``: what each branch takes on disk, and what may be dropped."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.lineage.show.texts import plural

from .complete import branch_names
from .payload import counting
from .shell import AsJson, Limit, Repo, Shell

if TYPE_CHECKING:
    from datastates.upkeep.retention import Pruned
    from datastates.upkeep.usage import StateUse, Usage

    from .tables import Table

__all__ = ["register", "show_pruned"]

_LISTED = 20

Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        "-k",
        metavar="POLICY",
        help="What stays of each branch, such as 'latest:5 best:3:val_loss every:1000 at-most:50G' (default: as its training asked).",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (du, prune):
        app.command()(command)


def du(
    context: typer.Context,
    branch: Annotated[
        str | None,
        typer.Argument(metavar="BRANCH", help="Its states, one by one; without it, all branches.", autocompletion=branch_names),
    ] = None,
    limit: Limit = _LISTED,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show what each branch, or each state of one, takes on disk: what dropping it would free, and what others need as well."""
    from datastates.errors import NotFound
    from datastates.upkeep.usage import usage

    shell = Shell(context, repo, as_json)
    with shell.repository() as repository, counting(shell, "reading states") as count:
        found = usage(repository.core, on_progress=count)
    states = sorted((use for use in found.states if use.branch == branch), key=lambda use: -use.step)
    if branch is not None and not states:
        raise NotFound(f"branch {branch!r} has no state of its own on disk: `datastates du` lists the branches that have some")
    if shell.as_json:
        shell.write_lines(found.branches if branch is None else states)
    elif branch is None:
        _show_branches(shell, found, limit)
    else:
        _show_states(shell, states, limit)


def prune(
    context: typer.Context,
    keep: Keep = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be dropped.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Drop the bytes of states that a policy does not keep; they stay in the lineage. Trainings may go on.

    Whatever the policy says, these stay: what names lead to, the newest durable state of each branch, and where branches forked.
    """
    shell = Shell(context, repo, as_json)
    with shell.repository() as repository, counting(shell, "pruning") as count:
        report = repository.prune(keep, dry_run=dry_run, on_progress=count)
    show_pruned(shell, report)


def _show_branches(shell: Shell, found: Usage, limit: int) -> None:
    from .render import size_text

    made = _table("branch", "states")
    for use in found.branches[: limit or None]:
        made.add(use.branch or "(no branch)", f"{use.states:,}", size_text(use.own_bytes), size_text(use.shared_bytes))
    shell.write(made)
    if len(found.branches) > limit > 0:
        shell.hint(f"these are {limit} of {len(found.branches)}: -n 0 shows all")
    shell.write(f"{plural(len(found.states), 'state')}, {size_text(found.bytes)} on disk")


def _show_states(shell: Shell, states: list[StateUse], limit: int) -> None:
    from .render import short, size_text
    from .tables import Column

    made = _table("state", "step")
    made.columns.append(Column("stays because of", is_flexible=True, rank=1))
    for use in states[: limit or None]:
        made.add(short(use.uid), f"{use.step}", size_text(use.own_bytes), size_text(use.shared_bytes), use.stays or "")
    shell.write(made)
    if len(states) > limit > 0:
        shell.hint(f"these are the newest {limit} of {len(states)}: -n 0 shows all")


def _table(name: str, number: str) -> Table:
    from .tables import Column, Table

    numbers = (Column(each, is_number=True) for each in (number, "dropping it frees", "shared with others"))
    return Table([Column(name, is_flexible=True), *numbers])


def show_pruned(shell: Shell, report: Pruned) -> None:
    """Write what was dropped, or would be."""
    if shell.as_json:
        import msgspec

        return shell.write_json({**msgspec.to_builtins(report), "bytes_freed": report.bytes_freed})
    from .render import short, size_text

    would = "would be dropped" if report.is_dry_run else "dropped"
    for each in report.dropped[:_LISTED] if report.is_dry_run else ():
        shell.write(f"{short(each.uid)}  {each.branch or '(no branch)'}  step {each.step}  {size_text(each.bytes)}  {each.reason}")
    if report.is_dry_run and len(report.dropped) > _LISTED:
        shell.write(f"and {len(report.dropped) - _LISTED} more")
    for reason, count in Counter(report.kept).most_common(_LISTED):
        shell.write(f"{count:>8,} stay: {reason}")
    freed = f"{size_text(report.bytes_freed)} of {size_text(report.bytes_before)} freed"
    shell.write(f"{plural(len(report.dropped), 'state')} {would}, {freed}; kept: {report.policy}")
    return None
