"""A comparison of states: what was configured, measured and noted for each, and where each can be
restored. Reads no payload.

Each state of a comparison is a column; each name that at least one of them has is a row. Rows that
differ come first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, bindparam, select

from datastates.errors import InvalidInput
from datastates.lineage import lookup
from datastates.lineage.lookup import id_of, rows_in_batches, states
from datastates.lineage.query import walk
from datastates.lineage.query.names import replicas_of
from datastates.lineage.query.walk import first_parents
from datastates.lineage.schema import REF, SEGMENT, STATE, STRETCH
from datastates.lineage.states import WHOLE, Ref, RefKind, State, Status
from datastates.lineage.write import runs
from datastates.values import Value

from .branch_rows import branches_of
from .branches import heads_where, is_same
from .cards import code, status_html, table_html, text
from .detail import refs_at
from .text import Direction, by_relevance, direction_of, short, step_text

if TYPE_CHECKING:
    from datastates.lineage.session import Session
    from datastates.lineage.states import Run


MOST_COMPARED = 32
"""The most states that can be compared at once."""

_LONG = 80  # letters of a value in a notebook


@dataclass(frozen=True, slots=True)
class Compared:
    """One state of a comparison. ``rev`` is the revision as it was given. ``branch`` captured the
    state. ``refs`` name it now.

    ``places`` are the tiers that are recorded as holding its bytes, with their machines: ``local on
    host``. ``nearest`` is the nearest state that can be restored: itself, or the newest of its
    first parents that has its bytes, or None.
    """

    rev: str
    state: State
    branch: str | None
    refs: tuple[Ref, ...]
    places: tuple[str, ...]
    nearest: State | None


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One name, and its value for each state in order; None where a state has none.
    ``direction`` is the better direction of a metric."""

    key: str
    values: tuple[Value, ...]
    differs: bool
    direction: Direction | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """States side by side.

    In each kind, rows that differ come first. ``code`` has commits and versions."""

    states: tuple[Compared, ...]
    config: tuple[ComparisonRow, ...]
    metrics: tuple[ComparisonRow, ...]
    attributes: tuple[ComparisonRow, ...]
    code: tuple[ComparisonRow, ...]

    def _repr_html_(self) -> str:
        kinds = (
            ("config.", self.config),
            ("metrics.", self.metrics),
            ("attr.", self.attributes),
            ("", self.code),
        )
        rows = [
            (text(prefix + row.key), *map(_cell, row.values))
            for prefix, each in kinds
            for row in each
            if row.differs
        ]
        rows.append(("status", *(status_html(each.state.status) for each in self.states)))
        rows.append(
            (
                "restorable",
                *(
                    "" if each.nearest is None else code(short(each.nearest.uid))
                    for each in self.states
                ),
            )
        )
        made = table_html(
            ("", *(f"{each.rev} (step {step_text(each.state)})" for each in self.states)), rows
        )
        same = sum(not row.differs for _, each in kinds for row in each)
        return made + (f"<p>{same} more are the same in all of them</p>" if same else "")

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)


def compare(session: Session, revs: Sequence[str], found: Sequence[State]) -> Comparison:
    """A comparison of states; ``revs`` are the revisions as they were given.

    :raises InvalidInput: there are fewer than two, or more than ``MOST``.
    """
    check_count(len(found))
    uids = [state.uid for state in found]
    captured_on = branches_of(session, uids)
    ran = {
        uid: runs.get(session, uid)
        for uid in {state.run for state in found if state.run is not None}
    }
    ran_each = [None if state.run is None else ran[state.run] for state in found]
    return Comparison(
        states=tuple(
            Compared(
                rev=rev,
                state=state,
                branch=captured_on.get(state.uid),
                refs=tuple(refs_at(session, state.uid)),
                places=_places(session, state),
                nearest=walk.nearest_restorable(session, state.uid),
            )
            for rev, state in zip(revs, found, strict=True)
        ),
        config=_rows([state.config for state in found]),
        metrics=_rows([state.metrics for state in found], are_metrics=True),
        attributes=_rows([state.attributes for state in found]),
        code=_rows([_code(run) for run in ran_each]),
    )


def _cell(value: Value) -> str:
    return (
        ""
        if value is None
        else text(f"{value:.6g}" if isinstance(value, float) else value, most=_LONG)
    )


def check_count(count: int) -> None:
    """Check that so many states can be compared.

    :raises InvalidInput: they cannot; the error names the next step.
    """
    if count < 2:
        raise InvalidInput(f"a comparison needs two states or more, not {count}: name another one")
    if count > MOST_COMPARED:
        raise InvalidInput(
            f"{count} states are too many for one comparison: name at most {MOST_COMPARED},"
            " or see all branches by their settings and metrics: 'datastates branches --csv',"
            " parallel coordinates on the page"
        )


