"""Branches and tags: names of states. Each change is a compare-and-swap and a line of the reflog.

Branches and tags share one namespace. A branch moves with captures (``record``), a tag only by
``move``.
"""

from __future__ import annotations

import logging
import re
import secrets
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, bindparam, delete, func, insert, select, update
from sqlalchemy import delete as sql_delete
from sqlalchemy.dialects import postgresql, sqlite

from datastates import values
from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage.lookup import id_of, state, unknown
from datastates.lineage.query.names import get, get_note
from datastates.lineage.query.names import get as ref_of
from datastates.lineage.query.walk import nearest_restorable
from datastates.lineage.schema import (
    ATTRIBUTE,
    EVENT,
    METRIC,
    NOTE,
    REF,
    RUN,
    STATE,
    to_us,
)
from datastates.lineage.states import Note, Ref, RefKind, State, columns_of
from datastates.values import Value

from . import segments

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_logger = logging.getLogger(__name__)
NAME_LENGTH = 200
_UID_LIKE = re.compile(r"[0-9a-f]{4,24}")
_FORBIDDEN = re.compile(r"[\s\x00-\x1f\x7f~^@{}:\\?*\[\]\"'`()]|\.\.")


def check_name(name: str) -> str:
    """The name itself, if it is valid for a branch or a tag.

    :raises InvalidInput: it is not; the error gives the reason and a valid name.
    """
    problem = _problem(values.string(name, "the name of a branch or a tag"))
    if problem:
        raise InvalidInput(
            f"{name!r} cannot name a branch or a tag: {problem}; {_propose(name)!r} would do"
        )
    return str.__str__(name)


def tag(
    session: Session, name: str, uid: str, *, message: str | None = None, reason: str = "tag"
) -> Ref:
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
        raise Conflict(
            f"{found.kind} {name!r} is at {found.state}, not at {expected}: look again, then move"
            " it from there"
        )
    moved = get(session, name)
    if moved.kind is RefKind.BRANCH:
        segments.move(session, name, old_id, new_id)
    note_event(session, name, moved.kind, old_id, new_id, reason)
    return moved


def delete_ref(session: Session, name: str, *, reason: str = "delete") -> Ref:
    """Delete a name; its states and its reflog stay.

    :raises NotFound: there is no such ref; the error names the nearest.
    """
    segments.lock(session, [name])
    found = get(session, name)
    done = session.execute(
        sql_delete(REF).where(REF.c.name == name, REF.c.version == found.version)
    )
    if _changed(done) != 1:
        raise Conflict(
            f"{found.kind} {name!r} changed while it was deleted: look again, then delete it"
        )
    segments.detach(session, name)
    note_event(session, name, found.kind, id_of(session, found.state), None, reason)
    return found


def rename(session: Session, name: str, new: str, *, reason: str = "rename") -> Ref:
    """Give a branch or a tag another name. A branch keeps its states, its notes and the policies of
    its trainings; each name has a reflog.

    :raises Conflict: the new name is taken.
    :raises NotFound: there is no such ref; the error names the nearest.
    """
    segments.lock(session, [name])
    found, new = get(session, name), check_name(new)
    if session.execute(select(REF.c.name).where(REF.c.name == new)).first():
        raise Conflict(f"{name!r} cannot be renamed: {new!r} is taken, choose another name")
    session.execute(update(REF).where(REF.c.name == name).values(name=new))
    id_ = id_of(session, found.state)
    if found.kind is RefKind.BRANCH:
        segments.rename(session, name, new)
        session.execute(update(NOTE).where(NOTE.c.branch == name).values(branch=new))
        session.execute(update(RUN).where(RUN.c.branch == name).values(branch=new))
    note_event(session, name, found.kind, id_, None, f"{reason} to {new}")
    note_event(session, new, found.kind, None, id_, f"{reason} from {name}")
    return replace(found, name=new)


def warn(session: Session, ref: Ref) -> bool:
    """Log a warning about a tag of a state whose bytes are gone, which names the nearest state that
    has its bytes; returns whether it did.

    A state that only the memory of a process holds has its bytes, also if nothing can be found out
    about that process.
    """
    found = state(session, ref.state)
    if ref.kind is not RefKind.TAG or found.status.is_restorable:
        return False
    nearest = nearest_restorable(session, ref.state)
    near = (
        None
        if nearest is None
        else f"the nearest state that has its bytes is {nearest.uid[:10]} (step {nearest.step})"
    )
    _logger.warning(
        "tag %r names state %s (step %s), which is %s and cannot be restored: %s",
        ref.name,
        found.uid[:10],
        found.step,
        found.status,
        near or "no ancestor has its bytes",
    )
    return True


def note_event(
    session: Session, name: str, kind: RefKind, old: int | None, new: int | None, reason: str
) -> None:
    """Append to the reflog, by row ids; called in the transaction that changes the ref."""
    row = {
        "name": name,
        "kind": kind.value,
        "old_id": old,
        "new_id": new,
        "reason": reason,
        "created_at": to_us(None),
    }
    session.execute(_LOG, row)


