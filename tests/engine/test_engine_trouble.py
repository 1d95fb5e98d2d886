"""What the engine decides while nothing can be written: what is tried when, and what gives way
in memory."""

from __future__ import annotations

import pytest

from datastates.engine.scheduler import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    Closing,
    GiveWay,
    LineOpened,
    Recorded,
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
from datastates.policy.contract import Cadence
from tests.support.engines import NEVER, SKIP, after, engine, refs, room


def fails(uid: str, now: float) -> WriteFailed:
    return WriteFailed((uid,), now, is_passing=True)


def test_what_failed_in_passing_stays_wanted_and_is_tried_again_later_and_later() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a")
    now, waited = 10.0, []
    for _ in range(8):
        assert after(made, fails("a", now)) == []
        assert made.is_in_trouble
        due = made.next_tick()
        assert due is not None
        assert after(made, Tick(due - 0.01)) == []
        assert after(made, Tick(due)) == [Write(("a",))]
        waited.append(due - now)
        now = due
    assert waited[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert waited[-1] == LAST_RETRY_S
    assert after(made, Written(("a",))) == []
    assert not made.is_in_trouble
    assert made.next_tick() is None
    assert after(made, Recorded("b", "main", now), fails("b", now), Tick(now + FIRST_RETRY_S)) == [
        Write(("b",)),
        Write(("b",)),
    ]


def test_nothing_else_is_tried_until_then_unless_somebody_waits() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    assert (
        after(
            made,
            fails("a", 1.0),
            Wanted("b"),
            Recorded("c", "main", 1.1),
            refs("b"),
            Closing("main"),
        )
        == []
    )
    assert after(made, Retry()) == [Write(("c",))]


def test_heads_then_tags_then_what_is_waited_for_come_first_when_writing_works_again() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c", "d", "e")
    made.handle(LineOpened("other", NEVER, "other"))
    after(made, fails("a", 5.0), Wanted("d"), refs("c", other="b"))
    assert after(made, Tick(9.0)) == [Write(("b",))]
    assert after(made, Written(("b",)), Written(("e",)), Written(("c",)), Written(("d",))) == [
        Write(("e",)),
        Write(("c",)),
        Write(("d",)),
        Write(("a",)),
    ]
    assert after(made, Written(("a",)), Recorded("f", "main", 9.0), Recorded("g", "main", 9.0)) == [
        Write(("f",))
    ]
    assert after(made, Recorded("h", "main", 9.0), Written(("f",)), Written(("g",))) == [
        Write(("g",)),
        Write(("h",)),
    ], "in order, as ever"


def test_a_state_that_cannot_be_written_does_not_keep_the_others_from_it() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c")
    after(made, fails("a", 5.0))
    assert after(made, Retry()) == [Write(("c",))], "the head"
    assert after(made, fails("c", 6.0), Retry()) == [Write(("b",))]
    assert after(made, fails("b", 7.0), Retry()) == [Write(("c",))], "each had its turn"
    assert after(made, fails("c", 8.0), Retry(), fails("b", 9.0), Retry()) == [
        Write(("b",)),
        Write(("a",)),
    ]
    assert after(made, Written(("a",)), fails("c", 9.0), Retry()) == [Write(("c",)), Write(("b",))]


def test_heads_of_lines_that_were_closed_come_first_too() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    made.handle(LineOpened("other", NEVER, "other"))
    after(made, Recorded("o", "other", 1.0), fails("a", 2.0), Closing("other"))
    assert after(made, Retry(), Written(("b",))) == [Write(("b",)), Write(("o",))]


def test_memory_that_is_full_lets_older_states_give_way_in_the_order_of_what_they_are_worth() -> (
    None
):
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c", "d", "e")
    made.handle(LineOpened("other", NEVER, "other"))
    after(
        made,
        Recorded("o", "other", 5.0),
        fails("a", 5.0),
        Wanted("b"),
        refs("c", main="e", other="o"),
    )
    assert after(made, room(2, line="main", is_patient=True)) == [
        GiveWay(("a", "d", "b", "e", "c"), (2,))
    ]
    assert after(made, room(2, line="other", is_patient=True)) == [
        GiveWay(("a", "d", "b", "o", "c"), (2,))
    ]


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
    assert after(made, Tick(9.0), Written(("b",))) == [Write(("b",))]
    assert made.pending_writes == 0


def test_nothing_gives_way_while_the_disk_is_tried() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    after(made, fails("a", 5.0), Tick(9.0))
    assert after(made, room(2, line="main", is_patient=True)) == []
    assert after(made, fails("b", 9.0), room(2, line="main", is_patient=True)) == [
        GiveWay(("a", "b"), (2,))
    ]


def test_what_failed_for_good_after_it_failed_in_passing_is_tried_again_when_room_is_needed() -> (
    None
):
    made = engine(NEVER, "a")
    assert after(made, Wanted("a")) == [Write(("a",))]
    assert after(made, fails("a", 0.0), Retry()) == [Write(("a",))]
    assert after(made, WriteFailed(("a",), 0.0)) == []
    assert after(made, room(2, since=0.0)) == [Refuse(("a",))]
    late = LAST_RETRY_S + 1
    assert after(made, Tick(late), room(2, since=late, now=late)) == [Write(("a",))]
    assert after(made, Written(("a",))) == []
    assert not made.is_in_trouble


def test_a_stalled_write_keeps_its_state_and_lets_others_give_way() -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b", "c")
    assert after(made, room(2, line="main", is_patient=True)) == []
    made.handle(Stalled(True))
    assert made.is_in_trouble
    assert after(made, room(2, line="main", is_patient=True)) == [GiveWay(("b", "c"), (2,))]
    assert after(made, Stalled(False), room(2, line="main", is_patient=True)) == []
    after(made, Stalled(True))
    assert after(made, Written(("a",))) == [Write(("b",))]
    assert not made.is_in_trouble


@pytest.mark.parametrize(
    "event", [room(2, line="main"), room(2, SKIP, line="main", is_patient=True)]
)
def test_nothing_gives_way_for_those_who_would_rather_be_refused_or_skip(event: RoomNeeded) -> None:
    made = engine(Cadence(every=1, interval_s=None), "a", "b")
    after(made, fails("a", 5.0))
    assert not [action for action in after(made, event) if isinstance(action, GiveWay)]
