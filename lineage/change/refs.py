"""Branches and tags: names of states. Each change is a compare-and-swap and a line of the reflog.

Branches and tags share one namespace. A branch moves with captures (``record``), a tag only by ``move``.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, insert, select, update
from sqlalchemy import delete as sql_delete
from sqlalchemy.dialects import postgresql, sqlite

from datastates import values
from datastates.errors import Conflict, InvalidInput
from datastates.lineage.amendments import Amended, amend
from datastates.lineage.lookup import id_of, state
from datastates.lineage.schema import NoteRow, RefEventRow, RefRow, RunRow, table, to_us
from datastates.lineage.search.refs import find, get, last_event, moved, near, reflog, refs
from datastates.lineage.search.walk import nearest_restorable
from datastates.lineage.states import Ref, RefKind

from . import segments

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = [
    "branch",
    "check_name",
    "delete",
    "find",
    "get",
    "keep_tag",
    "last_event",
    "move",
    "moved",
    "near",
    "note_event",
    "reflog",
    "refs",
    "rename",
    "tag",
    "warn",
]

_logger = logging.getLogger(__name__)
NAME_LENGTH = 200
_UID_LIKE = re.compile(r"[0-9a-f]{4,24}")
_FORBIDDEN = re.compile(r"[\s\x00-\x1f\x7f~^@{}:\\?*\[\]\"'`()]|\.\.")

_ref, _event, _note, _run = (table(row) for row in (RefRow, RefEventRow, NoteRow, RunRow))


def check_name(name: str) -> str:
    """The name itself, if it is valid for a branch or a tag.

    :raises InvalidInput: it is not; the error says why, and proposes a valid one.
    """
    problem = _problem(values.string(name, "the name of a branch or a tag"))
    if problem:
        raise InvalidInput(f"{name!r} cannot name a branch or a tag: {problem}; {_propose(name)!r} would do")
    return str.__str__(name)


def tag(session: Session, name: str, uid: str, *, message: str | None = None, reason: str = "tag") -> Ref:
    """Give a state a permanent name.

    :raises Conflict: the name is taken, even by a tag of the same state.
    """
    return _make(session, Ref(name, RefKind.TAG, uid, 1, message), reason)


def keep_tag(session: Session, name: str, uid: str, *, message: str | None = None) -> Ref:
    """Give a state a permanent name; if this tag names it already, the tag as it stands.

    :raises Conflict: the name is taken by another state, or by a branch.
    """
    try:
        return tag(session, name, uid, message=message)
    except Conflict:
        found = get(session, name)
        if found.kind is not RefKind.TAG or found.state != uid:
            raise
        return found


def branch(session: Session, name: str, uid: str, *, reason: str = "branch") -> Ref:
    """Create a branch with its head at a state.

    :raises Conflict: the name is taken.
    """
    return _make(session, Ref(name, RefKind.BRANCH, uid, 1), reason)


def move(session: Session, name: str, uid: str, *, expected: str, reason: str = "move") -> Ref:
    """Point a branch or a tag at another state, if it still points at ``expected``.

    :raises Conflict: it points elsewhere by now.
    """
    name = values.text(name, "the name of a branch or a tag")
    new_id, old_id = id_of(session, uid), id_of(session, expected)
    segments.lock(session, [name])
    done = session.execute(_MOVE, {"new": new_id, "ref": name, "old": old_id})
    if _changed(done) != 1:
        found = get(session, name)
        raise Conflict(f"{found.kind} {name!r} is at {found.state}, not at {expected}: look again, then move it from there")
    moved = get(session, name)
    if moved.kind is RefKind.BRANCH:
        segments.move(session, name, old_id, new_id)
    note_event(session, name, moved.kind, old_id, new_id, reason)
    return moved


def delete(session: Session, name: str, *, reason: str = "delete") -> Ref:
    """Delete a name; its states and its reflog stay.

    :raises NotFound: there is no such ref; the error names the nearest.
    """
    segments.lock(session, [name])
    found = get(session, name)
    done = session.execute(sql_delete(_ref).where(_ref.c.name == name, _ref.c.version == found.version))
    if _changed(done) != 1:
        raise Conflict(f"{found.kind} {name!r} changed while it was deleted: look again, then delete it")
    segments.leave(session, name)
    note_event(session, name, found.kind, id_of(session, found.state), None, reason)
    return found


def rename(session: Session, name: str, new: str, *, reason: str = "rename") -> Ref:
    """Give a branch or a tag another name. A branch keeps its states, its notes and the policies of its trainings; each name has a reflog.

    :raises Conflict: the new name is taken.
    :raises NotFound: there is no such ref; the error names the nearest.
    """
    segments.lock(session, [name])
    found, new = get(session, name), check_name(new)
    if session.execute(select(_ref.c.name).where(_ref.c.name == new)).first():
        raise Conflict(f"{name!r} cannot be renamed: {new!r} is taken, choose another name")
    session.execute(update(_ref).where(_ref.c.name == name).values(name=new))
    id_ = id_of(session, found.state)
    if found.kind is RefKind.BRANCH:
        segments.rename(session, name, new)
        session.execute(update(_note).where(_note.c.branch == name).values(branch=new))
        amend(session, Amended.RUN, session.execute(select(_run.c.uid).where(_run.c.branch == name)).scalars().all())
        session.execute(update(_run).where(_run.c.branch == name).values(branch=new))
    note_event(session, name, found.kind, id_, None, f"{reason} to {new}")
    note_event(session, new, found.kind, None, id_, f"{reason} from {name}")
    return replace(found, name=new)


def warn(session: Session, ref: Ref) -> bool:
    """Log a warning about a tag of a state whose bytes are gone, which names the nearest state that has its bytes; returns whether it did.

    A state that only the memory of a process holds has its bytes, also if nothing can be found out about that process.
    """
    found = state(session, ref.state)
    if ref.kind is not RefKind.TAG or found.status.is_restorable:
        return False
    nearest = nearest_restorable(session, ref.state)
    near = None if nearest is None else f"the nearest state that has its bytes is {nearest.uid[:10]} (step {nearest.step})"
    _logger.warning(
        "tag %r names state %s (step %s), which is %s and cannot be restored: %s",
        ref.name,
        found.uid[:10],
        found.step,
        found.status,
        near or "no ancestor has its bytes",
    )
    return True


def note_event(session: Session, name: str, kind: RefKind, old: int | None, new: int | None, reason: str) -> None:
    """Append to the reflog, by row ids; called in the transaction that changes the ref."""
    row = {"name": name, "kind": kind.value, "old_id": old, "new_id": new, "reason": reason, "created_at": to_us(None)}
    session.execute(_LOG, row)


def _make(session: Session, ref: Ref, reason: str) -> Ref:
    check_name(ref.name)
    values.message(ref.message or "", f"the message of {ref.name!r}")
    id_ = id_of(session, ref.state)
    dialect = session.get_bind().dialect.name
    row = {"name": ref.name, "kind": ref.kind.value, "state_id": id_, "version": ref.version, "message": ref.message}
    if _changed(session.execute(_INSERT[dialect], row)) != 1:
        found = get(session, ref.name)
        raise Conflict(
            f"{found.kind} {ref.name!r} already names {found.state}: choose another name,"
            f" or move it: move({ref.name!r}, {ref.state!r}, expected={found.state!r})"
        )
    if ref.kind is RefKind.BRANCH:
        segments.begin(session, ref.name, id_)
    note_event(session, ref.name, ref.kind, None, id_, reason)
    return ref


def _changed(result: Any) -> int:
    return int(result.rowcount)


def _problem(name: str) -> str | None:
    if not name:
        return "it is empty"
    if len(name) > NAME_LENGTH:
        return f"it has {len(name)} characters, at most {NAME_LENGTH} fit"
    found = _FORBIDDEN.search(name)
    if found:
        return f"{found.group()!r} has a meaning of its own, or none that can be typed"
    if not name.isprintable():
        return "it has characters that cannot be printed"
    if not unicodedata.is_normalized("NFC", name):
        return "it has letters in decomposed form (Unicode NFD), which look like others"
    if name[0] in "-./" or name[-1] in "./" or "//" in name or "/./" in name:
        return "it begins with '-', '.' or '/', ends with '.' or '/', or has '//' or '/./' inside"
    if _UID_LIKE.fullmatch(name):
        return "it reads like the beginning of a uid"
    return None


def _propose(name: str) -> str:
    """A valid name that resembles this one."""
    name = unicodedata.normalize("NFC", name)
    plain = "".join(letter if letter.isprintable() else "-" for letter in _FORBIDDEN.sub("-", name))
    plain = re.sub(r"-{2,}", "-", re.sub(r"/(\.?/)+", "/", plain))[: NAME_LENGTH - 10].lstrip("-./").rstrip("-./")
    plain = plain or "branch"
    return f"branch-{plain}" if _problem(plain) else plain


_MOVE = (
    update(_ref)
    .where(_ref.c.name == bindparam("ref"), _ref.c.state_id == bindparam("old"))
    .values(state_id=bindparam("new"), version=_ref.c.version + 1)
)
_LOG = insert(_event)
_INSERT = {
    name: make(_ref).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    for name, make in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}
