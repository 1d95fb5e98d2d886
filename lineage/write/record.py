"""The commit point: one transaction makes a state, with everything that belongs to it, part of the
lineage.

It runs during training, under its GIL. It therefore executes a handful of statements, which are
compiled once. Several states take no more statements than one.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    bindparam,
    exc,
    func,
    insert,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from datastates import values
from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage import lookup
from datastates.lineage.lookup import ids_of
from datastates.lineage.schema import (
    ATTRIBUTE,
    EDGE,
    EVENT,
    METRIC,
    REF,
    REPLICA,
    RUN,
    SEGMENT,
    STATE,
    from_us,
    to_us,
)
from datastates.lineage.states import (
    STATES,
    TAKEN,
    NewState,
    RefKind,
    Run,
    State,
    StateFacts,
    Tally,
    columns_of,
)
from datastates.system import logs
from datastates.values import storable

from . import segments
from .refs import check_name

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_UID = re.compile(r"[0-9a-f]{24}")


def record(session: Session, new: NewState) -> State:
    """Make a state visible and move its branch to it; the branch may only come from the state's
    parent.

    The branch is created if nothing has its name. A metric may be NaN or infinite, and is read back
    as it was. An error must leave the transaction, so that nothing half-recorded is committed.

    :raises Conflict: the branch has moved on, its name is a tag's, or the uid is taken.
    :raises NotFound: the parent, the run or a further parent is unknown.
    :raises InvalidInput: a uid, a name or a value cannot be stored; the error names it.
    """
    (state,) = record_all(session, [new])
    return state


def record_all(session: Session, news: Sequence[NewState]) -> list[State]:
    """``record`` for several states at once, parents before their children: all of them or none."""
    for new in news:
        _check(new)
    if not news:
        return []
    begins = _first_to_inherit(news)
    if begins is not None:
        return [*record_all(session, news[:begins]), *record_all(session, news[begins:])]
    segments.lock(
        session,
        {new.facts.branch for new in news if new.facts.branch is not None},
        takes_turns=False,
    )
    places, rows, states = _Places(session), _Rows(), []
    for new, id_ in zip(news, _free_ids(session, len(news)), strict=True):
        facts = new.facts
        place = places.of(facts)
        further_ids = places.ids_of([edge.parent for edge in facts.edges])
        created_us = to_us(facts.created_at)
        rows.add(new, id_, place, places.segment_of(facts, id_), further_ids, created_us)
        places.add(facts, id_, place, created_us)
        states.append(_state_of(new, place, created_us))
    rows.insert(session)
    for name in sorted(places.branches):
        # always in the same order, so that two writers never wait for each other
        _advance(session, name, places.branches[name])
    if places.events:
        session.execute(_INSERT_EVENT, places.events)
    return states


def check(new: NewState) -> None:
    """Raise unless ``record`` would store such a state; whether its parents exist is not checked.

    :raises InvalidInput: a uid, a name or a value cannot be stored; the error names it.
    """
    _check(new)
    for key, value in new.facts.attributes.items():
        columns_of(key, value, "attribute")


# The steps of record_all


def _first_to_inherit(news: Sequence[NewState]) -> int | None:
    """The first state on a branch whose parent comes before it without a branch. The branch takes
    the parent into its segment, so the parent must be recorded first."""
    free: set[str | None] = set()
    for number, new in enumerate(news):
        if new.facts.branch is None:
            free.add(new.uid)
        elif new.facts.parent in free:
            return number
    return None


def _check(new: NewState) -> None:
    facts = new.facts
    if new.status.is_restorable and not new.tier:
        raise InvalidInput(
            f"{facts.uid} has the status {new.status}, but no tier: name the tier that holds its"
            " bytes"
        )
    if not _UID.fullmatch(facts.uid):
        raise InvalidInput(f"{facts.uid!r} is no uid: it must have 24 lower-case hex digits")
    for key in (*facts.metrics, *facts.attributes):
        values.key(key, "the name of a metric or an attribute")
    values.text(facts.message or "", "message")
    if len({(edge.parent, edge.kind) for edge in facts.edges}) < len(facts.edges):
        raise InvalidInput(
            f"{facts.uid} names a further parent twice in the same way: name each once"
        )
    for what, number, bits in (
        ("step", facts.step, 63),
        ("micro_step", facts.micro_step, 31),
        ("bytes_total", new.bytes_total, 63),
        ("bytes_new", new.bytes_new, 63),
    ):
        if not -(2**bits) <= number < 2**bits:
            raise InvalidInput(
                f"{what} {number} of {facts.uid} does not fit {bits + 1} bits: count from 0"
            )
    if not 1 <= facts.world_size <= values.RANKS:
        raise InvalidInput(
            f"{facts.uid} has {facts.world_size} parts: a state has 1 to {values.RANKS}"
        )
    if not all(math.isfinite(edge.weight) for edge in facts.edges):
        raise InvalidInput(f"a further parent of {facts.uid} has a weight that is no number")


@dataclass(frozen=True, slots=True)
class _Node:
    """The facts about a state that later states need. ``step`` is needed of parents only."""

    id: int
    generation: int
    jump_id: int | None
    jump_step: int | None
    step: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a new state in the graph."""

    parent_id: int | None
    run_id: int | None
    generation: int
    jump_id: int | None
    jump_step: int | None


