"""Everything that is known of one state, for the API and for ``datastates show --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from datastates.content.manifest import PackInfo
from datastates.lineage import lookup
from datastates.lineage.change import runs
from datastates.lineage.search.holders import replicas_of
from datastates.lineage.search.incomplete import parts_of
from datastates.lineage.search.notes import notes
from datastates.lineage.search.refs import reflog
from datastates.lineage.show.detail import child_uids, refs_at
from datastates.lineage.show.origins import branches_of
from datastates.lineage.states import State

from .models import StateDetail, StoredPack

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["detail_of"]

_EVER = 2**62  # the log of most states has no line, which is no error


def detail_of(session: Session, uid: str, packs: Sequence[PackInfo] = ()) -> StateDetail:
    """The state of this uid, and everything that refers to it; ``packs`` are the files that it needs here.

    :raises NotFound: there is no such state.
    """
    state = lookup.state(session, uid)
    children = tuple(child_uids(session, uid))
    return StateDetail(
        **{field.name: getattr(state, field.name) for field in fields(State)},
        refs=tuple(refs_at(session, uid)),
        children=children,
        origins=branches_of(session, [uid, *children]),
        replicas=tuple(replicas_of(session, uid)),
        packs=tuple(StoredPack(pack.name, pack.size) for pack in sorted(packs, key=lambda pack: pack.name)),
        run_record=None if state.run is None else runs.get(session, state.run),
        notes=tuple(notes(session, state=uid)),
        added=tuple(reflog(session, uid, before=_EVER)),
        parts=tuple(parts_of(session, uid)) if state.world_size > 1 else (),
    )
