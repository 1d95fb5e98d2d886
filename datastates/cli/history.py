"""The commands ``log``, ``show`` and ``find``: the states of a repository, and their data."""

from __future__ import annotations

import csv
import errno
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from datastates.errors import Corrupt, InvalidInput, NotFound, SyntaxProblem, Unavailable
from datastates.lineage.lookup import ids_of
from datastates.lineage.query import names as refs
from datastates.lineage.query import walk
from datastates.lineage.states import GIT_REMOTE, GIT_ROOT, Ref, RefKind, State
from datastates.lineage.views.branch_rows import branches_of, kept_of, newest_id, states_after
from datastates.lineage.views.graph import draw, lanes
from datastates.lineage.views.text import (
    age_text,
    by_rank,
    clean,
    kept_text,
    metrics_text,
    short,
    size_text,
    spread_text,
    step_text,
    time_text,
)

from .app import MOST, AsJson, Limit, Repo, Shell, field_names, ref_names
from .tables import (
    Known,
    by_state,
    change_lines,
    csv_rows,
    facts_table,
    refs_text,
    state_text,
    states_table,
    status_text,
    stored_text,
)

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from datastates.api.models import FileInfo, StateDetail
    from datastates.lineage import Database, Run, State
    from datastates.lineage.query.grammar import Field, Node, Order, Query
    from datastates.lineage.session import Session

Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        "-c",
        metavar="NAMES",
        help="Columns, by commas: loss,attr.seed (default: what matters).",
        show_default=False,
        autocompletion=field_names,
    ),
]
Sort = Annotated[
    str | None,
    typer.Option(
        "--sort",
        metavar="NAME",
        help="Order by a column: loss, 'val_acc desc', step.",
        show_default=False,
        autocompletion=field_names,
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="AGE",
        help="Captured since: 2h, 30m, 7d, 2026-11-21.",
        show_default=False,
    ),
]
AsCsv = Annotated[
    bool, typer.Option("--csv", help="Write CSV, with whole uids.", show_default=False)
]
FOUND = 100
"""How many states ``find`` shows to people who set no limit."""

GONE = "o"
"""The node of a state that cannot be restored. The node of any other state is ``*``."""

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_LOOK_MS = 250
_AGAIN = 256
"""PostgreSQL may commit a lower row id after a higher one, so this many of the last ids are
looked at again."""


def refine(session: Session, query: Query, *, sort: str | None, since: str | None) -> Query:
    """The query, ordered and bounded by the options.

    :raises SyntaxProblem: ``sort`` is no known field.
    :raises InvalidInput: ``since`` is neither an age nor a date.
    """
    from datastates.lineage.query.grammar import AllOf

    if since is not None:
        parts = (*query.conjuncts, _later(since))
        query = replace(query, condition=AllOf(parts) if len(parts) > 1 else parts[0])
    return (
        query
        if sort is None
        else replace(query, order=tuple(_order(session, part) for part in _parts(sort)))
    )


def columns_of(session: Session, text: str) -> list[Field]:
    """The fields that ``--columns`` names.

    :raises SyntaxProblem: one is not known. The text names the most similar one.
    """
    from datastates.lineage.query.fields import field_of

    return [field_of(session, part) for part in _parts(text)]


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InvalidInput("no column is named: give names such as loss,step")
    return parts


def _order(session: Session, text: str) -> Order:
    from datastates.lineage.query.fields import field_of, written
    from datastates.lineage.query.grammar import parse_query

    name, _, direction = text.rpartition(" ")
    if direction.lower() not in ("asc", "desc"):
        name, direction = text, ""
    (order,) = parse_query(f"order by {written(field_of(session, name.strip()))} {direction}").order
    return order


