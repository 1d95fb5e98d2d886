"""Branches and tags, the notes on states and branches, and the processes that hold a state's
bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Select, bindparam, func, select

from datastates import values
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.lookup import id_of, rows_in_batches
from datastates.lineage.schema import (
    EVENT,
    FOLDER,
    NOTE,
    REF,
    REPLICA,
    STATE,
    from_us,
)
from datastates.lineage.states import Note, Ref, RefEvent, RefKind

if TYPE_CHECKING:
    from datastates.lineage.session import Session


# Branches and tags as they stand, and where they stood before. ``change.refs`` changes them.


_NEAR = 100

_old = STATE.alias("old")
_new = STATE.alias("new")


def get(session: Session, name: str) -> Ref:
    """The ref of this name.

    :raises NotFound: there is no such ref; the error names the nearest.
    """
    found = find(session, name)
    if found is None:
        raise NotFound(f"there is no branch or tag {name!r}{nearest(session, name)}")
    return found


def find(session: Session, name: str) -> Ref | None:
    """The ref of this name, or None."""
    row = session.execute(
        REFS.where(REF.c.name == bindparam("ref")),
        {"ref": values.text(name, "the name of a branch or a tag")},
    ).first()
    return None if row is None else to_ref(row)


def refs(session: Session, kind: RefKind | None = None) -> list[Ref]:
    """All refs, or the refs of one kind, by name."""
    query = REFS if kind is None else REFS.where(REF.c.kind == kind.value)
    return sorted((to_ref(row) for row in session.execute(query)), key=lambda ref: ref.name)


def moved(session: Session, after: int) -> dict[str, Ref | None]:
    """The refs that have a line of the reflog after the line ``after``, by name; None if they
    are deleted. All refs if that is negative."""
    if after < 0:
        return {ref.name: ref for ref in refs(session)}
    found: dict[str, Ref | None] = dict.fromkeys(
        session.execute(_MOVED, {"after": after}).scalars()
    )
    rows = rows_in_batches(session, _NAMED, list(found), "names")
    return found | {row.name: to_ref(row) for row in rows}


def reflog(
    session: Session, name: str, *, limit: int | None = None, before: int | None = None
) -> list[RefEvent]:
    """The moves of a ref, newest first, even after it was deleted; with ``before`` only those with
    lower ids.

    :raises NotFound: there never was such a ref; the error names the nearest that exists.
    """
    name = values.text(name, "the name of a branch or a tag")
    query = EVENTS.where(EVENT.c.name == name).order_by(EVENT.c.id.desc()).limit(limit)
    rows = session.execute(query if before is None else query.where(EVENT.c.id < before)).all()
    if not rows and limit != 0 and before is None:
        raise NotFound(f"there never was a branch or tag {name!r}{nearest(session, name)}")
    return [to_event(row) for row in rows]


def last_event(session: Session) -> int:
    """The id of the newest line of any reflog, 0 when there is none: one look-up shows whether a
    reflog has grown."""
    return int(session.execute(_LAST_EVENT).scalar() or 0)


def to_ref(row: Any) -> Ref:
    """The ref in a row of ``REFS``."""
    return Ref(row.name, RefKind(row.kind), row.uid, row.version, row.message)


def to_event(row: Any) -> RefEvent:
    """The line of a reflog in a row of ``EVENTS``."""
    at = from_us(row.created_at)
    return RefEvent(row.id, row.name, RefKind(row.kind), row.old, row.new, row.reason, at)


def nearest(session: Session, name: str) -> str:
    """The hint of an error message that lists similar names; empty if there are none."""
    names = get_close_matches(name, near(session, name), n=3)
    return f": did you mean {' or '.join(repr(each) for each in names)}?" if names else ""


def near(session: Session, name: str, kind: RefKind | None = None) -> list[str]:
    """Names that may be meant by this one: its neighbors in alphabetical order, and the names of
    the newest states.

    Each of the three groups has at most ``_NEAR`` names, because to compare 60,000 names takes a
    second.
    """
    query = (
        select(REF.c.name) if kind is None else select(REF.c.name).where(REF.c.kind == kind.value)
    )
    before, behind = (
        query.where(REF.c.name < name).order_by(REF.c.name.desc()),
        query.where(REF.c.name > name).order_by(REF.c.name),
    )
    newest = query.order_by(REF.c.state_id.desc())
    return sorted(
        {
            each
            for some in (before, behind, newest)
            for each in session.execute(some.limit(_NEAR)).scalars()
        }
    )


REFS: Select[Any] = select(
    REF.c.name, REF.c.kind, REF.c.version, REF.c.message, STATE.c.uid
).join_from(REF, STATE, STATE.c.id == REF.c.state_id)
_NAMED = REFS.where(REF.c.name.in_(bindparam("names", expanding=True)))
EVENTS: Select[Any] = (
    select(
        EVENT.c.id,
        EVENT.c.name,
        EVENT.c.kind,
        EVENT.c.reason,
        EVENT.c.created_at,
    )
    .add_columns(_old.c.uid.label("old"), _new.c.uid.label("new"))
    .outerjoin_from(EVENT, _old, _old.c.id == EVENT.c.old_id)
    .outerjoin(_new, _new.c.id == EVENT.c.new_id)
)
_MOVED = select(EVENT.c.name).where(EVENT.c.id > bindparam("after", type_=BigInteger)).distinct()
_LAST_EVENT = select(func.max(EVENT.c.id))


# The notes on states and branches. ``change.notes`` writes them.


_NOTES = select(NOTE, STATE.c.uid.label("state")).outerjoin_from(
    NOTE, STATE, STATE.c.id == NOTE.c.state_id
)
_NOTES_OF = _NOTES.where(STATE.c.uid.in_(bindparam("uids", expanding=True)))


def get_note(session: Session, uid: str) -> Note:
    """The note of this uid.

    :raises NotFound: there is none.
    """
    row = session.execute(_NOTES.where(NOTE.c.uid == bindparam("note")), {"note": uid}).first()
    if row is None:
        raise NotFound(
            f"there is no note {uid!r}: it may have been deleted, the list of notes has those that"
            " are there"
        )
    return _to_note(row)


def notes(
    session: Session,
    *,
    state: str | None = None,
    branch: str | None = None,
    limit: int | None = None,
    after: str | None = None,
) -> list[Note]:
    """The notes on a state (by its uid) or a branch, or all of them, newest first; only those after
    the note ``after``, if given.

    :raises NotFound: there is no note ``after``.
    """
    if state is not None and branch is not None:
        raise InvalidInput("notes are of a state or of a branch: name one of the two")
    query = _NOTES.order_by(NOTE.c.id.desc()).limit(limit)
    if state is not None:
        query = query.where(STATE.c.uid == state)
    if branch is not None:
        query = query.where(NOTE.c.branch == branch)
    if after is not None:
        last = session.execute(select(NOTE.c.id).where(NOTE.c.uid == after)).scalar()
        if last is None:
            raise NotFound(
                f"there is no note {after!r} to go on after: begin again at the first page"
            )
        query = query.where(NOTE.c.id < last)
    return [_to_note(row) for row in session.execute(query)]


def of_states(session: Session, uids: Iterable[str]) -> list[Note]:
    """The notes on some states, oldest first."""
    rows = rows_in_batches(session, _NOTES_OF, sorted(set(uids)), "uids")
    return [_to_note(row) for row in sorted(rows, key=lambda row: int(row.id))]


def _to_note(row: Any) -> Note:
    edited_at = None if row.edited_at is None else from_us(row.edited_at)
    return Note(
        row.uid, row.state, row.branch, row.author, row.text, from_us(row.created_at), edited_at
    )


# The holders of a state's bytes: its replicas, as they were reported.


_MARK = "#"

_REPLICAS = (
    select(
        *(
            REPLICA.c.rank,
            REPLICA.c.tier,
            func.coalesce(FOLDER.c.host, REPLICA.c.node).label("node"),
        ),
        *(REPLICA.c.status, REPLICA.c.bytes),
    )
    .outerjoin_from(REPLICA, FOLDER, FOLDER.c.uid == REPLICA.c.node)
    .where(REPLICA.c.state_id == bindparam("state"))
    .order_by(REPLICA.c.rank, REPLICA.c.tier, REPLICA.c.node)
)


@dataclass(frozen=True, slots=True)
class Replica:
    """One rank's shard is complete on a tier of a node; ``status`` is ``ok`` or ``gone``. ``run``
    is the process whose memory has it, if it is in memory.

    ``bytes`` are those that it added there: bytes that other states held already came without a
    copy.
    """

    rank: int
    tier: str
    node: str
    status: str
    bytes: int
    run: str | None = None


def holder(node: str, run: str | None) -> str:
    """The node of a replica that is in the memory of a process."""
    return node if run is None else f"{node}{_MARK}{run}"


def node_of(place: str) -> str:
    """The node in a place, whichever process has the memory."""
    return place.partition(_MARK)[0]


def replicas_of(session: Session, uid: str) -> list[Replica]:
    """Every replica of a state, by rank, tier and node.

    :raises NotFound: there is no such state.
    """
    found = []
    for row in session.execute(_REPLICAS, {"state": id_of(session, uid)}):
        node, _, run = row.node.partition(_MARK)
        found.append(Replica(row.rank, row.tier, node, row.status, row.bytes, run or None))
    return found
