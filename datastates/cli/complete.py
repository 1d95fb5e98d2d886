"""Completion of names: reads the lineage, needs no torch, and never reports errors."""

from __future__ import annotations

import typer  # noqa: TC002  # typer itself reads the annotations of these functions

from datastates.errors import DatastatesError

from .shell import Globals, Shell

__all__ = ["branch_names", "ref_names", "tag_names"]


def ref_names(context: typer.Context, incomplete: str) -> list[str]:
    """Branches and tags that begin with this text; the last part of a range is completed too."""
    head, dots, last = incomplete.rpartition("..")
    return [f"{head}{dots}{name}" for name, _ in _refs(context) if name.startswith(last)]


def branch_names(context: typer.Context, incomplete: str) -> list[str]:
    """Branches that begin with this text."""
    return [name for name, kind in _refs(context) if kind == "branch" and name.startswith(incomplete)]


def tag_names(context: typer.Context, incomplete: str) -> list[str]:
    """Tags that begin with this text."""
    return [name for name, kind in _refs(context) if kind == "tag" and name.startswith(incomplete)]


def _refs(context: typer.Context) -> list[tuple[str, str]]:
    try:
        from datastates.lineage.search import refs

        # While a line is completed no callback has run: the options are only in the parameters.
        outer = context.parent.params if context.parent is not None else {}
        context.obj = Globals(repo=outer.get("repo"), packs=outer.get("packs"))
        with Shell(context, context.params.get("repo")).reading() as session:
            return [(ref.name, ref.kind.value) for ref in refs.refs(session)]
    except (DatastatesError, OSError):
        return []
