"""``compare``: states side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .complete import ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from rich.text import Text

    from datastates.lineage.show.comparison import Comparison, ComparisonRow
    from datastates.lineage.states import Value

    from .tables import Table

__all__ = ["register"]

_KINDS = (("config", "config."), ("metrics", "metrics."), ("attributes", "attr."), ("code", ""))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(compare)


def compare(
    context: typer.Context,
    revs: Annotated[
        list[str],
        typer.Argument(metavar="REV", help="Two to 32 states: names of branches, uids, main@best:val_loss, …", autocompletion=ref_names),
    ],
    show_same: Annotated[bool, typer.Option("--all", "-a", help="Also show what is the same in all of them.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Put states beside each other: configuration, metrics, attributes, and where each can be restored. No payload is read."""
    from datastates.lineage.search import revision
    from datastates.lineage.show import comparison

    shell = Shell(context, repo, as_json)
    comparison.check_count(len(revs))
    with shell.reading() as session:
        found = comparison.compare(session, revs, [revision.resolve(session, rev) for rev in revs])
    if shell.as_json:
        shell.write_json(found)
        return
    shell.write(_table(found, show_same=show_same))
    same = sum(not row.differs for kind, _ in _KINDS for row in getattr(found, kind))
    if same and not show_same:
        shell.hint(f"{same} more are the same in all of them: --all shows them, too")


def _table(found: Comparison, *, show_same: bool) -> Table:
    """A table with a column for each state; the best value of each metric is green."""
    from rich.text import Text

    from datastates.lineage.show.texts import short, step_text

    from .render import stored_text
    from .tables import Column, Table

    table = Table([Column("", is_flexible=True), *(Column(each.rev, is_number=True, is_flexible=True) for each in found.states)])
    table.add("state", *(Text(short(each.state.uid), "yellow") for each in found.states))
    table.add("step", *(step_text(each.state) for each in found.states))
    if any(each.branch != each.rev for each in found.states):
        table.add("branch", *(each.branch or "" for each in found.states))
    for kind, prefix in _KINDS:
        for row in getattr(found, kind):
            if row.differs or show_same:
                table.add(prefix + row.key, *_cells(row))
    table.add("bytes", *(stored_text(each.state) for each in found.states))
    table.add("lies", *(", ".join(each.places) for each in found.states))
    if any(not each.state.status.is_restorable for each in found.states):
        table.add("restorable", *("nothing" if each.nearest is None else short(each.nearest.uid) for each in found.states))
    return table


def _cells(row: ComparisonRow) -> list[Text]:
    from rich.text import Text

    best = _best(row)
    return [Text(_value(value), "green" if best is not None and value == best else "") for value in row.values]


def _best(row: ComparisonRow) -> float | None:
    numbers: Sequence[float] = [value for value in row.values if isinstance(value, int | float) and value == value]
    if row.direction is None or not row.differs or len(numbers) < 2:
        return None
    return min(numbers) if row.direction == "min" else max(numbers)


def _value(value: Value) -> str:
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