def _later(since: str) -> Node:
    from datastates.lineage.query.grammar import parse_query

    for form in (
        f"created >= now-{since.strip()}",
        f"created >= {since.strip()}",
        f"created >= '{since.strip()}'",
    ):
        try:
            (condition,) = parse_query(form).conjuncts
        except (SyntaxProblem, ValueError):
            continue
        return condition
    raise InvalidInput(f"--since {since!r} is no age and no date: give 2h, 30m, 7d or 2026-11-21")


# --- ``log``, ``show`` and ``find`` ---


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
    all_refs: Annotated[
        bool, typer.Option("--all", "-a", help="Begin at every branch and tag.")
    ] = False,
    oneline: Annotated[bool, typer.Option("--oneline", help="One line a state.")] = False,
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="Draw the branches next to the states.")
    ] = True,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Also show new states as they are recorded, until Ctrl-C."
        ),
    ] = False,
    is_incomplete: Annotated[
        bool,
        typer.Option(
            "--incomplete",
            help="Instead, the states of several ranks that wait for parts or were given up.",
        ),
    ] = False,
    columns: Columns = None,
    sort: Sort = None,
    since: Since = None,
    as_csv: AsCsv = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show states and their ancestors, newest first; with --columns or --sort as a table."""
    if rev is not None and all_refs:
        raise typer.BadParameter("--all begins everywhere: leave REV out", param_hint="--all")
    shell = Shell(context, repo, as_json)
    if is_incomplete:
        from .lists import show_incomplete

        return show_incomplete(shell, limit)
    if follow:
        if sort or since or as_csv or columns:
            raise typer.BadParameter(
                "it goes with no --columns, --sort, --since or --csv", param_hint="--follow"
            )

        return follow_log(shell, rev, limit, all_refs=all_refs)
    with shell.reading() as session:
        names = refs.refs(session)
        most = None if limit == 0 else limit + 1
        if sort is None and since is None:
            states = _select(session, rev, most, all_refs=all_refs)
        else:
            states = _search(
                session, _within(session, rev, all_refs=all_refs), most, sort=sort, since=since
            )[0]
        chosen = None if columns is None else columns_of(session, columns)
        shown, is_table = states[: limit or None], columns is not None or sort is not None or as_csv
        if is_table and not shell.as_json:
            _write_table(
                shell, session, shown, chosen=chosen, asked=_asked(session, sort), as_csv=as_csv
            )
        late = None if shell.as_json or as_csv else _late(session, shown)
    if shell.as_json:
        shell.write_states(shown)
    elif not is_table:
        shell.write_cut(log_lines(shown, names, is_drawn=graph, is_short=oneline))
        if graph and any(not state.status.is_restorable for state in shown):
            shell.hint(
                f"{GONE} marks states that cannot be restored; `datastates restore REV --nearest`"
                " takes the nearest one that can"
            )
    if not names:
        _say_empty(shell)
    elif len(shown) < len(states):
        shell.hint(
            f"these are the newest {limit}: -n 0 shows all, -n another number"
            if sort is None
            else _first(limit)
        )
    if late is not None:
        shell.hint(late)
    return None


def show(
    context: typer.Context,
    rev: Annotated[
        str | None,
        typer.Argument(
            metavar="REV",
            help="A state: uid, name, main~3, …; without it, the repository in numbers.",
            autocompletion=ref_names,
        ),
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show everything about a state, or how much the repository has."""
    from datastates.api.models import detail_of
    from datastates.lineage import lookup
    from datastates.lineage.query import revision
    from datastates.lineage.views.comparison import configured
    from datastates.storage.pack import packs_of

    shell = Shell(context, repo, as_json)
    if rev is None:
        return _show_repository(shell)
    folder = shell.location().packs
    with shell.reading() as session:
        uid = revision.resolve(session, rev).uid
        config = configured(session, uid)
        known = detail_of(session, uid, packs_of(folder, uid))
        parents, children = (
            lookup.states(session, known.parents),
            lookup.states(session, known.children),
        )
        kept = (
            None if known.run_record is None else kept_text(*kept_of(session, known.run_record.uid))
        )
    files = _files(folder, uid) if known.packs else ()
    if shell.as_json:
        before = None if config.before is None else config.before.uid
        record = {"since": config.since.uid, "before": before, "changes": config.changes}
        return shell.write_json(known, configured=record, files=files)
    shell.write(_facts(known, files, parents, children, kept))
    if config.before is not None:
        shell.write(
            "",
            f"configured like this since step {config.since.step}, {short(config.since.uid)};"
            " before that:",
            *change_lines(config.changes),
        )
    return None


