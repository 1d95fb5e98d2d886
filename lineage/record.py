"""The commit point: a state becomes part of the lineage in one transaction, with everything that belongs to it.

``record`` runs beside training for every capture, under its GIL, so it is a handful of statements that were compiled
once, on tables rather than on models.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, bindparam, exc, insert, literal, select, update
from sqlalchemy.dialects import postgresql, sqlite

from datastates import values
from datastates.errors import Conflict, InvalidInput, NotFound

from .lookup import ids_of
from .refs import check_name
from .replicas import evict, mark, packs_of
from .schema import (
    EXACT_INT,
    AttributeRow,
    EdgeRow,
    MetricRow,
    RefEventRow,
    RefRow,
    ReplicaRow,
    RunRow,
    StateRow,
    from_us,
    table,
    to_us,
)
from .states import NewState, RefKind, State, Value

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["check", "evict", "mark", "packs_of", "record"]

_UID = re.compile(r"[0-9a-f]{24}")


def record(session: Session, new: NewState) -> State:
    """Make a state visible and move its branch to it, from its parent and from nowhere else.

    The branch is made when nothing has its name. A metric may be NaN or infinite; it comes back as it was. An error
    must leave the transaction, so that nothing half-recorded is committed.

    :raises Conflict: the branch has moved on, its name is a tag's, or the uid is taken.
    :raises NotFound: the parent, the run or a further parent is unknown.
    :raises InvalidInput: a uid, a name or a value cannot be stored; names it.
    """
    _check(new)
    attributes = [_attribute_row(key, value) for key, value in new.attributes.items()]
    connection = session.connection()
    created_us = to_us(new.created_at)
    place = connection.execute(_PLACE, {"parent": new.parent, "run": new.run, "branch": new.branch}).one()
    _check_place(new, place)
    further_ids = ids_of(session, [edge.parent for edge in new.edges]) if new.edges else []
    generation, jump_id, jump_step = _jump(place)
    id_ = _insert_state(connection, new, place, generation, jump_id, jump_step, created_us)
    _insert_belongings(connection, new, id_, further_ids, attributes)
    if new.branch is not None:
        _advance(connection, new.branch, place, id_, created_us)
    return State(
        uid=new.uid,
        digest=new.digest,
        step=new.step,
        micro_step=new.micro_step,
        metrics=dict(new.metrics),
        attributes=dict(new.attributes),
        message=new.message,
        created_at=from_us(created_us),
        status=new.status,
        parents=(() if new.parent is None else (new.parent,)) + tuple(edge.parent for edge in new.edges),
        edges=new.edges,
        run=new.run,
        generation=generation,
        bytes_total=new.bytes_total,
        bytes_new=new.bytes_new,
        world_size=new.world_size,
    )


def check(new: NewState) -> None:
    """Nothing, if ``record`` would store such a state; whether its parents are there is another question.

    :raises InvalidInput: a uid, a name or a value cannot be stored; names it.
    """
    _check(new)
    for key, value in new.attributes.items():
        _attribute_row(key, value)


# The steps of record


def _check(new: NewState) -> None:
    if not _UID.fullmatch(new.uid):
        raise InvalidInput(f"{new.uid!r} is no uid: it must have 24 lower-case hex digits")
    for key in (*new.metrics, *new.attributes):
        values.key(key, "the name of a metric or an attribute")
    values.text(new.message or "", "message")
    if len({(edge.parent, edge.kind) for edge in new.edges}) < len(new.edges):
        raise InvalidInput(f"{new.uid} names a further parent twice in the same way: name each once")
    for what, number, bits in (
        ("step", new.step, 63),
        ("micro_step", new.micro_step, 31),
        ("world_size", new.world_size, 31),
        ("bytes_total", new.bytes_total, 63),
        ("bytes_new", new.bytes_new, 63),
    ):
        if not -(2**bits) <= number < 2**bits:
            raise InvalidInput(f"{what} {number} of {new.uid} does not fit {bits + 1} bits: count from 0")
    if not all(math.isfinite(edge.weight) for edge in new.edges):
        raise InvalidInput(f"a further parent of {new.uid} has a weight that is no number")


def _check_place(new: NewState, place: Any) -> None:
    if new.parent is not None and place.parent_id is None:
        raise NotFound(f"there is no state {new.parent!r} to be the parent of {new.uid}: record it first")
    if new.run is not None and place.run_id is None:
        raise NotFound(f"there is no run {new.run!r}: start it before it records states")
    if new.branch is None:
        return
    if place.ref_kind is None:
        check_name(new.branch)
    elif place.ref_kind != RefKind.BRANCH.value:
        raise Conflict(f"{new.branch!r} is a tag, captures cannot move it: choose another branch")
    elif place.head_id != place.parent_id:
        raise _moved_on(new.branch, place.head, new.parent)


def _moved_on(branch: str, head: str | None, parent: str | None) -> Conflict:
    at = f"is at {head}" if head else "changed just now"
    return Conflict(f"branch {branch!r} {at}, not at {parent or 'its beginning'}: go on from its head, or fork another branch")


def _jump(place: Any) -> tuple[int, int | None, int | None]:
    """Generation, jump pointer and lowest step up to there: over both jumps of the parent when they are equally long, else one up.

    A root counts as its own jump.
    """
    if place.parent_id is None:
        return 0, None, None
    at, jump_at, far_at = place.generation, place.jump_generation or 0, place.far_generation or 0
    generation = at + 1
    if at - jump_at == jump_at - far_at:
        far_id = place.far_id or place.jump_id or place.parent_id
        steps = (place.step, place.jump_step, place.jumped_step)
        return generation, far_id, min(step for step in steps if step is not None)
    return generation, place.parent_id, place.step


def _insert_state(
    connection: Connection, new: NewState, place: Any, generation: int, jump_id: int | None, jump_step: int | None, created_us: int
) -> int:
    row = {
        "uid": new.uid,
        "digest": new.digest,
        "parent_id": place.parent_id,
        "generation": generation,
        "jump_id": jump_id,
        "jump_step": jump_step,
        "run_id": place.run_id,
        "step": new.step,
        "micro_step": new.micro_step,
        "created_at": created_us,
        "status": new.status.value,
        "bytes_total": new.bytes_total,
        "bytes_new": new.bytes_new,
        "world_size": new.world_size,
        "message": new.message,
    }
    try:
        inserted: Any = connection.execute(_INSERT_STATE, row)
    except exc.IntegrityError as error:
        raise Conflict(f"there is a state {new.uid} already: every capture needs a uid of its own") from error
    return int(inserted.inserted_primary_key[0])


def _insert_belongings(
    connection: Connection, new: NewState, id_: int, further_ids: list[int], attributes: list[dict[str, object]]
) -> None:
    if new.edges:
        connection.execute(
            _INSERT_EDGE,
            [
                {"child_id": id_, "parent_id": parent, "kind": edge.kind.value, "position": position, "weight": edge.weight}
                for position, (edge, parent) in enumerate(zip(new.edges, further_ids, strict=True))
            ],
        )
    if new.metrics:
        metrics = [{"state_id": id_, "key": key, "value": None if math.isnan(value) else value} for key, value in new.metrics.items()]
        connection.execute(_INSERT_METRIC, metrics)
    if attributes:
        connection.execute(_INSERT_ATTRIBUTE, [{"state_id": id_, **row} for row in attributes])
    if new.status.is_restorable:
        replica = {"state_id": id_, "rank": 0, "tier": new.tier, "node": new.node, "status": "ok", "bytes": new.bytes_new}
        connection.execute(_INSERT_REPLICA, replica)


def _attribute_row(key: str, value: Value) -> dict[str, object]:
    type_, number, text = "none", None, None
    match value:
        case str():
            type_, text = "str", values.text(value, f"attribute {key!r}")
        case bool():
            type_, number = "bool", float(value)
        case int():
            type_, number, text = "int", _nearest_float(value), None if abs(value) <= EXACT_INT else str(value)
        case float():
            type_, number = "float", None if math.isnan(value) else value
        case None:
            pass
        case _:
            raise InvalidInput(f"attribute {key!r} is a {type(value).__name__}: store a str, int, float, bool or None")
    return {"key": key, "type": type_, "number": number, "text": text}


def _nearest_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _advance(connection: Connection, branch: str, place: Any, id_: int, created_us: int) -> None:
    """The branch goes from the parent to the new state, or nothing is recorded at all."""
    if place.ref_kind is None:
        row = {"name": branch, "kind": RefKind.BRANCH.value, "state_id": id_, "version": 1, "message": None}
        done: Any = connection.execute(_MAKE_BRANCH[connection.dialect.name], row)
    else:
        done = connection.execute(_MOVE_BRANCH, {"ref": branch, "old": place.head_id, "new": id_})
    if done.rowcount != 1:
        raise _moved_on(branch, None, place.parent_uid)
    event = {
        "name": branch,
        "kind": RefKind.BRANCH.value,
        "old_id": None if place.ref_kind is None else place.head_id,
        "new_id": id_,
        "reason": "capture",
        "created_at": created_us,
    }
    connection.execute(_INSERT_EVENT, event)


# The statements

_state, _run, _ref, _event = table(StateRow), table(RunRow), table(RefRow), table(RefEventRow)
_parent, _jumped, _far, _head = (_state.alias(name) for name in ("parent", "jumped", "far", "head"))
_one = select(literal(1).label("one")).subquery()

_PLACE = (
    select(_parent.c.id.label("parent_id"), _parent.c.uid.label("parent_uid"), _parent.c.generation)
    .add_columns(_parent.c.step, _parent.c.jump_step, _jumped.c.jump_step.label("jumped_step"))
    .add_columns(_jumped.c.id.label("jump_id"), _jumped.c.generation.label("jump_generation"))
    .add_columns(_far.c.id.label("far_id"), _far.c.generation.label("far_generation"), _run.c.id.label("run_id"))
    .add_columns(_ref.c.kind.label("ref_kind"), _head.c.id.label("head_id"), _head.c.uid.label("head"))
    .select_from(
        _one.outerjoin(_parent, _parent.c.uid == bindparam("parent"))
        .outerjoin(_jumped, _jumped.c.id == _parent.c.jump_id)
        .outerjoin(_far, _far.c.id == _jumped.c.jump_id)
        .outerjoin(_run, _run.c.uid == bindparam("run"))
        .outerjoin(_ref, _ref.c.name == bindparam("branch"))
        .outerjoin(_head, _head.c.id == _ref.c.state_id)
    )
)
_INSERT_STATE = insert(_state)
_INSERT_EDGE, _INSERT_METRIC, _INSERT_ATTRIBUTE = insert(table(EdgeRow)), insert(table(MetricRow)), insert(table(AttributeRow))
_INSERT_REPLICA, _INSERT_EVENT = insert(table(ReplicaRow)), insert(_event)
_MAKE_BRANCH = {
    name: make(_ref).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    for name, make in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}
_MOVE_BRANCH = (
    update(_ref)
    .where(_ref.c.name == bindparam("ref"), _ref.c.kind == RefKind.BRANCH.value, _ref.c.state_id == bindparam("old"))
    .values(state_id=bindparam("new"), version=_ref.c.version + 1)
)
