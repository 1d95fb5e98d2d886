"""Studies: the tree of their variants, the cost and result of each, and which failed and why.

Refs and attributes of states record what a study trained. Its rows (``change/studies``) have its
plan, the time it took and its failures. For a study without rows, as after a rebuild without a
backup, the variants are those that have branches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import BigInteger, Integer, bindparam, func, select

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.lookup import id_of, rows_in_batches, states
from datastates.lineage.schema import (
    ATTRIBUTE,
    EDGE,
    METRIC,
    REF,
    REPORT,
    REPORT_SAMPLE,
    RUN,
    SEGMENT,
    STATE,
    VARIANT,
    from_us,
)
from datastates.lineage.states import EdgeKind, Life, RefKind, State, Status
from datastates.lineage.write import runs
from datastates.values import Value

from .branch_rows import Living, branches_of, bytes_of_segments
from .text import Direction, by_relevance, direction_of

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_START = "start/"
_DONE = "done/"
_ATTRIBUTES = ("study", "variant", "epoch", "samples", "samples_all", "variant_set")


class Stage(StrEnum):
    """How far a variant has come.

    ``begun``: no process trains it now. The study's next run continues with it."""

    DONE = "done"
    RUNNING = "running"
    BEGUN = "begun"
    FAILED = "failed"
    SKIPPED = "skipped"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One study. ``start`` is the state from which its first variants fork, None if its tag was
    deleted.

    ``took_s`` is the number of seconds that workers reported to have trained; ``bytes`` those that
    its states added, or take in a folder of packs if one was named. ``planned_at`` is None if the
    study is only known by its branches.
    """

    name: str
    start: str | None
    variants: int
    done: int
    failed: int
    planned_at: datetime | None
    changed_at: datetime | None
    took_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Studies:
    """Some of the studies, the last changed first, out of ``total``."""

    items: tuple[Study, ...]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyVariant:
    """One variant. ``state`` is its result, or the newest state that it recorded; ``value`` is the
    metric of that state.

    ``rank`` 1 is the best of those that are done.

    ``depth`` counts its ancestors in the plan. ``epoch`` of ``epochs`` are over; ``samples`` of
    ``samples_all`` were trained on, None if they are not planned. ``config`` is what it changes;
    ``set`` is what that changed in restored optimizers. ``took_s`` is the number of seconds over
    all ``attempts`` that ended; ``states`` and ``bytes`` are what its branch has to itself.
    ``alike`` are variants that ended with the same bytes. ``error`` says why its last attempt
    failed, or names the ancestor because of which it was skipped.
    """

    name: str
    branch: str
    parent: str | None
    depth: int
    stage: Stage
    epoch: int | None
    epochs: int | None
    samples: int | None
    samples_all: int | None
    state: str | None
    step: int | None
    status: Status | None
    value: float | None
    rank: int | None
    metrics: dict[str, float]
    config: dict[str, Value]
    set: str | None
    took_s: float | None
    attempts: int
    states: int
    bytes: int
    began_at: datetime | None
    changed_at: datetime | None
    alike: tuple[str, ...]
    error: str | None


@dataclass(frozen=True, slots=True)
class StudyDetail:
    """A study and its variants: parents before children, siblings in the order of the plan. There
    are ``total`` variants.

    ``metric`` is the one of ``metrics`` by which variants are ranked; it gets better in
    ``direction``.
    """

    study: Study
    variants: tuple[StudyVariant, ...]
    total: int
    metric: str | None
    direction: Direction
    metrics: tuple[str, ...]


def studies(session: Session, *, limit: int | None = None, folder: str | None = None) -> Studies:
    """Every study, the last changed first. ``folder`` is the uid of the folder of packs in which
    ``bytes`` are counted."""
    made = _summaries(session, _names_studies(session), folder)
    made.sort(key=lambda one: (one.changed_at or one.planned_at or _NEVER, one.name), reverse=True)
    return Studies(tuple(made[:limit]), len(made))


def study(
    session: Session,
    name: str,
    *,
    metric: str | None = None,
    direction: Direction | None = None,
    limit: int | None = None,
    living: Living | None = None,
    folder: str | None = None,
) -> StudyDetail:
    """One study and its variants.

    :param name: the study's name.
    :param metric: the metric by which variants are ranked; None: the most relevant one that they
        have.
    :param direction: which of its values are better; None: judged by its name.
    :param limit: the most variants to return; None: all.
    :param living: returns whether the process of a run that did not finish is alive.
    :param folder: the uid of the folder of packs in which ``bytes`` are counted.
    :raises NotFound: there is no such study.
    """
    rows = _read(session, name)
    if not rows and name not in _names_studies(session):
        raise NotFound(
            f"there is no study {name!r}: there are"
            f" {', '.join(sorted(_names_studies(session))[:10]) or 'none'}"
        )
    _learn(session, rows, living, folder)
    metrics = by_relevance(key for row in rows.values() for key in row.metrics)
    metric = metric if metric is not None else next(iter(metrics), None)
    direction = direction or (Direction.MIN if metric is None else direction_of(metric))
    ranks = _ranks(rows.values(), metric, direction)
    order = list(_tree(rows))
    alike = _alike(rows)
    shown = tuple(
        _variant_of(rows, row, depth, metric, ranks, alike) for row, depth in order[:limit]
    )
    (summary,) = _summaries(session, [name], folder)
    return StudyDetail(summary, shown, len(order), metric, direction, tuple(metrics))


# What is known


@dataclass(slots=True)
class _Row:
    """One variant, while it is assembled."""

    name: str
    branch: str
    place: int = 0
    parent: str | None = None
    epochs: int | None = None
    config: Mapping[str, Value] = field(default_factory=dict)
    attempts: int = 0
    took_s: float | None = None
    error: str | None = None
    began_us: int | None = None
    head: Any = None
    is_done: bool = False
    is_running: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    states: int = 0
    bytes: int = 0
    fork_branch: str | None = None

    @property
    def has_reported(self) -> bool:
        """Whether its branch is at a state that the variant itself captured."""
        return bool(self.attributes)


def _names_studies(session: Session) -> list[str]:
    names = set(session.execute(_STUDIES).scalars())
    return sorted(
        names | {head.name.removeprefix(_START) for head in _heads(session, _START, RefKind.TAG)}
    )


def _read(session: Session, study: str) -> dict[str, _Row]:
    """The variants by name, from the plan and from branches that the plan does not have."""
    rows: dict[str, _Row] = {}
    for planned in session.execute(_PLANNED, {"of": study}):
        rows[planned.name] = _Row(
            planned.name,
            f"{study}/{planned.name}",
            planned.place,
            planned.parent,
            planned.epochs,
            msgspec.json.decode(planned.config),
            planned.attempts,
            planned.took_s,
            planned.error,
            planned.began_at,
        )
    done = {head.name for head in _heads(session, f"{_DONE}{study}/", RefKind.TAG)}
    places = len(rows)
    for head in _heads(session, f"{study}/", RefKind.BRANCH):
        name = head.name.removeprefix(f"{study}/")
        row = rows.get(name) or _Row(name, head.name, places + len(rows))
        row.head, row.is_done = head, f"{_DONE}{head.name}" in done
        rows[name] = row
    values: defaultdict[int, dict[str, Value]] = defaultdict(dict)
    for value in rows_in_batches(session, _VALUES, _head_ids(rows), keys=list(_ATTRIBUTES)):
        values[value.state_id][value.key] = value.text if value.type == "str" else value.number
    for row in list(rows.values()):
        row.attributes = values.get(row.head.id, {}) if row.head is not None else {}
        if row.epochs is None and row.attributes.get("study") != study:
            del rows[row.name]  # a branch that only has such a name
        if (row.attributes.get("study"), row.attributes.get("variant")) != (study, row.name):
            row.attributes = {}
    return rows


def _heads(session: Session, prefix: str, kind: RefKind) -> list[Any]:
    """The refs whose names begin with a prefix, with the states that they name."""
    found = session.execute(
        _HEADS.where(REF.c.kind == kind.value, REF.c.name.startswith(prefix, autoescape=True))
    )
    return [row for row in found if row.name.startswith(prefix)]  # SQLite's LIKE ignores case


def _learn(
    session: Session, rows: Mapping[str, _Row], living: Living | None, folder: str | None
) -> None:
    """Add to each variant its metrics, what its branch holds, whether it is being trained, and
    where it forked."""
    metrics: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for state_id, key, value in rows_in_batches(session, _METRICS, _head_ids(rows)):
        metrics[state_id][key] = math.nan if value is None else value
    by_branch = {row.branch: row for row in rows.values()}
    for held, size in _held(session, by_branch, folder):
        row = by_branch[held.branch]
        row.states, row.bytes, row.fork_branch = held.states, size, held.fork
    at_work = [row.id for row in rows_in_batches(session, _AT_WORK, by_branch, "names")]
    for run in runs.by_ids(session, at_work).values():
        if run.branch is not None and living is not None and living(run) is Life.RUNNING:
            by_branch[run.branch].is_running = True
    for row in rows.values():
        row.metrics = metrics.get(row.head.id, {}) if row.has_reported else {}
        if row.epochs is None and row.fork_branch in by_branch:
            row.parent = by_branch[row.fork_branch].name
    for row in rows.values():
        if row.parent == row.name or row.parent not in rows:
            row.parent = None


def _held(
    session: Session, branches: Collection[str], folder: str | None
) -> Iterator[tuple[Any, int]]:
    """What each of these branches has to itself, with its bytes."""
    found = list(rows_in_batches(session, _HELD, branches, "names"))
    sizes = (
        None if folder is None else bytes_of_segments(session, [row.id for row in found], folder)
    )
    for row in found:
        yield row, int(row.size or 0) if sizes is None else sizes.get(row.id, 0)


def _head_ids(rows: Mapping[str, _Row]) -> list[int]:
    return [row.head.id for row in rows.values() if row.head is not None]


# The tree of variants


def _tree(rows: Mapping[str, _Row]) -> Iterable[tuple[_Row, int]]:
    """Each variant once, with its depth, parents before children. A circle does not repeat."""
    children: defaultdict[str | None, list[_Row]] = defaultdict(list)
    for row in sorted(rows.values(), key=lambda one: (one.place, one.name)):
        children[row.parent].append(row)
    waiting, seen = [(row, 0) for row in reversed(children[None])], set[str]()
    while waiting:
        row, depth = waiting.pop()
        seen.add(row.name)
        yield row, depth
        waiting += [(child, depth + 1) for child in reversed(children[row.name])]
    # members of a circle, which no plan has
    yield from ((row, 0) for row in rows.values() if row.name not in seen)


def _ranks(rows: Iterable[_Row], metric: str | None, direction: Direction) -> dict[str, int]:
    sign = 1 if direction is Direction.MIN else -1
    have = [
        (sign * value, row.name)
        for row in rows
        if row.is_done and (value := _finite(row.metrics, metric)) is not None
    ]
    have.sort(key=itemgetter(0))
    ranks: dict[str, int] = {}
    for place, (value, name) in enumerate(have):
        is_tied = place > 0 and have[place - 1][0] == value
        ranks[name] = ranks[have[place - 1][1]] if is_tied else place + 1
    return ranks


def _alike(rows: Mapping[str, _Row]) -> dict[str, tuple[str, ...]]:
    """The finished variants that ended with the same bytes, by digest."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows.values():
        if row.is_done and row.head is not None:
            found[row.head.digest].append(row.name)
    return {digest: tuple(names) for digest, names in found.items() if len(names) > 1}