def _places(session: Session, state: State) -> tuple[str, ...]:
    if not state.status.is_restorable:
        return ()
    held = [replica for replica in replicas_of(session, state.uid) if replica.status == "ok"]
    return tuple(
        sorted({f"{each.tier} on {each.node}" if each.node else each.tier for each in held})
    )


def _code(run: Run | None) -> dict[str, Value]:
    if run is None:
        return {}
    commit: dict[str, Value] = {}
    if run.git_commit is not None:
        commit["commit"] = run.git_commit + (" with changes" if run.git_dirty else "")
    return {**commit, **run.versions}


def _rows(
    each: Sequence[Mapping[str, Value]], *, are_metrics: bool = False
) -> tuple[ComparisonRow, ...]:
    keys = {key for values in each for key in values}
    rows = [
        _row(key, each, direction_of(key) if are_metrics else None)
        for key in (by_relevance(keys) if are_metrics else sorted(keys))
    ]
    return tuple(sorted(rows, key=lambda row: not row.differs))


def _row(
    key: str, each: Sequence[Mapping[str, Value]], direction: Direction | None
) -> ComparisonRow:
    values = tuple(values.get(key) for values in each)
    same = all(key in one for one in each) and all(is_same(values[0], value) for value in values)
    return ComparisonRow(key, values, not same, direction)


# Settings and metrics of many branches, one axis for each: the data of parallel coordinates and
# scatter plots.


MOST_LINES = 1000
"""The most branches that are drawn."""


class AxisKind(StrEnum):
    """The source of the values of an axis: the configuration, or a metric."""

    SETTING = "setting"
    METRIC = "metric"


