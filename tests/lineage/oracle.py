"""A small random lineage, in a database and as plain values, for tests that compare SQL with
brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from datastates.lineage import Database, Edge, EdgeKind, Run, State, Status
from datastates.lineage.write import record, refs, runs
from tests.support.lineages import told

START = datetime(2026, 11, 1, tzinfo=UTC)
NOW = START + timedelta(days=10)
METRICS = ("loss", "acc", "val/loss")
ATTRIBUTES = ("kind", "size", "has space")
TEXTS = ("", "a", "ab", "B", "ü", "z%_", "it's", "\\n")
NUMBERS = (-1, 0, 1, 2, 2.5, 0.1, math.inf, -math.inf)
LARGE = (
    2**53,
    2**53 + 1,
    2**53 + 2,
    -(2**53) - 1,
    -(2**53) - 2,
    float(2**53),
    10**16 - 1,
    10**16,
    10**16 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2.0**64,
)
"""Several have the same nearest float."""


@dataclass
class Lineage:
    """``states`` in the order of their recording; ``moves`` are each ref's uids, the oldest
    first."""

    states: list[State] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    moves: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_uid: dict[str, State] = {state.uid: state for state in self.states}

    def chain(self, state: State) -> Iterator[State]:
        """The state and its first parents."""
        while True:
            yield state
            first = self.first_parent(state)
            if first is None:
                return
            state = first

    def first_parent(self, state: State) -> State | None:
        return self.by_uid[state.parents[0]] if len(state.parents) > len(state.edges) else None

    def reach(self, state: State) -> set[str]:
        """The uids of the state and all its ancestors."""
        seen: set[str] = set()
        waiting = [state.uid]
        while waiting:
            uid = waiting.pop()
            if uid not in seen:
                seen.add(uid)
                waiting += self.by_uid[uid].parents
        return seen


def grow(database: Database, seed: int, count: int = 30) -> Lineage:
    """The same lineage for the same seed: forks, merges, criss-crosses, steps that fall back,
    values that are missing."""
    rng = random.Random(seed)
    lineage = Lineage()
    for index in range(2):
        _start_run(database, lineage, rng, index)
    for index in range(count):
        _record(database, lineage, rng, index)
    with database.write() as session:
        for name in ("warm", "x/y.z-1"):
            lineage.tags[name] = rng.choice(lineage.states).uid
            refs.tag(session, name, lineage.tags[name])
            lineage.moves[name] = [lineage.tags[name]]
    return lineage


def _start_run(database: Database, lineage: Lineage, rng: random.Random, index: int) -> None:
    run = Run(
        uid=f"{index:024x}",
        host=rng.choice(TEXTS),
        user=rng.choice(TEXTS),
        pid=index,
        argv=("train",),
        git_commit=rng.choice([None, "abc123", "ü"]),
        git_dirty=None,
        config={
            "lr": rng.choice([0.1, 1, 2.5]),
            "seed": rng.choice([*LARGE[:5], 2**63 - 1]),
            "ü": rng.choice(TEXTS),
            "flag": rng.choice([True, False]),
            "none": None,
        },
        versions={},
        started_at=START,
    )
    with database.write() as session:
        runs.start(session, run)
    lineage.runs[run.uid] = run


def _record(database: Database, lineage: Lineage, rng: random.Random, index: int) -> None:
    branch = rng.choice(["main", "fork", "other"])
    head = lineage.branches.get(branch)
    parent = (
        lineage.by_uid[head]
        if head
        else rng.choice([None, *lineage.states[-5:]])
        if lineage.states
        else None
    )
    choices = [*TEXTS, *NUMBERS, True, False, None, math.nan] if rng.random() < 0.6 else LARGE
    further = [
        state
        for state in rng.sample(lineage.states, min(len(lineage.states), 2))
        if parent is None or state.uid != parent.uid
    ]
    new = told(
        uid=f"{rng.getrandbits(96):024x}",
        digest=f"{index:064x}",
        parent=parent.uid if parent else None,
        branch=branch,
        run=rng.choice([None, *lineage.runs]),
        step=(
            rng.choice([0, 3])
            if parent is None or rng.random() < 0.2
            else parent.step + rng.choice([0, 1, 2])
        ),
        micro_step=rng.choice([0, 0, 1]),
        metrics={key: rng.choice([*NUMBERS, math.nan]) for key in METRICS if rng.random() < 0.7},
        attributes={key: rng.choice(choices) for key in ATTRIBUTES if rng.random() < 0.7},
        message=rng.choice([None, *TEXTS]),
        created_at=START + timedelta(hours=index),
        status=rng.choice(list(Status)),
        edges=(
            tuple(Edge(state.uid, rng.choice(list(EdgeKind)), 0.5) for state in further)
            if rng.random() < 0.3
            else ()
        ),
    )
    with database.write() as session:
        state = record.record(session, new)
    lineage.states.append(state)
    lineage.by_uid[state.uid] = state
    lineage.branches[branch] = state.uid
    lineage.moves.setdefault(branch, []).append(state.uid)