def _finite(metrics: Mapping[str, float], metric: str | None) -> float | None:
    value = metrics.get(metric or "")
    return None if value is None or not math.isfinite(value) else value


def _stage(rows: Mapping[str, _Row], row: _Row) -> tuple[Stage, str | None]:
    """How far a variant has come, and why no further."""
    if row.is_done:
        return Stage.DONE, None
    if row.is_running:
        return Stage.RUNNING, None
    if row.error is not None:
        return Stage.FAILED, row.error
    above, seen = row.parent, set[str]()
    while above is not None and above not in seen:
        seen.add(above)
        if rows[above].error is not None and not rows[above].is_done:
            return Stage.SKIPPED, f"{above} failed, from which it was to go on"
        above = rows[above].parent
    return (Stage.BEGUN if row.has_reported or row.began_us is not None else Stage.WAITING), None


def _variant_of(
    rows: Mapping[str, _Row],
    row: _Row,
    depth: int,
    metric: str | None,
    ranks: Mapping[str, int],
    alike: Mapping[str, tuple[str, ...]],
) -> StudyVariant:
    stage, error = _stage(rows, row)
    said, head = row.attributes, row.head if row.has_reported else None
    others = alike.get(head.digest, ()) if head is not None and row.is_done else ()
    return StudyVariant(
        name=row.name,
        branch=row.branch,
        parent=row.parent,
        depth=depth,
        stage=stage,
        epoch=_whole(said.get("epoch")),
        epochs=row.epochs,
        samples=_whole(said.get("samples")),
        samples_all=_whole(said.get("samples_all")),
        state=None if head is None else head.uid,
        step=None if head is None else head.step,
        status=None if head is None else Status(head.status),
        value=_finite(row.metrics, metric),
        rank=ranks.get(row.name),
        metrics=dict(row.metrics),
        config=dict(row.config),
        set=None if said.get("variant_set") is None else str(said["variant_set"]),
        took_s=row.took_s if row.attempts else None,
        attempts=row.attempts,
        states=row.states,
        bytes=row.bytes,
        began_at=None if row.began_us is None else from_us(row.began_us),
        changed_at=None if head is None else from_us(head.created_at),
        alike=tuple(name for name in others if name != row.name),
        error=error,
    )


