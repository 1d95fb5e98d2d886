"""Where a tracker sets out: which state its branch stands at, and its objects put there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import Conflict, NotFound
from .lineage import refs, revision, walk
from .lineage.states import Ref, RefKind, State
from .missing import explain, is_elsewhere, nearest_here

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from .repository import Repository
    from .tracker import Tracker

__all__ = ["Outset", "origin_of", "set_out"]

_log = logging.getLogger("datastates")


@dataclass(frozen=True, slots=True)
class Outset:
    """What a tracker sets out from; None begins a root. ``is_fork``: the branch is not there yet. ``is_beyond``: it has left ``start``."""

    state: State | None
    is_fork: bool = False
    is_beyond: bool = False


def origin_of(repository: Repository, branch: str, start: str | State | None, *, resume: bool) -> Outset:
    """The state that a tracker sets out from. A branch whose head cannot be restored is moved back; none is made."""
    with repository._reading() as session:
        ref = _find_ref(session, branch)
        origin = None if start is None else revision.resolve(session, start.uid if isinstance(start, State) else start)
        if ref is None:
            refs.check_name(branch)
            if origin is None:
                return Outset(None)
            if not origin.status.is_restorable:
                raise explain(repository, session, origin)
        else:
            if ref.kind is not RefKind.BRANCH:
                raise Conflict(f"{branch!r} is a tag: choose another name for the branch")
            if not resume:
                raise Conflict(f"branch {branch!r} exists at {ref.state[:10]}: choose another name, or go on there with resume=True")
            if origin is not None and not walk.is_ancestor(session, origin.uid, ref.state):
                raise Conflict(f"branch {branch!r} exists and does not descend from {start!r}: choose another name, or no start")
            head = walk.state(session, ref.state)
            begun, origin = origin, head if is_elsewhere(repository, session, head) else nearest_here(repository, session, head.uid)
            if origin is None:
                raise explain(repository, session, head)
            why = None if origin.uid == head.uid else explain(repository, session, head)
    if ref is None:
        return Outset(origin, is_fork=True)
    if origin.uid != ref.state:
        _log.warning("branch %s goes back to state %s (step %d): %s", branch, origin.uid[:10], origin.step, why)
        repository.move(branch, origin.uid, expected=ref.state)
    return Outset(origin, is_beyond=begun is None or begun.uid != origin.uid)


def set_out(repository: Repository, tracker: Tracker, state: State, *, only: str | Sequence[str] | None, strict: bool) -> None:
    """Put the tracker's objects where ``state`` stands, and have its first capture share with it what is unchanged."""
    tracker._restore_objects(state, only=only, strict=strict)
    tracker.resumed_from = state
    try:
        with repository._local.open(state.uid, verify=False) as reader:
            tracker._line.base = reader.manifest
    except NotFound:
        tracker._line.kin = repository._runner().line_of(state.uid)  # in memory only: what they share is written with the first of them
    _log.info("branch %s goes on from state %s, step %d", tracker.branch, state.uid[:10], state.step)


def _find_ref(session: Session, name: str) -> Ref | None:
    try:
        return refs.get(session, name)
    except NotFound:
        return None
