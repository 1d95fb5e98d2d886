"""``branches``: every branch of a lineage, chosen, sorted and grouped. ``show/branches`` describes
the fields of each.

The sort keys are read for all branches, in a few queries whose cost grows with the number of
branches. Everything else is read for the branches of one page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, ColumnElement, bindparam, func, select, true

from datastates.errors import InvalidInput
from datastates.lineage import lookup
from datastates.lineage.lookup import rows_in_batches, states
from datastates.lineage.query.conditions import Scope, condition
from datastates.lineage.query.curves import lost_parts
from datastates.lineage.query.fields import check_names, resolve_names
from datastates.lineage.query.grammar import parse_query
from datastates.lineage.query.names import REFS, to_ref
from datastates.lineage.query.pages import sorting
from datastates.lineage.schema import (
    ATTRIBUTE,
    METRIC,
    REF,
    RUN,
    STATE,
    from_us,
    is_finite,
    to_us,
)
from datastates.lineage.states import (
    GONE,
    Ending,
    How,
    Life,
    Ref,
    RefKind,
    Run,
    State,
    Status,
    ending_of,
)
from datastates.lineage.write import runs
from datastates.values import Value

from .branch_rows import (
    COUNTED,
    Branch,
    Branches,
    Counts,
    Group,
    Lines,
    Living,
    Origin,
    Place,
    Point,
    Row,
    Setting,
    count_states,
    line_of,
    metrics_of,
    place_of,
    place_of_group,
    read_cursor,
    request_digest,
    rows_of,
    sort_of,
    write_cursor,
)
from .text import Direction, by_relevance, direction_of, is_validation

if TYPE_CHECKING:
    from datastates.lineage.session import Session


def groups_of(session: Session, group: str, made_by: Mapping[int, int | None]) -> dict[int, Value]:
    """The value of ``study``, ``config.KEY`` or ``attr.KEY`` for each state, by row id; states
    without one are left out.

    :param made_by: the states, and the row id of the run of each.
    :raises InvalidInput: ``group`` is none of these.
    """
    kind, _, key = group.partition(".")
    if group == "study":
        kind, key = "attr", "study"
    if kind == "attr" and key:
        return attributes_of(session, list(made_by), key)
    if kind == "config" and key:
        configs = lookup.of_runs(session, [run for run in made_by.values() if run is not None])
        return {
            state: configs[run][key]
            for state, run in made_by.items()
            if run is not None and key in configs.get(run, {})
        }
    raise InvalidInput(
        f"branches cannot be grouped by {group!r}: name 'study', 'config.KEY' or 'attr.KEY'"
    )


def attributes_of(session: Session, ids: Sequence[int], key: str) -> dict[int, Value]:
    """One attribute of states, by row id."""
    rows = rows_in_batches(session, _ATTRIBUTES, ids, of=key)
    return {row.state_id: row.text if row.type == "str" else row.number for row in rows}


def runs_of(session: Session, ids: Sequence[int]) -> dict[int, int | None]:
    """The row ids of the runs that captured states."""
    return {row.id: row.run_id for row in rows_in_batches(session, _RUNS, ids)}


_ids = bindparam("ids", type_=BigInteger, expanding=True)
_ATTRIBUTES = select(
    ATTRIBUTE.c.state_id, ATTRIBUTE.c.type, ATTRIBUTE.c.number, ATTRIBUTE.c.text
).where(ATTRIBUTE.c.state_id.in_(_ids), ATTRIBUTE.c.key == bindparam("of"))
_RUNS = select(STATE.c.id, STATE.c.run_id).where(STATE.c.id.in_(_ids))


POINTS = 60
"""How many points the small curve of a branch has."""

_DONE = "done/"  # the prefix of the tags that studies put on what they have finished


def branches(
    session: Session,
    query: str = "",
    *,
    name: str = "",
    names: Collection[str] | None = None,
    metric: str | None = None,
    direction: Direction | None = None,
    sort: str = "changed",
    group: str | None = None,
    after: str | None = None,
    limit: int | None = None,
    living: Living | None = None,
    now: datetime | None = None,
    counts: Callable[[Session], Counts] | None = None,
    drawn: Lines | None = None,
    folder: str | None = None,
) -> Branches:
    """The branches that match the request.

    :param query: a search, as for states; it must find a branch's newest state. If it has an order,
        that is used instead of ``sort``.
    :param name: a part of the names of the branches.
    :param names: the names of the branches; None: any.
    :param metric: the metric of ``last``, ``best`` and ``line``; None: the metric in ``query``,
        else a validation metric if branches have one, else the most relevant one.
    :param direction: which of its values are better; None: judged by its name.
    :param sort: one of ``SORTS``, in the order that people expect: the best, newest, longest first;
        a leading ``-`` reverses it.
    :param group: ``study``, ``config.KEY`` or ``attr.KEY``: branches with the same value stand
        together.
    :param after: ``next`` of the page before. The other arguments must be the same.
    :param limit: the most branches to return; None: all.
    :param living: returns whether the process of a run that did not finish is alive.
    :param counts: returns an earlier result of ``counts_of``, by which branches are sorted. The
        returned counts are always current.
    :param drawn: the lines of earlier answers. This call adds its lines.
    :param folder: the uid of the folder of packs in which ``bytes`` are counted.
    :raises SyntaxProblem: the query does not parse; the error points at the column.
    :raises InvalidInput: one of these values is not valid.
    """
    by, is_reversed = sort_of(sort)
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit}: a page has at least one branch")
    keys = by_relevance(metrics_of(session))
    found = heads_where(session, query, now) if query.strip() else None

    def matches(row: Row) -> bool:
        is_named = name in row.name and (names is None or row.name in names)
        return is_named and (found is None or row.head_id in found.places)

    given = direction
    for key in _metrics_to_try(session, metric, query, keys):
        metric, direction = key, given or (Direction.MIN if key is None else direction_of(key))
        every = rows_of(session, metric, direction)
        rows = [row for row in every if matches(row)]
        if any(row.tally is not None for row in rows):
            break
    assert direction is not None
    total = len(every)
    if by in COUNTED:
        count_states(session, rows, counts(session) if counts else None, folder=folder)
    if group is not None:
        values = groups_of(session, group, {row.head_id: row.run_id for row in rows})
        for row in rows:
            row.group = values.get(row.head_id)
    request = request_digest(
        query, name, None if names is None else sorted(names), metric, direction, sort, group
    )
    placed = sorted(
        (
            (
                found.place_of(row)
                if found is not None and found.is_ordered
                else place_of(row, by, direction, is_reversed=is_reversed),
                row,
            )
            for row in rows
        ),
        key=itemgetter(0),
    )
    if found is not None:
        placed = placed[: found.limit]
        rows = [row for _, row in placed]
    if after is not None:
        last = read_cursor(request, after)
        placed = [pair for pair in placed if pair[0] > last]
    shown = [row for _, row in placed[:limit]]
    return Branches(
        items=_described(session, shown, metric, direction, living, drawn or Lines(), folder),
        next=(
            write_cursor(request, placed[limit - 1][0])
            if limit is not None and len(placed) > limit
            else None
        ),
        total=total,
        matching=len(rows),
        metric=metric,
        direction=direction,
        metrics=tuple(keys),
        groups=() if group is None else _groups(rows, direction),
    )


# What is known of all branches


def _metrics_to_try(
    session: Session, metric: str | None, query: str, keys: Sequence[str]
) -> list[str | None]:
    """The metric that was named, or those that may be shown: the first one that a matching branch
    has."""
    if metric is not None:
        return [metric]
    fields = resolve_names(session, parse_query(query), query).fields
    found = [field.key for field in fields if field.name == "metrics"][:1]
    found += [*filter(is_validation, keys)][:1] + list(keys[:1])
    return list(dict.fromkeys(found)) or [None]


@dataclass(frozen=True, slots=True)
class FoundHeads:
    """The newest states of branches that a search finds: the place of each in its order, by row id.

    ``limit`` is the most branches that the search returns. None is no limit."""

    places: Mapping[int, int]
    is_ordered: bool
    limit: int | None

    def place_of(self, row: Row) -> Place:
        """The place of a branch in the order of the search, within its group."""
        name = tuple(map(ord, row.name))
        return place_of_group(row.group), 0, float(self.places[row.head_id]), name


def heads_where(session: Session, query: str, now: datetime | None = None) -> FoundHeads:
    """The newest states of branches that a search finds.

    :raises SyntaxProblem: the query does not parse, or compares a name that nothing has.
    """
    parsed = parse_query(query)
    check_names(session, parsed, query)
    parsed = resolve_names(session, parsed, query)
    scope = Scope(session, to_us(now), query)
    where = true() if parsed.condition is None else condition(parsed.condition, scope)
    ids = session.execute(
        select(STATE.c.id)
        .where(STATE.c.id.in_(_HEADS), where)
        .order_by(*sorting(parsed, scope.dialect))
    ).scalars()
    places = {id_: place for place, id_ in enumerate(ids)}
    return FoundHeads(places, bool(parsed.order), parsed.limit)


def _groups(rows: Sequence[Row], direction: Direction) -> tuple[Group, ...]:
    found: dict[tuple[int, float, str], list[Row]] = {}
    for row in rows:
        found.setdefault(place_of_group(row.group), []).append(row)
    sign = 1 if direction is Direction.MIN else -1
    made = []
    for _, members in sorted(found.items()):
        best = min(
            (row for row in members if row.best is not None),
            key=lambda row: sign * (row.best or 0.0),
            default=None,
        )
        made.append(
            Group(
                members[0].group,
                len(members),
                None if best is None else best.best,
                None if best is None else best.name,
            )
        )
    return tuple(made)


# What is read for the branches of one page


def _described(
    session: Session,
    rows: Sequence[Row],
    metric: str | None,
    direction: Direction,
    living: Living | None,
    drawn: Lines,
    folder: str | None,
) -> tuple[Branch, ...]:
    """Some branches, with everything else that is read for them."""
    count_states(session, rows, folder=folder)
    best = _best_restorable(session, rows, metric, direction)
    ids = [
        *(row.best_id for row in rows),
        *(row.tally.last_id for row in rows if row.tally is not None),
        *(id_ for id_, _ in best.values()),
    ]
    points = _states(session, [id_ for id_ in ids if id_ is not None])

    def point(id_: int, value: float | None) -> Point:
        state = points[id_]
        return Point(state.uid, state.step, value, Status(state.status))

    run_ids = {id_ for row in rows for id_ in (row.run_id, row.fork_run_id) if id_ is not None}
    known = runs.by_ids(session, run_ids)
    configs = lookup.of_runs(session, run_ids)
    heads = [row.head_id for row in rows]
    studies, variants = (attributes_of(session, heads, key) for key in ("study", "variant"))
    rates = _rates(session, rows)
    lost = lost_parts(session, {row.name: row.head_id for row in rows})
    done = set(session.execute(_FINISHED).all())
    died = runs.died(session, {run.process for run in known.values() if run.process is not None})
    differing = varying([configs[row.run_id] for row in rows if row.run_id in configs])
    made = []
    for row in rows:
        run = known.get(row.run_id or 0)
        tally, restorable = row.tally, best.get(row.name)
        study, variant = studies.get(row.head_id), variants.get(row.head_id)
        if (_DONE + row.name, row.head_id) in done:
            life, ending = Life.ENDED, Ending(How.ENDED)
        elif run is None:
            life, ending = Life.UNKNOWN, None
        else:
            life = _life(run, living)
            ending = ending_of(run, died, is_over=life is Life.ENDED)
        made.append(
            Branch(
                name=row.name,
                head=row.head,
                step=row.step,
                status=Status(row.status),
                fork=_origin(row),
                states=row.states,
                restorable=row.restorable,
                durable=row.durable,
                bytes=row.bytes,
                last=None if tally is None else point(tally.last_id, tally.last),
                best=point(row.best_id, row.best) if row.best_id else None,
                best_restorable=None if restorable is None else point(*restorable),
                line=line_of(session, row, metric, POINTS, drawn),
                config=_differences(configs, row),
                run=None if run is None else run.uid,
                host=None if run is None else run.host,
                life=life,
                began_at=None if row.began_us is None else from_us(row.began_us),
                changed_at=from_us(row.changed_us),
                took_s=row.took_us / 1e6,
                steps_per_s=rates.get(row.name),
                study=None if study is None else str(study),
                variant=None if variant is None else str(variant),
                group=row.group,
                ending=ending,
                lost_step=lost[row.name][-1].step if row.name in lost else None,
                settings={
                    key: value
                    for key, value in configs.get(row.run_id or 0, {}).items()
                    if key in differing
                },
            )
        )
    return tuple(made)


def _best_restorable(
    session: Session, rows: Sequence[Row], metric: str | None, direction: Direction
) -> dict[str, tuple[int, float]]:
    """The best restorable value of each branch, and the row id of its state."""
    found: dict[str, tuple[int, float]] = {}
    at_best = _states(session, [row.best_id for row in rows if row.best_id is not None])
    for row in rows:
        if row.best_id is None or row.best is None:
            continue
        if Status(at_best[row.best_id].status).is_restorable:
            found[row.name] = row.best_id, row.best
        elif row.restorable:
            asked = {"segment": row.segment_id, "of": metric}
            best = session.execute(_BEST[direction], asked).first()
            if best is not None:
                found[row.name] = best.id, best.value
    return found


def _origin(row: Row) -> Origin | None:
    if row.fork is None or row.fork_step is None:
        return None
    return Origin(
        row.fork,
        row.fork_step,
        row.parent or row.parent_name,
        row.parent is None and row.parent_name is not None,
    )


def _differences(configs: Mapping[int, Mapping[str, Value]], row: Row) -> tuple[Setting, ...]:
    ours, theirs = configs.get(row.run_id or 0, {}), configs.get(row.fork_run_id or 0, {})
    keys = sorted(ours.keys() | theirs.keys())
    return tuple(
        Setting(key, ours.get(key), theirs.get(key))
        for key in keys
        if (key in ours) != (key in theirs) or not is_same(ours[key], theirs[key])
    )


def varying(configs: Sequence[Mapping[str, Value]]) -> set[str]:
    """The settings in which some configurations differ. ``optimizer.lr`` is left out if ``lr`` has
    the same values."""
    keys = {key for config in configs for key in config if not key.startswith("datastates.")}
    values = {key: [config.get(key) for config in configs] for key in keys}

    def is_shorter(key: str) -> bool:
        _, dot, leaf = key.rpartition(".")
        return bool(dot) and leaf in values and all(map(is_same, values[key], values[leaf]))

    return {
        key
        for key, own in values.items()
        if not all(is_same(own[0], value) for value in own) and not is_shorter(key)
    }


def is_same(one: Value, other: Value) -> bool:
    """Whether two values are equal and both or neither boolean; NaN equals NaN."""
    return (one == other and isinstance(one, bool) == isinstance(other, bool)) or (
        one != one and other != other
    )


def _life(run: Run, living: Living | None) -> Life:
    if run.finished_at is not None:
        return Life.ENDED
    return Life.UNKNOWN if living is None else living(run)


def _states(session: Session, ids: Sequence[int]) -> dict[int, Any]:
    return {row.id: row for row in rows_in_batches(session, _SOME, sorted(set(ids)))}


def _rates(session: Session, rows: Sequence[Row]) -> dict[str, float]:
    """Steps per second over the latest captures of each branch's newest run: back to where its
    jumps lead (see ``search/walk``)."""
    found: dict[str, float] = {}
    ends: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.states > 1:
            ends[row.head_id].append(row)
    for head, *before in rows_in_batches(session, _BACK, sorted(ends)):
        back = list(zip(*[iter(before)] * 4, strict=True))  # the farthest first
        for row in ends[head]:
            for id_, run_id, step, created_us in back:
                if (
                    id_ is not None
                    and id_ >= (row.first_id or 0)
                    and run_id == row.run_id
                    and row.changed_us > created_us
                ):
                    took_us = row.changed_us - created_us
                    found[row.name] = max(0.0, (row.step - step) * 1e6 / took_us)
                    break
    return found


_is_branch = REF.c.kind == RefKind.BRANCH.value
_HEADS = select(REF.c.state_id).where(_is_branch)
_SOME = select(STATE.c.id, STATE.c.uid, STATE.c.step, STATE.c.status).where(STATE.c.id.in_(_ids))
_FINISHED = select(REF.c.name, REF.c.state_id).where(
    REF.c.kind == RefKind.TAG.value, REF.c.name.like(_DONE + "%")
)


def _best(direction: Direction) -> Any:
    """The query reads the states of the segment, each with its value: in a join, SQLite may walk
    all values of the metric, of every branch."""
    of_state = (METRIC.c.state_id == STATE.c.id) & (METRIC.c.key == bindparam("of"))
    found = select(
        STATE.c.id, select(METRIC.c.value).where(of_state).scalar_subquery().label("value")
    ).where(
        STATE.c.segment_id == bindparam("segment", type_=BigInteger), STATE.c.status.not_in(GONE)
    )
    held = found.subquery()
    value = held.c.value
    return (
        select(held.c.id, value)
        .where(is_finite(value))
        .order_by(value.asc() if direction is Direction.MIN else value.desc(), held.c.id)
        .limit(1)
    )


def _back() -> Any:
    """Each state with the target of its jump, the target of that state's jump, and so on, the
    farthest first; its parent comes last."""
    steps = [STATE.alias(f"back_{number}") for number in range(5)]
    before: Any = STATE
    joined: Any = STATE
    for number, step in enumerate(steps[:-1]):
        joined = joined.outerjoin(step, step.c.id == before.c.jump_id)
        before = steps[number]
    joined = joined.outerjoin(steps[-1], steps[-1].c.id == STATE.c.parent_id)
    farthest = [*reversed(steps[:-1]), steps[-1]]
    columns = [step.c[name] for step in farthest for name in ("id", "run_id", "step", "created_at")]
    return select(STATE.c.id, *columns).select_from(joined).where(STATE.c.id.in_(_ids))


_BEST = {direction: _best(direction) for direction in Direction}
_BACK = _back()


# A summary of a lineage: how much there is, which branches were active, and what came last.


_KINDS = select(REF.c.kind, func.count().label("number")).group_by(REF.c.kind)


@dataclass(frozen=True, slots=True)
class Summary:
    """``heads`` are branches and where they stand; ``newest`` are states, newest first, so children
    before their parents.

    ``named`` are the refs of ``newest``.
    """

    states: int
    branches: int
    tags: int
    heads: tuple[tuple[Ref, State], ...]
    newest: tuple[State, ...]
    named: tuple[Ref, ...]


def summary(session: Session, *, heads: int, newest: int) -> Summary:
    """The ``heads`` branches that moved last, and the ``newest`` states; a handful of queries,
    however much there is."""
    count = session.execute(select(func.count()).select_from(STATE)).scalar_one()
    kinds = {row.kind: int(row.number) for row in session.execute(_KINDS)}
    ids = list(
        session.execute(select(STATE.c.id).order_by(STATE.c.id.desc()).limit(newest)).scalars()
    )
    branches = _refs(session, REF.c.kind == RefKind.BRANCH.value, heads)
    return Summary(
        states=int(count),
        branches=kinds.get(RefKind.BRANCH.value, 0),
        tags=kinds.get(RefKind.TAG.value, 0),
        heads=tuple(zip(branches, states(session, [ref.state for ref in branches]), strict=True)),
        newest=tuple(states(session, ids)),
        named=tuple(_refs(session, REF.c.state_id.in_(ids), None)),
    )


def _refs(session: Session, where: ColumnElement[bool], limit: int | None) -> list[Ref]:
    """Refs, those that name the newest states first."""
    query = REFS.where(where).order_by(REF.c.state_id.desc(), REF.c.name).limit(limit)
    return [to_ref(row) for row in session.execute(query)]


# The processes that are tracking now, as far as can be known, and what their trainings captured
# last.


@dataclass(frozen=True, slots=True)
class Process:
    """A process that did not finish: its run, whether it is alive, and its running trainings.

    ``branches`` are, by the uid of a training, those whose newest state it captured.
    """

    run: Run
    life: Life
    trainings: tuple[Run, ...]
    branches: dict[str, Branch]


def processes(
    session: Session, living: Living, *, metric: str | None = None
) -> tuple[list[Process], str | None]:
    """Every process that is alive or may be, the last begun first; and the metric whose values
    are given for their branches."""
    lives = [
        (run, life)
        for run in reversed(runs.unfinished(session))
        if (life := living(run)) is not Life.ENDED
    ]
    trainings = _trainings(session, [run.uid for run, _ in lives])
    names = {
        each.branch for found in trainings.values() for each in found if each.branch is not None
    }
    found = branches(session, names=names, metric=metric, living=living)
    captured = {(branch.run, branch.name): branch for branch in found}
    made = []
    for run, life in lives:
        own = tuple(trainings.get(run.uid, ()))
        known = {
            each.uid: captured[key]
            for each in own
            if (key := (each.uid, each.branch or "")) in captured
        }
        made.append(Process(run, life, own, known))
    return made, found.metric


def _trainings(session: Session, uids: Sequence[str]) -> dict[str, list[Run]]:
    """The running trainings of some processes, by the uid of the process, the first begun first."""
    found: defaultdict[str, list[Run]] = defaultdict(list)
    ids = [row.id for row in rows_in_batches(session, _TRAININGS, uids, "uids")]
    for run in sorted(runs.by_ids(session, ids).values(), key=lambda one: one.started_at):
        found[run.process or ""].append(run)
    return found


_TRAININGS = select(RUN.c.id).where(
    RUN.c.process.in_(bindparam("uids", expanding=True)), RUN.c.finished_at.is_(None)
)
