"""What each branch has to itself, and the summaries of its metrics, beside brute force."""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from datastates.errors import Conflict
from datastates.lineage import Database, Run, Status
from datastates.lineage.database import retry_conflicts
from datastates.lineage.lookup import id_of
from datastates.lineage.query import names
from datastates.lineage.query.curves import curve, outline
from datastates.lineage.schema import METRIC, REF, SEGMENT, STATE, STRETCH
from datastates.lineage.states import PLACES, STATES, WHOLE, Tally, place_of
from datastates.lineage.write import record, refs, runs
from tests.lineage.oracle import START
from tests.support.effort import seeds
from tests.support.lineages import told

if TYPE_CHECKING:
    from datastates.lineage.session import Session

KEYS = ("loss", "acc", "val/loss")
NUMBERS = (0.5, -1.0, 2.0, 0.5, 3.25, math.nan, math.inf, -math.inf)


class Story:
    """What people and trainings do to branches, at random; ``heads`` are where branches should
    be."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database, self.rng = database, random.Random(seed)
        self.uids: list[str] = []
        self.steps: dict[str, int] = {}
        self.heads: dict[str, str] = {}
        self.run = Run("a" * 24, "here", "me", 1, (), None, None, {}, {}, START)
        with database.write() as session:
            runs.start(session, self.run)

    def capture(self) -> None:
        name = self.rng.choice(["main", "fork", "other"])
        at = self.heads.get(name) or (
            self.rng.choice([None, *self.uids[-100:]]) if self.uids else None
        )
        rows = []
        for _ in range(self.rng.choice([1, 2, 7, STATES, STATES + 1, 100])):
            uid = secrets.token_hex(12)
            metrics = {key: self.rng.choice(NUMBERS) for key in KEYS if self.rng.random() < 0.8}
            self.steps[uid] = self.steps.get(at or "", -1) + 1
            status = self.rng.choice(list(Status))
            rows.append(
                told(
                    uid,
                    secrets.token_hex(32),
                    at,
                    name,
                    self.run.uid,
                    self.steps[uid],
                    metrics=metrics,
                    status=status,
                )
            )
            at = uid
        with self.database.write() as session:
            record.record_all(session, rows)
        self.uids += [row.facts.uid for row in rows]
        assert at is not None
        self.heads[name] = at

    def alone(self) -> None:
        """A state to which no branch moves, as clones bring them."""
        uid, at = secrets.token_hex(12), self.rng.choice([None, *self.uids[-5:]])
        with self.database.write() as session:
            record.record(
                session,
                told(
                    uid,
                    secrets.token_hex(32),
                    at,
                    None,
                    None,
                    0,
                    metrics={"loss": 1.0},
                    status=Status.EVICTED,
                ),
            )
        self.uids.append(uid)

    def make(self) -> None:
        name = self.rng.choice(["made", "fork", "other"])
        if name in self.heads or not self.uids:
            return
        at = self.rng.choice(self.uids[-150:])
        with self.database.write() as session:
            refs.branch(session, name, at)
        self.heads[name] = at

    def move(self) -> None:
        if self.heads:
            name = self.rng.choice(sorted(self.heads))
            to = self.rng.choice(self.uids[-150:])
            with self.database.write() as session:
                refs.move(session, name, to, expected=self.heads[name])
            self.heads[name] = to

    def delete(self) -> None:
        if self.heads:
            name = self.rng.choice(sorted(self.heads))
            with self.database.write() as session:
                refs.delete_ref(session, name)
            del self.heads[name]

    def recover(self) -> None:
        with self.database.write() as session:
            runs.recover(session, [self.run.uid], volatile=["memory"])
            self.heads = {ref.name: ref.state for ref in names.refs(session)}

    def rename(self) -> None:
        if self.heads and "renamed" not in self.heads:
            name = self.rng.choice(sorted(self.heads))
            with self.database.write() as session:
                refs.rename(session, name, "renamed")
            self.heads["renamed"] = self.heads.pop(name)

    def measure(self) -> None:
        for uid in self.rng.choices(self.uids, k=5) if self.uids else ():
            metrics = {key: self.rng.choice(NUMBERS) for key in ("acc", "late")}
            with self.database.write() as session:
                refs.measure(session, uid, metrics, author="me", is_replacing=True)

    def go_on(self) -> None:
        acts = [self.capture] * 5 + [
            self.alone,
            self.make,
            self.make,
            self.move,
            self.move,
            self.delete,
            self.recover,
            self.rename,
            self.measure,
        ]
        self.rng.choice(acts)()


@pytest.mark.parametrize("seed", seeds(10))
def test_segments_and_summaries_are_those_of_brute_force(database: Database, seed: int) -> None:
    story = Story(database, seed)
    for _ in range(12):
        story.go_on()
        with database.read() as session:
            check(session)
    with database.read() as session:
        for uid in random.Random(seed).sample(story.uids, min(10, len(story.uids))):
            check_outline(session, uid)


def check(session: Session) -> None:
    """Compare what is kept with what the states say."""
    states = {row.id: row for row in session.execute(select(STATE))}
    values: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for row in session.execute(select(METRIC)):
        values[row.state_id][row.key] = row.value
    segments = {row.id: row for row in session.execute(select(SEGMENT))}
    own: defaultdict[int, list[Any]] = defaultdict(list)
    for id_ in sorted(states):
        if states[id_].segment_id is not None:
            own[states[id_].segment_id].append(states[id_])
    expected: dict[tuple[int, str, int], tuple[Any, ...]] = {}
    for segment in segments.values():
        chain = own[segment.id]
        assert segment.first_id == (chain[0].id if chain else None)
        for parent, child in zip(
            [segment.fork_id, *(state.id for state in chain)], chain, strict=False
        ):
            assert child.parent_id == parent, "a segment is a piece of a path"
        expected |= summaries(segment.id, chain, values)
    found = {
        (row.segment_id, row.key, row.place): tuple(getattr(row, name) for name in PLACES)
        for row in session.execute(select(STRETCH))
    }
    assert found.keys() == expected.keys()
    for key, kept in found.items():
        assert kept == pytest.approx(expected[key]), key
    heads = {
        row.name: row.state_id for row in session.execute(select(REF).where(REF.c.kind == "branch"))
    }
    ends = {
        segment.branch: own[segment.id][-1].id if own[segment.id] else segment.fork_id
        for segment in segments.values()
        if segment.branch
    }
    assert ends == heads, "a branch stands at the end of its segment"
    for segment in segments.values():
        if segment.branch and segment.first_id is None:
            at = states[segment.fork_id].segment_id
            assert at is not None, "a branch gets states that no branch has"
            assert segments[at].branch is not None, "a branch gets states that no branch has"


def summaries(
    segment: int, chain: list[Any], values: dict[int, dict[str, Any]]
) -> dict[tuple[int, str, int], tuple[Any, ...]]:
    """The rows that a segment should have."""
    made: defaultdict[tuple[int, str, int], list[tuple[int, float | None]]] = defaultdict(list)
    for state in chain:
        for key, value in values[state.id].items():
            made[segment, key, WHOLE].append((state.id, value))
            if place_of(state.generation) < place_of(chain[-1].generation + 1):
                made[segment, key, place_of(state.generation)].append((state.id, value))
    return {key: brute(points) for key, points in made.items()}


def brute(points: list[tuple[int, float | None]]) -> tuple[Any, ...]:
    finite = [(value, id_) for id_, value in points if value is not None and math.isfinite(value)]
    gaps = [id_ for id_, value in points if value is None or not math.isfinite(value)]
    least, least_id = min(finite, default=(None, None))
    most = max((value for value, _ in finite), default=None)
    most_id = next((id_ for value, id_ in finite if value == most), None)
    ends = (points[0][1], points[0][0], points[-1][1], points[-1][0])
    return (
        len(points),
        len(gaps),
        sum(value for value, _ in finite),
        least,
        least_id,
        most,
        most_id,
        *ends,
        gaps[0] if gaps else None,
    )


def check_outline(session: Session, uid: str) -> None:
    """A curve by its summaries has the ends and extremes of the whole one, and nothing that this
    has not."""
    head = id_of(session, uid)
    for key in KEYS:
        whole, found = curve(session, head, key), outline(session, head, key)
        assert found.count == len(whole.ids)
        values = dict(zip(whole.ids, whole.values, strict=True))
        assert list(found.ids) == sorted(set(found.ids))
        assert all(
            values[id_] == value or not math.isfinite(value)
            for id_, value in zip(found.ids, found.values, strict=True)
        )
        assert not whole.ids or (found.ids[0], found.ids[-1]) == (whole.ids[0], whole.ids[-1])
        finite = [value for value in whole.values if math.isfinite(value)]
        kept = [value for value in found.values if math.isfinite(value)]
        assert (min(kept, default=None), max(kept, default=None)) == (
            min(finite, default=None),
            max(finite, default=None),
        )
        assert (
            any(map(math.isnan, found.values))
            or len(finite) == len(whole.values)
            or any(map(math.isinf, found.values))
        )


def test_a_tally_of_two_parts_is_that_of_the_whole() -> None:
    rng = random.Random(3)
    for _ in range(200):
        points = [(id_, rng.choice(NUMBERS)) for id_ in range(1, rng.randrange(2, 9))]
        at = rng.randrange(len(points) + 1)
        one, other = Tally(), Tally()
        for place, (id_, value) in enumerate(points):
            (one if place < at else other).add(id_, value)
        one.extend(other)
        plain = [(id_, None if math.isnan(value) else value) for id_, value in points]
        assert tuple(one.row().values()) == pytest.approx(brute(plain))


def test_summaries_are_right_while_other_processes_change_branches_and_metrics(
    database: Database, database_url: str
) -> None:
    story, ended = Story(database, 1), threading.Event()
    story.heads = {}
    for _ in range(3):
        story.capture()
    uids, problems = list(story.uids), list[BaseException]()

    def beside(change: Callable[[Session, random.Random, int], None], seed: int) -> None:
        own, rng = Database(database_url), random.Random(seed)
        for number in count():
            try:
                with own.write() as session:
                    change(session, rng, number)
            except Conflict:
                pass  # the other one was first
            except BaseException as problem:
                problems.append(problem)
                break
            if ended.is_set():
                break
        own.close()

    def measure(session: Session, rng: random.Random, number: int) -> None:
        refs.measure(
            session,
            rng.choice(uids),
            {"loss": number, "late": rng.random()},
            author="me",
            is_replacing=True,
        )

    def twig(session: Session, rng: random.Random, number: int) -> None:
        if number % 2:
            refs.delete_ref(session, "twig")
        else:
            refs.branch(session, "twig", rng.choice(uids))

    threads = [
        threading.Thread(target=beside, args=(change, seed))
        for seed, change in enumerate((measure, twig))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            retry_conflicts(story.capture)()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not problems
    with database.read() as session:
        check(session)