def _whole(value: Value) -> int | None:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _summaries(session: Session, names: Sequence[str], folder: str | None) -> list[Study]:
    """Summaries of studies, in a few queries for all of them."""
    refs = {row.name: row for row in session.execute(_STUDIES_REFS)}
    planned: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for row in session.execute(_PLANS):
        planned[row.study][row.name] = row
    variants = {
        name: list(planned.get(name, ()))
        or [
            each.removeprefix(f"{name}/")
            for each, row in refs.items()
            if row.kind == RefKind.BRANCH.value and each.startswith(f"{name}/")
        ]
        for name in names
    }
    branches = [
        f"{name}/{variant}"
        for name, found in variants.items()
        for variant in found
        if f"{name}/{variant}" in refs
    ]
    sizes = {row.branch: size for row, size in _held(session, branches, folder)}
    made = []
    for name in names:
        plan = planned.get(name, {})
        done = {variant for variant in variants[name] if f"{_DONE}{name}/{variant}" in refs}
        changed = [
            refs[f"{name}/{variant}"].created_at
            for variant in variants[name]
            if f"{name}/{variant}" in refs
        ]
        start = refs.get(_START + name)
        made.append(
            Study(
                name=name,
                start=None if start is None else start.uid,
                variants=len(variants[name]),
                done=len(done),
                failed=sum(
                    row.error is not None and variant not in done for variant, row in plan.items()
                ),
                planned_at=from_us(min(row.planned_at for row in plan.values())) if plan else None,
                changed_at=from_us(max(changed)) if changed else None,
                took_s=float(sum(row.took_s for row in plan.values())),
                bytes=sum(sizes.get(f"{name}/{variant}", 0) for variant in variants[name]),
            )
        )
    return made