@dataclass(slots=True)
class _Branch:
    """A branch and how it is about to move, from ``old`` to ``head``. ``is_new``: nothing has its
    name yet.

    ``segment_id`` is the branch's segment, once it has one; ``first_id`` is that segment's first
    state, once there is one.
    """

    is_new: bool
    old_id: int | None
    old: str | None
    head_id: int | None
    head: str | None
    segment_id: int | None
    first_id: int | None
    moves: int = 0


class _Places:
    """The places of new states, taken from the database or from the states before them in the
    same call."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._nodes: dict[int, _Node] = {}
        self._added: dict[str, int] = {}
        self._runs: dict[str, int] = {}
        self.branches: dict[str, _Branch] = {}
        self.events: list[dict[str, object]] = []

    def of(self, facts: StateFacts) -> _Place:
        parent_id = self._added.get(facts.parent or "")
        is_said = facts.parent is None or parent_id is not None
        if (
            not is_said
            or not (facts.run is None or facts.run in self._runs)
            or not (facts.branch is None or facts.branch in self.branches)
        ):
            parent_id = self._ask(facts, parent_id)
        if facts.branch is not None and self.branches[facts.branch].head_id != parent_id:
            raise _moved_on(facts.branch, self.branches[facts.branch].head, facts.parent)
        run_id = None if facts.run is None else self._runs[facts.run]
        if parent_id is None:
            return _Place(None, run_id, 0, None, None)
        return _Place(parent_id, run_id, *self._jump(self._nodes[parent_id]))

    def ids_of(self, uids: Sequence[str]) -> list[int]:
        """The row ids of further parents."""
        here = [self._added.get(uid) for uid in uids]
        asked = iter(
            ids_of(self._session, [uid for uid, id_ in zip(uids, here, strict=True) if id_ is None])
            if None in here
            else ()
        )
        return [next(asked) if id_ is None else id_ for id_ in here]

    def segment_of(self, facts: StateFacts, id_: int) -> int | None:
        """The segment of a state that is about to join its branch; None without a branch."""
        if facts.branch is None:
            return None
        branch = self.branches[facts.branch]
        if (
            branch.is_new
            and branch.segment_id is None
            and facts.parent is not None
            and facts.parent not in self._added
        ):
            branch.segment_id, branch.first_id = segments.begin(
                self._session, facts.branch, int(branch.head_id or 0)
            )
        if branch.segment_id is None:
            branch.segment_id = segments.make(
                self._session, facts.branch, branch.head_id, id_, branch=facts.branch
            )
            if branch.segment_id is None:
                raise _moved_on(facts.branch, None, facts.parent)
        elif branch.first_id is None:
            segments.note_first(self._session, branch.segment_id, id_)
        branch.first_id = branch.first_id or id_
        return branch.segment_id

    def add(self, facts: StateFacts, id_: int, place: _Place, created_us: int) -> None:
        """Note that a state will take this place; its branch moves to it."""
        self._added[facts.uid] = id_
        self._nodes[id_] = _Node(id_, place.generation, place.jump_id, place.jump_step, facts.step)
        if facts.branch is None:
            return
        branch = self.branches[facts.branch]
        old_id = None if branch.is_new and not branch.moves else branch.head_id
        event = {
            "name": facts.branch,
            "kind": RefKind.BRANCH.value,
            "old_id": old_id,
            "new_id": id_,
        }
        self.events.append({**event, "reason": "capture", "created_at": created_us})
        branch.head_id, branch.head = id_, facts.uid
        branch.moves += 1

    def _ask(self, facts: StateFacts, parent_id: int | None) -> int | None:
        """Read from the database what is not yet known of a state's place; returns the row id of
        its parent."""
        parent = None if parent_id is not None else facts.parent
        row: Any = self._session.execute(
            _PLACE, {"parent": parent, "run": facts.run, "branch": facts.branch}
        ).one()
        if parent is not None:
            if row.parent_id is None:
                raise NotFound(
                    f"there is no state {parent!r} to be the parent of {facts.uid}: record it first"
                )
            parent_id = row.parent_id
            self._nodes[row.parent_id] = _Node(
                row.parent_id, row.generation, row.jump_id, row.jump_step, row.step
            )
            if row.jump_id is not None:
                self._nodes[row.jump_id] = _Node(
                    row.jump_id, row.jump_generation, row.far_id, row.jumped_step
                )
            if row.far_id is not None:
                self._nodes[row.far_id] = _Node(
                    row.far_id, row.far_generation, row.behind_id, row.far_step
                )
        if facts.run is not None:
            if row.run_id is None:
                raise NotFound(f"there is no run {facts.run!r}: start it before it records states")
            self._runs[facts.run] = row.run_id
            if facts.branch is not None and row.taken is not None:
                raise Conflict(
                    f"branch {facts.branch!r} was taken over by {row.taken}: this training captures"
                    " no more there; track a branch of another name, or take this one back with"
                    " takeover=True"
                )
        if facts.branch is not None and facts.branch not in self.branches:
            if row.ref_kind is None:
                check_name(facts.branch)
            elif row.ref_kind != RefKind.BRANCH.value:
                raise Conflict(
                    f"{facts.branch!r} is a tag, captures cannot move it: choose another branch"
                )
            if row.ref_kind is None:
                segments.detach(self._session, facts.branch)  # an older branch of that name
            old = (parent_id, facts.parent, parent_id, facts.parent, None, None)
            found = (row.head_id, row.head, row.head_id, row.head, row.segment_id, row.first_id)
            self.branches[facts.branch] = _Branch(
                row.ref_kind is None, *(old if row.ref_kind is None else found)
            )
        return parent_id

    def _jump(self, parent: _Node) -> tuple[int, int | None, int | None]:
        """Generation, jump pointer and lowest step up to there. Two equally long jumps of the
        parent become one; else the pointer goes one up.

        A root counts as its own jump.
        """
        jumped = parent if parent.jump_id is None else self._node(parent.jump_id)
        far = jumped if jumped.jump_id is None else self._node(jumped.jump_id)
        if parent.generation - jumped.generation == jumped.generation - far.generation:
            steps = (parent.step, parent.jump_step, None if jumped is parent else jumped.jump_step)
            return parent.generation + 1, far.id, min(step for step in steps if step is not None)
        return parent.generation + 1, parent.id, parent.step

    def _node(self, id_: int) -> _Node:
        node = self._nodes.get(id_)
        if node is None:
            node = self._nodes[id_] = _Node(
                id_, *self._session.execute(_ABOVE, {"above": id_}).one()
            )
        return node


def _moved_on(branch: str, head: str | None, parent: str | None) -> Conflict:
    at = f"is at {head}" if head else "changed just now"
    return Conflict(
        f"branch {branch!r} {at}, not at {parent or 'its beginning'}: go on from its head, or fork"
        " another branch"
    )


def _free_ids(session: Session, count: int) -> Iterator[int]:
    """Row ids that no other writer takes."""
    if session.dialect.name == "sqlite":  # we hold the write lock
        first = session.execute(_NEXT_ID).scalar_one()
        return iter(range(first, first + count))
    return iter(session.execute(_NEXT_IDS, {"count": count}).scalars().all())


class _Rows:
    """The rows to insert, by table."""

    def __init__(self) -> None:
        self._states: list[dict[str, object]] = []
        self._belongings: dict[Any, list[dict[str, object]]] = {
            _INSERT_EDGE: [],
            _INSERT_METRIC: [],
            _INSERT_ATTRIBUTE: [],
            _INSERT_REPLICA: [],
        }
        self._tallies: defaultdict[tuple[int, str], Tally] = defaultdict(Tally)
        self._ends: list[int] = []

    def add(
        self,
        new: NewState,
        id_: int,
        place: _Place,
        segment_id: int | None,
        further_ids: list[int],
        created_us: int,
    ) -> None:
        """Add a state, and what belongs to it."""
        facts = new.facts
        self._states.append(
            {
                "id": id_,
                "uid": facts.uid,
                "digest": new.digest,
                "parent_id": place.parent_id,
                "generation": place.generation,
                "jump_id": place.jump_id,
                "jump_step": place.jump_step,
                "run_id": place.run_id,
                "step": facts.step,
                "micro_step": facts.micro_step,
                "created_at": created_us,
                "status": new.status.value,
                "bytes_total": new.bytes_total,
                "bytes_new": new.bytes_new,
                "world_size": facts.world_size,
                "message": facts.message,
                "segment_id": segment_id,
            }
        )
        edges, metrics, attributes, replicas = self._belongings.values()
        for position, (edge, parent) in enumerate(zip(facts.edges, further_ids, strict=True)):
            edges.append(
                {
                    "child_id": id_,
                    "parent_id": parent,
                    "kind": edge.kind.value,
                    "position": position,
                    "weight": edge.weight,
                }
            )
        for key, value in facts.metrics.items():
            metrics.append(
                {"state_id": id_, "key": key, "value": None if math.isnan(value) else value}
            )
            if segment_id is not None:
                self._tallies[segment_id, key].add(id_, value)
        if segment_id is not None and not (place.generation + 1) % STATES:
            self._ends.append(id_)
        attributes += [
            {"state_id": id_, **columns_of(key, value, "attribute")}
            for key, value in facts.attributes.items()
        ]
        if new.status.is_restorable:
            replicas.append(
                {
                    "state_id": id_,
                    "rank": 0,
                    "tier": new.tier,
                    "node": new.node,
                    "status": "ok",
                    "bytes": new.bytes_new,
                }
            )

    def insert(self, session: Session) -> None:
        """Insert all rows."""
        try:
            session.execute(_INSERT_STATE, self._states)
        except exc.IntegrityError as error:
            uids = " or ".join(str(row["uid"]) for row in self._states)
            raise Conflict(
                f"there is a state {uids} already: every capture needs a new uid"
            ) from error
        for statement, rows in self._belongings.items():
            if rows:
                session.execute(statement, rows)
        segments.grow(session, self._tallies, self._ends)


def _advance(session: Session, name: str, branch: _Branch) -> None:
    """Move the branch from where it was found to the newest state; if it has moved on, nothing
    at all is recorded."""
    if branch.is_new:
        row = {
            "name": name,
            "kind": RefKind.BRANCH.value,
            "state_id": branch.head_id,
            "version": branch.moves,
            "message": None,
        }
        done: Any = session.execute(_MAKE_BRANCH[session.dialect.name], row)
    else:
        moves = {"ref": name, "old": branch.old_id, "new": branch.head_id, "moves": branch.moves}
        done = session.execute(_MOVE_BRANCH, moves)
    if done.rowcount != 1:
        raise _moved_on(name, None, branch.old)


def _state_of(new: NewState, place: _Place, created_us: int) -> State:
    facts = new.facts
    return State(
        uid=facts.uid,
        digest=new.digest,
        step=facts.step,
        micro_step=facts.micro_step,
        metrics=dict(facts.metrics),
        attributes=dict(facts.attributes),
        message=facts.message,
        created_at=from_us(created_us),
        status=new.status,
        parents=facts.parents,
        edges=facts.edges,
        run=facts.run,
        generation=place.generation,
        bytes_total=new.bytes_total,
        bytes_new=new.bytes_new,
        world_size=facts.world_size,
        config=facts.config,
    )


# The statements

_parent, _jumped, _far, _head = (STATE.alias(name) for name in ("parent", "jumped", "far", "head"))
_one = select(literal(1).label("one")).subquery()

_PLACE = (
    select(_parent.c.id.label("parent_id"), _parent.c.generation)
    .add_columns(_parent.c.step, _parent.c.jump_step, _jumped.c.jump_step.label("jumped_step"))
    .add_columns(_jumped.c.id.label("jump_id"), _jumped.c.generation.label("jump_generation"))
    .add_columns(
        _far.c.id.label("far_id"),
        _far.c.generation.label("far_generation"),
        _far.c.jump_step.label("far_step"),
    )
    .add_columns(_far.c.jump_id.label("behind_id"), RUN.c.id.label("run_id"))
    .add_columns(RUN.c.config[TAKEN].as_string().label("taken"))
    .add_columns(
        REF.c.kind.label("ref_kind"), _head.c.id.label("head_id"), _head.c.uid.label("head")
    )
    .add_columns(SEGMENT.c.id.label("segment_id"), SEGMENT.c.first_id)
    .select_from(
        _one.outerjoin(_parent, _parent.c.uid == bindparam("parent"))
        .outerjoin(_jumped, _jumped.c.id == _parent.c.jump_id)
        .outerjoin(_far, _far.c.id == _jumped.c.jump_id)
        .outerjoin(RUN, RUN.c.uid == bindparam("run"))
        .outerjoin(REF, REF.c.name == bindparam("branch"))
        .outerjoin(_head, _head.c.id == REF.c.state_id)
        .outerjoin(SEGMENT, SEGMENT.c.branch == bindparam("branch"))
    )
)
_ABOVE = select(STATE.c.generation, STATE.c.jump_id, STATE.c.jump_step).where(
    STATE.c.id == bindparam("above", type_=BigInteger)
)
_NEXT_ID = select(func.coalesce(func.max(STATE.c.id), 0) + 1)
_NEXT_IDS = text(
    "SELECT nextval(pg_get_serial_sequence('state', 'id')) FROM generate_series(1, :count)"
)
_INSERT_STATE = insert(STATE)
_INSERT_EDGE = insert(EDGE)
_INSERT_METRIC = insert(METRIC)
_INSERT_ATTRIBUTE = insert(ATTRIBUTE)
_INSERT_REPLICA = insert(REPLICA)
_INSERT_EVENT = insert(EVENT)
_MAKE_BRANCH = {
    name: make(REF).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    for name, make in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}
_MOVE_BRANCH = (
    update(REF)
    .where(
        REF.c.name == bindparam("ref"),
        REF.c.kind == RefKind.BRANCH.value,
        REF.c.state_id == bindparam("old"),
    )
    .values(state_id=bindparam("new"), version=REF.c.version + bindparam("moves"))
)


# Computes the metrics of a state from those that its ranks measured.


Reduce = str | Mapping[str, str]
"""How one number is made of those of all ranks: one word for every metric, or a word by name.

