"""The engine after any sequence of events, beside a model of what it owes."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datastates.config import BackPressure
from datastates.engine.scheduler import (
    AT_A_TIME,
    LAST_RETRY_S,
    Action,
    Adopted,
    Closing,
    Engine,
    Event,
    Evict,
    GiveUp,
    GiveWay,
    LineOpened,
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
from datastates.policy.contract import Cadence
from tests.support.effort import examples
from tests.support.engines import DROP, WAIT, room


class EngineMachine(RuleBasedStateMachine):
    """The engine between a runner and a model: what is in memory, durable, named, a head; what
    was asked for."""

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

    @initialize(
        cadences=st.lists(
            st.builds(Cadence, st.none() | st.integers(1, 3), st.none() | st.floats(0, 5)),
            min_size=1,
            max_size=3,
        ),
        latest=st.none() | st.integers(1, 3),
    )
    def open_lines(self, cadences: list[Cadence], latest: int | None) -> None:
        self.engine.memory_latest = latest
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
                case Write((uid,)):
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
                assert uid not in {
                    *self.tagged,
                    *(at for name, at in self.branches.items() if name != line),
                }
                return
            assert uid not in self.heads.values(), "a head left before it was durable"
            assert uid not in {
                *self.tagged,
                *self.branches.values(),
            }, "a named state left before it was durable"

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
        self.branches = data.draw(
            st.dictionaries(st.sampled_from(["line0", "line1", "line2", "other"]), uid)
        )
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
        self.act(Written((uid,)) if is_well else WriteFailed((uid,), self.now))

    @precondition(lambda self: self.writing)
    @rule()
    def fail_in_passing(self) -> None:
        uid, self.writing = self.writing, None
        assert uid is not None
        self.owed.add(uid)
        self.has_failed.add(uid)
        self.is_safe.discard(self.memory[uid])
        self.act(WriteFailed((uid,), self.now, is_passing=True))
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
        """A patient capture never waits for a disk that is in trouble: what may go goes, or it
        is refused."""
        self.giving_way = data.draw(st.sampled_from(sorted(self.lines)))
        for _ in range(3):
            if not self.memory or not self.engine.is_in_trouble:
                break
            event = RoomNeeded(
                (1 << 20,), True, WAIT, self.giving_way, 0, self.now, self.now, is_patient=True
            )
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
        self.act(RoomNeeded((slots,), is_blocked=False, back_pressure=WAIT))

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), in_flight=st.integers(0, 1))
    def wait_for_room_for_a_line(self, data: st.DataObject, in_flight: int) -> None:
        self.giving_way = data.draw(st.sampled_from(sorted(self.lines)))
        self.act(RoomNeeded((1,), True, WAIT, self.giving_way, in_flight, self.now, self.now))
        self.giving_way = None

    @precondition(lambda self: self.memory)
    @rule(line=st.sampled_from([None, "line0"]))
    def wait_while_nothing_can_be_written(self, line: str | None) -> None:
        """Whoever waits is refused, or gets the whole arena because nothing was left that is to
        be kept."""
        since, self.giving_way = self.now, line
        for _ in range(3 * len(self.memory) + 3):
            refused = self.engine.handle(
                RoomNeeded((1 << 20,), True, WAIT, line, 0, since, self.now)
            )
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
        """A capture that needs the whole arena gets it: writes end, and then everything can
        leave."""
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
        assert self.engine.pending_writes >= len(self.owed - {self.writing}) + (
            self.writing is not None
        )
        assert not self.owed or self.writing is not None or self.engine.is_in_trouble, (
            "something is wanted and nothing is being written"
        )

    @invariant()
    def the_oldest_that_may_leave_are_found(self) -> None:
        held = self.engine._held()
        may_leave = [
            uid
            for uid, entry in self.engine._entries.items()
            if self.engine._may_leave(uid, entry, held)
        ]
        assert (
            self.engine._free(held)
            == sorted(may_leave, key=lambda uid: self.engine._rank(uid) or (True, 0, uid))[
                :AT_A_TIME
            ]
        )

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
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much],
)
