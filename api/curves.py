"""Curves of a repository, as they were read: metrics never change, so a branch that grew is read from where it stood before."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from datastates.lineage.lookup import states
from datastates.lineage.search.order import uids_of
from datastates.lineage.search.outline import Outline, generation_of, names_of, outline
from datastates.lineage.search.series import Curve, curve, partings
from datastates.lineage.search.walk import first_meeting

from .models import Fork, Series, SeriesLine
from .thinning import thin

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Curves"]

_POINTS = 2_000_000  # kept in memory, 24 bytes each
_TRIED = 4  # curves of which one may share a path with the one that is wanted
_LONG = 4096  # a path of so many states is drawn by its summaries
_OUTLINES = 64  # kept in memory


class Curves:
    """The curves that were read of one repository. Safe from any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], Curve] = OrderedDict()
        self._outlines: OrderedDict[tuple[str, int], Outline] = OrderedDict()
        self._lock = threading.Lock()

    def series(self, session: Session, heads: Sequence[str], ids: Sequence[int], keys: Sequence[str], points: int) -> Series:
        """Each metric of ``keys`` along the first parents of each head; ``ids`` are the states that ``heads`` name."""
        uids = dict(zip(ids, uids_of(session, ids), strict=True))
        lines = (self._line(session, head, id_, uids[id_], key, points) for head, id_ in zip(heads, ids, strict=True) for key in keys)
        return Series(tuple(lines), tuple(_forks(session, heads, ids)))

    def _line(self, session: Session, name: str, head: int, uid: str, key: str, points: int) -> SeriesLine:
        if generation_of(session, head) >= _LONG:
            return _long_line(session, name, uid, key, self._outline_of(session, head, key), points)
        return _line(session, name, uid, key, self._of(session, head, key), points)

    def _outline_of(self, session: Session, head: int, key: str) -> Outline:
        with self._lock:
            found = self._outlines.pop((key, head), None)
        made = found or outline(session, head, key)
        with self._lock:
            self._outlines[key, head] = made
            while len(self._outlines) > _OUTLINES:
                self._outlines.popitem(last=False)
        return made

    def _of(self, session: Session, head: int, key: str) -> Curve:
        with self._lock:
            found = self._kept.get((key, head))
            if found is not None:
                self._kept.move_to_end((key, head))
                return found
            near = [(other, one) for (name, other), one in reversed(self._kept.items()) if name == key][:_TRIED]
        above, base, passed = 0, None, None
        for other, one in near:
            met = first_meeting(session, head, other) or 0
            if met > above:
                above, base, passed = met, one, other
            if met == other:
                break
        made = curve(session, head, key, base=base, above=above)
        self._keep(key, head, made, passed if passed == above else None)
        return made

    def _keep(self, key: str, head: int, made: Curve, passed: int | None) -> None:
        """``passed`` is a head that is on the way to this one: its curve is part of this one's."""
        with self._lock:
            if passed is not None:
                self._kept.pop((key, passed), None)
            self._kept[key, head] = made
            while len(self._kept) > 1 and sum(len(one.ids) for one in self._kept.values()) > _POINTS:
                self._kept.popitem(last=False)


def _line(session: Session, head: str, state: str, key: str, found: Curve, points: int) -> SeriesLine:
    steps = np.asarray(found.steps)
    values = np.asarray(found.values)
    order = np.argsort(steps, kind="stable")  # a guard that went back, or a user who counts anew
    kept = order[thin(values[order], points)]
    ids = np.asarray(found.ids)[kept].tolist()
    return SeriesLine(
        head=head,
        state=state,
        key=key,
        steps=tuple(steps[kept].tolist()),
        values=tuple(values[kept].tolist()),
        uids=tuple(uids_of(session, ids)),
        total=len(found.ids),
    )


def _long_line(session: Session, head: str, state: str, key: str, found: Outline, points: int) -> SeriesLine:
    """The same of a path of which only some points are known; where its steps are is read for those that are shown."""
    values = np.asarray(found.values)
    kept = thin(values, points)
    named = names_of(session, np.asarray(found.ids)[kept].tolist())
    steps = np.asarray([step for _, step in named], dtype=np.int64)
    order = np.argsort(steps, kind="stable")
    return SeriesLine(
        head=head,
        state=state,
        key=key,
        steps=tuple(steps[order].tolist()),
        values=tuple(values[kept][order].tolist()),
        uids=tuple(named[place][0] for place in order.tolist()),
        total=found.count,
    )


def _forks(session: Session, heads: Sequence[str], ids: Sequence[int]) -> list[Fork]:
    found = partings(session, ids)
    parted = states(session, [one.id for one in found])
    return [Fork(state.uid, state.step, tuple(heads[place] for place in one.heads)) for state, one in zip(parted, found, strict=True)]
