"""The engine's decisions, event by event: no thread, no clock, no disk."""

from __future__ import annotations

import pytest

from datastates.config import BackPressure
from datastates.engine.scheduler import (
    AT_A_TIME,
    RETRY_S,
    Adopted,
    Closing,
    Engine,
    Event,
    Evict,
    GiveUp,
    LineOpened,
    Recorded,
    Refuse,
    Tick,
    Wanted,
    Write,
    WriteFailed,
    Written,
)
from datastates.errors import InvalidInput
from datastates.policy.contract import Cadence, Moment
from tests.support.engines import DROP, NEVER, SKIP, WAIT, after, engine, refs, room

# --- what is wanted -------------------------------------------------------------------------------


def test_nothing_is_written_that_nobody_wants() -> None:
    made = engine()
    assert after(made, *(Recorded(f"s{i}", "main", float(i)) for i in range(5)), Tick(100.0)) == []
    assert made.next_tick() is None
    assert made.pending_writes == 0


def test_every_second_capture_is_written_one_at_a_time_in_order() -> None:
    made = engine(Cadence(every=2, interval_s=None))
    assert after(made, *(Recorded(f"s{i}", "main", float(i)) for i in range(7))) == [Write(("s1",))]
    assert made.pending_writes == 3
    assert after(made, Written(("s1",)), Written(("s3",)), Written(("s5",))) == [
        Write(("s3",)),
        Write(("s5",)),
    ]
    assert made.pending_writes == 0


def test_by_time_the_first_is_written_and_then_the_newest_once_an_interval() -> None:
    made = engine(Cadence(interval_s=10.0))
    assert made.next_tick() is None
    assert after(made, Recorded("a", "main", 5.0)) == [Write(("a",))]
    assert (
        after(made, Written(("a",)), Recorded("b", "main", 6.0), Recorded("c", "main", 7.0)) == []
    )
    assert made.next_tick() == 15.0
    assert after(made, Tick(14.9)) == []
    assert after(made, Tick(15.0)) == [Write(("c",))]
    assert after(made, Written(("c",)), Tick(99.0)) == []
    assert made.next_tick() is None


def test_that_time_goes_by_counts_no_capture() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a")
    assert after(made, WriteFailed(("a",), 1.0), Tick(99.0)) == [], (
        "it was due once, when it was captured"
    )


def test_each_line_has_a_cadence_of_its_own() -> None:
    made = engine(Cadence(every=1, interval_s=None))
    made.handle(LineOpened("other", NEVER))
    assert after(made, Recorded("o", "other", 0.0), Recorded("m", "main", 0.0)) == [Write(("m",))]


def test_a_tag_makes_a_state_wanted_and_a_branch_does_not() -> None:
    made = engine(NEVER, "a", "b", "c")
    assert after(made, refs("a", old="b")) == [Write(("a",))]


def test_a_state_that_is_waited_for_before_it_is_recorded_is_written_once_it_is() -> None:
    made = engine()
    assert after(made, Wanted("a")) == []
    assert after(made, Recorded("a", "main", 0.0)) == [Write(("a",))]
    assert after(made, Wanted("a"), Written(("a",)), Wanted("a")) == []


def test_a_failed_write_is_wanted_no_longer_and_the_next_goes_on() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    assert after(made, WriteFailed(("a",), 2.0)) == [Write(("b",))]
    assert after(made, Written(("b",))) == []
    assert after(made, Wanted("a")) == [Write(("a",))]


@pytest.mark.parametrize("line", ["main", None])
def test_closing_wants_the_heads_that_are_not_durable(line: str | None) -> None:
    made = engine(NEVER, "a", "b")
    assert after(made, Closing(line)) == [Write(("b",))]
    assert after(made, Written(("b",)), Closing(line)) == []


def test_closing_one_line_leaves_the_other_alone() -> None:
    made = engine(NEVER, "a")
    made.handle(LineOpened("other", NEVER))
    made.handle(Recorded("o", "other", 0.0))
    assert after(made, Closing("other")) == [Write(("o",))]
    assert after(made, Written(("o",)), room()) == [Evict(("o",), (1,))]


