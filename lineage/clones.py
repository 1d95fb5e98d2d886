"""States that come from other processes: their place in this lineage, and the record of where they came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, insert, select, update

from datastates.errors import Conflict

from .lookup import id_of
from .record import mark, record
from .schema import CloneRow, RepositoryRow, RunRow, StateRow, from_us, table, to_us
from .states import NewState, State, Status

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Clone", "arrive", "clones_of", "import_ancestry", "known", "repository_uid"]

_BATCH = 500  # uids in one IN list


@dataclass(frozen=True, slots=True)
class Clone:
    """One arrival of a state: the url that it was cloned from, that lineage's uid, the node that it came to."""

    state: str
    source: str
    source_repository: str
    node: str
    bytes_moved: int
    created_at: datetime


def repository_uid(session: Session) -> str:
    """Which lineage this is: the same in all processes that share the database."""
    return str(session.execute(_REPOSITORY).scalar_one())


def known(session: Session, uids: Iterable[str]) -> dict[str, str]:
    """The digest of each of these states that is here."""
    wanted, found = list(uids), dict[str, str]()
    for start in range(0, len(wanted), _BATCH):
        rows = session.execute(_DIGESTS, {"uids": wanted[start : start + _BATCH]})
        found.update((row.uid, row.digest) for row in rows)
    return found


def import_ancestry(session: Session, states: Iterable[State]) -> int:
    """Add those of ``states`` that are not here, as ``evicted``: their bytes did not come. How many there were.

    In any order; a parent that is neither here nor among them is left out, and its child begins a root. Idempotent.

    :raises Conflict: a state of the same uid and another digest is here.
    """
    coming = {state.uid: state for state in sorted(states, key=lambda state: state.generation)}
    here = _check_same(known(session, coming), coming.values())
    added = 0
    for state in coming.values():
        if state.uid not in here:
            here |= known(session, [parent for parent in state.parents if parent not in here])
            record(session, _new(state, here, status=Status.EVICTED))
            here[state.uid] = state.digest
            added += 1
    return added


def arrive(
    session: Session, state: State, *, run: str | None, node: str, bytes_new: int, source: str, source_repository: str, bytes_moved: int
) -> State:
    """A state's bytes came into this node's memory: record it, or its new replica, and where it came from; the state as it is now.

    ``run`` is the process that holds the bytes: if it dies with them, a state that nobody else has captured here is lost.

    :raises Conflict: a state of the same uid and another digest is here.
    """
    here = _check_same(known(session, [state.uid, *state.parents]), [state])
    status = Status.CAPTURED
    if state.uid in here:
        status = mark(session, state.uid, Status.CAPTURED, tier="memory", node=node, bytes=state.bytes_total)
        session.execute(_TAKE_OVER, {"held": state.uid, "run": run})
        now = replace(state, status=status)
    else:
        new = _new(state, here, status=status)
        now = record(session, replace(new, run=run, node=node, bytes_new=bytes_new))
    row = {"state_id": id_of(session, state.uid), "source": source, "source_repository": source_repository, "node": node}
    session.execute(_INSERT, {**row, "bytes_moved": bytes_moved, "created_at": to_us(None)})
    return now


def clones_of(session: Session, uid: str) -> list[Clone]:
    """Every arrival of a state here, newest first."""
    rows = session.execute(_CLONES, {"state": id_of(session, uid)})
    return [Clone(uid, row.source, row.source_repository, row.node, row.bytes_moved, from_us(row.created_at)) for row in rows]


def _check_same(here: dict[str, str], states: Iterable[State]) -> dict[str, str]:
    for state in states:
        if here.get(state.uid, state.digest) != state.digest:
            raise Conflict(
                f"state {state.uid} is here with the digest {here[state.uid][:16]}, not {state.digest[:16]}: one of them is forged"
            )
    return here


def _new(state: State, here: dict[str, str], *, status: Status) -> NewState:
    first = next(iter(state.parents), None)
    edges = tuple(edge for edge in state.edges if edge.parent in here)
    further = {edge.parent for edge in state.edges}
    return NewState(
        uid=state.uid,
        digest=state.digest,
        parent=first if first in here and first not in further else None,
        branch=None,
        run=None,
        step=state.step,
        micro_step=state.micro_step,
        metrics=state.metrics,
        attributes=state.attributes,
        message=state.message,
        created_at=state.created_at,
        status=status,
        edges=edges,
        bytes_total=state.bytes_total,
        bytes_new=0,
        world_size=state.world_size,
    )


_state, _run, _clone, _repository = table(StateRow), table(RunRow), table(CloneRow), table(RepositoryRow)
_REPOSITORY = select(_repository.c.uid)
_DIGESTS = select(_state.c.uid, _state.c.digest).where(_state.c.uid.in_(bindparam("uids", expanding=True)))
_INSERT = insert(_clone)
_CLONES = select(_clone).where(_clone.c.state_id == bindparam("state")).order_by(_clone.c.id.desc())
_TAKE_OVER = (
    update(_state)
    .where(_state.c.uid == bindparam("held"), _state.c.run_id.is_(None))
    .values(run_id=select(_run.c.id).where(_run.c.uid == bindparam("run")).scalar_subquery())
)
