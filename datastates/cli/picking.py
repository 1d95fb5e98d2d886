"""The meaning of ``--columns``, ``--sort`` and ``--since``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import InvalidInput, SyntaxProblem

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.lineage.search.query import Field, Node, Order, Query

__all__ = ["AsCsv", "Columns", "Since", "Sort", "columns_of", "refine"]

Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        "-c",
        metavar="NAMES",
        help="Columns, by commas: loss,attr.seed (default: what matters).",
        show_default=False,
    ),
]
Sort = Annotated[
    str | None, typer.Option("--sort", metavar="NAME", help="Order by a column: loss, 'val_acc desc', step.", show_default=False)
]
Since = Annotated[str | None, typer.Option("--since", metavar="AGE", help="Captured since: 2h, 30m, 7d, 2026-11-21.", show_default=False)]
AsCsv = Annotated[bool, typer.Option("--csv", help="Write CSV, with whole uids.", show_default=False)]


def refine(session: Session, query: Query, *, sort: str | None, since: str | None) -> Query:
    """The query, ordered and bounded as the options say.

    :raises SyntaxProblem: ``sort`` names nothing that is known.
    :raises InvalidInput: ``since`` is neither an age nor a date.
    """
    from datastates.lineage.search.query import AllOf

    if since is not None:
        parts = (*query.conjuncts, _later(since))
        query = replace(query, condition=AllOf(parts) if len(parts) > 1 else parts[0])
    return query if sort is None else replace(query, order=tuple(_order(session, part) for part in _parts(sort)))


def columns_of(session: Session, text: str) -> list[Field]:
    """The fields that ``--columns`` names.

    :raises SyntaxProblem: one is not known; names the closest.
    """
    from datastates.lineage.search.names import field_of

    return [field_of(session, part) for part in _parts(text)]


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InvalidInput("no column is named: give names such as loss,step")
    return parts


def _order(session: Session, text: str) -> Order:
    from datastates.lineage.search.names import field_of, written
    from datastates.lineage.search.query import parse_query

    name, _, direction = text.rpartition(" ")
    if direction.lower() not in ("asc", "desc"):
        name, direction = text, ""
    (order,) = parse_query(f"order by {written(field_of(session, name.strip()))} {direction}").order
    return order


def _later(since: str) -> Node:
    from datastates.lineage.search.query import parse_query

    for form in (f"created >= now-{since.strip()}", f"created >= {since.strip()}", f"created >= '{since.strip()}'"):
        try:
            (condition,) = parse_query(form).conjuncts
        except (SyntaxProblem, ValueError):
            continue
        return condition
    raise InvalidInput(f"--since {since!r} is no age and no date: give 2h, 30m, 7d or 2026-11-21")