# The statements

_NEVER = from_us(0)
_fork = STATE.alias("fork")
_parent = SEGMENT.alias("parent")
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_of = VARIANT.c.study == bindparam("of")
_STUDIES = select(VARIANT.c.study).distinct()
_PLANNED = select(VARIANT).where(_of).order_by(VARIANT.c.place)
_PLANS = select(
    VARIANT.c.study, VARIANT.c.name, VARIANT.c.took_s, VARIANT.c.planned_at, VARIANT.c.error
)
_STUDIES_REFS = select(REF.c.name, REF.c.kind, STATE.c.uid, STATE.c.created_at).join_from(
    REF, STATE, STATE.c.id == REF.c.state_id
)
_VALUES = select(
    ATTRIBUTE.c.state_id,
    ATTRIBUTE.c.key,
    ATTRIBUTE.c.type,
    ATTRIBUTE.c.number,
    ATTRIBUTE.c.text,
).where(ATTRIBUTE.c.state_id.in_(_ids), ATTRIBUTE.c.key.in_(bindparam("keys", expanding=True)))
_METRICS = select(METRIC.c.state_id, METRIC.c.key, METRIC.c.value).where(
    METRIC.c.state_id.in_(_ids)
)
_HELD = (
    select(
        SEGMENT.c.id,
        SEGMENT.c.branch,
        func.count(STATE.c.id).label("states"),
        func.sum(STATE.c.bytes_new).label("size"),
        func.max(_parent.c.branch).label("fork"),
    )
    .outerjoin_from(SEGMENT, STATE, STATE.c.segment_id == SEGMENT.c.id)
    .outerjoin(_fork, _fork.c.id == SEGMENT.c.fork_id)
    .outerjoin(_parent, _parent.c.id == _fork.c.segment_id)
    .where(SEGMENT.c.branch.in_(bindparam("names", expanding=True)))
    .group_by(SEGMENT.c.id, SEGMENT.c.branch)
)
_AT_WORK = select(RUN.c.id).where(
    RUN.c.branch.in_(bindparam("names", expanding=True)),
    RUN.c.finished_at.is_(None),
    RUN.c.process.is_not(None),
)
_HEADS = (
    select(
        REF.c.name,
        STATE.c.id,
        STATE.c.uid,
        STATE.c.step,
        STATE.c.status,
        STATE.c.created_at,
        STATE.c.digest,
    )
    .join_from(REF, STATE, STATE.c.id == REF.c.state_id)
    .order_by(REF.c.name)
)