Metrics not named are those of rank 0."""

FIRST = "first"
EACH = "each"

_WAYS: Mapping[str, Callable[[Sequence[float]], float]] = {
    FIRST: lambda measured: measured[0],
    EACH: lambda measured: measured[0],
    "mean": lambda measured: _sum(measured, len(measured)),
    "max": lambda measured: math.nan if any(map(math.isnan, measured)) else max(measured),
    "min": lambda measured: math.nan if any(map(math.isnan, measured)) else min(measured),
    "sum": lambda measured: _sum(measured, 1),
}


def check_reduce(reduce: object) -> Reduce:
    """The user's value, if it is a valid way to reduce metrics.

    :raises InvalidInput: it does not; the error lists the words.
    """
    ways = reduce.values() if isinstance(reduce, Mapping) else [reduce]
    for way in ways:
        if not isinstance(way, str) or way not in _WAYS:
            raise InvalidInput(
                f"reduce is {values.shown(way)}: say one of {', '.join(_WAYS)}, or a dict of these"
                " by the name of a metric"
            )
    if isinstance(reduce, Mapping):
        return {values.key(name, "the name of a metric"): str(way) for name, way in reduce.items()}
    return str(reduce)


def check_metrics(metrics: Mapping[str, float], reduce: Reduce, rank: int) -> None:
    """Raise unless what one rank measured can be recorded under its names.

    :raises InvalidInput: a name with its rank appended is too long.
    """
    for key in metrics:
        if _way(reduce, key) == EACH:
            values.key(_of_rank(key, rank), "the name of a metric of one rank")


def reduced(measured: Sequence[Mapping[str, float]], reduce: Reduce) -> dict[str, float]:
    """The metrics of a state, from what its ranks measured, by rank. A metric that rank 0 did not
    measure counts only if it is reduced.

    NaN stays NaN, and a minimum or maximum over values with a NaN is NaN. A metric that only some
    ranks measured is reduced over those ranks.
    """
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for metrics in measured for key in metrics):
        way = _way(reduce, key)
        there = [metrics[key] for metrics in measured if key in metrics]
        if way != FIRST or key in measured[0]:
            found[key] = _WAYS[way](there)
        if way == EACH:
            found |= {
                _of_rank(key, rank): metrics[key]
                for rank, metrics in enumerate(measured)
                if key in metrics
            }
    return found


def _sum(measured: Sequence[float], divisor: int) -> float:
    """The sum divided by the divisor; infinite only if that is beyond the range of floats,
    however large the sum is."""
    if not all(map(math.isfinite, measured)):
        return sum(measured)
    total = sum(map(Fraction, measured))
    try:
        return float(total / divisor)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _way(reduce: Reduce, key: str) -> str:
    return reduce if isinstance(reduce, str) else reduce.get(key, FIRST)


def _of_rank(key: str, rank: int) -> str:
    return f"{key}@{rank}"


# Runs of other lineages, whose records arrive with states. Each record is kept once; nothing here
# changes it, and its process is not ours.


_UID_BYTES = 12


def import_runs(
    session: Session, states: Iterable[State], runs: Mapping[str, Run]
) -> dict[str, str]:
    """Keep the runs of states that arrive; ``runs`` are those that came with the states, by uid.
    Returns the uid here, by the uid there."""
    wanted = {state.run for state in states if state.run in runs}
    rows = {uid: _row(runs[uid]) for uid in wanted if uid is not None}
    for uid, row in sorted(rows.items(), key=lambda item: str(item[1]["uid"])):
        # in one order, so that two writers never wait for each other
        session.execute(_INSERT[session.dialect.name], row)
        id_ = session.execute(_ID, {"uid": row["uid"]}).one().id
        if not lookup.of_runs(session, [id_]):
            lookup.keep(session, id_, runs[uid].config)
    return {uid: str(row["uid"]) for uid, row in rows.items()}


def check_imported_run(run: Run) -> None:
    """Raise unless the record of a run could be kept.

    :raises InvalidInput: a name or a value cannot be stored; the error names it.
    """
    for key, value in run.config.items():
        values.key(key, "the name of a setting")
        columns_of(key, value, "setting")


def _row(run: Run) -> dict[str, object]:
    row: dict[str, object] = {
        "host": storable(run.host),
        "user": storable(run.user),
        "argv": list(map(storable, logs.arguments(run.argv))),
        "git_commit": run.git_commit and storable(run.git_commit),
        "git_dirty": run.git_dirty,
        "versions": {
            storable(name): storable(version) for name, version in sorted(run.versions.items())
        },
        "started_at": to_us(run.started_at),
        "branch": run.branch and storable(run.branch),
    }
    said = json.dumps(
        [*row.values(), sorted(lookup.shown(run.config).items())], separators=(",", ":")
    )
    uid = blake2b(said.encode(), digest_size=_UID_BYTES, person=b"run").hexdigest()
    finished_at = None if run.finished_at is None else to_us(run.finished_at)
    return {
        **row,
        "uid": uid,
        "finished_at": finished_at,
        "pid": 0,
        "config": {},
        "is_carried": True,
    }


_INSERT = {
    "sqlite": sqlite.insert(RUN).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(RUN).on_conflict_do_nothing(),
}
_ID = select(RUN.c.id).where(RUN.c.uid == bindparam("uid"))
