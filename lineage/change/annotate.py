"""Attributes and metrics that people give a state after it was captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, delete, insert, select

from datastates import values
from datastates.errors import Conflict, InvalidInput
from datastates.lineage.amendments import Amended, amend
from datastates.lineage.lookup import state, unknown
from datastates.lineage.schema import AttributeRow, MetricRow, StateRow, table
from datastates.lineage.states import RefKind, State, Value
from datastates.lineage.typed import columns_of

from . import segments
from .refs import note_event

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["annotate", "measure"]

ATTRIBUTES = 1000
"""The most attributes that an annotated state may have."""


def annotate(session: Session, uid: str, attributes: Mapping[str, Value]) -> State:
    """Set attributes of a state, and remove those whose value is None; returns the state as it is then.

    Its digest stays: that identifies what was captured, while attributes are what is known of it. For the same reason its manifest on disk
    keeps the attributes from its capture.

    :raises NotFound: there is no such state.
    :raises InvalidInput: a name or a value cannot be stored, or there are too many.
    """
    for key in attributes:
        values.key(key, "the name of an attribute")
    plain = {key: values.plain(value, f"attribute {key!r}") for key, value in attributes.items() if value is not None}
    rows = [columns_of(key, value, "attribute") for key, value in plain.items()]
    id_ = session.execute(_LOCK_STATE, {"uid": uid}).scalar()
    if id_ is None:
        raise unknown(uid)
    if attributes:
        session.execute(_FORGET, {"state": id_, "keys": list(attributes)})
        amend(session, Amended.ATTRIBUTES, [uid])
    if rows:
        session.execute(_SET, [{"state_id": id_, **row} for row in rows])
    annotated = state(session, uid)
    if rows and len(annotated.attributes) > ATTRIBUTES:
        raise InvalidInput(f"state {uid} would have {len(annotated.attributes)} attributes, at most {ATTRIBUTES} fit: take some away")
    return annotated


def measure(session: Session, uid: str, metrics: Mapping[str, object], *, author: str, is_replacing: bool = False) -> State:
    """Add metrics to a state that was captured without them; returns the state as it is then.

    A metric that has this value already is left out. The reflog under the state's uid is the log: it gets a line with the author, the
    values, and the values that they replace.

    :raises NotFound: there is no such state.
    :raises Conflict: the state has another value of a metric, and ``is_replacing`` is false.
    :raises InvalidInput: a name or a value cannot be stored.
    """
    given, who = values.metrics(metrics), values.text(author, "the author", at_most=255).strip() or "unknown"
    segments.lock(session, of_state=uid)
    id_ = session.execute(_LOCK_STATE, {"uid": uid}).scalar()
    if id_ is None:
        raise unknown(uid)
    had = state(session, uid).metrics
    new = {key: value for key, value in given.items() if key not in had or repr(had[key]) != repr(value)}
    key = next((key for key in new if key in had), None)
    if key is not None and not is_replacing:
        raise Conflict(f"state {uid} has the metric {key!r} = {had[key]!r} already: replace=True (--replace) changes it to {new[key]!r}")
    if new:
        session.execute(_FORGET_METRICS, {"state": id_, "keys": list(new)})
        session.execute(
            _SET_METRICS, [{"state_id": id_, "key": key, "value": None if value != value else value} for key, value in new.items()]
        )
        segments.remeasure(session, id_)
        said = [f"{key}={value!r}" + (f" (was {had[key]!r})" if key in had else "") for key, value in new.items()]
        note_event(session, uid, RefKind.TAG, None, None, f"metrics by {who}: {', '.join(said)}")
        amend(session, Amended.METRICS, [uid])
    return state(session, uid)


_state, _attribute, _metric = table(StateRow), table(AttributeRow), table(MetricRow)
_LOCK_STATE = select(_state.c.id).where(_state.c.uid == bindparam("uid")).with_for_update(key_share=True)
_FORGET, _FORGET_METRICS = (
    delete(each).where(each.c.state_id == bindparam("state"), each.c.key.in_(bindparam("keys", expanding=True)))
    for each in (_attribute, _metric)
)
_SET, _SET_METRICS = insert(_attribute), insert(_metric)