# Merged states, with their parents and the weight of each.


_KINDS = (EdgeKind.MERGE.value, EdgeKind.SOUP.value)


@dataclass(frozen=True, slots=True)
class Ingredient:
    """A parent of a merged state.

    ``branch`` captured it; ``weight`` is its share, None if none was recorded."""

    state: str
    step: int
    status: Status
    branch: str | None
    weight: float | None
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One merged state. ``method`` is as for ``Repository.merge``; ``refs`` are its names."""

    state: str
    step: int
    status: Status
    kind: EdgeKind
    method: str | None
    created_at: datetime
    message: str | None
    refs: tuple[str, ...]
    value: float | None
    parents: tuple[Ingredient, ...]


@dataclass(frozen=True, slots=True)
class Merges:
    """Some merged states, the newest first.

    ``next`` continues ``after`` the last of them. ``values`` are of ``metric``."""

    items: tuple[Merge, ...]
    next: str | None
    metric: str | None


def merges(
    session: Session, *, metric: str | None = None, after: str | None = None, limit: int = 50
) -> Merges:
    """The merged states, the newest first; without ``metric`` it is the most relevant one that they
    or their parents have.

    :raises NotFound: there is no state ``after``.
    """
    if limit < 1:
        raise InvalidInput(f"limit is {limit}: a page has at least one merge")
    before = None if after is None else id_of(session, after)
    wanted = _NEWEST if before is None else _NEWEST.where(EDGE.c.child_id < before)
    ids = list(session.execute(wanted.limit(limit + 1)).scalars())
    made = states(session, ids[:limit])
    uids = sorted({uid for state in made for uid in state.parents})
    parents = {state.uid: state for state in states(session, uids)}
    if metric is None:
        known = by_relevance(key for state in (*made, *parents.values()) for key in state.metrics)
        metric = next(iter(known), None)
    origins = branches_of(session, list(parents))
    names = defaultdict[str, list[str]](list)
    for uid, name in session.execute(_MERGES_REFS, {"uids": [state.uid for state in made]}):
        names[uid].append(name)
    items = tuple(_merge(state, parents, origins, names[state.uid], metric) for state in made)
    return Merges(items, items[-1].state if len(ids) > limit else None, metric)


def _merge(
    state: State,
    parents: dict[str, State],
    origins: dict[str, str],
    refs: Sequence[str],
    metric: str | None,
) -> Merge:
    weights = _weights(state)
    members = [
        Ingredient(
            uid,
            parents[uid].step,
            parents[uid].status,
            origins.get(uid),
            weight,
            _finite(parents[uid].metrics, metric),
        )
        for uid, weight in zip(state.parents, weights, strict=True)
        if uid in parents
    ]
    method = state.attributes.get("merge.method")
    return Merge(
        state=state.uid,
        step=state.step,
        status=state.status,
        kind=next((edge.kind for edge in state.edges if edge.kind.value in _KINDS), EdgeKind.MERGE),
        method=None if method is None else str(method),
        created_at=state.created_at,
        message=state.message,
        refs=tuple(refs),
        value=_finite(state.metrics, metric),
        parents=tuple(members),
    )


def _weights(state: State) -> list[float | None]:
    """The weight of each parent, the first parent's first: from the recipe, else from the edges,
    where the first parent has none."""
    try:
        recorded = msgspec.json.decode(str(state.attributes.get("merge.weights")), type=list[float])
    except msgspec.MsgspecError:
        recorded = []
    if len(recorded) == len(state.parents):
        return [*recorded]
    edges = {edge.parent: edge.weight for edge in state.edges}
    return [edges.get(uid) for uid in state.parents]


_NEWEST = (
    select(EDGE.c.child_id)
    .where(EDGE.c.kind.in_(_KINDS))
    .group_by(EDGE.c.child_id)
    .order_by(EDGE.c.child_id.desc())
)
_MERGES_REFS = (
    select(STATE.c.uid, REF.c.name)
    .join_from(REF, STATE, STATE.c.id == REF.c.state_id)
    .where(STATE.c.uid.in_(bindparam("uids", expanding=True)))
    .order_by(REF.c.name)
)


# Stored reports on outliers: what they contain, and the samples that they rank highest, with
# pictures.


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report on outliers: over ``count`` samples, of which ``suspects`` were selected at
    ``noise_rate``.

    The ``kept`` highest ranked of them are stored here. ``cost`` is the time of training and
    scoring.
    """

    id: int
    name: str
    created_at: datetime
    count: int
    suspects: int
    noise_rate: float
    is_noise_rate_estimated: bool
    kept: int
    branches: tuple[str, ...]
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSample:
    """One sample: ``rank`` 1 is the most suspicious. Losses are means: ``lineage_loss`` under
    states that may have been trained on it, ``held_out_loss`` under those that were not.
    ``description`` is the user's.
    """

    rank: int
    index: int
    score: float | None
    strength: float | None
    lineage_loss: float | None
    held_out_loss: float | None
    spread: float | None
    sources: int
    is_suspect: bool
    description: str | None
    has_picture: bool


