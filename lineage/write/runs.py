"""Runs: the processes that tracked, their trainings, and what becomes of their states when they
die.

A training is a run whose ``process`` names another run. It ends with that run, and has no lease and
no memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    insert,
    or_,
    select,
    union,
    update,
)

from datastates.errors import Conflict, NotFound
from datastates.lineage import lookup
from datastates.lineage.lookup import batches, id_of, states
from datastates.lineage.query.incomplete import Waiting
from datastates.lineage.query.names import holder
from datastates.lineage.query.walk import nearest_restorable
from datastates.lineage.schema import (
    CLONE,
    PART,
    REF,
    REPLICA,
    RUN,
    STATE,
    from_us,
    to_us,
)
from datastates.lineage.states import DIED, GONE, OURS, RefKind, Run, Status
from datastates.system import logs
from datastates.values import Value, storable

from . import segments
from .parts import drop_waiting
from .refs import note_event
from .replicas import unheld

if TYPE_CHECKING:
    from datastates.lineage.session import Session


RANK, RANKS = f"{OURS}rank", f"{OURS}ranks"
_OURS = RUN.c.is_carried.is_(None)
_VOLATILE: BindParameter[Any] = bindparam("volatile", expanding=True)
_ELSEWHERE = exists().where(REPLICA.c.state_id == STATE.c.id, REPLICA.c.tier.not_in(_VOLATILE))


@dataclass(frozen=True, slots=True)
class Recovered:
    """A branch that was moved back from ``old``, whose bytes are gone, to ``new``.

    None: the branch was deleted, since nothing is left."""

    branch: str
    old: str
    new: str | None


def start(session: Session, run: Run) -> None:
    """Record that a process or a training begins. Secrets in its command line and configuration are
    masked (see ``masking``).

    :raises Conflict: its uid was used before.
    :raises NotFound: the process that it names does not exist.
    """
    if session.execute(select(RUN.c.id).where(RUN.c.uid == run.uid)).first():
        raise Conflict(f"run {run.uid} was recorded before: every run needs a new uid")
    if (
        run.process is not None
        and not session.execute(select(RUN.c.id).where(RUN.c.uid == run.process)).first()
    ):
        raise NotFound(
            f"there is no run {run.process!r} to be the process of {run.uid}: start it first"
        )
    made: Any = session.execute(
        insert(RUN),
        {
            "uid": run.uid,
            "process": run.process,
            "branch": run.branch,
            "host": storable(run.host),
            "user": storable(run.user),
            "pid": run.pid,
            "argv": list(map(storable, logs.arguments(run.argv))),
            "git_commit": run.git_commit,
            "git_dirty": run.git_dirty,
            "config": {key: value for key, value in run.config.items() if key.startswith(OURS)},
            "versions": dict(run.versions),
            "started_at": to_us(run.started_at),
            "finished_at": None if run.finished_at is None else to_us(run.finished_at),
        },
    )
    lookup.keep(session, made.inserted_primary_key[0], run.config)


def configure(session: Session, run: Run) -> None:
    """Replace the settings in the record of a run by the settings of ``run``.

    Does nothing if the run is not recorded."""
    found = session.execute(select(RUN.c.id).where(RUN.c.uid == run.uid)).scalar()
    if found is not None:
        lookup.keep(session, found, run.config, replaces=True)


def finish(
    session: Session,
    uid: str,
    finished_at: datetime | None = None,
    *,
    volatile: Collection[str] = (),
) -> list[Waiting]:
    """Record that a training is over, or a process with all its trainings, by default now. A run
    that has already finished keeps its time.

    The ``volatile`` tiers of the process are gone with it. States that still wait for parts, and
    had a part in those tiers, can never be complete: they are removed, and returned.

    :raises NotFound: there is no such run.
    """
    get(session, uid)
    uids = _with_trainings(session, [uid])
    lost = drop_waiting(session, uids, tiers=volatile) if volatile else []
    _finish(session, uids, finished_at)
    return lost


def note(session: Session, uid: str, facts: Mapping[str, Value]) -> None:
    """Add settings of ours to a run's record; each name begins with ``OURS``.

    Does nothing if there is no such run."""
    found = session.execute(select(RUN.c.config).where(RUN.c.uid == uid).with_for_update()).scalar()
    if found is not None and facts:
        session.execute(update(RUN).where(RUN.c.uid == uid).values(config={**found, **facts}))


def noted(session: Session, branch: str, key: str) -> str | None:
    """A text under a key of ours in the record of a training of the branch that has not finished.
    None if there is none."""
    text = RUN.c.config[key].as_string()
    of = and_(RUN.c.branch == branch, RUN.c.finished_at.is_(None), text.is_not(None), _OURS)
    found: str | None = session.execute(select(text).where(of).limit(1)).scalar()
    return found


def fruitless(
    session: Session, branch: str, key: str, value: str, *, dead: Collection[str], limit: int
) -> int:
    """How many of the last ``limit`` trainings of a branch have this text in their record, and
    ended before their first state as their process died, or is among the ``dead``."""
    process = RUN.alias("process")
    rank = RUN.c.config[RANK].as_integer()
    query = (
        select(
            RUN.c.config[key].as_string() == value,
            or_(process.c.config[DIED].as_boolean(), process.c.uid.in_(list(dead))),
            ~exists().where(STATE.c.run_id == RUN.c.id),
        )
        .join_from(RUN, process, process.c.uid == RUN.c.process)
        .where(RUN.c.branch == branch, _OURS, or_(rank.is_(None), rank == 0))
        .order_by(RUN.c.id.desc())
        .limit(limit)
    )
    return sum(all(row) for row in session.execute(query))


def get(session: Session, uid: str) -> Run:
    """The run of this uid.

    :raises NotFound: there is no such run.
    """
    for run in by_uids(session, [uid]):
        return run
    raise NotFound(f"there is no run {uid!r}")


def by_ids(session: Session, ids: Collection[int]) -> dict[int, Run]:
    """Runs by their row ids; ids without a run are left out."""
    found: dict[int, Run] = {}
    for some in batches(sorted(ids), 1000):
        found |= _by_id(session, select(RUN).where(RUN.c.id.in_(some)))
    return found


def by_uids(session: Session, uids: Collection[str]) -> list[Run]:
    """Runs by their uids; uids without a run are left out."""
    query = select(RUN).where(RUN.c.uid.in_(uids)).order_by(RUN.c.id)
    return list(_by_id(session, query).values())


def branches_of(session: Session, uids: Collection[str]) -> dict[str, list[str]]:
    """The names of the branches whose newest state each of these runs captured, by the run's
    uid."""
    found: dict[str, list[str]] = {}
    for name, uid in session.execute(_CAPTURED_HEADS, {"runs": list(uids)}):
        found.setdefault(uid, []).append(name)
    return found


def died(session: Session, uids: Collection[str]) -> dict[str, datetime]:
    """When each of these processes was found dead, by uid. Processes that were not found dead are
    left out."""
    return {uid: from_us(at) for uid, at in session.execute(_FOUND_DEAD, {"runs": list(uids)})}


def listing(
    session: Session, *, limit: int, after: str | None = None
) -> tuple[list[Run], str | None]:
    """Runs, the last begun first, and the uid to continue ``after`` (None when there are no more).
    A process is listed if it has no trainings.

    :raises NotFound: ``after`` is no run.
    """
    query = select(RUN).where(counted()).order_by(RUN.c.id.desc()).limit(limit + 1)
    if after is not None:
        last = session.execute(select(RUN.c.id).where(RUN.c.uid == after)).scalar()
        if last is None:
            raise NotFound(
                f"there is no run {after!r} to go on after: pass the uid of the last one that came"
            )
        query = query.where(RUN.c.id < last)
    found = list(_by_id(session, query).values())
    return found[:limit], found[limit - 1].uid if len(found) > limit else None


def of_job(job: str, rank: int, size: int) -> dict[str, Value]:
    """What each run of a training of several ranks records of it.

    There is one run for each rank. Views show the run of rank 0 only."""
    return {f"{OURS}job": job, RANK: rank, RANKS: size}


def of_ranks(session: Session, uid: str, ranks: Collection[int]) -> dict[int, Run]:
    """The runs of these ranks in the job that captures a state, complete or not, by rank; only
    ranks that tracked."""
    told = select(PART.c.run_id).where(PART.c.state_uid == uid, PART.c.run_id.is_not(None)).limit(1)
    job = session.execute(
        select(RUN.c.config[f"{OURS}job"].as_string()).where(RUN.c.id == told.scalar_subquery())
    ).scalar()
    if job is None:
        return {}
    rank = RUN.c.config[RANK].as_integer()
    its = RUN.c.config[f"{OURS}job"].as_string() == job
    found = _by_id(session, select(RUN).where(its, rank.in_(sorted(ranks)))).values()
    # the query selects only numbers
    return {each.config[RANK]: each for each in found}  # type: ignore[misc]


def counted() -> ColumnElement[bool]:
    """The condition for what people call a run: a training, counted once for all its ranks, or a
    process without a training. Runs of other lineages count too."""
    rank = RUN.c.config[RANK].as_integer()
    return and_(
        or_(rank.is_(None), rank == 0),
        or_(RUN.c.process.is_not(None), ~exists().where(_training.c.process == RUN.c.uid)),
    )


def unfinished(session: Session, branch: str | None = None) -> list[Run]:
    """The processes, or the trainings of a branch, that never recorded that they finished,
    oldest first: they are alive, or died."""
    of = RUN.c.process.is_(None) if branch is None else RUN.c.branch == branch
    query = select(RUN).where(RUN.c.finished_at.is_(None), of, _OURS).order_by(RUN.c.id)
    return list(_by_id(session, query).values())


def in_memory_of(session: Session, uids: Collection[str], *, volatile: Collection[str]) -> set[str]:
    """The uids of the states that are recorded as being in the memory of these processes."""
    query = select(STATE.c.uid).join_from(REPLICA, STATE, STATE.c.id == REPLICA.c.state_id)
    places = REPLICA.c.node.in_(_places(session, uids)), REPLICA.c.tier.in_(list(volatile))
    return set(session.execute(query.where(*places)).scalars())


def in_memory(session: Session, uid: str, *, volatile: Collection[str]) -> dict[str, str]:
    """The states of one part that a process captured or cloned and that only memory holds, as far
    as it is recorded: uids with digests.

    ``volatile`` are the tiers that are lost with a process.
    """
    uids = _with_trainings(session, [uid])
    query = select(STATE.c.uid, STATE.c.digest).where(
        STATE.c.id.in_(union(_captured(uids), _cloned(uids), _in_places(_places(session, uids))))
    )
    query = query.where(STATE.c.status.not_in(GONE), STATE.c.world_size == 1, ~_ELSEWHERE)
    return {
        row.uid: row.digest
        for row in session.execute(query.order_by(STATE.c.id), {"volatile": list(volatile)})
    }


def parts_in_memory(
    session: Session, uid: str, *, volatile: Collection[str]
) -> dict[tuple[str, int], str]:
    """The parts of complete states that a process reported or cloned and that only memory holds, as
    far as it is recorded: uid and rank, with the digest of the part.
    """
    uids = _with_trainings(session, [uid])
    told = or_(
        RUN.c.uid.in_(uids),
        STATE.c.id.in_(union(_cloned(uids), _in_places(_places(session, uids)))),
    )
    its = (REPLICA.c.state_id == STATE.c.id, REPLICA.c.rank == PART.c.rank)
    query = (
        select(PART.c.state_uid, PART.c.rank, PART.c.digest)
        .join_from(PART, STATE, STATE.c.uid == PART.c.state_uid)
        .outerjoin(RUN, RUN.c.id == PART.c.run_id)
        .where(told, STATE.c.status.not_in(GONE))
        .where(~exists().where(*its, REPLICA.c.tier.not_in(_VOLATILE)))
        .order_by(STATE.c.id, PART.c.rank)
    )
    return {
        (row.state_uid, row.rank): row.digest
        for row in session.execute(query, {"volatile": list(volatile)})
    }


def recover(session: Session, dead: Iterable[str], *, volatile: Collection[str]) -> list[Recovered]:
    """Settle what the runs of dead processes left behind: whatever was in their ``volatile`` tiers
    is gone.

    States that have a part of such a run and still wait for other parts are removed. States that no
    other process holds, or of which some part is no longer held, become ``lost``. The runs finish
    now, and their records get a mark that they died. Then each branch, of any run, whose head's
    bytes are gone moves back to its newest restorable first parent. A branch that has none is
    deleted, since such a name would only prevent the next run from starting. The reflog has its
    last place.
    """
    for uid in sorted(set(dead)):
        note(session, uid, {DIED: True})
    uids = _with_trainings(session, sorted(set(dead)))
    drop_waiting(session, uids)
    _lose(session, uids, volatile)
    _finish(session, uids, None)
    return _move_back(session)


def hand_over(
    session: Session, dead: Collection[str], run: Run, *, volatile: Collection[str]
) -> dict[str, Status]:
    """Give a process the states in the ``volatile`` tiers of dead processes, whose memory it has;
    returns their uids, with how safe each is.

    The dead runs finish now, with a mark that they died. Their states that still wait for parts of
    other ranks are removed.
    """
    for uid in sorted(dead):
        note(session, uid, {DIED: True})
    uids = _with_trainings(session, sorted(dead))
    drop_waiting(session, uids)
    _finish(session, uids, None)
    place = holder(run.host, run.uid)
    theirs = REPLICA.c.node.in_(_places(session, uids)) & REPLICA.c.tier.in_(list(volatile))
    ids = list(session.execute(select(REPLICA.c.state_id).where(theirs).distinct()).scalars())
    for some in batches(sorted(ids), 1000):
        session.execute(
            select(STATE.c.id)
            .where(STATE.c.id.in_(some))
            .order_by(STATE.c.id)
            .with_for_update(of=STATE, key_share=True)
        )
    session.execute(update(REPLICA).where(theirs).values(node=place))
    found = dict[str, Status]()
    for some in batches(sorted(ids), 1000):
        query = select(STATE.c.uid, STATE.c.status).where(STATE.c.id.in_(some))
        found |= {row.uid: Status(row.status) for row in session.execute(query)}
    return found


def _places(session: Session, runs: Collection[str]) -> list[str]:
    """The names of the memories of these runs."""
    query = select(RUN.c.host, RUN.c.uid).where(RUN.c.uid.in_(runs))
    return [holder(row.host, row.uid) for row in session.execute(query)]


def _lose(session: Session, runs: list[str], volatile: Collection[str]) -> None:
    """Mark states as lost. Each replica in the memory of these processes is gone.

    A state that a living process cloned on the same database is still in the memory of that
    process. A replica that names no process belongs to the run that captured the state.
    """
    places = _places(session, runs)
    theirs = union(_captured(runs), _cloned(runs), _shared(runs))
    handed = _in_places(places)
    taken = list(session.execute(handed.where(REPLICA.c.state_id.not_in(theirs))).scalars())
    held = or_(STATE.c.id.in_(theirs), STATE.c.id.in_(taken))
    # in id order, as every writer does
    session.execute(
        select(STATE.c.id)
        .where(held)
        .order_by(STATE.c.id)
        .with_for_update(of=STATE, key_share=True)
    )
    of_captured = REPLICA.c.state_id.in_(_captured(runs)) & REPLICA.c.node.not_like(
        "%" + holder("", "") + "%"
    )
    of_runs = REPLICA.c.node.in_(places)
    session.execute(delete(REPLICA).where(REPLICA.c.tier.in_(volatile), or_(of_captured, of_runs)))
    session.execute(
        update(STATE)
        .where(held, STATE.c.status.not_in(GONE), unheld())
        .values(status=Status.LOST.value)
    )


def _with_trainings(session: Session, uids: Sequence[str]) -> list[str]:
    """These runs, with all trainings of the processes among them."""
    return [
        *uids,
        *session.execute(
            select(RUN.c.uid).where(RUN.c.process.in_(uids)).order_by(RUN.c.id)
        ).scalars(),
    ]


def _captured(runs: list[str]) -> Select[tuple[int]]:
    return (
        select(STATE.c.id)
        .join_from(STATE, RUN, RUN.c.id == STATE.c.run_id)
        .where(RUN.c.uid.in_(runs))
    )


def _cloned(runs: list[str]) -> Select[tuple[int]]:
    return (
        select(CLONE.c.state_id)
        .join_from(CLONE, RUN, RUN.c.id == CLONE.c.run_id)
        .where(RUN.c.uid.in_(runs))
    )


def _in_places(places: Collection[str]) -> Select[tuple[int]]:
    """The states in these memories; a process may have them from one that died."""
    return select(REPLICA.c.state_id).where(REPLICA.c.node.in_(places))


def _shared(runs: list[str]) -> Select[tuple[int]]:
    """The states of several parts of which these runs reported one."""
    told = (
        select(STATE.c.id)
        .join_from(PART, RUN, RUN.c.id == PART.c.run_id)
        .join(STATE, STATE.c.uid == PART.c.state_uid)
    )
    return told.where(RUN.c.uid.in_(runs))


def _move_back(session: Session) -> list[Recovered]:
    moved = []
    for name, version, head_id, head in session.execute(_GONE_HEADS).all():
        found = nearest_restorable(session, head)
        seen: dict[str, object] = {"ref": name, "seen": version}
        if found is None:
            new_id, went = None, "no ancestor can be restored, deleted"
            done: Any = session.execute(_DELETE, seen)
        else:
            new_id, went = id_of(session, found.uid), "went back to the newest restorable state"
            done = session.execute(_MOVE_BACK, {**seen, "new": new_id})
        if done.rowcount == 1:  # else another process moved it meanwhile, which wins
            if new_id is None:
                segments.detach(session, name)
            else:
                segments.move(session, name, head_id, new_id)
            status = states(session, [head_id])[0].status
            note_event(
                session,
                name,
                RefKind.BRANCH,
                head_id,
                new_id,
                f"recover: {head} is {status}, {went}",
            )
            moved.append(Recovered(name, head, None if found is None else found.uid))
    return moved


def _finish(session: Session, uids: list[str], finished_at: datetime | None) -> None:
    session.execute(
        update(RUN)
        .where(RUN.c.uid.in_(uids), RUN.c.finished_at.is_(None))
        .values(finished_at=to_us(finished_at))
    )


def _by_id(session: Session, query: Select[Any]) -> dict[int, Run]:
    """The runs that a query of whole rows finds, in its order, with their settings."""
    rows = session.execute(query).all()
    found = lookup.of_runs(session, [row.id for row in rows])
    return {
        row.id: Run(
            uid=row.uid,
            host=row.host,
            user=row.user,
            pid=row.pid,
            argv=tuple(row.argv),
            git_commit=row.git_commit,
            git_dirty=row.git_dirty,
            config={**found.get(row.id, {}), **row.config},
            versions=row.versions,
            started_at=from_us(row.started_at),
            finished_at=None if row.finished_at is None else from_us(row.finished_at),
            process=row.process,
            branch=row.branch,
            is_imported=bool(row.is_carried),
        )
        for row in rows
    }


_CAPTURED_HEADS = (
    select(REF.c.name, RUN.c.uid)
    .join_from(REF, STATE, STATE.c.id == REF.c.state_id)
    .join(RUN, RUN.c.id == STATE.c.run_id)
    .where(REF.c.kind == RefKind.BRANCH.value, RUN.c.uid.in_(bindparam("runs", expanding=True)))
    .order_by(REF.c.name)
)
_FOUND_DEAD = select(RUN.c.uid, RUN.c.finished_at).where(
    RUN.c.uid.in_(bindparam("runs", expanding=True)),
    RUN.c.finished_at.is_not(None),
    RUN.c.config[DIED].as_boolean(),
)
_training = RUN.alias("training")
_GONE_HEADS = (
    select(REF.c.name, REF.c.version, STATE.c.id, STATE.c.uid)
    .join_from(REF, STATE, STATE.c.id == REF.c.state_id)
    .where(REF.c.kind == RefKind.BRANCH.value, STATE.c.status.in_(GONE))
    .order_by(REF.c.name)
)
_MOVE_BACK = (
    update(REF)
    .where(REF.c.name == bindparam("ref"), REF.c.version == bindparam("seen"))
    .values(state_id=bindparam("new"), version=REF.c.version + 1)
)
_DELETE = delete(REF).where(REF.c.name == bindparam("ref"), REF.c.version == bindparam("seen"))