def _make(session: Session, ref: Ref, reason: str) -> Ref:
    check_name(ref.name)
    values.message(ref.message or "", f"the message of {ref.name!r}")
    id_ = id_of(session, ref.state)
    dialect = session.dialect.name
    row = {
        "name": ref.name,
        "kind": ref.kind.value,
        "state_id": id_,
        "version": ref.version,
        "message": ref.message,
    }
    if _changed(session.execute(_INSERT[dialect], row)) != 1:
        found = get(session, ref.name)
        raise Conflict(
            f"{found.kind} {ref.name!r} already names {found.state}: choose another name, or move"
            f" it: `datastates {found.kind} {ref.name} {ref.state[:10]} --move` (repo.move)"
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
    plain = (
        re.sub(r"-{2,}", "-", re.sub(r"/(\.?/)+", "/", plain))[: NAME_LENGTH - 10]
        .lstrip("-./")
        .rstrip("-./")
    )
    plain = plain or "branch"
    return f"branch-{plain}" if _problem(plain) else plain


_MOVE = (
    update(REF)
    .where(REF.c.name == bindparam("ref"), REF.c.state_id == bindparam("old"))
    .values(state_id=bindparam("new"), version=REF.c.version + 1)
)
_LOG = insert(EVENT)
_INSERT = {
    name: make(REF).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    for name, make in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}


# Attributes and metrics that people give a state after it was captured.


ATTRIBUTES = 1000
"""The most attributes that an annotated state may have."""


def annotate(session: Session, uid: str, attributes: Mapping[str, Value]) -> State:
    """Set attributes of a state, and remove those whose value is None; returns the state as it is
    then.

    Its digest stays: that identifies what was captured, while attributes are what is known of it.
    For the same reason its manifest on disk keeps the attributes from its capture.

    :raises NotFound: there is no such state.
    :raises InvalidInput: a name or a value cannot be stored, or there are too many.
    """
    for key in attributes:
        values.key(key, "the name of an attribute")
    plain = {
        key: values.plain(value, f"attribute {key!r}")
        for key, value in attributes.items()
        if value is not None
    }
    rows = [columns_of(key, value, "attribute") for key, value in plain.items()]
    id_ = session.execute(_LOCK_STATE, {"uid": uid}).scalar()
    if id_ is None:
        raise unknown(uid)
    if attributes:
        session.execute(_FORGET, {"state": id_, "keys": list(attributes)})
    if rows:
        session.execute(_SET, [{"state_id": id_, **row} for row in rows])
    annotated = state(session, uid)
    if rows and len(annotated.attributes) > ATTRIBUTES:
        raise InvalidInput(
            f"state {uid} would have {len(annotated.attributes)} attributes, at most {ATTRIBUTES}"
            " fit: take some away"
        )
    return annotated


def measure(
    session: Session,
    uid: str,
    metrics: Mapping[str, object],
    *,
    author: str,
    is_replacing: bool = False,
) -> State:
    """Add metrics to a state that was captured without them; returns the state as it is then.

    A metric that has this value already is left out. The reflog under the state's uid is the log:
    it gets a line with the author, the values, and the values that they replace.

    :raises NotFound: there is no such state.
    :raises Conflict: the state has another value of a metric, and ``is_replacing`` is false.
    :raises InvalidInput: a name or a value cannot be stored.
    """
    given, who = (
        values.metrics(metrics),
        values.text(author, "the author", at_most=255).strip() or "unknown",
    )
    segments.lock(session, of_state=uid)
    id_ = session.execute(_LOCK_STATE, {"uid": uid}).scalar()
    if id_ is None:
        raise unknown(uid)
    had = state(session, uid).metrics
    new = {
        key: value
        for key, value in given.items()
        if key not in had or repr(had[key]) != repr(value)
    }
    key = next((key for key in new if key in had), None)
    if key is not None and not is_replacing:
        raise Conflict(
            f"state {uid} has the metric {key!r} = {had[key]!r} already: replace=True (--replace)"
            f" changes it to {new[key]!r}"
        )
    if new:
        session.execute(_FORGET_METRICS, {"state": id_, "keys": list(new)})
        session.execute(
            _SET_METRICS,
            [
                {"state_id": id_, "key": key, "value": None if value != value else value}
                for key, value in new.items()
            ],
        )
        segments.remeasure(session, id_)
        said = [
            f"{key}={value!r}" + (f" (was {had[key]!r})" if key in had else "")
            for key, value in new.items()
        ]
        note_event(session, uid, RefKind.TAG, None, None, f"metrics by {who}: {', '.join(said)}")
    return state(session, uid)


_LOCK_STATE = (
    select(STATE.c.id).where(STATE.c.uid == bindparam("uid")).with_for_update(key_share=True)
)
_FORGET, _FORGET_METRICS = (
    delete(each).where(
        each.c.state_id == bindparam("state"), each.c.key.in_(bindparam("keys", expanding=True))
    )
    for each in (ATTRIBUTE, METRIC)
)
_SET = insert(ATTRIBUTE)
_SET_METRICS = insert(METRIC)


# Notes: what people write about states and branches, in Markdown. The notes of a branch belong to
# its name, whatever becomes of it.


TEXT = 16_384
"""The most characters that a note may have."""

NOTES = 1_000
"""The most notes that a state or a branch may have."""

_AUTHOR = 255


def write(
    session: Session, text: str, *, state: str | None = None, branch: str | None = None, author: str
) -> Note:
    """Write a note on a state (by its uid) or on a branch.

    :raises NotFound: there is no such state, or no such branch.
    :raises InvalidInput: the text is empty or too long, or there are too many notes already.
    """
    if (state is None) == (branch is None):
        raise InvalidInput("a note is of a state or of a branch: name one of the two")
    if branch is not None and ref_of(session, branch).kind is not RefKind.BRANCH:
        raise InvalidInput(f"{branch!r} is a tag: write the note of the state that it names")
    row = {"state_id": None if state is None else id_of(session, state), "branch": branch}
    count = session.execute(
        select(func.count()).where(
            NOTE.c.state_id == row["state_id"] if branch is None else NOTE.c.branch == branch
        )
    )
    if count.scalar_one() >= NOTES:
        raise InvalidInput(
            f"{state or branch} has {NOTES} notes: delete some, or add to one that is there"
        )
    made = {
        "uid": secrets.token_hex(12),
        "author": _author(author),
        "text": _text(text),
        "created_at": to_us(None),
        "edited_at": None,
    }
    session.execute(insert(NOTE), {**row, **made})
    note = get_note(session, str(made["uid"]))
    _log(session, note, f"written by {note.author}")
    return note


def edit(session: Session, uid: str, text: str, *, seen: Note | None = None) -> Note:
    """Change the text of a note, which is marked as edited from then on. ``seen``: only if the note
    is still this one.

    :raises NotFound: there is no such note.
    :raises Conflict: the note was edited since ``seen`` was read.
    """
    done: Any = session.execute(
        _EDIT.where(*_as_seen(seen)), {"note": uid, "text": _text(text), "edited_at": to_us(None)}
    )
    changed = get_note(session, uid)
    if done.rowcount == 0:
        raise _was_edited(changed)
    _log(session, changed, "edited")
    return changed


def remove(session: Session, uid: str, *, seen: Note | None = None) -> Note:
    """Delete a note permanently; returns it as it was. ``seen``: only if the note is still this
    one.

    :raises NotFound: there is no such note.
    :raises Conflict: the note was edited since ``seen`` was read.
    """
    gone = get_note(session, uid)
    done: Any = session.execute(_DELETE.where(*_as_seen(seen)), {"note": uid})
    if done.rowcount == 0:
        raise _was_edited(get_note(session, uid))
    _log(session, gone, "deleted")
    return gone


def check_notes(coming: Iterable[Note]) -> None:
    """Raise unless ``import_notes`` could add these notes.

    :raises InvalidInput: a text cannot be stored; the error names its note.
    """
    for note in coming:
        _text(note.text)
        _author(note.author)


def import_notes(session: Session, coming: Iterable[Note]) -> int:
    """Add those notes that are not here yet, on states that came along with them.

    Returns how many there were."""
    count = 0
    for note in coming:
        if note.state is None:
            continue
        try:
            get_note(session, note.uid)
        except NotFound:
            row = {
                "uid": note.uid,
                "author": _author(note.author),
                "text": _text(note.text),
                "state_id": id_of(session, note.state),
            }
            edited_at = None if note.edited_at is None else to_us(note.edited_at)
            session.execute(
                insert(NOTE),
                {
                    **row,
                    "branch": None,
                    "created_at": to_us(note.created_at),
                    "edited_at": edited_at,
                },
            )
            count += 1
    return count


def _text(text: str) -> str:
    found = values.text(text, "the note", at_most=TEXT)
    if not found.strip():
        raise InvalidInput("the note is empty: write something, or delete it")
    return found


def _author(author: str) -> str:
    return values.text(author, "the author", at_most=_AUTHOR).strip() or "unknown"


def _as_seen(seen: Note | None) -> list[ColumnElement[bool]]:
    return (
        []
        if seen is None
        else [
            func.coalesce(NOTE.c.edited_at, NOTE.c.created_at)
            == to_us(seen.edited_at or seen.created_at)
        ]
    )


def _was_edited(note: Note) -> Conflict:
    return Conflict(
        f"note {note.uid} was edited at {note.edited_at}, after it was read here: read it again,"
        " then change it"
    )


def _log(session: Session, note: Note, what: str) -> None:
    """Append to the reflog under the note's uid.

    Whoever follows the events reads the notes again."""
    note_event(
        session, note.uid, RefKind.TAG, None, None, f"note on {note.branch or note.state} {what}"
    )


_EDIT = update(NOTE).where(NOTE.c.uid == bindparam("note"))
_DELETE = delete(NOTE).where(NOTE.c.uid == bindparam("note"))