class Taken(StrEnum):
    """Which value of a branch's metric represents it: the best one, or the newest."""

    BEST = "best"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class ParallelBranch:
    """One branch: its name, its newest state, and that state's step and status."""

    branch: str
    head: str
    step: int
    status: Status


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting or metric, and its value for each branch in order; None where a branch has none,
    or has only NaN.

    ``varies``: at least two branches differ in it. ``direction`` is the better direction of a
      metric.
    """

    key: str
    kind: AxisKind
    values: tuple[Value, ...]
    varies: bool
    direction: Direction | None = None


@dataclass(frozen=True, slots=True)
class Parallels:
    """Branches by settings and metrics. ``matching`` out of ``total`` branches match; ``branches``
    are the first of them, by name or in the order of the search.

    Settings come first, those that vary before those that do not; then metrics, the most relevant
    first.
    """

    branches: tuple[ParallelBranch, ...]
    axes: tuple[Axis, ...]
    total: int
    matching: int


def parallels(
    session: Session,
    query: str = "",
    *,
    name: str = "",
    taken: Taken = Taken.BEST,
    limit: int = MOST_LINES,
    now: datetime | None = None,
) -> Parallels:
    """The branches that match the request, with an axis for each setting and metric.

    :param query: a search, as for states; it must find a branch's newest state.
    :param name: a part of the names of the branches.
    :param taken: which value of a metric represents a branch.
    :param limit: the most branches to return.
    :raises SyntaxProblem: the query does not parse; the error points at the column.
    :raises InvalidInput: ``limit`` is out of bounds.
    """
    if not 1 <= limit <= MOST_LINES:
        raise InvalidInput(
            f"limit is {limit}: from 1 to {MOST_LINES} branches can be drawn; choose them by a"
            " condition"
        )
    rows = sorted(session.execute(_HEADS), key=lambda row: row.name)
    total = len(rows)
    rows = [row for row in rows if name in row.name]
    if query.strip():
        found = heads_where(session, query, now)
        rows = [row for row in rows if row.id in found.places]
        if found.is_ordered:
            rows.sort(key=lambda row: found.places[row.id])
        rows = rows[: found.limit]
    shown = rows[:limit]
    configs = lookup.of_runs(session, [row.run_id for row in shown if row.run_id is not None])
    settings = _settings([configs.get(row.run_id or 0, {}) for row in shown])
    return Parallels(
        branches=tuple(
            ParallelBranch(row.name, row.uid, row.step, Status(row.status)) for row in shown
        ),
        axes=(*settings, *_metrics(session, shown, taken)),
        total=total,
        matching=len(rows),
    )


def _settings(configs: Sequence[Mapping[str, Value]]) -> list[Axis]:
    keys = sorted({key for config in configs for key in config})
    axes = {
        key: _axis(key, AxisKind.SETTING, [config.get(key) for config in configs]) for key in keys
    }
    own = []
    for key, axis in axes.items():
        # a setting such as optimizer.lr, with the values of the one that the user named lr
        _, dot, leaf = key.rpartition(".")
        if not (dot and leaf in axes and axes[leaf].values == axis.values):
            own.append(axis)
    return sorted(own, key=lambda axis: not axis.varies)


def _metrics(session: Session, rows: Sequence[Any], taken: Taken) -> list[Axis]:
    found: defaultdict[str, dict[int, float | None]] = defaultdict(dict)
    ids = [row.segment_id for row in rows if row.segment_id is not None]
    for tally in rows_in_batches(session, _TALLIES, ids):
        found[tally.key][tally.segment_id] = _value(tally, taken)
    return [
        _axis(
            key,
            AxisKind.METRIC,
            [found[key].get(row.segment_id or 0) for row in rows],
            direction_of(key),
        )
        for key in by_relevance(found)
    ]


def _value(tally: Any, taken: Taken) -> float | None:
    best = tally.least if direction_of(tally.key) is Direction.MIN else tally.most
    value = tally.last if taken is Taken.LAST else best
    return float(value) if value is not None and math.isfinite(value) else None


def _axis(
    key: str, kind: AxisKind, values: Sequence[Value], direction: Direction | None = None
) -> Axis:
    prefix = "config" if kind is AxisKind.SETTING else "metrics"
    distinct = {(type(value) is bool, value) for value in values if value == value}
    return Axis(f"{prefix}.{key}", kind, tuple(values), len(distinct) > 1, direction)


_HEADS = (
    select(
        REF.c.name,
        STATE.c.id,
        STATE.c.uid,
        STATE.c.step,
        STATE.c.status,
        STATE.c.run_id,
        SEGMENT.c.id.label("segment_id"),
    )
    .join_from(REF, STATE, STATE.c.id == REF.c.state_id)
    .outerjoin(SEGMENT, SEGMENT.c.branch == REF.c.name)
    .where(REF.c.kind == RefKind.BRANCH.value)
)
_TALLIES = select(
    STRETCH.c.segment_id, STRETCH.c.key, STRETCH.c.last, STRETCH.c.least, STRETCH.c.most
).where(
    STRETCH.c.segment_id.in_(bindparam("ids", type_=BigInteger, expanding=True)),
    STRETCH.c.place == WHOLE,
)


# The configuration that a state was trained with, since when it holds, and what was different
# before.


_PAGE = 1000
_RUNS = select(STATE.c.id, STATE.c.run_id).where(
    STATE.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True))
)

Pair = tuple[Value, Value]
"""The old and the new value; None where there is none."""


@dataclass(frozen=True, slots=True)
class Configured:
    """``since`` is the oldest state, among this one and its first parents, from which on the
    configuration is the same. ``before`` is the one before that, with a different configuration;
    None if the path begins like this. ``changes`` lead from ``before`` to here.
    """

    state: State
    since: State
    before: State | None
    changes: Mapping[str, Pair]


def configured(session: Session, uid: str) -> Configured:
    """A state's configuration and its history; of its first parents only the runs are looked up."""
    start = since = id_of(session, uid)
    chosen: Mapping[str, Value] | None = None
    for id_, config in _configs(session, start):
        if chosen is None:
            chosen = config
        elif changes(config, chosen):
            here, oldest, before = states(session, [start, since, id_])
            return Configured(here, oldest, before, changes(before.config, here.config))
        since = id_
    here, oldest = states(session, [start, since])
    return Configured(here, oldest, None, {})


def _configs(session: Session, start: int) -> Iterator[tuple[int, Mapping[str, Value]]]:
    """The configurations of a state and its first parents; each run's is read once."""
    known: dict[int | None, Mapping[str, Value]] = {None: {}}
    ids = (id_ for id_, _ in first_parents(session, start, 0))
    while page := list(islice(ids, _PAGE)):
        runs: dict[int, int | None] = {
            row[0]: row[1] for row in session.execute(_RUNS, {"ids": page})
        }
        missing = {run for run in runs.values() if run is not None and run not in known}
        found = lookup.of_runs(session, missing)
        known.update({run: found.get(run, {}) for run in missing})
        yield from ((id_, known[runs[id_]]) for id_ in page)


def changes(old: Mapping[str, Value], new: Mapping[str, Value]) -> dict[str, Pair]:
    """The differences between two configurations, in alphabetical order."""
    return {
        key: (old.get(key), new.get(key))
        for key in sorted({*old, *new})
        if (type(old.get(key)), old.get(key), key in old)
        != (type(new.get(key)), new.get(key), key in new)
    }