@dataclass(frozen=True, slots=True)
class ReportDetail:
    """A report with some of its samples by rank; ``next`` is the rank to continue ``after``,
    None after the last."""

    report: Report
    samples: tuple[ReportSample, ...]
    next: int | None


def reports(session: Session, *, limit: int | None = None) -> tuple[Report, ...]:
    """The reports, the newest first."""
    return tuple(_report_of(row) for row in session.execute(_REPORTS.limit(limit)))


def report(session: Session, id_: int, *, after: int = 0, limit: int = 100) -> ReportDetail:
    """One report, with its samples of the ranks after ``after``.

    :raises NotFound: there is no report of this id.
    """
    row = session.execute(_REPORTS.where(REPORT.c.id == id_)).first()
    if row is None:
        raise NotFound(f"there is no report {id_}: outliers lists the reports")
    found = session.execute(_SAMPLES, {"id": id_, "after": after, "limit": limit + 1}).all()
    samples = tuple(
        msgspec.convert(
            {
                **msgspec.json.decode(each.body),
                "rank": each.rank,
                "index": each.sample,
                "has_picture": bool(each.has),
            },
            ReportSample,
        )
        for each in found[:limit]
    )
    return ReportDetail(_report_of(row), samples, samples[-1].rank if len(found) > limit else None)


def picture(session: Session, id_: int, index: int) -> bytes | None:
    """The stored picture of a sample; None if it has none.

    :raises NotFound: the report has no such sample.
    """
    row = session.execute(_PICTURE, {"id": id_, "index": index}).first()
    if row is None:
        raise NotFound(f"report {id_} has no sample {index} among those that it kept")
    return None if row.picture is None else bytes(row.picture)


def _report_of(row: Any) -> Report:
    body: Mapping[str, Any] = msgspec.json.decode(row.body)
    fields = ("count", "suspects", "noise_rate", "is_noise_rate_estimated", "cost")
    return Report(
        id=row.id,
        name=row.name,
        created_at=from_us(row.created_at),
        kept=row.kept,
        branches=tuple(body["branches"]),
        **{key: body[key] for key in fields},
    )


_kept = (
    select(func.count())
    .where(REPORT_SAMPLE.c.report_id == REPORT.c.id)
    .correlate(REPORT)
    .scalar_subquery()
)
_REPORTS = select(
    REPORT.c.id, REPORT.c.name, REPORT.c.created_at, REPORT.c.body, _kept.label("kept")
).order_by(REPORT.c.created_at.desc(), REPORT.c.id.desc())
_id = REPORT_SAMPLE.c.report_id == bindparam("id", type_=BigInteger)
_SAMPLES = (
    select(
        REPORT_SAMPLE.c.rank,
        REPORT_SAMPLE.c.sample,
        REPORT_SAMPLE.c.body,
        REPORT_SAMPLE.c.picture.is_not(None).label("has"),
    )
    .where(_id, REPORT_SAMPLE.c.rank > bindparam("after", type_=Integer))
    .order_by(REPORT_SAMPLE.c.rank)
    .limit(bindparam("limit", type_=Integer))
)
_PICTURE = select(REPORT_SAMPLE.c.picture).where(
    _id, REPORT_SAMPLE.c.sample == bindparam("index", type_=BigInteger)
)
