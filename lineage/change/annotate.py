"""Attributes that people give a state after it was captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, delete, insert, select

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.amendments import Amended, amend
from datastates.lineage.lookup import state, unknown
from datastates.lineage.schema import AttributeRow, StateRow, table
from datastates.lineage.states import State, Value
from datastates.lineage.typed import columns_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["annotate"]

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


_state, _attribute = table(StateRow), table(AttributeRow)
_LOCK_STATE = select(_state.c.id).where(_state.c.uid == bindparam("uid")).with_for_update(key_share=True)
_FORGET = delete(_attribute).where(_attribute.c.state_id == bindparam("state"), _attribute.c.key.in_(bindparam("keys", expanding=True)))
_SET = insert(_attribute)
