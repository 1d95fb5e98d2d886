"""The engine's decisions, event by event: no thread, no clock, no disk."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datastates.capture.engine import FIRST_RETRY_S, LAST_RETRY_S, RETRY_S, Engine
from datastates.capture.events import (
    Action,
    Adopted,
    Closing,
    Event,
    Evict,
    GiveUp,
    GiveWay,
    LineOpened,
    PassOn,
    Recorded,
    RefsChanged,
    Refuse,
    Retry,
    RoomNeeded,
    Stalled,
    Tick,
    Wanted,
    Write,
    WriteFailed,
    Written,
)
from datastates.capture.pacing import Taken
from datastates.config import BackPressure
from datastates.errors import InvalidInput
from datastates.policy.cadence import Cadence
from datastates.policy.contract import CadenceChoice, Costs, Moment
from tests.support.effort import examples

NEVER = Cadence(every=None, interval_s=None)
WAIT, DROP, SKIP = BackPressure.WAIT, BackPressure.DROP_OLDEST, BackPressure.SKIP


def engine(cadence: Cadence = NEVER, *uids: str) -> Engine:
    """An engine with one line, ``main``, that has recorded ``uids`` a second apart."""
    made = Engine()
    made.handle(LineOpened("main", cadence, "main"))
    for now, uid in enumerate(uids):
        made.handle(Recorded(uid, "main", float(now)))
    return made


def room(
    slots: int = 1,
    back_pressure: BackPressure = WAIT,
    *,
    is_blocked: bool = True,
    line: str | None = None,
    in_flight: int = 0,
    since: float = 0.0,
    now: float | None = None,
    is_patient: bool = False,
) -> RoomNeeded:
    return RoomNeeded(slots, is_blocked, back_pressure, line, in_flight, since, since if now is None else now, is_patient)


def refs(*tagged: str, **branches: str) -> RefsChanged:
    return RefsChanged(frozenset(tagged), branches)


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


def test_that_time_goes_by_counts_no_capture() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a")
    assert after(made, WriteFailed("a", 1.0), Tick(99.0)) == [], "it was due once, when it was captured"


def test_each_line_has_a_cadence_of_its_own() -> None:
    made = engine(Cadence(every=1, interval_s=None))
    made.handle(LineOpened("other", NEVER))
    assert after(made, Recorded("o", "other", 0.0), Recorded("m", "main", 0.0)) == [Write("m")]


def test_a_tag_makes_a_state_wanted_and_a_branch_does_not() -> None:
    made = engine(NEVER, "a", "b", "c")
    assert after(made, refs("a", old="b")) == [Write("a")]


def test_a_state_that_is_waited_for_before_it_is_recorded_is_written_once_it_is() -> None:
    made = engine()
    assert after(made, Wanted("a")) == []
    assert after(made, Recorded("a", "main", 0.0)) == [Write("a")]
    assert after(made, Wanted("a"), Written("a"), Wanted("a")) == []


def test_a_failed_write_is_wanted_no_longer_and_the_next_goes_on() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    assert after(made, WriteFailed("a", 2.0)) == [Write("b")]
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
    after(made, refs(old="b"), Wanted("x"), Wanted("c"))
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
    after(made, refs(old="a"))
    assert after(made, room(2), Written("a"), room(2)) == [Write("a"), Evict(("a",), 2)]


def test_drop_oldest_gives_up_the_oldest_waiting_write_and_nothing_that_is_named() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c", "d")  # a is being written
    after(made, refs(old="b"))
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


def test_no_more_states_stay_that_may_leave_than_are_to_be_held() -> None:
    made = Engine(most_held=2)
    made.handle(LineOpened("main", NEVER, "main"))
    after(made, Adopted("clone"), *(Recorded(uid, "main", 0.0) for uid in "ab"))
    assert after(made, Recorded("c", "main", 0.0)) == []
    assert after(made, Recorded("d", "main", 0.0)) == [Evict(("a",), None)]
    made.forget("a")
    assert after(made, refs("b"), Recorded("e", "main", 0.0)) == [Write("b")]


# --- memory for less than two states ------------------------------------------------------------------------------------------


def test_nothing_is_written_for_room_while_a_capture_is_in_flight() -> None:
    made = engine(NEVER, "a")
    assert after(made, refs(main="a"), room(2, in_flight=1)) == []
    assert after(made, Recorded("b", "main", 1.0), room(2, in_flight=1)) == [Evict(("a",), 2)]


def test_what_a_branch_named_may_leave_once_the_branch_went_on() -> None:
    made = engine(NEVER, "a")
    after(made, refs(main="a", other="a"), Recorded("b", "main", 1.0))
    assert after(made, room(is_blocked=False)) == []
    assert after(made, refs(main="a"), Recorded("c", "main", 2.0), room(is_blocked=False)) == [Evict(("a", "b"), 1)]


def test_the_head_gives_way_to_its_follower_between_two_writes_of_its_cadence() -> None:
    made = engine(Cadence(interval_s=10.0))
    assert after(made, Recorded("a", "main", 0.0), Written("a"), room(2, line="main")) == [Write("a"), Evict(("a",), 2)]
    made.forget("a")
    for uid, now in (("b", 1.0), ("c", 2.0)):
        after(made, Recorded(uid, "main", now), refs(main=uid))
        assert after(made, room(2, line="main", since=now)) == [Evict((uid,), 2)]
        made.forget(uid)
    assert after(made, Recorded("d", "main", 9.0), room(2, line="main", since=11.0)) == [Write("d")]  # the tick did not come first
    assert after(made, Written("d"), Recorded("e", "main", 12.0), Tick(20.9)) == []


def test_the_head_of_another_line_does_not_give_way() -> None:
    made = engine(Cadence(interval_s=10.0))
    made.handle(LineOpened("other", Cadence(interval_s=10.0), "other"))
    after(made, Recorded("a", "main", 0.0), Written("a"), Recorded("o", "other", 0.0), Written("o"))
    after(made, Recorded("b", "main", 1.0), Recorded("p", "other", 1.0), room(9))
    for uid in ("a", "o"):
        made.forget(uid)
    assert after(made, room(2, line="other", since=1.0)) == [Evict(("p",), 2)]


@pytest.mark.parametrize("event", [refs("b", main="b"), refs(main="b", other="b"), Wanted("b")])
def test_a_head_that_somebody_counts_on_does_not_give_way(event: Event) -> None:
    made = engine(Cadence(interval_s=10.0))
    after(made, Recorded("a", "main", 0.0), Written("a"), room(2), Recorded("b", "main", 1.0))
    made.forget("a")
    assert after(made, event, room(2, line="main", since=1.0)) == [Write("b")]


def test_a_clone_is_written_before_a_head_gives_way() -> None:
    made = engine(Cadence(interval_s=10.0))
    after(made, Recorded("a", "main", 0.0), Written("a"), Adopted("clone"), Recorded("b", "main", 1.0))
    made.forget("a")
    assert after(made, room(2, line="main", since=1.0)) == [Write("clone")]
    assert after(made, WriteFailed("clone", 2.0), room(2, line="main", since=1.0)) == [Evict(("b",), 2)]


def test_a_head_does_not_give_way_when_its_line_could_not_be_written() -> None:
    made = engine(Cadence(interval_s=10.0))
    after(made, Recorded("a", "main", 0.0), WriteFailed("a", 1.0))
    assert after(made, room(2, line="main", since=1.0 + RETRY_S + 0.1)) == [Write("a")]


# --- what cannot be written ---------------------------------------------------------------------------------------------------


def test_whoever_waits_is_refused_when_nothing_that_is_held_can_be_written() -> None:
    made = engine(NEVER, "a", "b")
    after(made, refs("a", main="b"), WriteFailed("a", 3.0))
    assert after(made, room(2, since=2.0, now=4.0)) == [Write("b")]
    assert after(made, WriteFailed("b", 5.0), room(2, since=2.0, now=6.0)) == [Refuse(("a", "b"))]


def test_waiting_ends_although_tags_want_what_fails_again_and_again() -> None:
    made = engine(NEVER, "a", "b")
    after(made, refs("a", "b"), WriteFailed("a", 1.0), WriteFailed("b", 2.0))
    (again,) = after(made, refs("a", "b"))
    assert isinstance(again, Write)
    assert after(made, room(2, since=0.5, now=3.0)) == [Refuse(("a", "b"))]


def test_what_failed_is_tried_again_by_those_who_come_later() -> None:
    made = engine(NEVER, "a")
    after(made, room(2), WriteFailed("a", 1.0))
    assert after(made, room(2, since=1.0 + RETRY_S)) == [Refuse(("a",))]
    assert after(made, room(2, since=1.1 + RETRY_S)) == [Write("a")]
    assert after(made, Written("a"), room(2, since=9.0)) == [Evict(("a",), 2)]


def test_one_write_that_goes_well_gives_hope_for_the_others() -> None:
    made = engine(NEVER, "a", "b")
    after(made, refs("a", main="b"), WriteFailed("a", 1.0), Wanted("b"), Written("b"))
    assert after(made, room(2, since=0.5)) == [Evict(("b",), 2)]
    made.forget("b")
    assert after(made, room(2, since=0.5)) == [Write("a")]


# --- a trouble that passes ----------------------------------------------------------------------------------------------------


def fails(uid: str, now: float) -> WriteFailed:
    return WriteFailed(uid, now, is_passing=True)


def test_what_failed_in_passing_stays_wanted_and_is_tried_again_later_and_later() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a")
    now, waited = 10.0, []
    for _ in range(8):
        assert after(made, fails("a", now)) == []
        assert made.is_in_trouble
        due = made.next_tick()
        assert due is not None
        assert after(made, Tick(due - 0.01)) == []
        assert after(made, Tick(due)) == [Write("a")]
        waited.append(due - now)
        now = due
    assert waited[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert waited[-1] == LAST_RETRY_S
    assert after(made, Written("a")) == []
    assert not made.is_in_trouble
    assert made.next_tick() is None
    assert after(made, Recorded("b", "main", now), fails("b", now), Tick(now + FIRST_RETRY_S)) == [Write("b"), Write("b")]


def test_nothing_else_is_tried_until_then_unless_somebody_waits() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    assert after(made, fails("a", 1.0), Wanted("b"), Recorded("c", "main", 1.1), refs("b"), Closing("main")) == []
    assert after(made, Retry()) == [Write("c")]


def test_heads_then_tags_then_what_is_waited_for_come_first_when_writing_works_again() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c", "d", "e")
    made.handle(LineOpened("other", NEVER, "other"))
    after(made, fails("a", 5.0), Wanted("d"), refs("c", other="b"))
    assert after(made, Tick(9.0)) == [Write("b")]
    assert after(made, Written("b"), Written("e"), Written("c"), Written("d")) == [Write("e"), Write("c"), Write("d"), Write("a")]
    assert after(made, Written("a"), Recorded("f", "main", 9.0), Recorded("g", "main", 9.0)) == [Write("f")]
    assert after(made, Recorded("h", "main", 9.0), Written("f"), Written("g")) == [Write("g"), Write("h")], "in order, as ever"


def test_a_state_that_cannot_be_written_does_not_keep_the_others_from_it() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c")
    after(made, fails("a", 5.0))
    assert after(made, Retry()) == [Write("c")], "the head"
    assert after(made, fails("c", 6.0), Retry()) == [Write("b")]
    assert after(made, fails("b", 7.0), Retry()) == [Write("c")], "each had its turn"
    assert after(made, fails("c", 8.0), Retry(), fails("b", 9.0), Retry()) == [Write("b"), Write("a")]
    assert after(made, Written("a"), fails("c", 9.0), Retry()) == [Write("c"), Write("b")]


def test_heads_of_lines_that_were_closed_come_first_too() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    made.handle(LineOpened("other", NEVER, "other"))
    after(made, Recorded("o", "other", 1.0), fails("a", 2.0), Closing("other"))
    assert after(made, Retry(), Written("b")) == [Write("b"), Write("o")]


def test_memory_that_is_full_lets_older_states_give_way_in_the_order_of_what_they_are_worth() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c", "d", "e")
    made.handle(LineOpened("other", NEVER, "other"))
    after(made, Recorded("o", "other", 5.0), fails("a", 5.0), Wanted("b"), refs("c", main="e", other="o"))
    assert after(made, room(2, line="main", is_patient=True)) == [GiveWay(("a", "d", "b", "e", "c"), 2)]
    assert after(made, room(2, line="other", is_patient=True)) == [GiveWay(("a", "d", "b", "o", "c"), 2)]


def test_the_heads_of_other_branches_never_give_way_and_the_capture_is_refused() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a")
    made.handle(LineOpened("other", NEVER, "other"))
    after(made, refs("a", main="a"), fails("a", 5.0))
    assert after(made, room(2, line="other", is_patient=True)) == [Refuse(("a",))]
    assert after(made, room(2, line="main", is_patient=True)) == [Refuse(("a",))], "a tag names it"


def test_what_left_is_not_written_later() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    after(made, fails("a", 5.0))
    made.forget("a")
    assert after(made, Tick(9.0), Written("b")) == [Write("b")]
    assert made.pending_writes == 0


def test_nothing_gives_way_while_the_disk_is_tried() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    after(made, fails("a", 5.0), Tick(9.0))
    assert after(made, room(2, line="main", is_patient=True)) == []
    assert after(made, fails("b", 9.0), room(2, line="main", is_patient=True)) == [GiveWay(("a", "b"), 2)]


def test_a_stalled_write_keeps_its_state_and_lets_others_give_way() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c")
    assert after(made, room(2, line="main", is_patient=True)) == []
    made.handle(Stalled(True))
    assert made.is_in_trouble
    assert after(made, room(2, line="main", is_patient=True)) == [GiveWay(("b", "c"), 2)]
    assert after(made, Stalled(False), room(2, line="main", is_patient=True)) == []
    after(made, Stalled(True))
    assert after(made, Written("a")) == [Write("b")]
    assert not made.is_in_trouble


@pytest.mark.parametrize("event", [room(2, line="main"), room(2, SKIP, line="main", is_patient=True)])
def test_nothing_gives_way_for_those_who_would_rather_be_refused_or_skip(event: RoomNeeded) -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    after(made, fails("a", 5.0))
    assert not [action for action in after(made, event) if isinstance(action, GiveWay)]


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
    assert after(made, Adopted("a"), Adopted("b"), refs(old="b"), Closing("main")) == []
    assert after(made, Closing(None)) == [Write("b")]


def test_a_clone_that_is_waited_for_before_it_is_adopted_is_written_once_it_is() -> None:
    made = engine()
    assert after(made, Wanted("a"), Adopted("a")) == [Write("a")]


def test_a_state_that_a_line_captured_is_no_clone() -> None:
    made = engine(NEVER, "a", "b")
    assert after(made, Adopted("a"), room(1, is_blocked=False)) == [Evict(("a",), 1)]


# --- cadence ----------------------------------------------------------------------------------------------------------------


def test_a_cadence_refuses_what_makes_no_sense() -> None:
    with pytest.raises(InvalidInput, match="durable_every, which counts captures, is 0"):
        Cadence(every=0)
    for interval_s in (-1.0, float("nan")):
        with pytest.raises(InvalidInput, match="durable_interval_s is"):
            Cadence(interval_s=interval_s)


def test_a_cadence_is_due_by_count_or_by_time() -> None:
    cadence = Cadence(every=3, interval_s=10.0)
    assert [index for index in range(7) if cadence.is_due(Moment(0.0, index, last_write=0.0))] == [0, 3, 6]
    assert cadence.is_due(Moment(10.0, 1, last_write=0.0))
    assert not cadence.is_due(Moment(99.0, 1, last_write=0.0, is_newest=False))
    assert not cadence.is_due(Moment(1.0, None, last_write=0.0)), "no capture came, so none is counted"
    assert cadence.is_due(Moment(10.0, None, last_write=0.0))
    assert cadence.next_due(Moment(5.0, last_write=4.0)) == 14.0
    assert cadence.next_due(Moment(5.0)) is None
    assert Cadence(every=1, interval_s=None).next_due(Moment(5.0, last_write=4.0)) is None


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
        self.tagged: frozenset[str] = frozenset()
        self.branches: dict[str, str] = {}
        self.writing: str | None = None
        self.has_failed: set[str] = set()
        self.is_safe: set[str] = set()
        self.giving_way: str | None = None

    @initialize(cadences=st.lists(st.builds(Cadence, st.none() | st.integers(1, 3), st.none() | st.floats(0, 5)), min_size=1, max_size=3))
    def open_lines(self, cadences: list[Cadence]) -> None:
        self.lines = {f"line{i}": cadence for i, cadence in enumerate(cadences)}
        for line, cadence in self.lines.items():
            self.act(LineOpened(line, cadence, line))

    def act(self, event: Event, *, may_drop: bool = False) -> None:
        """Carry out what the engine decides, as the runner does, and check that it may be done."""
        self.carry_out(self.engine.handle(event), may_drop=may_drop)

    def carry_out(self, actions: list[Action], *, may_drop: bool = False) -> None:
        given_up: set[str] = set()
        for action in actions:
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
                case GiveWay(uids, _):
                    assert self.engine.is_in_trouble
                    beside = {at for name, at in self.branches.items() if name != self.giving_way}
                    for uid in uids:
                        assert uid in self.memory
                        assert uid != self.writing
                        assert uid not in beside
                        assert self.giving_way == self.memory[uid] or uid not in self.heads.values()
                        self.engine.forget(uid)
                        self.owed.discard(uid)
                        del self.memory[uid]
                        self.has_failed.discard(uid)
                case Refuse(uids):
                    assert set(uids) | {self.writing} >= set(self.memory) - self.durable
                    assert self.has_failed.issuperset(uids) or self.engine.is_in_trouble
                case Evict(uids, _):
                    for uid in uids:
                        self.check_may_leave(uid)
                        self.engine.forget(uid)
                        del self.memory[uid]

    def check_may_leave(self, uid: str) -> None:
        assert uid in self.memory
        assert uid != self.writing
        if uid not in self.durable:
            line = self.memory[uid]
            assert uid not in self.owed, "a wanted state left before it was durable"
            if self.giving_way == line and self.heads.get(line) == uid:
                assert line in self.is_safe, "the only state of a line left before it was durable"
                assert uid not in {*self.tagged, *(at for name, at in self.branches.items() if name != line)}
                return
            assert uid not in self.heads.values(), "a head left before it was durable"
            assert uid not in {*self.tagged, *self.branches.values()}, "a named state left before it was durable"

    @rule(data=st.data(), seconds=st.floats(0, 3))
    def record(self, data: st.DataObject, seconds: float) -> None:
        if not self.lines:
            return
        line = data.draw(st.sampled_from(sorted(self.lines)))
        uid = f"s{self.serial}"
        self.serial, self.now = self.serial + 1, self.now + seconds
        self.memory[uid] = line
        self.heads[line] = uid
        if line in self.branches:
            self.branches[line] = uid
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
        uid = st.sampled_from(sorted(self.memory))
        self.tagged = data.draw(st.frozensets(uid, max_size=3))
        self.branches = data.draw(st.dictionaries(st.sampled_from(["line0", "line1", "line2", "other"]), uid))
        self.owed |= self.tagged - self.durable
        self.act(RefsChanged(self.tagged, self.branches))

    @precondition(lambda self: self.writing)
    @rule(is_well=st.booleans())
    def finish_write(self, is_well: bool) -> None:
        uid, self.writing = self.writing, None
        assert uid is not None
        self.owed.discard(uid)
        line = self.memory[uid]
        if is_well:
            self.durable.add(uid)
            self.has_failed.clear()
            self.is_safe.add(line)
        else:
            self.has_failed.add(uid)
            self.is_safe.discard(line)
        self.act(Written(uid) if is_well else WriteFailed(uid, self.now))

    @precondition(lambda self: self.writing)
    @rule()
    def fail_in_passing(self) -> None:
        uid, self.writing = self.writing, None
        assert uid is not None
        self.owed.add(uid)
        self.has_failed.add(uid)
        self.is_safe.discard(self.memory[uid])
        self.act(WriteFailed(uid, self.now, is_passing=True))
        assert self.writing is None

    @rule(is_stalled=st.booleans())
    def stall(self, is_stalled: bool) -> None:
        self.act(Stalled(is_stalled))

    @rule()
    def retry(self) -> None:
        self.act(Retry())
        assert not self.owed or self.writing is not None

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def wait_for_room_and_go_on_whatever_comes(self, data: st.DataObject) -> None:
        """A patient capture never waits for a disk that is in trouble: what may go goes, or it is refused."""
        self.giving_way = data.draw(st.sampled_from(sorted(self.lines)))
        for _ in range(3):
            if not self.memory or not self.engine.is_in_trouble:
                break
            event = RoomNeeded(1 << 20, True, WAIT, self.giving_way, 0, self.now, self.now, is_patient=True)
            if self.writing is None:
                assert self.engine.handle(Stalled(False)) == []
            actions = self.engine.handle(event)
            assert actions or self.writing is not None
            if any(isinstance(action, Refuse) for action in actions):
                break
            self.carry_out(actions)
        self.giving_way = None

    @rule(seconds=st.floats(0, 10))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.act(Tick(self.now))

    @rule(slots=st.integers(1, 4))
    def make_room_ahead(self, slots: int) -> None:
        self.act(RoomNeeded(slots, is_blocked=False, back_pressure=WAIT))

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), in_flight=st.integers(0, 1))
    def wait_for_room_for_a_line(self, data: st.DataObject, in_flight: int) -> None:
        self.giving_way = data.draw(st.sampled_from(sorted(self.lines)))
        self.act(RoomNeeded(1, True, WAIT, self.giving_way, in_flight, self.now, self.now))
        self.giving_way = None

    @precondition(lambda self: self.memory)
    @rule(line=st.sampled_from([None, "line0"]))
    def wait_while_nothing_can_be_written(self, line: str | None) -> None:
        """Whoever waits is refused, or gets the whole arena because nothing was left that is to be kept."""
        since, self.giving_way = self.now, line
        for _ in range(3 * len(self.memory) + 3):
            refused = self.engine.handle(RoomNeeded(1 << 20, True, WAIT, line, 0, since, self.now))
            if refused and isinstance(refused[0], Refuse):
                assert set(refused[0].uids) | {self.writing} >= set(self.memory) - self.durable
                break
            self.carry_out(refused)
            if self.writing is not None:
                self.finish_write(is_well=False)
            if not self.memory:
                break
        else:
            raise AssertionError("waiting for room did not end")
        self.giving_way = None

    @rule(back_pressure=st.sampled_from(list(BackPressure)))
    def wait_for_all_room(self, back_pressure: BackPressure) -> None:
        """A capture that needs the whole arena gets it: writes end, and then everything can leave."""
        for _ in range(3 * len(self.memory) + 3):
            if not self.memory:
                return
            self.now += LAST_RETRY_S + 1
            self.act(Tick(self.now))
            self.act(Stalled(False))
            self.act(room(1 << 20, back_pressure, since=self.now), may_drop=back_pressure is DROP)
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
        self.is_safe.discard(line)

    @invariant()
    def what_is_owed_is_on_its_way(self) -> None:
        assert self.engine.pending_writes >= len(self.owed - {self.writing}) + (self.writing is not None)
        assert not self.owed or self.writing is not None or self.engine.is_in_trouble, "something is wanted and nothing is being written"

    def teardown(self) -> None:
        self.heads.clear()
        self.owed |= {uid for uid in self.branches.values() if uid in self.memory} - self.durable
        self.act(Closing(None))
        self.act(Retry())
        while self.writing is not None:
            self.finish_write(is_well=True)
        assert self.owed == set()
        assert self.engine.pending_writes == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


# --- what a policy keeps near --------------------------------------------------------------------------------------------------


class EveryThirdFurther(Cadence):
    """Writes each capture, and lets every third of them go on."""

    __slots__ = ()

    def is_due(self, moment: Moment, /) -> bool:
        return True

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        return current or CadenceChoice("mine", "for a test", every=1, further_every=3, costs=costs)


def near(made: Engine, uids: list[str]) -> list[str]:
    """Record and write states a second apart; those that are kept near."""
    kept = []
    for at, uid in enumerate(uids, int(uids[0][1:])):
        made.handle(Recorded(uid, "main", float(at), Taken(float(at))))
        if made.keeps_near(uid):
            kept.append(uid)
        made.handle(Written(uid, at + 0.1, at + 0.2))
    return kept


def test_of_what_a_policy_picks_every_nth_state_goes_on_and_whatever_somebody_wants() -> None:
    made = engine(EveryThirdFurther(1, None))
    near(made, [f"s{i}" for i in range(40)])  # until it knows the costs
    kept = near(made, [f"s{i}" for i in range(40, 49)])
    assert kept == [f"s{i}" for i in range(40, 49) if i % 3]
    assert made.handle(Wanted("s40")) == [PassOn(("s40",))]
    assert made.handle(Wanted("s40")) == [], "once"
    assert made.handle(refs("s41", main="s48")) == [PassOn(("s41",))]
    made.forget("s43")
    assert made.handle(Wanted("s43")) == [PassOn(("s43",))], "it is on disk, though memory let it go"


def test_a_head_that_was_kept_near_goes_on_when_its_line_closes() -> None:
    made = engine(EveryThirdFurther(1, None))
    near(made, [f"s{i}" for i in range(41)])
    assert made.handle(Closing("main")) == [PassOn(("s40",))]


def test_what_somebody_wants_before_it_is_written_is_not_kept_near() -> None:
    made = engine(EveryThirdFurther(1, None))
    near(made, [f"s{i}" for i in range(40)])
    made.handle(Recorded("s40", "main", 40.0, Taken(40.0)))
    made.handle(Wanted("s40"))
    made.handle(Tick(99.0))
    assert not made.keeps_near("s40")
