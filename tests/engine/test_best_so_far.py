"""The best so far by a metric that a training is told to keep: it stays in memory until it is
durable, and is so before what follows it."""

from __future__ import annotations

import math

from datastates.config import BackPressure
from datastates.engine.cadence_stats import CaptureFacts
from datastates.engine.scheduler import (
    BestKnown,
    Closing,
    Engine,
    Evict,
    LineOpened,
    Recorded,
    RefsChanged,
    RoomNeeded,
    Tick,
    Wanted,
    Withdrawn,
    Write,
    Written,
)
from datastates.policy.contract import Cadence
from datastates.policy.retention import Best

LOSS = Best("loss")
NEVER = Cadence(every=None, interval_s=None)


def engine(*losses: float, cadence: Cadence = NEVER, rule: Best = LOSS) -> Engine:
    """An engine with one line that has recorded s0, s1, … of these losses."""
    made = Engine()
    made.handle(LineOpened("main", cadence, "main"))
    made.handle(BestKnown("main", {rule: None}))
    for number, loss in enumerate(losses):
        made.handle(recorded(number, loss))
    return made


def recorded(number: int, loss: float) -> Recorded:
    return Recorded(f"s{number}", "main", float(number), CaptureFacts(metrics={"loss": loss}))


def blocked(slots: int = 1) -> RoomNeeded:
    return RoomNeeded((slots,), True, BackPressure.WAIT, "main", since=100.0, now=100.0)


def test_best_so_far_is_not_evicted_and_what_it_was_before_is() -> None:
    made = engine(3, 1, 2, math.nan, 5)
    assert made.handle(RoomNeeded((9,), False, BackPressure.WAIT))[0] == Evict(
        ("s0", "s2", "s3"), (9,)
    )
    made.handle(recorded(5, 0.5))
    assert made.handle(RoomNeeded((9,), False, BackPressure.WAIT))[0] == Evict(
        ("s0", "s1", "s2", "s3", "s4"), (9,)
    )


def test_the_newest_of_equals_is_the_best_and_larger_ones_are_where_they_are_better() -> None:
    assert engine(1, 1, 2).handle(RoomNeeded((9,), False, BackPressure.WAIT))[0] == Evict(
        ("s0",), (9,)
    )
    assert engine(1, 3, 2, 0, rule=Best("loss", goal="max")).handle(
        RoomNeeded((9,), False, BackPressure.WAIT)
    )[0] == Evict(("s0", "s2"), (9,))


def test_best_is_written_before_any_other_state_of_its_line_and_only_then() -> None:
    made = engine(3, 1, 2)
    assert made.handle(Tick(1e9)) == []
    assert made.handle(Wanted("s2")) == [Write(("s1",))]
    assert made.handle(Written(("s1",))) == [Write(("s2",))]
    assert made.handle(Written(("s2",))) == []
    made.handle(recorded(3, 4))
    assert made.handle(Closing("main")) == [Write(("s3",))], "the best is durable already"


def test_best_is_written_when_its_line_ends_though_the_head_is_durable() -> None:
    made = engine(1)
    made.handle(Wanted("s0"))
    made.handle(Written(("s0",)))
    made.handle(Withdrawn("s0"))
    assert made.handle(Closing("main")) == [Write(("s0",))], "it was dropped from disk meanwhile"


def test_head_that_is_the_best_does_not_give_way_unwritten() -> None:
    for loss, expected in ((1, [Write(("s1",))]), (99, [Evict(("s1",), (1,))])):
        made = engine(9)
        made.handle(Wanted("s0"))
        made.handle(Written(("s0",)))
        made.handle(recorded(1, loss))
        made.forget("s0")
        assert made.handle(blocked()) == expected


def test_where_a_line_goes_back_to_says_what_the_best_is() -> None:
    made = engine(3, 1, 2)
    made.handle(BestKnown("main", {LOSS: (3.0, "s0")}))
    assert made.handle(RoomNeeded((9,), False, BackPressure.WAIT))[0] == Evict(("s1",), (9,))
    made.handle(recorded(3, 2.5))
    assert made.handle(RoomNeeded((9,), False, BackPressure.WAIT))[0] == Evict(
        ("s0", "s1", "s2"), (9,)
    )


def by_name(cadence: Cadence = NEVER, *, keeps_bests: bool = True) -> Engine:
    made = Engine()
    made.handle(LineOpened("main", cadence, "main", keeps_bests=keeps_bests))
    return made


def measured(number: int, **metrics: float) -> Recorded:
    return Recorded(f"s{number}", "main", float(number), CaptureFacts(metrics=metrics))


def test_best_by_each_metric_whose_name_has_a_direction_is_kept_without_being_asked() -> None:
    made = by_name()
    seen = [
        {"val_loss": 1.0, "acc": 0.1, "lr": 9.0},
        {"val_loss": 2.0, "acc": 0.7, "lr": 1.0},
        {"val_loss": 3.0, "acc": 0.2, "lr": 5.0},
    ]
    for number, metrics in enumerate([*seen, {"lr": 0.0}]):
        made.handle(measured(number, **metrics))
    assert made.handle(RoomNeeded((9,), False, BackPressure.WAIT))[0] == Evict(("s2",), (9,)), (
        "neither the best loss nor the best accuracy"
    )
    assert made.handle(Wanted("s3")) == [Write(("s0",))]
    assert made.handle(Written(("s0",))) == [Write(("s1",))]
    assert made.handle(Written(("s1",))) == [Write(("s3",))]


def test_without_states_that_become_durable_by_themselves_no_best_is_kept_unasked() -> None:
    made = by_name(keeps_bests=False)
    made.handle(measured(0, loss=1.0))
    made.handle(measured(1, loss=2.0))
    assert made.handle(Closing("main")) == [Write(("s1",))]


def test_a_loss_that_gets_better_at_each_step_adds_no_writes() -> None:
    made, written = by_name(Cadence(every=10, interval_s=None)), list[str]()
    for number in range(100):
        actions = made.handle(measured(number, loss=1.0 / (number + 1)))
        for action in actions:
            assert isinstance(action, Write)
            written += action.uids
            made.handle(Written(action.uids))
    assert written == [f"s{number}" for number in range(9, 100, 10)]


def test_what_was_asked_for_decides_about_its_metric() -> None:
    made = by_name()
    made.handle(BestKnown("main", {Best("loss", goal="max"): None}))
    for number, loss in enumerate((5.0, 1.0, 2.0)):
        made.handle(measured(number, loss=loss))
    assert made.handle(Closing("main")) == [Write(("s0",))], (
        "the largest, and not the smallest, too"
    )
    assert made.handle(Written(("s0",))) == [Write(("s2",))]
    assert made.handle(Written(("s2",))) == []


def test_what_was_dropped_from_disk_is_written_again_once_a_tag_names_it() -> None:
    made = engine(1, 2)
    made.handle(Wanted("s0"))
    made.handle(Written(("s0",)))
    made.handle(Withdrawn("s0"))
    assert made.handle(RefsChanged(frozenset({"s0"}), {})) == [Write(("s0",))]
    made.handle(Written(("s0",)))
    assert made.handle(Withdrawn("s0")) == [Write(("s0",))], "it was named meanwhile"
    assert made.handle(Withdrawn("nobody's")) == []