# --- what leaves ----------------------------------------------------------------------------------


def test_the_oldest_leave_first_and_never_a_head_nor_what_is_named_or_wanted() -> None:
    made = engine(NEVER, "a", "b", "c", "d", "e")
    after(made, refs(old="b"), Wanted("x"), Wanted("c"))
    assert after(made, room(3, is_blocked=False)) == [Evict(("a", "d"), (3,))]


def test_what_is_durable_may_leave_even_a_head() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a")
    assert after(made, room(is_blocked=False)) == []
    assert after(made, Written(("a",)), room(is_blocked=False)) == [Evict(("a",), (1,))]


def test_a_blocked_capture_gets_the_head_written_when_nothing_else_helps() -> None:
    made = engine(NEVER, "a")
    assert after(made, room(2)) == [Write(("a",))]
    assert after(made, room(2)) == []  # it is on its way
    assert after(made, Written(("a",)), room(2)) == [Evict(("a",), (2,))]


def test_named_states_are_written_for_room_too() -> None:
    made = engine(NEVER, "a", "b")
    after(made, refs(old="a"))
    assert after(made, room(2), Written(("a",)), room(2)) == [Write(("a",)), Evict(("a",), (2,))]


def test_drop_oldest_gives_up_the_oldest_waiting_write_and_nothing_that_is_named() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c", "d")  # a is being written
    after(made, refs(old="b"))
    assert after(made, room(1, DROP)) == [GiveUp(("c",)), Evict(("c",), (1,))]
    made.forget("c")
    assert after(made, room(1, DROP)) == []
    assert after(made, Written(("a",))) == [Write(("b",))]


@pytest.mark.parametrize("back_pressure", [WAIT, SKIP])
def test_only_drop_oldest_gives_up_a_write(back_pressure: BackPressure) -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c")
    assert after(made, room(1, back_pressure)) == []


def test_room_is_made_ahead_without_giving_anything_up() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c")
    assert after(made, room(1, DROP, is_blocked=False)) == []


def test_a_few_states_are_named_for_room_at_a_time_the_oldest_first() -> None:
    made = engine(NEVER, *(f"s{number}" for number in range(100)))
    for first in (0, AT_A_TIME):
        named = tuple(f"s{number}" for number in range(first, first + AT_A_TIME))
        assert (
            after(made, room(is_blocked=False))
            == after(made, room(is_blocked=False))
            == [Evict(named, (1,))]
        )
        for uid in named:
            made.forget(uid)


