"""Curves of a repository, cached: a branch that grew is read only from where it was before. Metrics
that are added to states that were captured before make a new version of all curves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from datastates.lineage.lookup import states, uids_of
from datastates.lineage.query.curves import (
    Axis,
    Curve,
    Means,
    Outline,
    along,
    began,
    curve,
    forks,
    generation_of,
    lost_parts,
    means,
    metrics_version,
    names_of,
    outline,
)
from datastates.lineage.query.walk import first_meeting
from datastates.values import Value

from .models import Fork, Series, SeriesLine

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_KEPT = 5  # of each stretch


def thin(values: npt.ArrayLike, points: int) -> npt.NDArray[np.intp]:
    """The indices of at most ``points`` values that show what all of them do, rising."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) <= points:
        return np.arange(len(given))
    is_gap = ~np.isfinite(given)
    size = -(-len(given) // max(1, points // (_KEPT if is_gap.any() else _KEPT - 1)))
    stretches = -(-len(given) // size)
    padding = stretches * size - len(given)

    def rows(array: npt.NDArray[np.float64], last: float) -> npt.NDArray[np.float64]:
        return np.pad(array, (0, padding), constant_values=last).reshape(stretches, size)

    starts = np.arange(stretches) * size
    low, high = (
        rows(np.where(is_gap, np.inf, given), np.inf),
        rows(np.where(is_gap, -np.inf, given), -np.inf),
    )
    kept = [
        starts,
        np.minimum(starts + size, len(given)) - 1,
        starts + low.argmin(axis=1),
        starts + high.argmax(axis=1),
    ]
    if is_gap.any():
        kept.append(starts + rows(is_gap.astype(np.float64), 0.0).argmax(axis=1))
    return np.unique(np.concatenate(kept))


def pool(
    sums: npt.ArrayLike, counts: npt.ArrayLike, points: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The means over at most ``points`` stretches, from sums and counts of values: the index where
    each stretch ends, and its mean.

    The mean of no values is NaN.
    """
    total, number = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if not len(total):
        return np.arange(0), total
    starts = np.arange(0, len(total), -(-len(total) // points))
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(total, starts) / np.add.reduceat(number, starts)
    return np.append(starts[1:], len(total)) - 1, means


# Curves of a repository, cached: a branch that grew is read only from where it was before.
# Metrics that are added to states that were captured before make a new version of all curves.


_POINTS = 2_000_000  # kept in memory, 24 bytes each
_TRIED = 4  # how many kept curves are tried for a path shared with the wanted one
_LONG = 4096  # a path of at least so many states is drawn from its summaries
_OUTLINES = 256  # kept in memory, about 100 kB each for 100,000 states


_Key = tuple[int, str]  # the version of all curves, and the metric


class Shape(StrEnum):
    """What is kept of a curve with more points than fit: the points that show its extremes, or the
    means of stretches.

    Extremes show how a single curve behaves. Means serve to average several curves: extremes do
    not show how many values are near them.
    """

    EXTREMES = "extremes"
    MEANS = "means"


@dataclass(frozen=True, slots=True)
class _Kept:
    """The points of a curve that fit: row ids and values, and out of how many points.

    ``steps`` are set where they are known."""

    ids: list[int]
    values: npt.NDArray[np.float64]
    total: int
    steps: npt.NDArray[np.int64] | None = None


class Curves:
    """The curves that were read of one repository. Safe from any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[_Key, int], Curve] = OrderedDict()
        self._outlines: OrderedDict[tuple[_Key, int, Shape], Outline | Means] = OrderedDict()
        self._lock = threading.Lock()

    def series(
        self,
        session: Session,
        heads: Sequence[str],
        ids: Sequence[int],
        keys: Sequence[str],
        points: int,
        *,
        axis: Axis = Axis.STEP,
        shape: Shape = Shape.EXTREMES,
        groups: Mapping[int, Value] | None = None,
    ) -> Series:
        """Each metric of ``keys`` along the first parents of each head; ``ids`` are the states that
        ``heads`` name.

        :param session: the session to read from.
        :param heads: revisions, as they were given.
        :param ids: the row ids of their states.
        :param keys: metrics.
        :param points: the most points of a line.
        :param axis: what is given of each point besides its step.
        :param shape: what is kept of lines with more points.
        :param groups: the group of each state, by row id.
        """
        uids, version = dict(zip(ids, uids_of(session, ids), strict=True)), metrics_version(session)
        lost = lost_parts(session, dict(zip(heads, ids, strict=True)))
        lines, gone = list[SeriesLine](), list[SeriesLine]()
        for head, id_ in zip(heads, ids, strict=True):
            is_long = generation_of(session, id_) >= _LONG
            since = began(session, id_) if axis is Axis.TIME else None
            for key in keys:
                versioned = (version, key)
                if is_long:
                    kept = self._long(session, id_, versioned, points, shape)
                else:
                    kept = _short(self._of(session, id_, versioned), points, shape)
                lines.append(
                    _line(session, head, uids[id_], key, kept, axis, since, (groups or {}).get(id_))
                )
                for part in lost.get(head, ()):  # from where it leaves the branch
                    kept = _short(
                        curve(session, part.id, key, above=(part.after or 1) - 1), points, shape
                    )
                    gone.append(
                        _line(
                            session, head, part.uid, key, kept, axis, since, (groups or {}).get(id_)
                        )
                    )
        return Series(tuple(lines), tuple(_forks(session, heads, ids)), tuple(gone))

    def _long(self, session: Session, head: int, key: _Key, points: int, shape: Shape) -> _Kept:
        with self._lock:
            known = self._outlines.pop((key, head, shape), None)
        found = known or (means if shape is Shape.MEANS else outline)(session, head, key[1])
        with self._lock:
            self._outlines[key, head, shape] = found
            while len(self._outlines) > _OUTLINES:
                self._outlines.popitem(last=False)
        if isinstance(found, Means):
            ends, values = pool(found.sums, found.counts, points)
            return _Kept(np.asarray(found.ids)[ends].tolist(), values, found.count)
        kept = thin(found.values, points)
        return _Kept(
            np.asarray(found.ids)[kept].tolist(), np.asarray(found.values)[kept], found.count
        )

    def _of(self, session: Session, head: int, key: _Key) -> Curve:
        with self._lock:
            found = self._kept.get((key, head))
            if found is not None:
                self._kept.move_to_end((key, head))
                return found
            near = [
                (other, one) for (name, other), one in reversed(self._kept.items()) if name == key
            ][:_TRIED]
        above, base, passed = 0, None, None
        for other, one in near:
            met = first_meeting(session, head, other) or 0
            if met > above:
                above, base, passed = met, one, other
            if met == other:
                break
        made = curve(session, head, key[1], base=base, above=above)
        with self._lock:
            if passed is not None and passed == above:
                # a head on the way to this one: its curve is part of this one's
                self._kept.pop((key, passed), None)
            self._kept[key, head] = made
            while (
                len(self._kept) > 1 and sum(len(one.ids) for one in self._kept.values()) > _POINTS
            ):
                self._kept.popitem(last=False)
        return made


def _short(found: Curve, points: int, shape: Shape) -> _Kept:
    ids, steps, values = np.asarray(found.ids), np.asarray(found.steps), np.asarray(found.values)
    # steps fall after a guard's rewind, or when a user restarts the count
    order = np.argsort(steps, kind="stable")
    if shape is Shape.MEANS and len(order) > points:
        is_number = np.isfinite(values[order])
        ends, pooled = pool(np.where(is_number, values[order], 0.0), is_number, points)
        return _Kept(ids[order[ends]].tolist(), pooled, len(ids), steps[order[ends]])
    kept = order[thin(values[order], points)]
    return _Kept(ids[kept].tolist(), values[kept], len(ids), steps[kept])


def _line(
    session: Session,
    head: str,
    state: str,
    key: str,
    kept: _Kept,
    axis: Axis,
    since: float | None,
    group: Value,
) -> SeriesLine:
    """One line of an answer.

    If its steps are not known, they and the uids are read for the points that are shown."""
    ids, values, xs = kept.ids, kept.values.tolist(), along(session, kept.ids, axis)
    if kept.steps is None:
        named = names_of(session, ids)
        order = sorted(range(len(named)), key=lambda place: named[place][1])
        steps, uids = [named[place][1] for place in order], [named[place][0] for place in order]
        values, xs = (
            [values[place] for place in order],
            ([xs[place] for place in order] if xs else []),
        )
    else:
        steps, uids = kept.steps.tolist(), uids_of(session, ids)
    return SeriesLine(
        head=head,
        state=state,
        key=key,
        steps=tuple(steps),
        values=tuple(values),
        uids=tuple(uids),
        total=kept.total,
        xs=tuple(xs),
        began=since,
        group=group,
    )


def _forks(session: Session, heads: Sequence[str], ids: Sequence[int]) -> list[Fork]:
    found = forks(session, ids)
    parted = states(session, [one.id for one in found])
    return [
        Fork(state.uid, state.step, tuple(heads[place] for place in one.heads))
        for state, one in zip(parted, found, strict=True)
    ]