def _files(folder: Path, uid: str) -> tuple[FileInfo, ...]:
    """The files that were captured with a state, from its manifest in this folder; none if they
    cannot be read."""
    from datastates.api.models import file_infos
    from datastates.storage.local import LocalTier

    with suppress(OSError, Corrupt, NotFound, Unavailable), LocalTier(folder).open(uid) as reader:
        return file_infos(reader)
    return ()


def _show_repository(shell: Shell) -> None:
    """Show states by status, names, runs, bytes, and the range of each metric."""
    from datastates.api.models import stats_of
    from datastates.lineage.views import detail
    from datastates.storage.pack import bytes_of_packs  # imports torch

    from .lists import NOTHING, stats_table

    stored = bytes_of_packs(shell.location().packs)
    with shell.reading() as session:
        found = stats_of(session, detail.count(session), stored)
    if shell.as_json:
        return shell.write_json(found)
    shell.write(stats_table(found))
    if not found.states:
        shell.hint(NOTHING)
    return None


def find(
    context: typer.Context,
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help=("Such as 'val_loss < 0.2 and step > 500 order by val_loss limit 5'."),
            autocompletion=field_names,
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            max=MOST,
            help=(
                "Show at most this many states; 0 shows all (default: the query's own limit, else"
                f" {FOUND}; with --json and --csv all)."
            ),
            show_default=False,
        ),
    ] = None,
    columns: Columns = None,
    sort: Sort = None,
    since: Since = None,
    as_csv: AsCsv = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Find states by metric, step, branch, tag, attribute, run or ancestry."""
    from datastates.lineage.query.grammar import parse_query

    shell = Shell(context, repo, as_json)
    parsed = parse_query(query)
    if limit is None and not (shell.as_json or as_csv) and parsed.limit is None:
        limit = FOUND
    with shell.reading() as session:
        most = limit + 1 if limit else None
        states, asked = _search(session, parsed, most, sort=sort, since=since, text=query)
        chosen = None if columns is None else columns_of(session, columns)
        shown = states[: limit or None]
        if shown and not shell.as_json:
            _write_table(shell, session, shown, chosen=chosen, asked=asked.fields, as_csv=as_csv)
        is_empty = not shown and not refs.refs(session)
    if shell.as_json:
        shell.write_states(shown)
    if len(shown) < len(states):
        shell.hint(_first(limit))
    elif is_empty:
        _say_empty(shell)
    elif not shown:
        shell.hint("no state fits")


def _first(limit: int | None) -> str:
    return f"these are the first {limit}: -n 0 shows all, 'limit' in the query or -n another number"


def _search(
    session: Session,
    query: Query,
    most: int | None,
    *,
    sort: str | None,
    since: str | None,
    text: str | None = None,
) -> tuple[list[State], Query]:
    """At most ``most`` of the states that match a query with the options, and the query that was
    finally used."""
    from datastates.lineage.query.fields import check_names, resolve_names
    from datastates.lineage.query.pages import find_each

    check_names(session, query, text)
    query = resolve_names(session, query, text or "")
    query = refine(session, query, sort=sort, since=since)
    if most is not None:
        query = replace(query, limit=most if query.limit is None else min(query.limit, most))
    return list(find_each(session, query, text or "")), query


def _write_table(
    shell: Shell,
    session: Session,
    states: Sequence[State],
    *,
    chosen: Sequence[Field] | None,
    asked: Sequence[Field],
    as_csv: bool,
) -> None:
    with_runs = any(one.name.startswith("run.") for one in (*(chosen or ()), *asked))
    known = Known.of(session, states, with_runs=with_runs)
    if as_csv:
        rows = csv_rows(states, known, chosen=chosen)
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
    elif states:
        shell.write(states_table(states, known, chosen=chosen, asked=asked))


def _asked(session: Session, sort: str | None) -> Sequence[Field]:
    from datastates.lineage.query.grammar import Query

    return refine(session, Query(None, (), None), sort=sort, since=None).fields


def _within(session: Session, rev: str | None, *, all_refs: bool) -> Query:
    """The states that ``log`` would show, as a query; with ``--all`` every state."""
    from datastates.lineage.query import revision
    from datastates.lineage.query.grammar import parse_query

    def reach(uid: str) -> str:
        return f"(uid = '{uid}' or ancestor_of('{uid}'))"

    if rev is not None and ".." in rev:
        found = revision.resolve_range(session, rev)
        left, right = reach(found.left.uid), reach(found.right.uid)
        other = f" or {left} and not {right}" if found.is_symmetric else ""
        return parse_query(f"{right} and not {left}{other}")
    heads = {ref.name: ref.state for ref in refs.refs(session)}
    if rev is None and (all_refs or "main" not in heads):
        return parse_query("")
    return parse_query(reach(heads["main"] if rev is None else revision.resolve(session, rev).uid))


def _say_empty(shell: Shell) -> None:
    """Print what to do with a repository in which nothing was captured."""
    shell.hint(
        f"no states yet in {shell.url}: a training that captures records them there,"
        " `datastates clone` and `datastates import` bring them, `datastates demo` makes some to"
        " look at"
    )


def _late(session: Session, shown: Sequence[State]) -> str | None:
    """A line about states that wait for parts of ranks: in the training of the newest state shown,
    or in all if there is none yet."""
    if shown and shown[0].world_size == 1:
        return None
    from datastates.lineage.query.incomplete import late, waiting

    from .lists import late_text

    return late_text(late(session, shown[0].uid) if shown else waiting(session))


def _select(session: Session, rev: str | None, limit: int | None, *, all_refs: bool) -> list[State]:
    """The states for the log to show, newest first."""
    if rev is not None:
        from datastates.lineage.query import revision  # its grammar takes a while to import

        if ".." in rev:
            return revision.resolve_range(session, rev).states(session, limit)
        return walk.log(session, revision.resolve(session, rev).uid, limit=limit)
    heads = {ref.name: ref.state for ref in refs.refs(session)}
    if "main" in heads and not all_refs:
        return walk.log(session, heads["main"], limit=limit)
    return _merge(session, sorted(set(heads.values())), limit)


def _merge(session: Session, heads: list[str], limit: int | None) -> list[State]:
    """The histories of several heads in one, each state once. Row ids fall along every path, so a
    child comes before its parents.

    The newest ``limit`` states are therefore on the paths of the newest ``limit`` heads.
    """
    heads = [
        head for _, head in sorted(zip(ids_of(session, heads), heads, strict=True), reverse=True)
    ][:limit]
    found = {state.uid: state for head in heads for state in walk.log(session, head, limit=limit)}
    order = sorted(
        zip(ids_of(session, list(found)), found.values(), strict=True), key=lambda pair: -pair[0]
    )
    return [state for _, state in order[:limit]]


def _facts(
    state: StateDetail,
    files: Sequence[FileInfo],
    parents: list[State],
    children: list[State],
    kept: str | None,
) -> Table:
    from .lists import part_facts

    was = "" if state.status.is_restorable else "was "
    kinds = {edge.parent: f"  {edge.kind.value}, weight {edge.weight:g}" for edge in state.edges}
    metrics, of_ranks = by_rank(state.metrics, state.world_size)
    message = (state.message or "").splitlines()
    facts: list[tuple[str, object]] = [
        ("state", state.uid),
        ("digest", state.digest),
        ("refs", str(refs_text(state.refs)).strip(" ()")),
        ("status", status_text(state.status)),
        ("step", step_text(state)),
        ("captured", f"{time_text(state.created_at)}, {age_text(state.created_at)}"),
        *(("message" if number == 0 else " ", line) for number, line in enumerate(message)),
        *(("metric", f"{key} = {value:.9g}") for key, value in sorted(metrics.items())),
        *(("by rank", f"{key} = {spread_text(each, 9)}") for key, each in sorted(of_ranks.items())),
        *(("attribute", f"{key} = {value!r}") for key, value in sorted(state.attributes.items())),
        *(("added", f"{each.reason}, {age_text(each.created_at)}") for each in state.added),
        *(("config", f"{key} = {value!r}") for key, value in sorted(state.config.items())),
        *(("parent", state_text(each).append(kinds.get(each.uid, ""))) for each in parents),
        *(("child", state_text(child)) for child in children),
        ("size", f"{was}{size_text(state.bytes_total)}, {size_text(state.bytes_new)} of it new"),
        *(("file", f"{file.name}, {size_text(file.bytes)}") for file in files),
        ("generation", state.generation),
        ("ranks", state.world_size if state.world_size > 1 else None),
    ]
    if state.world_size > 1:
        facts += part_facts(state)
    for each in state.replicas if state.world_size == 1 else ():
        place = f"{each.tier} on {each.node or '?'}, rank {each.rank}"
        facts.append(("replica", f"{place}, {size_text(each.bytes)} added there"))
    facts += [("pack", f"{pack.name}, {size_text(pack.bytes)}") for pack in state.packs]
    if state.run_record is not None:
        facts += [*_run_facts(state.run_record, short(state.run_record.uid)), ("kept", kept)]
    return facts_table(facts)


def _run_facts(run: Run, name: str) -> list[tuple[str, object]]:
    ended = (
        "no end is recorded" if run.finished_at is None else f"until {time_text(run.finished_at)}"
    )
    commit = (
        None
        if run.git_commit is None
        else run.git_commit[:12] + (" with changes" if run.git_dirty else "")
    )
    versions = ", ".join(
        f"{package} {version}" for package, version in sorted(run.versions.items())
    )
    where = f"{run.host}, {'imported' if run.is_imported else f'process {run.pid}'}"
    return [
        ("run", f"{name}{f' of branch {run.branch}' * bool(run.branch)} by {run.user} on {where}"),
        ("ran", f"{time_text(run.started_at)}, {ended}"),
        ("command", " ".join(run.argv)),
        ("commit", commit),
        (
            "checkout",
            " of ".join(str(run.config[key]) for key in (GIT_ROOT, GIT_REMOTE) if key in run.config)
            or None,
        ),
        ("versions", versions),
    ]


# --- The log for people: states from new to old, with the lanes of their branches ---


def log_lines(
    states: Sequence[State], refs: Iterable[Ref], *, is_drawn: bool, is_short: bool
) -> list[Text]:
    """The lines of the log; one for each state with ``is_short``, else a few.

    ``states`` come newest first."""
    names = by_state(refs)
    texts = [
        [state_text(s, names.get(s.uid, ()))] if is_short else _paragraph(s, names.get(s.uid, ()))
        for s in states
    ]
    if not is_drawn:
        return [line for paragraph in texts for line in paragraph]
    lines: list[Text] = []
    for state, drawn, paragraph in zip(states, draw(lanes(states)), texts, strict=True):
        width = max(len(drawn.node), len(drawn.rest)) + 1
        lines += map(_coloured, drawn.before)
        node = drawn.node if state.status.is_restorable else drawn.node.replace("*", GONE)
        lines.append(_coloured(node.ljust(width)).append(paragraph[0]))
        # The lines after a node come at once: the line after a merge is next to the lanes that it
        # opened.
        lines += map(_coloured, drawn.after)
        lines += [_coloured(drawn.rest.ljust(width)).append(line) for line in paragraph[1:]]
    return lines


def _coloured(prefix: str) -> Text:
    text = Text()
    for column, box in enumerate(prefix):
        text.append(box, "" if box in f" *{GONE}" else _COLOURS[column // 2 % len(_COLOURS)])
    return text


def _paragraph(state: State, refs: Sequence[Ref]) -> list[Text]:
    head = Text.assemble(("state ", "yellow"), (state.uid, "yellow"), refs_text(refs))
    facts = [
        Text.assemble(
            "  step ",
            (step_text(state), "bold"),
            f"  {time_text(state.created_at)}, {age_text(state.created_at)}  ",
        ),
    ]
    facts[0].append(stored_text(state))
    if state.metrics:
        facts.append(Text(f"  {metrics_text(state.metrics, state.world_size)}"))
    if state.message:
        facts += [Text(f"  {clean(line)}", "italic") for line in state.message.splitlines()]
    return [head, *facts, Text()]


# --- ``log --follow``: new states, one a line, until Ctrl-C or until the reader is gone ---


def follow_log(shell: Shell, rev: str | None, limit: int, *, all_refs: bool) -> None:
    """Show the newest ``limit`` states (0: all), oldest first, then each new one. They are from one
    branch, or from all branches.

    :raises InvalidInput: ``rev`` is not a branch.
    :raises BrokenPipeError: the reader of the output has gone.
    """
    with shell.database() as database:
        with database.read() as session:
            names = [ref.name for ref in refs.refs(session, RefKind.BRANCH)]
        if rev is not None and rev not in names:
            raise InvalidInput(
                f"{rev!r} is no branch: --follow goes on with a branch, or with --all of them"
                f" ({', '.join(names[:10]) or 'none yet'})"
            )
        branch = rev or ("main" if "main" in names and not all_refs else None)
        # a reader of a pipe that has gone is otherwise noticed only when a state is written
        poller = select.poll()
        poller.register(sys.stdout.fileno(), 0)
        for states in _arriving(database, branch, limit):
            _write(shell, database, states, with_branch=branch is None)
            sys.stdout.flush()
            if any(event & select.POLLERR for _, event in poller.poll(_LOOK_MS)):
                raise BrokenPipeError(os.strerror(errno.EPIPE))


def _arriving(database: Database, branch: str | None, limit: int) -> Iterator[list[State]]:
    """The newest states, then at each look the new ones; parents before children."""
    with database.read() as session:
        last = newest_id(session)
        seen = {state.uid for state in states_after(session, max(0, last - _AGAIN))}
        if branch is None:
            first = states_after(session, max(0, last - limit) if limit else 0)
        else:
            first = walk.log(session, refs.get(session, branch).state, limit=limit or None)[::-1]
    yield first
    while True:
        with database.read() as session:
            found = [
                state
                for state in states_after(session, max(0, last - _AGAIN))
                if state.uid not in seen
            ]
            last = newest_id(session)
            origins = branches_of(session, [state.uid for state in found]) if found else {}
        seen.update(state.uid for state in found)
        yield [state for state in found if branch is None or origins.get(state.uid) == branch]


def _write(shell: Shell, database: Database, states: list[State], *, with_branch: bool) -> None:
    if shell.as_json or not states:
        shell.write_states(states)
        return
    with database.read() as session:
        names = by_state(refs.refs(session))
        origins = branches_of(session, [state.uid for state in states]) if with_branch else {}
    for state in states:
        line = state_text(state, names.get(state.uid, ()))
        shell.write_cut(
            [line if state.uid not in origins else Text(f"{origins[state.uid]}: ").append(line)]
        )