@pytest.mark.parametrize("latest", [None, 20])
def test_the_work_for_a_capture_does_not_grow_with_the_states_held(
    latest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, rank = [0], Engine._rank

    def counted(made: Engine, uid: str) -> tuple[bool, int, str] | None:
        calls[0] += 1
        return rank(made, uid)

    monkeypatch.setattr(Engine, "_rank", counted)
    work = []
    for states in (100, 5000):
        made = Engine(latest)
        made.handle(LineOpened("main", Cadence(every=2, interval_s=None), "main"))
        made.handle(refs(*(f"s{number}" for number in range(0, states, 10))))
        for number in range(states):
            made.handle(Recorded(f"s{number}", "main", 0.0))
        calls[0] = 0
        for number in range(states, states + 20):
            made.handle(Recorded(f"s{number}", "main", 0.0))
            for action in made.handle(room(is_blocked=False)):
                if isinstance(action, Evict):
                    made.forget(action.uids[0])
        work.append(calls[0])
    assert work[1] <= work[0] + 20 * AT_A_TIME


def test_states_that_are_free_again_keep_their_age() -> None:
    # b is being written, d is wanted
    made = engine(Cadence(every=2, interval_s=None), "a", "b", "c", "d")
    assert after(made, refs("a"), room(is_blocked=False)) == [Evict(("c",), (1,))]
    assert after(made, refs(), Written(("b",)), room(is_blocked=False)) == [
        Write(("d",)),
        Evict(("b", "c"), (1,)),
    ], "a is wanted"
    after(made, Written(("d",)), Written(("a",)))
    assert after(made, room(is_blocked=False)) == [Evict(("a", "b", "c", "d"), (1,))]


# --- memory for less than two states --------------------------------------------------------------


def test_nothing_is_written_for_room_while_a_capture_is_in_flight() -> None:
    made = engine(NEVER, "a")
    assert after(made, refs(main="a"), room(2, in_flight=1)) == []
    assert after(made, Recorded("b", "main", 1.0), room(2, in_flight=1)) == [Evict(("a",), (2,))]


def test_what_a_branch_named_may_leave_once_the_branch_went_on() -> None:
    made = engine(NEVER, "a")
    after(made, refs(main="a", other="a"), Recorded("b", "main", 1.0))
    assert after(made, room(is_blocked=False)) == []
    assert after(made, refs(main="a"), Recorded("c", "main", 2.0), room(is_blocked=False)) == [
        Evict(("a", "b"), (1,))
    ]


def test_the_head_gives_way_to_its_follower_between_two_writes_of_its_cadence() -> None:
    made = engine(Cadence(interval_s=10.0))
    assert after(made, Recorded("a", "main", 0.0), Written(("a",)), room(2, line="main")) == [
        Write(("a",)),
        Evict(("a",), (2,)),
    ]
    made.forget("a")
    for uid, now in (("b", 1.0), ("c", 2.0)):
        after(made, Recorded(uid, "main", now), refs(main=uid))
        assert after(made, room(2, line="main", since=now)) == [Evict((uid,), (2,))]
        made.forget(uid)
    # the tick did not come first
    assert after(made, Recorded("d", "main", 9.0), room(2, line="main", since=11.0)) == [
        Write(("d",))
    ]
    assert after(made, Written(("d",)), Recorded("e", "main", 12.0), Tick(20.9)) == []


def test_the_head_of_another_line_does_not_give_way() -> None:
    made = engine(Cadence(interval_s=10.0))
    made.handle(LineOpened("other", Cadence(interval_s=10.0), "other"))
    after(
        made,
        Recorded("a", "main", 0.0),
        Written(("a",)),
        Recorded("o", "other", 0.0),
        Written(("o",)),
    )
    after(made, Recorded("b", "main", 1.0), Recorded("p", "other", 1.0), room(9))
    for uid in ("a", "o"):
        made.forget(uid)
    assert after(made, room(2, line="other", since=1.0)) == [Evict(("p",), (2,))]


@pytest.mark.parametrize("event", [refs("b", main="b"), refs(main="b", other="b"), Wanted("b")])
def test_a_head_that_somebody_counts_on_does_not_give_way(event: Event) -> None:
    made = engine(Cadence(interval_s=10.0))
    after(made, Recorded("a", "main", 0.0), Written(("a",)), room(2), Recorded("b", "main", 1.0))
    made.forget("a")
    assert after(made, event, room(2, line="main", since=1.0)) == [Write(("b",))]


def test_a_clone_is_written_before_a_head_gives_way() -> None:
    made = engine(Cadence(interval_s=10.0))
    after(
        made,
        Recorded("a", "main", 0.0),
        Written(("a",)),
        Adopted("clone"),
        Recorded("b", "main", 1.0),
    )
    made.forget("a")
    assert after(made, room(2, line="main", since=1.0)) == [Write(("clone",))]
    assert after(made, WriteFailed(("clone",), 2.0), room(2, line="main", since=1.0)) == [
        Evict(("b",), (2,))
    ]


def test_a_head_does_not_give_way_when_its_line_could_not_be_written() -> None:
    made = engine(Cadence(interval_s=10.0))
    after(made, Recorded("a", "main", 0.0), WriteFailed(("a",), 1.0))
    assert after(made, room(2, line="main", since=1.0 + RETRY_S + 0.1)) == [Write(("a",))]


# --- what cannot be written -----------------------------------------------------------------------


def test_whoever_waits_is_refused_when_nothing_that_is_held_can_be_written() -> None:
    made = engine(NEVER, "a", "b")
    after(made, refs("a", main="b"), WriteFailed(("a",), 3.0))
    assert after(made, room(2, since=2.0, now=4.0)) == [Write(("b",))]
    assert after(made, WriteFailed(("b",), 5.0), room(2, since=2.0, now=6.0)) == [
        Refuse(("a", "b"))
    ]


def test_waiting_ends_although_tags_want_what_fails_again_and_again() -> None:
    made = engine(NEVER, "a", "b")
    after(made, refs("a"), refs("a", "b"), WriteFailed(("a",), 1.0), WriteFailed(("b",), 2.0))
    (again,) = after(made, refs("a", "b"))
    assert isinstance(again, Write)
    assert after(made, room(2, since=0.5, now=3.0)) == [Refuse(("a", "b"))]


def test_what_failed_is_tried_again_by_those_who_come_later() -> None:
    made = engine(NEVER, "a")
    after(made, room(2), WriteFailed(("a",), 1.0))
    assert after(made, room(2, since=1.0 + RETRY_S)) == [Refuse(("a",))]
    assert after(made, room(2, since=1.1 + RETRY_S)) == [Write(("a",))]
    assert after(made, Written(("a",)), room(2, since=9.0)) == [Evict(("a",), (2,))]


def test_one_write_that_goes_well_gives_hope_for_the_others() -> None:
    made = engine(NEVER, "a", "b")
    after(made, refs("a", main="b"), WriteFailed(("a",), 1.0), Wanted("b"), Written(("b",)))
    assert after(made, room(2, since=0.5)) == [Evict(("b",), (2,))]
    made.forget("b")
    assert after(made, room(2, since=0.5)) == [Write(("a",))]


# --- clones ---------------------------------------------------------------------------------------


def test_a_clone_stays_in_memory_until_it_is_durable_and_is_written_for_room() -> None:
    made = engine(NEVER, "a", "b")
    assert after(made, Adopted("clone"), room(1, is_blocked=False)) == [Evict(("a",), (1,))]
    made.forget("a")
    assert after(made, Wanted("b"), Written(("b",)), room(2)) == [
        Write(("b",)),
        Evict(("b",), (2,)),
    ]
    made.forget("b")
    assert after(made, room(3), Written(("clone",)), room(3)) == [
        Write(("clone",)),
        Evict(("clone",), (3,)),
    ]
    made.forget("clone")
    assert not made._adopted


def test_a_clone_is_written_at_closing_only_when_a_ref_names_it() -> None:
    made = engine()
    assert after(made, Adopted("a"), Adopted("b"), refs(old="b"), Closing("main")) == []
    assert after(made, Closing(None)) == [Write(("b",))]


def test_a_clone_that_is_waited_for_before_it_is_adopted_is_written_once_it_is() -> None:
    made = engine()
    assert after(made, Wanted("a"), Adopted("a")) == [Write(("a",))]


def test_a_state_that_a_line_captured_is_no_clone() -> None:
    made = engine(NEVER, "a", "b")
    assert after(made, Adopted("a"), room(1, is_blocked=False)) == [Evict(("a",), (1,))]


# --- cadence --------------------------------------------------------------------------------------


def test_a_cadence_refuses_what_makes_no_sense() -> None:
    with pytest.raises(InvalidInput, match="durable_every, which counts captures, is 0"):
        Cadence(every=0)
    for interval_s in (-1.0, float("nan")):
        with pytest.raises(InvalidInput, match="durable_interval_s is"):
            Cadence(interval_s=interval_s)


def test_a_cadence_is_due_by_count_or_by_time() -> None:
    cadence = Cadence(every=3, interval_s=10.0)
    assert [index for index in range(7) if cadence.is_due(Moment(0.0, index, last_write=0.0))] == [
        2,
        5,
    ]
    assert cadence.is_due(Moment(10.0, 1, last_write=0.0))
    assert not cadence.is_due(Moment(99.0, 1, last_write=0.0, is_newest=False))
    assert not cadence.is_due(Moment(1.0, None, last_write=0.0)), (
        "no capture came, so none is counted"
    )
    assert cadence.is_due(Moment(10.0, None, last_write=0.0))
    assert cadence.next_due(Moment(5.0, last_write=4.0)) == 14.0
    assert cadence.next_due(Moment(5.0)) is None
    assert Cadence(every=1, interval_s=None).next_due(Moment(5.0, last_write=4.0)) is None
