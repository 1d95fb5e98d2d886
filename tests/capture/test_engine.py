"""The engine's decisions, event by event: no thread, no clock, no disk."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datastates.capture.engine import (
    Action,
    Adopted,
    Closing,
    Engine,
    Event,
    Evict,
    GiveUp,
    LineOpened,
    Recorded,
    RefsChanged,
    RoomNeeded,
    Tick,
    Wanted,
    Write,
    WriteFailed,
    Written,
)
from datastates.config import BackPressure
from datastates.errors import InvalidInput
from datastates.policy.cadence import Cadence

NEVER = Cadence(every=None, interval_s=None)
WAIT, DROP, SKIP = BackPressure.WAIT, BackPressure.DROP_OLDEST, BackPressure.SKIP


def engine(cadence: Cadence = NEVER, *uids: str) -> Engine:
    """An engine with one line, ``main``, that has recorded ``uids`` a second apart."""
    made = Engine()
    made.handle(LineOpened("main", cadence))
    for now, uid in enumerate(uids):
        made.handle(Recorded(uid, "main", float(now)))
    return made


def room(slots: int = 1, back_pressure: BackPressure = WAIT, *, is_blocked: bool = True) -> RoomNeeded:
    return RoomNeeded(slots, is_blocked, back_pressure)


def after(made: Engine, *events: Event) -> list[Action]:
    return [action for event in events for action in made.handle(event)]


# --- what is wanted ---------------------------------------------------------------------------------------------------------


def test_nothing_is_written_that_nobody_wants() -> None:
    made = engine()
    assert after(made, *(Recorded(f"s{i}", "main", float(i)) for i in range(5)), Tick(100.0)) == []
    assert made.next_tick() is None
    assert made.pending_writes == 0


def test_every_second_capture_is_written_one_at_a_time_in_order() -> None:
    made = engine(Cadence(every=2, interval_s=None))
    assert after(made, *(Recorded(f"s{i}", "main", float(i)) for i in range(5))) == [Write("s0")]
    assert made.pending_writes == 3
    assert after(made, Written("s0"), Written("s2"), Written("s4")) == [Write("s2"), Write("s4")]
    assert made.pending_writes == 0


def test_by_time_the_first_is_written_and_then_the_newest_once_an_interval() -> None:
    made = engine(Cadence(interval_s=10.0))
    assert made.next_tick() is None
    assert after(made, Recorded("a", "main", 5.0)) == [Write("a")]
    assert after(made, Written("a"), Recorded("b", "main", 6.0), Recorded("c", "main", 7.0)) == []
    assert made.next_tick() == 15.0
    assert after(made, Tick(14.9)) == []
    assert after(made, Tick(15.0)) == [Write("c")]
    assert after(made, Written("c"), Tick(99.0)) == []
    assert made.next_tick() is None


def test_each_line_has_a_cadence_of_its_own() -> None:
    made = engine(Cadence(every=1, interval_s=None))
    made.handle(LineOpened("other", NEVER))
    assert after(made, Recorded("o", "other", 0.0), Recorded("m", "main", 0.0)) == [Write("m")]


def test_a_tag_makes_a_state_wanted_and_a_branch_does_not() -> None:
    made = engine(NEVER, "a", "b", "c")
    assert after(made, RefsChanged(frozenset({"a"}), frozenset({"a", "b"}))) == [Write("a")]


def test_a_state_that_is_waited_for_before_it_is_recorded_is_written_once_it_is() -> None:
    made = engine()
    assert after(made, Wanted("a")) == []
    assert after(made, Recorded("a", "main", 0.0)) == [Write("a")]
    assert after(made, Wanted("a"), Written("a"), Wanted("a")) == []


def test_a_failed_write_is_wanted_no_longer_and_the_next_goes_on() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    assert after(made, WriteFailed("a")) == [Write("b")]
    assert after(made, Written("b")) == []
    assert after(made, Wanted("a")) == [Write("a")]


@pytest.mark.parametrize("line", ["main", None])
def test_closing_wants_the_heads_that_are_not_durable(line: str | None) -> None:
    made = engine(NEVER, "a", "b")
    assert after(made, Closing(line)) == [Write("b")]
    assert after(made, Written("b"), Closing(line)) == []


def test_closing_one_line_leaves_the_other_alone() -> None:
    made = engine(NEVER, "a")
    made.handle(LineOpened("other", NEVER))
    made.handle(Recorded("o", "other", 0.0))
    assert after(made, Closing("other")) == [Write("o")]
    assert after(made, Written("o"), room()) == [Evict(("o",), 1)]


# --- what leaves ------------------------------------------------------------------------------------------------------------


def test_the_oldest_leave_first_and_never_a_head_nor_what_is_named_or_wanted() -> None:
    made = engine(NEVER, "a", "b", "c", "d", "e")
    after(made, RefsChanged(frozenset(), frozenset({"b"})), Wanted("x"), Wanted("c"))
    assert after(made, room(3, is_blocked=False)) == [Evict(("a", "d"), 3)]


def test_what_is_durable_may_leave_even_a_head() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a")
    assert after(made, room(is_blocked=False)) == []
    assert after(made, Written("a"), room(is_blocked=False)) == [Evict(("a",), 1)]


def test_a_blocked_capture_gets_the_head_written_when_nothing_else_helps() -> None:
    made = engine(NEVER, "a")
    assert after(made, room(2)) == [Write("a")]
    assert after(made, room(2)) == []  # it is on its way
    assert after(made, Written("a"), room(2)) == [Evict(("a",), 2)]


def test_named_states_are_written_for_room_too() -> None:
    made = engine(NEVER, "a", "b")
    after(made, RefsChanged(frozenset(), frozenset({"a"})))
    assert after(made, room(2), Written("a"), room(2)) == [Write("a"), Evict(("a",), 2)]


def test_drop_oldest_gives_up_the_oldest_waiting_write_and_nothing_that_is_named() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c", "d")  # a is being written
    after(made, RefsChanged(frozenset(), frozenset({"b"})))
    assert after(made, room(1, DROP)) == [GiveUp(("c",)), Evict(("c",), 1)]
    made.forget("c")
    assert after(made, room(1, DROP)) == []
    assert after(made, Written("a")) == [Write("b")]


@pytest.mark.parametrize("back_pressure", [WAIT, SKIP])
def test_only_drop_oldest_gives_up_a_write(back_pressure: BackPressure) -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c")
    assert after(made, room(1, back_pressure)) == []


def test_room_is_made_ahead_without_giving_anything_up() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c")
    assert after(made, room(1, DROP, is_blocked=False)) == []


# --- clones -----------------------------------------------------------------------------------------------------------------


def test_a_clone_stays_in_memory_until_it_is_durable_and_is_written_for_room() -> None:
    made = engine(NEVER, "a", "b")
    assert after(made, Adopted("clone"), room(1, is_blocked=False)) == [Evict(("a",), 1)]
    made.forget("a")
    assert after(made, Wanted("b"), Written("b"), room(2)) == [Write("b"), Evict(("b",), 2)]
    made.forget("b")
    assert after(made, room(3), Written("clone"), room(3)) == [Write("clone"), Evict(("clone",), 3)]
    made.forget("clone")
    assert made._adopted == set()


def test_a_clone_is_written_at_closing_only_when_a_ref_names_it() -> None:
    made = engine()
    assert after(made, Adopted("a"), Adopted("b"), RefsChanged(frozenset(), frozenset({"b"})), Closing(None)) == []
    assert after(made, RefsChanged(frozenset({"b"}), frozenset({"b"}))) == [Write("b")]


def test_a_clone_that_is_waited_for_before_it_is_adopted_is_written_once_it_is() -> None:
    made = engine()
    assert after(made, Wanted("a"), Adopted("a")) == [Write("a")]


def test_a_state_that_a_line_captured_is_no_clone() -> None:
    made = engine(NEVER, "a", "b")
    assert after(made, Adopted("a"), room(1, is_blocked=False)) == [Evict(("a",), 1)]


# --- cadence ----------------------------------------------------------------------------------------------------------------


def test_a_cadence_refuses_what_makes_no_sense() -> None:
    with pytest.raises(InvalidInput, match="durable_every is 0"):
        Cadence(every=0)
    for interval_s in (-1.0, float("nan")):
        with pytest.raises(InvalidInput, match="durable_interval_s is"):
            Cadence(interval_s=interval_s)


def test_a_cadence_is_due_by_count_or_by_time() -> None:
    cadence = Cadence(every=3, interval_s=10.0)
    assert [index for index in range(7) if cadence.is_due(index=index, now=0.0, last_write=0.0, is_newest=True)] == [0, 3, 6]
    assert cadence.is_due(index=1, now=10.0, last_write=0.0, is_newest=True)
    assert not cadence.is_due(index=1, now=99.0, last_write=0.0, is_newest=False)
    assert cadence.next_due(4.0) == 14.0
    assert cadence.next_due(None) is None
    assert Cadence(every=1, interval_s=None).next_due(4.0) is None


# --- any sequence of events ---------------------------------------------------------------------------------------------------


class EngineMachine(RuleBasedStateMachine):
    """The engine between a runner and a model: what is in memory, durable, named, a head; what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.now, self.serial = 0.0, 0
        self.memory: dict[str, str] = {}
        self.heads: dict[str, str] = {}
        self.durable: set[str] = set()
        self.owed: set[str] = set()
        self.named: frozenset[str] = frozenset()
        self.writing: str | None = None

    @initialize(cadences=st.lists(st.builds(Cadence, st.none() | st.integers(1, 3), st.none() | st.floats(0, 5)), min_size=1, max_size=3))
    def open_lines(self, cadences: list[Cadence]) -> None:
        self.lines = {f"line{i}": cadence for i, cadence in enumerate(cadences)}
        for line, cadence in self.lines.items():
            self.act(LineOpened(line, cadence))

    def act(self, event: Event, *, may_drop: bool = False) -> None:
        """Carry out what the engine decides, as the runner does, and check that it may be done."""
        given_up: set[str] = set()
        for action in self.engine.handle(event):
            match action:
                case Write(uid):
                    assert self.writing is None, "one write at a time"
                    assert uid in self.memory, "only what is in memory can be written"
                    assert uid not in self.durable
                    self.writing = uid
                case GiveUp(uids):
                    assert may_drop
                    given_up.update(uids)
                    self.owed.difference_update(uids)
                case Evict(uids, _):
                    for uid in uids:
                        self.check_may_leave(uid)
                        self.engine.forget(uid)
                        del self.memory[uid]

    def check_may_leave(self, uid: str) -> None:
        assert uid in self.memory
        assert uid != self.writing
        if uid not in self.durable:
            assert uid not in self.heads.values(), "a head left before it was durable"
            assert uid not in self.named, "a named state left before it was durable"
            assert uid not in self.owed, "a wanted state left before it was durable"

    @rule(data=st.data(), seconds=st.floats(0, 3))
    def record(self, data: st.DataObject, seconds: float) -> None:
        if not self.lines:
            return
        line = data.draw(st.sampled_from(sorted(self.lines)))
        uid = f"s{self.serial}"
        self.serial, self.now = self.serial + 1, self.now + seconds
        self.memory[uid] = line
        self.heads[line] = uid
        self.act(Recorded(uid, line, self.now))

    @rule()
    def adopt(self) -> None:
        uid = f"s{self.serial}"
        self.serial += 1
        self.memory[uid] = self.heads[uid] = uid
        self.act(Adopted(uid))

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def want(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.memory)))
        if uid not in self.durable:
            self.owed.add(uid)
        self.act(Wanted(uid))

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        uids = st.frozensets(st.sampled_from(sorted(self.memory)), max_size=3)
        tagged = data.draw(uids)
        self.named = tagged | data.draw(uids)
        self.owed |= tagged - self.durable
        self.act(RefsChanged(tagged, self.named))

    @precondition(lambda self: self.writing)
    @rule(is_well=st.booleans())
    def finish_write(self, is_well: bool) -> None:
        uid, self.writing = self.writing, None
        assert uid is not None
        self.owed.discard(uid)
        if is_well:
            self.durable.add(uid)
        self.act(Written(uid) if is_well else WriteFailed(uid))

    @rule(seconds=st.floats(0, 10))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.act(Tick(self.now))

    @rule(slots=st.integers(1, 4))
    def make_room_ahead(self, slots: int) -> None:
        self.act(RoomNeeded(slots, is_blocked=False, back_pressure=WAIT))

    @rule(back_pressure=st.sampled_from(list(BackPressure)))
    def wait_for_all_room(self, back_pressure: BackPressure) -> None:
        """A capture that needs the whole arena gets it: writes end, and then everything can leave."""
        for _ in range(3 * len(self.memory) + 3):
            if not self.memory:
                return
            self.act(RoomNeeded(1 << 20, is_blocked=True, back_pressure=back_pressure), may_drop=back_pressure is DROP)
            if self.writing is not None:
                self.finish_write(is_well=True)
        assert not self.memory, "waiting for room did not end"

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def close_line(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(sorted(self.lines)))
        del self.lines[line]
        head = self.heads.pop(line, None)
        if head in self.memory and head not in self.durable:
            self.owed.add(head)
        self.act(Closing(line))

    @invariant()
    def what_is_owed_is_on_its_way(self) -> None:
        assert self.engine.pending_writes >= len(self.owed - {self.writing}) + (self.writing is not None)
        assert not self.owed or self.writing is not None, "something is wanted and nothing is being written"

    def teardown(self) -> None:
        self.heads.clear()
        self.act(Closing(None))
        while self.writing is not None:
            self.finish_write(is_well=True)
        assert self.owed == set()
        assert self.engine.pending_writes == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
