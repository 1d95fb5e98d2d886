"""Which chunk is asked of which feed: every rule by itself, then any order of events against
what must always hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datastates.transport.fetch_schedule import (
    GRACE_S,
    Absent,
    Accepted,
    Action,
    Done,
    Drop,
    Event,
    GiveUp,
    Joined,
    Lost,
    NoRoom,
    Received,
    Refuse,
    Refuted,
    Returned,
    Schedule,
    Start,
    Stuck,
    Tick,
)
from tests.support.effort import examples


def make(chunks: int, *, window: int = 2, expected: int = 1, timeout_s: float = 10.0) -> Schedule:
    return Schedule(range(chunks), window=window, expected=expected, timeout_s=timeout_s, now=0.0)


def starts(actions: list[Action]) -> list[tuple[int, int]]:
    assert all(isinstance(action, Start) for action in actions), actions
    return [(action.feed, action.unit) for action in actions if isinstance(action, Start)]


def test_nothing_missing_is_done_at_once() -> None:
    assert make(0, expected=0).handle(Joined((), 0.0)) == [Done()]


def test_feeds_that_begin_together_take_turns() -> None:
    assert starts(make(4, window=8, expected=2).handle(Joined((0, 1), 0.0))) == [
        (0, 0),
        (1, 1),
        (0, 2),
        (1, 3),
    ]


def test_a_chunk_that_is_here_makes_place_for_the_next() -> None:
    schedule = make(4)
    assert starts(schedule.handle(Joined((0,), 0.0))) == [(0, 0), (0, 1)]
    assert starts(schedule.handle(Received(0, 0, 1.0))) == [(0, 2)]
    assert schedule.handle(Accepted(0, 1.0)) == []


def test_it_is_done_only_when_the_last_chunk_was_accepted() -> None:
    schedule = make(2)
    schedule.handle(Joined((0,), 0.0))
    for index in range(2):
        assert schedule.handle(Received(0, index, 1.0)) == []
    assert schedule.handle(Accepted(1, 1.0)) == []
    assert schedule.handle(Accepted(0, 1.0)) == [Done()]
    assert schedule.handle(Tick(2.0)) == []


def test_who_is_here_leaves_their_share_to_those_who_come_but_not_forever() -> None:
    schedule = make(9, window=2, expected=3)
    assert starts(schedule.handle(Joined((0,), 0.0))) == [(0, 0), (0, 1)]
    assert starts(schedule.handle(Received(0, 0, 0.01))) == [(0, 2)]
    assert schedule.handle(Received(0, 1, 0.02)) == []  # a third of nine
    assert starts(schedule.handle(Joined((1,), 0.03))) == [(1, 3), (1, 4)]
    assert starts(schedule.handle(Tick(GRACE_S + 0.01))) == [(0, 5)]


def test_shares_are_free_once_nobody_is_expected() -> None:
    schedule = make(9, window=1, expected=3)
    schedule.handle(Joined((0,), 0.0))
    for index in range(2):
        assert starts(schedule.handle(Received(0, index, 0.001))) == [(0, index + 1)]
        schedule.handle(Accepted(index, 0.001))
    assert schedule.handle(Received(0, 2, 0.002)) == []
    schedule.handle(Accepted(2, 0.002))
    assert schedule.handle(Absent(1, 0.003)) == [Start(0, 3)]  # half of nine now
    assert schedule.handle(Joined((2,), 0.004)) == [Start(2, 4)]


def test_a_slow_feed_takes_no_chunk_that_the_fast_one_would_deliver_sooner() -> None:
    schedule = make(6, window=2, expected=2)
    schedule.handle(Joined((0, 1), 0.0))
    schedule.handle(Received(1, 1, 0.01))
    schedule.handle(Accepted(1, 0.01))
    schedule.handle(Received(1, 3, 0.02))
    schedule.handle(Accepted(3, 0.02))
    assert schedule.handle(Received(0, 0, 1.0)) == []  # all six were begun
    schedule = make(5, window=2, expected=2)
    schedule.handle(Joined((0, 1), 0.0))
    assert starts(schedule.handle(Received(1, 1, 0.01))) == [(1, 4)]
    schedule.handle(Lost(1, 4, 0.9))  # its chunks are for anybody
    assert starts(schedule.handle(Returned(1, 3, 0.9))) == []
    assert starts(schedule.handle(Received(0, 0, 1.0))) == [(0, 3)]


def test_chunks_of_a_lost_feed_are_done_by_the_others_once_their_buffers_are_free() -> None:
    schedule = make(4, expected=2)
    schedule.handle(Joined((0, 1), 0.0))
    schedule.handle(Received(0, 0, 0.1))
    assert schedule.handle(Lost(1, 1, 0.1)) == [Drop(1), Start(0, 1)]
    schedule.handle(Received(0, 2, 0.2))
    assert starts(schedule.handle(Returned(1, 3, 0.3))) == [(0, 3)]


def test_several_chunks_that_break_with_a_feed_lose_it_once() -> None:
    schedule = make(2, expected=2)
    schedule.handle(Joined((0,), 0.0))
    assert schedule.handle(Absent(1, 0.0)) == []
    assert schedule.handle(Lost(0, 0, 0.1)) == [Drop(0)]
    assert schedule.handle(Lost(0, 1, 0.1)) == [GiveUp(0)]


def test_a_feed_that_is_lost_with_its_last_chunk_being_checked_decides_nothing_yet() -> None:
    schedule = make(2)
    schedule.handle(Joined((0,), 0.0))
    schedule.handle(Received(0, 0, 0.1))
    assert schedule.handle(Lost(0, 1, 0.1)) == []
    assert schedule.handle(Accepted(0, 0.2)) == [GiveUp(0)]


def test_a_lost_feed_does_not_end_the_clone_while_another_is_expected() -> None:
    schedule = make(1, expected=2)
    schedule.handle(Joined((0,), 0.0))
    assert schedule.handle(Lost(0, 0, 0.1)) == []
    assert schedule.handle(Tick(9.0)) == []
    assert starts(schedule.handle(Joined((1,), 9.0))) == [(1, 0)]


def test_a_wrong_chunk_goes_to_another_feed_even_if_that_one_is_busy() -> None:
    schedule = make(4, expected=2)
    schedule.handle(Joined((0, 1), 0.0))
    schedule.handle(Received(0, 0, 0.1))
    assert schedule.handle(Refuted(0, 0.1)) == []
    schedule.handle(Received(0, 2, 0.2))
    assert schedule.handle(Accepted(2, 0.2)) == []
    assert starts(schedule.handle(Received(1, 1, 0.3))) == [(1, 0)]
    schedule.handle(Received(1, 0, 0.4))
    assert schedule.handle(Refuted(0, 0.4)) == [Refuse(0, (0, 1))]


def test_a_wrong_chunk_goes_to_the_same_feed_once_it_is_the_only_one() -> None:
    schedule = make(2, window=1, expected=2)
    schedule.handle(Joined((0, 1), 0.0))
    schedule.handle(Received(0, 0, 0.1))
    assert schedule.handle(Refuted(0, 0.1)) == []
    assert starts(schedule.handle(Lost(1, 1, 0.2))) == [(0, 0)]


def test_what_had_no_room_comes_first_when_there_is_some() -> None:
    schedule = make(4, window=3)
    begun = schedule.handle(Joined((0,), 0.0))
    assert schedule.handle(NoRoom((Start(0, 1), Start(0, 2)), 0.0)) == []
    assert starts(begun) == [(0, 0), (0, 1), (0, 2)]
    assert schedule.handle(Received(0, 0, 0.1)) == []
    assert starts(schedule.handle(Accepted(0, 0.1))) == [(0, 1), (0, 2), (0, 3)]


def test_a_chunk_that_is_given_back_makes_room_too() -> None:
    schedule = make(4, window=1, expected=2)
    schedule.handle(Joined((0, 1), 0.0))
    assert schedule.handle(NoRoom((Start(1, 1),), 0.0)) == []
    assert starts(schedule.handle(Lost(0, 0, 0.1))) == [(1, 0)]


def test_what_had_no_room_is_not_counted_as_taken() -> None:
    schedule = make(4, window=2, expected=2)
    schedule.handle(Joined((0,), 0.0))
    assert schedule.handle(NoRoom((Start(0, 1),), 0.0)) == []
    schedule.handle(Received(0, 0, 0.1))
    assert starts(schedule.handle(Accepted(0, 0.1))) == [(0, 1)]  # its share is two: half of four


def test_no_room_with_nothing_under_way_is_tried_again_and_then_given_up() -> None:
    schedule = make(1, timeout_s=1.0)
    assert starts(schedule.handle(Joined((0,), 0.0))) == [(0, 0)]
    schedule.handle(NoRoom((Start(0, 0),), 0.0))
    for tenth in range(1, 10):
        assert starts(schedule.handle(Tick(tenth / 10))) == [(0, 0)]
        assert schedule.handle(NoRoom((Start(0, 0),), tenth / 10)) == []
    assert schedule.handle(Tick(1.5)) == [Stuck(1.5)]


def test_the_last_chunks_of_a_stalled_feed_are_robbed_and_given_to_an_idle_one() -> None:
    schedule = make(4, expected=2)
    schedule.handle(Joined((0, 1), 0.0))
    for index in (0, 2):
        schedule.handle(Received(0, index, 0.01))
        schedule.handle(Accepted(index, 0.01))
    assert schedule.handle(Tick(0.4)) == []
    assert schedule.handle(Tick(0.6)) == [Drop(1)]
    assert schedule.handle(Tick(0.7)) == []
    assert starts(schedule.handle(Returned(1, 3, 0.7))) == [(0, 3)]
    assert starts(schedule.handle(Returned(1, 1, 0.7))) == [(0, 1)]


def test_a_robbed_feed_is_asked_again_when_the_others_are_lost() -> None:
    schedule = make(2, window=1, expected=2)
    schedule.handle(Joined((0, 1), 0.0))
    schedule.handle(Received(0, 0, 0.01))
    schedule.handle(Accepted(0, 0.01))
    assert schedule.handle(Tick(0.6)) == [Drop(1)]
    assert starts(schedule.handle(Returned(1, 1, 0.6))) == [(0, 1)]
    assert starts(schedule.handle(Lost(0, 1, 0.7))) == [(1, 1)]
    assert schedule.handle(Lost(1, 1, 0.8)) == [GiveUp(1)]


class Clone(RuleBasedStateMachine):
    """Any order of events.

    What is under way is kept beside the schedule, and compared with what it asks for."""

    @initialize(
        chunks=st.integers(0, 12),
        window=st.integers(1, 4),
        feeds=st.integers(0, 3),
        late=st.integers(0, 2),
    )
    def begin(self, chunks: int, window: int, feeds: int, late: int) -> None:
        self.now, self.window, self.chunks = 0.0, window, chunks
        self.schedule = make(chunks, window=window, expected=feeds + late)
        self.waiting = list(range(feeds, feeds + late))
        self.here = set(range(feeds))
        self.flying: dict[int, set[int]] = {feed: set() for feed in range(feeds + late)}
        self.dropped: set[int] = set()
        self.lost: set[int] = set()
        self.checking: dict[int, int] = {}
        self.accepted: set[int] = set()
        self.wrong: dict[int, list[int]] = {}
        self.end: Action | None = None
        self.room: int | None = None
        self.send(Joined(tuple(range(feeds)), 0.0))

    def send(self, event: Event) -> None:
        refused: list[Start] = []
        for action in self.schedule.handle(event):
            assert self.end is None, "it had ended"
            match action:
                case Start(feed, index):
                    self.check(feed, index)
                    if refused or (
                        self.room is not None
                        and sum(map(len, self.flying.values())) + len(self.checking) >= self.room
                    ):
                        refused.append(action)
                    else:
                        self.flying[feed].add(index)
                case Drop(feed):
                    assert self.flying[feed]
                    assert feed not in self.dropped - self.lost
                    self.dropped.add(feed)
                case _:
                    self.end = action
        if refused:
            self.send(NoRoom(tuple(refused), self.now))

    def check(self, feed: int, index: int) -> None:
        """It may be started now."""
        assert feed in self.here - self.dropped - self.lost
        assert len(self.flying[feed]) < self.window
        assert index not in self.accepted | set(self.checking)
        assert not any(index in flying for flying in self.flying.values())
        if index in self.wrong and feed in self.wrong[index]:
            assert self.here - self.lost == {feed}
            assert not self.waiting

    def pass_time(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    def under_way(self) -> list[tuple[int, int]]:
        return sorted((feed, index) for feed, flying in self.flying.items() for index in flying)

    def ended(self, feed: int, index: int) -> None:
        self.flying[feed].discard(index)
        if not self.flying[feed] and feed not in self.lost:
            self.dropped.discard(feed)

    @precondition(lambda self: self.waiting)
    @rule(seconds=st.floats(0, 1), comes=st.booleans())
    def connect(self, seconds: float, comes: bool) -> None:
        feed = self.waiting.pop(0)
        if comes:
            self.here.add(feed)
            self.send(Joined((feed,), self.pass_time(seconds)))
        else:
            self.send(Absent(feed, self.pass_time(seconds)))

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), seconds=st.floats(0, 1))
    def receive(self, data: st.DataObject, seconds: float) -> None:
        feed, index = data.draw(st.sampled_from(self.under_way()))
        self.ended(feed, index)
        self.checking[index] = feed
        self.send(Received(feed, index, self.pass_time(seconds)))

    @precondition(lambda self: self.checking)
    @rule(data=st.data(), is_right=st.sampled_from([True, True, True, False]))
    def verify(self, data: st.DataObject, is_right: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.checking)))
        feed = self.checking.pop(index)
        if is_right:
            self.accepted.add(index)
            self.send(Accepted(index, self.now))
            return
        self.wrong.setdefault(index, []).append(feed)
        was_over = self.end is not None
        self.send(Refuted(index, self.now))
        if len(self.wrong[index]) == 2 and not was_over:
            assert self.end == Refuse(index, (self.wrong[index][0], self.wrong[index][1]))

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        feed, index = data.draw(st.sampled_from(self.under_way()))
        self.flying[feed].discard(index)
        if feed not in self.dropped:
            self.lost.add(feed)
            self.dropped.add(feed)
        elif not self.flying[feed] and feed not in self.lost:
            self.dropped.discard(feed)
        self.send(Lost(feed, index, self.now))

    @precondition(lambda self: any(self.flying[feed] for feed in self.dropped))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        feed, index = data.draw(
            st.sampled_from([pair for pair in self.under_way() if pair[0] in self.dropped])
        )
        self.ended(feed, index)
        self.send(Returned(feed, index, self.now))

    @rule(room=st.sampled_from([None, 1, 2, 5]))
    def resize(self, room: int | None) -> None:
        self.room = room

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.send(Tick(self.pass_time(seconds)))

    @invariant()
    def it_ends_when_and_only_when_there_is_nothing_to_do(self) -> None:
        if len(self.accepted) == self.chunks:
            assert self.end == Done()
        if isinstance(self.end, GiveUp):
            assert self.lost >= self.here
            assert not self.waiting
        assert not isinstance(self.end, Stuck)
        assert not isinstance(self.end, Done) or len(self.accepted) == self.chunks

    def teardown(self) -> None:
        """From anywhere: if from here on all goes well, it ends."""
        if not hasattr(self, "schedule"):
            return
        self.room = None
        for _ in range(40 * (self.chunks + 4)):
            if self.end is not None or (not self.here and not self.waiting):
                return
            self.now += 0.05
            self.step()
        raise AssertionError("all went well, and it did not end")

    def step(self) -> None:
        if self.checking:
            index = next(iter(self.checking))
            del self.checking[index]
            self.accepted.add(index)
            self.send(Accepted(index, self.now))
        elif self.under_way():
            feed, index = self.under_way()[0]
            self.ended(feed, index)
            if feed in self.dropped | self.lost:
                self.send(Returned(feed, index, self.now))
            else:
                self.checking[index] = feed
                self.send(Received(feed, index, self.now))
        elif self.waiting:
            self.send(Absent(self.waiting.pop(0), self.now))
        else:
            self.send(Tick(self.now))


Clone.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=60, deadline=None
)
TestAnyOrderOfEvents = Clone.TestCase
