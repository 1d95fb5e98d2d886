"""States that come from other processes: their place in this lineage, and the record of where
they came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, case, delete, func, insert, select, update

from datastates import values
from datastates.errors import Conflict, InvalidInput
from datastates.lineage.lookup import batches, rows_in_batches
from datastates.lineage.lookup import states as load
from datastates.lineage.query.names import holder
from datastates.lineage.schema import (
    CLONE,
    EVENT,
    NOTE,
    PART,
    REF,
    REPOSITORY,
    RUN,
    SEAL,
    STATE,
    VARIANT,
    from_us,
    to_us,
)
from datastates.lineage.states import (
    NewState,
    Ref,
    RefKind,
    Run,
    State,
    Status,
)
from datastates.system.interrupts import checkpoint

from . import refs, segments
from .parts import arrive_parts
from .record import check, check_imported_run, import_runs, record, record_all
from .replicas import mark

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_BATCH = 500  # rows inserted at once


@dataclass(frozen=True, slots=True)
class Clone:
    """One arrival of a state: the URL that it was cloned from, the uid of that lineage, and the
    node and the run that received it."""

    state: str
    source: str
    source_repository: str
    node: str
    run: str | None
    bytes_moved: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Move:
    """A line of a reflog: the states before and after it, and when it was written, in microseconds
    since the epoch."""

    name: str
    kind: RefKind
    old: str | None
    new: str | None
    at_us: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """The record of an arrival: the source, the uid of that lineage, how many bytes were moved, and
    the runs that came with the state, by their uids there."""

    source: str
    repository: str
    bytes_moved: int
    runs: Mapping[str, Run] = field(default_factory=dict)


def repository_uid(session: Session) -> str:
    """The uid of the lineage: the same in all processes that share the database."""
    return str(session.execute(_REPOSITORY).scalar_one())


def known(session: Session, uids: Iterable[str]) -> dict[str, str]:
    """The digest of each of these states that exists here."""
    return {row.uid: row.digest for row in rows_in_batches(session, _DIGESTS, uids, "uids")}


def check_arrival(
    session: Session,
    state: State,
    ancestry: Sequence[State],
    tags: Sequence[Ref],
    made_by: Mapping[str, Run],
) -> None:
    """Raise unless ``import_ancestry``, ``arrive`` and ``refs.tag`` would accept all of this;
    nothing is changed.

    :raises Conflict: a state of the same uid and another digest is here, or among them.
    :raises InvalidInput: a name or a value cannot be stored, or a tag names a state that does not
        come; the error names it.
    """
    coming: dict[str, str] = {}
    for each in (state, *ancestry):
        if coming.setdefault(each.uid, each.digest) != each.digest:
            raise Conflict(f"state {each.uid} comes with two digests: one of them is forged")
        # as it will be recorded, except for the tier of its bytes
        check(_new(each, coming, status=Status.EVICTED))
    for run in made_by.values():
        check_imported_run(run)
    _check_same(known(session, coming), (state, *ancestry))
    for tag in tags:
        refs.check_name(tag.name)
        values.text(tag.message or "", f"the message of tag {tag.name}")
        if tag.state not in coming:
            raise InvalidInput(
                f"tag {tag.name!r} names state {tag.state[:24]}, which does not come with it: leave"
                " the tag out"
            )


def check_ancestry(session: Session, states: Sequence[State], made_by: Mapping[str, Run]) -> None:
    """Raise unless ``import_ancestry`` would accept these states, each after its parents; nothing
    is changed.

    :raises Conflict: a state of the same uid and another digest is here.
    :raises InvalidInput: a name or a value cannot be stored; the error names it.
    """
    coming = {state.uid: state.digest for state in states}
    for state in states:
        check(_new(state, coming, status=Status.EVICTED))
    for run in made_by.values():
        check_imported_run(run)
    _check_same(known(session, coming), states)


def note(session: Session, uid: str, *, node: str, source: str, bytes_moved: int) -> None:
    """Note that a state's bytes were carried to a folder: they can be trusted as much as the one
    who carried them."""
    row = {"held": uid, "run": None, "source": source, "source_repository": "", "node": node}
    session.execute(_INSERT, {**row, "bytes_moved": bytes_moved, "created_at": to_us(None)})


def trusted(session: Session, uids: Iterable[str], *, party: str) -> list[str]:
    """The states whose bytes can be trusted as much as ``party``: they were captured here, or
    received from ``party`` only."""
    wanted, parties = list(uids), dict[str, set[str]]()
    for row in rows_in_batches(session, _PARTIES, wanted, "uids"):
        others = parties.setdefault(row.uid, set())
        if row.source != party and not (row.source is None and row.run_id is not None):
            others.add(row.source or "unknown")
    return [uid for uid in wanted if parties.get(uid) == set()]


def import_ancestry(session: Session, states: Sequence[State], made_by: Mapping[str, Run]) -> int:
    """Add the states that are not here, as ``evicted``, since their bytes did not come. Returns how
    many there were.

    They come newest first, as ``walk.log`` has them. A parent that is neither here nor listed after
    its child is left out; a state without a first parent becomes a root. ``made_by`` are the runs
    that came with them, by uid. Idempotent.

    :raises Conflict: a state of the same uid and another digest is here.
    """
    coming = {state.uid: state for state in reversed(states)}
    parents = (parent for state in coming.values() for parent in state.parents)
    here = _check_same(known(session, dict.fromkeys((*coming, *parents))), coming.values())
    news = []
    runs = import_runs(
        session, [state for state in coming.values() if state.uid not in here], made_by
    )
    for state in coming.values():
        if state.uid not in here:
            news.append(_new(state, here, status=Status.EVICTED, run=runs.get(state.run or "")))
            here[state.uid] = state.digest
    for batch in batches(news, _BATCH):
        record_all(session, batch)
    return len(news)


def arrive(
    session: Session,
    state: State,
    *,
    run: str | None,
    tier: str,
    node: str,
    bytes_new: int,
    came: Provenance,
    parts: Sequence[tuple[str, int]] = (),
) -> State:
    """Record that a state's bytes came onto a tier of this process: the state or its new replica,
    and where it came from. Returns the state.

    ``parts``: for a state of several ranks, all of whose parts came, each part's digest and bytes.
    ``run`` is the process that holds the bytes: when it dies, a state that no other process holds
    is lost. It is not the run that captured the state: ``came.runs`` has the record of that one.

    :raises Conflict: a state of the same uid and another digest is here.
    """
    here = _check_same(known(session, [state.uid, *state.parents]), [state])
    place = holder(node, run)
    if state.uid not in here:
        new = _new(
            state,
            here,
            status=Status.CAPTURED,
            run=import_runs(session, [state], came.runs).get(state.run or ""),
        )
        record(session, replace(new, tier=tier, node=place, bytes_new=bytes_new))
    if parts:
        arrive_parts(session, state.uid, parts, tier=tier, node=place)
    if state.uid in here:
        mark(
            session,
            state.uid,
            Status.CAPTURED,
            tier=tier,
            node=place,
            bytes=parts[0][1] if parts else bytes_new,
        )
    row = {
        "held": state.uid,
        "run": run,
        "source": came.source,
        "source_repository": came.repository,
        "node": node,
    }
    session.execute(_INSERT, {**row, "bytes_moved": came.bytes_moved, "created_at": to_us(None)})
    return load(session, [state.uid])[0]


def listing(
    session: Session, *, limit: int, after: int | None = None
) -> list[tuple[int, int, Clone]]:
    """Arrivals of states here, newest first, those before the one with the id ``after``: ids,
    steps of the states, and the records."""
    found = _ARRIVALS if after is None else _ARRIVALS.where(CLONE.c.id < after)
    rows = session.execute(found.limit(limit))
    return [
        (
            row.id,
            row.step,
            Clone(
                row.state,
                row.source,
                row.source_repository,
                row.node,
                row.run,
                row.bytes_moved,
                from_us(row.created_at),
            ),
        )
        for row in rows
    ]


def _check_same(here: dict[str, str], states: Iterable[State]) -> dict[str, str]:
    for state in states:
        if here.get(state.uid, state.digest) != state.digest:
            raise Conflict(
                f"state {state.uid} is here with the digest {here[state.uid][:16]}, not"
                f" {state.digest[:16]}: one of them is forged"
            )
    return here


def _new(state: State, here: dict[str, str], *, status: Status, run: str | None = None) -> NewState:
    """The record of a state here: without parents that are not here, without a branch, and with
    the uid that its run has here."""
    facts = state.facts
    facts = replace(
        facts,
        parent=facts.parent if facts.parent in here else None,
        run=run,
        edges=tuple(edge for edge in facts.edges if edge.parent in here),
    )
    return NewState(facts, state.digest, status, bytes_total=state.bytes_total)


_REPOSITORY = select(REPOSITORY.c.uid)
_DIGESTS = select(STATE.c.uid, STATE.c.digest).where(
    STATE.c.uid.in_(bindparam("uids", expanding=True))
)
_own_run = case((RUN.c.is_carried.is_(None), RUN.c.id))
_PARTIES = (
    select(STATE.c.uid, _own_run.label("run_id"), CLONE.c.source)
    .select_from(
        STATE.outerjoin(CLONE, CLONE.c.state_id == STATE.c.id).outerjoin(
            RUN, RUN.c.id == STATE.c.run_id
        )
    )
    .where(STATE.c.uid.in_(bindparam("uids", expanding=True)))
)
_INSERT = insert(CLONE).values(
    state_id=select(STATE.c.id).where(STATE.c.uid == bindparam("held")).scalar_subquery(),
    run_id=select(RUN.c.id).where(RUN.c.uid == bindparam("run")).scalar_subquery(),
)
_ARRIVALS = (
    select(CLONE, RUN.c.uid.label("run"), STATE.c.uid.label("state"), STATE.c.step)
    .select_from(
        CLONE.join(STATE, STATE.c.id == CLONE.c.state_id).outerjoin(RUN, RUN.c.id == CLONE.c.run_id)
    )
    .order_by(CLONE.c.id.desc())
)


# Adds to a lineage what the manifests in a folder have and it lacks: in one transaction, all of it
# or nothing.


def is_empty(session: Session) -> bool:
    """Whether nothing was ever recorded here."""
    return not any(
        session.execute(select(each.c.id).limit(1)).first() for each in (STATE, RUN, EVENT)
    )


def put_uid(session: Session, uid: str) -> None:
    """Give the lineage the uid that it had; two databases of one uid are never used at once."""
    session.execute(update(REPOSITORY).values(uid=uid))


def put_runs(session: Session, news: Iterable[NewState]) -> int:
    """Put the runs of these states that are not here, without any other facts; returns how many.
    They began with their first state and ended with their last one."""
    times: dict[str, list[int]] = {}
    for new in news:
        if new.facts.run is not None:
            times.setdefault(new.facts.run, []).append(to_us(new.facts.created_at))
    here = set(session.execute(select(RUN.c.uid)).scalars()) if times else set()
    empty = {"host": "", "user": "", "pid": 0, "argv": [], "config": {}, "versions": {}}
    rows = [
        {"uid": uid, **empty, "started_at": min(at), "finished_at": max(at)}
        for uid, at in times.items()
        if uid not in here
    ]
    if rows:
        session.execute(insert(RUN), rows)
    return len(rows)


def put_states(session: Session, news: Sequence[NewState], tell: Callable[[int], None]) -> None:
    """Put states, parents before their children, also those that waited for parts."""
    for start in range(0, len(news), _BATCH):
        checkpoint()
        some = news[start : start + _BATCH]
        session.execute(delete(PART).where(PART.c.state_uid.in_([new.uid for new in some])))
        record_all(session, some)
        tell(min(start + _BATCH, len(news)))


def put_parts(
    session: Session, parts: Iterable[tuple[str, int, int, str, int]], *, tier: str, node: str
) -> None:
    """Put the parts of states of several parts: uid, rank, number of parts, digest, and when it
    was reported."""
    same: dict[str, object] = {"run_id": None, "tier": tier, "node": node}
    same |= {
        "status": Status.DURABLE.value,
        "bytes_total": 0,
        "bytes_new": 0,
        "place": None,
        "said": None,
    }
    keys = ("state_uid", "rank", "world_size", "digest", "told_at")
    rows = [{**same, **dict(zip(keys, part, strict=True))} for part in parts]
    for some in batches(rows, _BATCH):
        session.execute(insert(PART), some)


def last_moves(session: Session) -> dict[str, Move]:
    """The last line of each reflog, by name."""
    rows = session.execute(_LAST_MOVES)
    return {name: Move(name, RefKind(kind), *rest) for name, kind, *rest in rows}


def put_moves(session: Session, moves: Sequence[Move], *, reason: str) -> None:
    """Move branches, or make them, with a line of the reflog for each move."""
    uids = {uid for move in moves for uid in (move.old, move.new) if uid is not None}
    ids = {row.uid: row.id for row in rows_in_batches(session, _HERE, uids, "uids")}
    rows = [
        {
            "name": move.name,
            "kind": move.kind.value,
            "old_id": ids.get(move.old or ""),
            "new_id": ids.get(move.new or ""),
            "reason": reason,
            "created_at": move.at_us,
        }
        for move in moves
    ]
    for some in batches(rows, _BATCH):
        session.execute(insert(EVENT), some)
    heads = {move.name: ids[move.new] for move in moves if move.new is not None}
    counts = Counter(move.name for move in moves)
    for name, head in heads.items():
        before = session.execute(_HEAD, {"ref": name}).scalar()
        if before is None:
            row = {"name": name, "kind": RefKind.BRANCH.value, "message": None}
            session.execute(insert(REF), {**row, "state_id": head, "version": counts[name]})
            segments.begin(session, name, head)
        else:
            version = REF.c.version + counts[name]
            moved = update(REF).where(REF.c.name == name)
            session.execute(moved.values(state_id=head, version=version))
            segments.move(session, name, before, head)


def totals(session: Session) -> dict[str, int]:
    """How many rows each of these has: branches, tags, notes, lines of reflogs, clones, seals,
    variants, states."""
    return {
        name: session.execute(query).scalar_one()
        for name, query in {
            "branches": _COUNT.where(REF.c.kind == RefKind.BRANCH.value),
            "tags": _COUNT.where(REF.c.kind == RefKind.TAG.value),
            "notes": select(func.count()).select_from(NOTE),
            "events": select(func.count()).select_from(EVENT),
            "clones": select(func.count()).select_from(CLONE),
            "seals": select(func.count()).select_from(SEAL),
            "variants": select(func.count()).select_from(VARIANT),
            "states": select(func.count()).select_from(STATE),
        }.items()
    }


_HERE = select(STATE.c.uid, STATE.c.id).where(STATE.c.uid.in_(bindparam("uids", expanding=True)))
_HEAD = select(REF.c.state_id).where(REF.c.name == bindparam("ref"))
_COUNT = select(func.count()).select_from(REF)
_old = STATE.alias("old")
_newest = STATE.alias("newest")
_LAST_MOVES = (
    select(EVENT.c.name, EVENT.c.kind, _old.c.uid, _newest.c.uid, EVENT.c.created_at)
    .outerjoin_from(EVENT, _old, _old.c.id == EVENT.c.old_id)
    .outerjoin(_newest, _newest.c.id == EVENT.c.new_id)
    .where(EVENT.c.id.in_(select(func.max(EVENT.c.id)).group_by(EVENT.c.name)))
)
