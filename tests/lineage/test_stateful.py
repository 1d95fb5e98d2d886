"""The lineage against a plain-dict model: any sequence of records, tags, branches, moves and
deletions."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from datastates.errors import Conflict, DatastatesError, NotFound
from datastates.lineage import Database, Edge, EdgeKind, RefKind, lookup
from datastates.lineage.query import names, walk
from datastates.lineage.schema import metadata
from datastates.lineage.write import record, refs
from tests.lineage.looking import nth_ancestor
from tests.support.effort import examples
from tests.support.lineages import told

NAMES = st.sampled_from(["main", "fork", "v1", "sweep/lr=0.1"])


@dataclass
class Model:
    """What the lineage should hold: parents of states in the order they were recorded, refs, and
    events oldest first."""

    first: dict[str, str | None] = field(default_factory=dict)
    further: dict[str, list[str]] = field(default_factory=dict)
    refs: dict[str, tuple[RefKind, str, int]] = field(default_factory=dict)
    events: list[tuple[str, RefKind, str | None, str | None, str]] = field(default_factory=list)

    def parents(self, uid: str) -> set[str]:
        first = self.first[uid]
        return {*self.further[uid], *(() if first is None else (first,))}

    def ancestors(self, uid: str) -> set[str]:
        found: set[str] = set()
        todo = self.parents(uid)
        while todo:
            found |= todo
            todo = {above for each in todo for above in self.parents(each)} - found
        return found

    def newest_first(self, uids: set[str]) -> list[str]:
        return [uid for uid in reversed(self.first) if uid in uids]

    def set_ref(self, name: str, kind: RefKind, uid: str, reason: str) -> None:
        _, old, version = self.refs.get(name, (kind, None, 0))
        self.refs[name] = (kind, uid, version + 1)
        self.events.append((name, kind, old, uid, reason))


class Machine(RuleBasedStateMachine):
    """Every rule does the same to the lineage and to the model, errors included."""

    database: Database
    states: Bundle[str] = Bundle("states")

    @initialize()
    def begin(self) -> None:
        self.model = Model()
        with self.database.write() as session:
            for table in reversed(metadata.sorted_tables):
                if table.name == "state":  # its rows refer to each other
                    session.execute(table.update().values(parent_id=None, jump_id=None))
                session.execute(table.delete())

    @rule(target=states, branch=st.none() | NAMES, count=st.integers(1, 4))
    def record_on_head(self, branch: str | None, count: int) -> Any:
        """Go on where the branch is, as a tracker does."""
        made = []
        for _ in range(count):
            head = self.model.refs[branch][1] if branch in self.model.refs else None
            made += self.record(head, branch, [])
        return multiple(*made)

    @rule(
        target=states,
        parent=states,
        branch=st.none() | NAMES,
        further=st.lists(states, max_size=2, unique=True),
    )
    def record_anywhere(self, parent: str, branch: str | None, further: list[str]) -> Any:
        """Fork or merge; from where the branch is not, this must fail."""
        return multiple(*self.record(parent, branch, further))

    def record(self, parent: str | None, branch: str | None, further: list[str]) -> list[str]:
        edges = tuple(Edge(uid, EdgeKind.MERGE, 0.5) for uid in further)
        new = told(
            secrets.token_hex(12),
            secrets.token_hex(32),
            parent,
            branch,
            None,
            len(self.model.first),
            edges=edges,
        )
        kind, head, _ = self.model.refs.get(branch or "", (RefKind.BRANCH, parent, 0))
        if branch is not None and (kind is RefKind.TAG or head != parent):
            self.fails(Conflict, lambda session: record.record(session, new))
            return []
        with self.database.write() as session:
            recorded = record.record(session, new)
        self.model.first[new.uid], self.model.further[new.uid] = parent, further
        if branch is not None:
            self.model.set_ref(branch, RefKind.BRANCH, new.uid, "capture")
        with self.database.read() as session:
            assert lookup.state(session, new.uid) == recorded
        return [new.uid]

    @rule(name=NAMES, uid=states, kind=st.sampled_from(RefKind))
    def name(self, name: str, uid: str, kind: RefKind) -> None:
        make = refs.tag if kind is RefKind.TAG else refs.branch
        if name in self.model.refs:
            self.fails(Conflict, lambda session: make(session, name, uid))
            return
        with self.database.write() as session:
            make(session, name, uid)
        self.model.set_ref(name, kind, uid, kind.value)

    @rule(name=NAMES, uid=states, expected=states, is_right=st.booleans())
    def move(self, name: str, uid: str, expected: str, is_right: bool) -> None:
        if name not in self.model.refs:
            self.fails(NotFound, lambda session: refs.move(session, name, uid, expected=expected))
            return
        kind, at, _ = self.model.refs[name]
        expected = at if is_right else expected
        if expected != at:
            self.fails(Conflict, lambda session: refs.move(session, name, uid, expected=expected))
            return
        with self.database.write() as session:
            refs.move(session, name, uid, expected=expected)
        self.model.set_ref(name, kind, uid, "move")

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name not in self.model.refs:
            self.fails(NotFound, lambda session: refs.delete_ref(session, name))
            return
        with self.database.write() as session:
            refs.delete_ref(session, name)
        kind, at, _ = self.model.refs.pop(name)
        self.model.events.append((name, kind, at, None, "delete"))

    def fails(self, error: type[DatastatesError], act: Any) -> None:
        with pytest.raises(error), self.database.write() as session:
            act(session)

    @rule(a=states, b=states)
    def walks_agree(self, a: str, b: str) -> None:
        model = self.model
        above_a, above_b = model.ancestors(a), model.ancestors(b)
        with self.database.read() as session:
            assert [state.uid for state in walk.ancestors(session, a)] == model.newest_first(
                above_a
            )
            assert [state.uid for state in walk.log(session, a, limit=3)] == model.newest_first(
                above_a | {a}
            )[:3]
            assert [state.uid for state in walk.children(session, a)] == [
                uid for uid in model.first if a in model.parents(uid)
            ]
            assert walk.is_ancestor(session, a, b) == (a == b or a in above_b)
            base = walk.merge_base(session, a, b)
            assert (None if base is None else base.uid) == next(
                iter(model.newest_first((above_a | {a}) & (above_b | {b}))), None
            )
            at: str | None = a
            for n in range(lookup.state(session, a).generation + 1):
                assert at == nth_ancestor(session, a, n).uid
                at = model.first[at]
            assert at is None

    @invariant()
    def refs_agree(self) -> None:
        with self.database.read() as session:
            assert {
                ref.name: (ref.kind, ref.state, ref.version) for ref in names.refs(session)
            } == self.model.refs

    def teardown(self) -> None:
        with self.database.read() as session:
            for name in {event[0] for event in self.model.events}:
                log = [
                    (event.name, event.kind, event.old, event.new, event.reason)
                    for event in names.reflog(session, name)
                ]
                assert log == [event for event in reversed(self.model.events) if event[0] == name]


def test_the_lineage_agrees_with_a_model(database: Database) -> None:
    class OnDatabase(Machine):
        pass

    OnDatabase.database = database
    run_state_machine_as_test(
        OnDatabase, settings=settings(max_examples=examples(40), stateful_step_count=25)
    )
