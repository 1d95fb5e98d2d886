"""``log``, ``show`` and ``find``: which states there are, and what is known of them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from .complete import ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from rich.table import Table
    from sqlalchemy.orm import Session

    from datastates.api.models import StateDetail
    from datastates.lineage import Ref, Run, State

__all__ = ["register"]

Limit = Annotated[int, typer.Option("--limit", "-n", min=0, help="At most so many states; 0: all.")]

FOUND = 100
"""How many states ``find`` shows to people who did not say."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(log)
    app.command()(show)
    app.command()(find)


def log(
    context: typer.Context,
    rev: Annotated[
        str | None,
        typer.Argument(
            metavar="REV",
            help="A state, or a range a..b or a...b (default: main, else all).",
            show_default=False,
            autocompletion=ref_names,
        ),
    ] = None,
    limit: Limit = 20,
    all_refs: Annotated[bool, typer.Option("--all", "-a", help="Begin at every branch and tag.")] = False,
    oneline: Annotated[bool, typer.Option("--oneline", help="One line a state.")] = False,
    graph: Annotated[bool, typer.Option("--graph/--no-graph", help="Draw the branches beside the states.")] = True,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show states and their ancestors, newest first."""
    from datastates.lineage.change import refs

    if rev is not None and all_refs:
        raise typer.BadParameter("--all begins everywhere: leave REV out", param_hint="--all")
    shell = Shell(context, repo, as_json)
    with shell.reading() as session:
        names = refs.refs(session)
        states = _select(session, rev, None if limit == 0 else limit, all_refs=all_refs)
    if shell.as_json:
        shell.write_lines(states)
        return
    from .graph import log_lines

    shell.write(*log_lines(states, names, is_drawn=graph, is_short=oneline))


def show(
    context: typer.Context,
    rev: Annotated[str, typer.Argument(metavar="REV", help="A state: uid, name, main~3, main@best:val_loss, …", autocompletion=ref_names)],
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show all that is known of one state."""
    from datastates.api.details import detail_of
    from datastates.lineage.search import revision, walk
    from datastates.store.naming import packs_of

    shell = Shell(context, repo, as_json)
    with shell.reading() as session:
        uid = revision.resolve(session, rev).uid
        known = detail_of(session, uid, packs_of(shell.location().packs, uid))
        parents, children = walk.states(session, known.parents), walk.states(session, known.children)
    if shell.as_json:
        shell.write_json(known)
    else:
        shell.write(_facts(known, parents, children))


def find(
    context: typer.Context,
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="Such as 'metrics.val_loss < 0.2 and step > 500 order by metrics.val_loss limit 5'.")
    ],
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            help=f"At most so many states; 0: all (default: the query's own limit, else {FOUND}; with --json all).",
            show_default=False,
        ),
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Find states by metric, step, branch, tag, attribute, run or ancestry."""
    from datastates.lineage.change import refs
    from datastates.lineage.search import pages as search
    from datastates.lineage.search.query import parse_query

    shell = Shell(context, repo, as_json)
    if limit is None and not shell.as_json and parse_query(query).limit is None:
        limit = FOUND
    with shell.reading() as session:
        found = search.find_all(session, query)
        if shell.as_json:
            shell.write_lines(islice(found, limit or None))
            return
        states = list(islice(found, limit + 1 if limit else None))
        names = refs.refs(session)
    _write_found(shell, states, names, limit)


def _write_found(shell: Shell, states: list[State], names: list[Ref], limit: int | None) -> None:
    """A table; and, where there is more than ``limit``, how to see it."""
    from .render import by_state, states_table

    shown = states[: limit or None]
    if shown:
        shell.write(states_table(shown, by_state(names)))
    if len(shown) < len(states):
        shell.hint(f"these are the first {limit}: -n 0 shows all, 'limit' in the query or -n another number")


def _select(session: Session, rev: str | None, limit: int | None, *, all_refs: bool) -> list[State]:
    """The states that the log is to show, newest first."""
    from datastates.lineage.change import refs
    from datastates.lineage.search import revision, walk

    if rev is not None and ".." in rev:
        return revision.resolve_range(session, rev).states(session, limit)
    if rev is not None:
        return walk.log(session, revision.resolve(session, rev).uid, limit=limit)
    heads = {ref.name: ref.state for ref in refs.refs(session)}
    if "main" in heads and not all_refs:
        return walk.log(session, heads["main"], limit=limit)
    return _merge(session, sorted(set(heads.values())), limit)


def _merge(session: Session, heads: list[str], limit: int | None) -> list[State]:
    """The histories of several heads in one, each state once. Row ids fall along every path: a child comes before its parents."""
    from datastates.lineage.lookup import ids_of
    from datastates.lineage.search import walk

    found = {state.uid: state for head in heads for state in walk.log(session, head, limit=limit)}
    order = sorted(zip(ids_of(session, list(found)), found.values(), strict=True), key=lambda pair: -pair[0])
    return [state for _, state in order[:limit]]


def _facts(state: StateDetail, parents: list[State], children: list[State]) -> Table:
    from .render import age_text, facts_table, refs_text, short, size_text, state_text, status_text, step_text, time_text

    named = str(refs_text(state.refs)).strip(" ()")
    kinds = {edge.parent: f"  {edge.kind.value}, weight {edge.weight:g}" for edge in state.edges}
    facts: list[tuple[str, object]] = [
        ("state", state.uid),
        ("digest", state.digest),
        ("refs", named),
        ("status", status_text(state.status)),
    ]
    facts += [("step", step_text(state)), ("captured", f"{time_text(state.created_at)}, {age_text(state.created_at)}")]
    facts += [("message" if number == 0 else " ", line) for number, line in enumerate((state.message or "").splitlines())]
    facts += [("metric", f"{key} = {value:.9g}") for key, value in sorted(state.metrics.items())]
    facts += [("attribute", f"{key} = {value!r}") for key, value in sorted(state.attributes.items())]
    facts += [("config", f"{key} = {value!r}") for key, value in sorted(state.config.items())]
    facts += [("parent", state_text(parent).append(kinds.get(parent.uid, ""))) for parent in parents]
    facts += [("child", state_text(child)) for child in children]
    facts += [("size", f"{size_text(state.bytes_total)}, {size_text(state.bytes_new)} of it new"), ("generation", state.generation)]
    facts += [("ranks", state.world_size if state.world_size > 1 else None)]
    facts += [
        ("replica", f"{one.tier} on {one.node or '?'}, rank {one.rank}, {size_text(one.bytes)} added there") for one in state.replicas
    ]
    facts += [("pack", f"{pack.name}, {size_text(pack.bytes)}") for pack in state.packs]
    if state.run_record is not None:
        facts += _run_facts(state.run_record, short(state.run_record.uid))
    return facts_table(facts)


def _run_facts(run: Run, name: str) -> list[tuple[str, object]]:
    from .render import time_text

    ended = "still going, or never said goodbye" if run.finished_at is None else f"until {time_text(run.finished_at)}"
    commit = None if run.git_commit is None else run.git_commit[:12] + (" with changes" if run.git_dirty else "")
    versions = ", ".join(f"{package} {version}" for package, version in sorted(run.versions.items()))
    return [
        ("run", f"{name}{f' of branch {run.branch}' * bool(run.branch)} by {run.user} on {run.host}, process {run.pid}"),
        ("ran", f"{time_text(run.started_at)}, {ended}"),
        ("command", " ".join(run.argv)),
        ("commit", commit),
        ("versions", versions),
    ]
