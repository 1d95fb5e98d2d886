"""``log --follow``: new states, one a line, as they are recorded; until Ctrl-C, or until nobody reads any more."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from datastates.errors import InvalidInput

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.lineage import Database
    from datastates.lineage.states import State

    from .shell import Shell

__all__ = ["follow_log"]

_LOOK_MS = 250
_AGAIN = 256
"""PostgreSQL may commit a lower row id after a higher one, so this many of the last ids are looked at again."""


def follow_log(shell: Shell, rev: str | None, limit: int, *, all_refs: bool) -> None:
    """Show the newest ``limit`` states (0: all), oldest first, then each new one: those of a branch, or of all branches.

    :raises InvalidInput: ``rev`` is not a branch.
    :raises BrokenPipeError: the reader of the output has gone.
    """
    with shell.database() as database:
        with database.read() as session:
            branch = _branch(session, rev, all_refs=all_refs)
        for states in _arriving(database, branch, limit):
            _write(shell, database, states, with_branch=branch is None)
            sys.stdout.flush()
            _wait()


def _branch(session: Session, rev: str | None, *, all_refs: bool) -> str | None:
    """The branch to follow; None: all."""
    from datastates.lineage.search import refs
    from datastates.lineage.states import RefKind

    names = [ref.name for ref in refs.refs(session, RefKind.BRANCH)]
    if rev is not None and rev not in names:
        raise InvalidInput(
            f"{rev!r} is no branch: --follow goes on with a branch, or with --all of them ({', '.join(names[:10]) or 'none yet'})"
        )
    return rev if rev is not None else "main" if "main" in names and not all_refs else None


def _arriving(database: Database, branch: str | None, limit: int) -> Iterator[list[State]]:
    """The newest states, then at each look the new ones; parents before children."""
    from datastates.lineage.search import refs, walk
    from datastates.lineage.show.origins import branches_of, newest_id, states_after

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
            found = [state for state in states_after(session, max(0, last - _AGAIN)) if state.uid not in seen]
            last = newest_id(session)
            origins = branches_of(session, [state.uid for state in found]) if found else {}
        seen.update(state.uid for state in found)
        yield [state for state in found if branch is None or origins.get(state.uid) == branch]


def _write(shell: Shell, database: Database, states: list[State], *, with_branch: bool) -> None:
    if shell.as_json or not states:
        shell.write_states(states)
        return
    from rich.text import Text

    from datastates.lineage.search import refs
    from datastates.lineage.show.origins import branches_of

    from .render import by_state, state_text

    with database.read() as session:
        names = by_state(refs.refs(session))
        origins = branches_of(session, [state.uid for state in states]) if with_branch else {}
    for state in states:
        line = state_text(state, names.get(state.uid, ()))
        shell.write_cut([line if state.uid not in origins else Text(f"{origins[state.uid]}: ").append(line)])


def _wait() -> None:
    """Wait a moment; ends when the reader of a pipe has gone, which would otherwise be noticed only when the next state is written."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    if any(said & select.POLLERR for _, said in poller.poll(_LOOK_MS)):
        raise BrokenPipeError(os.strerror(32))
