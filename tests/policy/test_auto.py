"""The automatic cadence on a clock of its own: every state while that costs little, else states
at even distances."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import Auto, Cadence, OnImprovement
from datastates.engine.cadence_stats import CadenceFacts, CaptureFacts
from datastates.errors import InvalidInput
from datastates.policy.contract import CadenceChoice, Costs, Moment
from datastates.policy.text import parse
from tests.support.effort import examples

KB, MB, GB = 1e3, 1e6, 1e9


@dataclass
class Training:
    """A training whose writer writes all waiting states as one group, at most every ``apart_s``; a
    write slows the training down.

    Captures come every ``pace_s`` of work, which scatters by ``noise``. A group takes ``fixed_s``
    and its bytes at ``speed``. ``kept`` are the captures that were picked, and ``choices`` what was
    chosen.
    """

    size: float
    pace_s: float
    policy: Auto = field(default_factory=Auto)
    noise: float = 0.0
    slowdown: float = 0.0
    cpu: float | None = 0.5
    fixed_s: float = 0.004
    speed: float = 1 * GB
    apart_s: float = 0.1
    seed: int = 0
    now: float = 1000.0
    count: int = 0
    written: float = 0.0
    delayed_s: float = 0.0
    kept: list[int] = field(default_factory=list)
    kept_at: list[float] = field(default_factory=list)
    choices: list[CadenceChoice] = field(default_factory=list)
    most_waiting: int = 0

    def __post_init__(self) -> None:
        self.pacing, self._random = CadenceFacts(self.policy, self.size), random.Random(self.seed)
        self._queue, self._group = 0, 0
        self._began = self._ends = 0.0

    @property
    def waiting(self) -> int:
        """So many states are being written or wait."""
        return self._queue + self._group

    def run(self, captures: int) -> None:
        """Train on, for so many captures."""
        for _ in range(captures):
            self._work(self.pace_s * max(0.2, self._random.lognormvariate(0, self.noise)))
            if self.pacing.is_due_at_capture(
                CaptureFacts(self.now, 0.0005, self.count), self.now, waiting=self.waiting
            ):
                self._pick(self.count)
            self.count += 1
            self._begin()

    def gaps(self, since: int = 0) -> list[int]:
        """How many captures lie between two that were kept, from this one on."""
        return [
            after - before
            for before, after in pairwise(each for each in self.kept if each >= since)
        ]

    def _pick(self, index: int) -> None:
        self.kept.append(index)
        self.kept_at.append(self.now)
        self._queue += 1
        self.most_waiting = max(self.most_waiting, self.waiting)

    def _begin(self) -> None:
        is_time = self.now >= self._began + self.apart_s or self._queue * self.size >= 16 * MB
        if self._queue and not self._group and is_time:
            self._group, self._queue, self._began = self._queue, 0, self.now
            took = (self.fixed_s + self._group * self.size / self.speed) * max(
                0.3, self._random.gauss(1, self.noise)
            )
            self._ends = self.now + took

    def _work(self, left: float) -> None:
        """So much work, slower beside a write."""
        while left > 0:
            if not self._group:
                self.now, left = self.now + left, 0.0
                continue
            until = min(left * (1 + self.slowdown), self._ends - self.now)
            self.now, left = self.now + until, left - until / (1 + self.slowdown)
            self.delayed_s += until - until / (1 + self.slowdown)
            if self.now >= self._ends - 1e-9:
                self._end()
                left = max(0.0, left) if left > 1e-9 else 0.0

    def _end(self) -> None:
        count, self._group = self._group, 0
        self.written += count * self.size
        took = self._ends - self._began
        cpu_s = None if self.cpu is None else self.cpu * took
        if self.pacing.wrote(
            self._began,
            self.now,
            is_own=True,
            states=count,
            size=int(count * self.size),
            cpu_s=cpu_s,
        ):
            assert self.pacing.choice is not None
            self.choices.append(self.pacing.choice)
        if (
            self.count
            and self.kept[-1] != self.count - 1
            and self.pacing.is_due_now(self.now, waiting=self.waiting)
        ):
            self._pick(self.count - 1)
        self._begin()


def bursts(training: Training, captures: int) -> None:
    """Train on, on a machine that other processes slow down by three for a while, again and
    again."""
    for index in range(captures // 50):
        usual = training.pace_s, training.fixed_s
        if index % 3 == 0:
            training.pace_s, training.fixed_s = 3 * usual[0], 5 * usual[1]
        training.run(50)
        training.pace_s, training.fixed_s = usual


@pytest.mark.parametrize("run", [Training.run, bursts])
@pytest.mark.parametrize("cpu", [0.3, None])
@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_stop_a_small_training_from_keeping_every_state(
    run: Callable[[Training, int], None], cpu: float | None, seed: int
) -> None:
    training = Training(240 * KB, 0.01, noise=0.4, cpu=cpu, seed=seed)
    run(training, 6000)
    assert training.kept == list(range(6000)), training.choices[-1].why


@pytest.mark.parametrize(
    ("size", "pace_s"), [(3.9 * KB, 0.003), (240 * KB, 0.061), (3.9 * MB, 1.0)]
)
def test_less_than_4_mb_a_second_is_written_whatever_it_costs(size: float, pace_s: float) -> None:
    training = Training(size, pace_s, slowdown=9.0, fixed_s=0.05, cpu=1.0)
    training.run(3000)
    assert training.kept == list(range(3000))
    assert training.choices[-1].every == 1
    assert "each of your steps is kept on disk; " in training.choices[0].why


def test_a_full_bucket_is_written_at_once_and_then_states_at_even_distances() -> None:
    training = Training(6 * MB, 0.018, speed=2 * GB)
    training.run(305)
    assert training.kept == list(range(305)), "less than a minute's worth"
    training.run(2000)
    begun = training.count
    training.run(20_000)
    assert set(training.gaps(begun)) == {11}, "333 MB/s, of which 32 may be written"
    assert training.written <= 60 * 32e6 + 32e6 * (training.now - 1000) + 6 * MB
    assert (
        "one of every 11 steps is kept on disk; 30 MB/s; more would exceed 32 MB/s"
        in training.choices[-1].why
    )
    assert len(training.choices) == 2, "the first and this one"


@settings(max_examples=examples(40), deadline=None)
@given(
    size=st.floats(3, 9.5).map(lambda power: 10**power),
    pace_s=st.floats(-2.5, 1.5).map(lambda power: 10**power),
    seed=st.integers(0, 99),
)
def test_the_bucket_is_kept_and_gaps_are_about_equal_in_the_end(
    size: float, pace_s: float, seed: int
) -> None:
    training = Training(size, pace_s, noise=0.05, seed=seed, speed=2 * GB)
    begun = training.now
    training.run(int(min(8000, max(400, 400 / pace_s))))
    times = [begun, *training.kept_at, training.now]
    apart = max(after - before for before, after in pairwise(times))
    assert apart <= max(30 + 1.5 * pace_s, 2 * pace_s), "one each 30 s at least"
    if size / 30 <= 32e6:
        assert training.written <= 60 * 32e6 + 32e6 * (training.now - 1000) + 2 * size
    gaps = training.gaps(training.count * 3 // 4)
    assert not gaps or max(gaps) <= 2 * min(gaps) + 1, training.choices[-1].why


def test_the_measured_cost_stays_under_the_share_that_is_allowed() -> None:
    training = Training(240 * KB, 0.01, slowdown=1.0, fixed_s=0.03, noise=0.1, cpu=1.0)
    training.run(200)
    assert training.kept == list(range(200)), "it is not limited before it was measured"
    training.run(3000)
    begun, delayed, now = training.count, training.delayed_s, training.now
    training.run(10_000)
    gaps = training.gaps(begun)
    assert max(gaps) <= min(gaps) + 1
    share, rate = (
        (training.delayed_s - delayed) / (training.now - now),
        240 * KB * len(gaps) / (training.now - now),
    )
    assert share <= 0.041 or rate <= 4.1 * MB, training.choices[-1].why
    assert "more would delay the training by over 3.5%" in training.choices[-1].why


def test_a_large_training_finds_its_cost_by_leaving_out_states_now_and_then() -> None:
    dear, cheap = (
        Training(20 * MB, 1.0, fixed_s=0.3, noise=0.02, slowdown=slowdown, cpu=0.9)
        for slowdown in (1.0, 0.0)
    )
    for training in (dear, cheap):
        training.run(3000)
    assert dear.choices[-1].every == 4, dear.choices[-1].why
    assert cheap.choices[-1].every == 1 or len(cheap.kept) > 2700, cheap.choices[-1].why
    assert len(cheap.kept) > 2700
    assert len(dear.gaps(1500)) < 500


def test_a_slow_disk_gets_less_at_even_distances_and_more_once_it_is_fast() -> None:
    training = Training(1 * MB, 0.04, speed=10 * MB)
    training.run(3000)
    assert training.most_waiting <= 68
    begun = training.count
    training.run(3000)
    assert set(training.gaps(begun)) <= {3}, "100 ms each, and a capture each 40 ms"
    assert "the disk is slow" in training.choices[-1].why
    assert len(training.choices) <= 4
    training.speed = 1 * GB
    training.run(3000)
    assert training.choices[-1].every == 1


def test_while_nothing_is_written_little_is_added_to_what_waits() -> None:
    training = Training(1 * MB, 0.03, speed=1.0)
    training.run(10_000)
    assert training.most_waiting <= 68 + 300 / 30


def test_evaluations_and_pauses_are_followed_by_no_burst() -> None:
    training = Training(6 * MB, 0.018, speed=2 * GB)
    training.run(3000)
    begun = training.count
    for _ in range(5):
        training.now += 120.0
        training.run(500)
    assert set(training.gaps(begun)) <= {11, *range(1, 11)}
    assert sum(gap < 11 for gap in training.gaps(begun)) <= 5, "the first capture after each pause"


def test_a_training_that_gets_slower_is_limited_no_more() -> None:
    training = Training(6 * MB, 0.018, speed=2 * GB)
    training.run(3000)
    assert training.choices[-1].every == 11
    training.pace_s = 0.4
    training.run(600)
    assert training.choices[-1].every == 1


def test_the_first_state_and_one_each_30_s_are_written_whatever_is_known() -> None:
    made = Auto()
    drained = CadenceChoice("auto", "", every=1000)
    assert made.is_due(Moment(now=5.0, index=0, count=1, size=1e12))
    seen = {
        "last_write": 100.0,
        "last_index": 3,
        "index": 9,
        "count": 10,
        "choice": drained,
        "debt": 1e15,
        "waiting": 9,
    }
    assert not made.is_due(Moment(now=129.9, **seen))  # type: ignore[arg-type]  # of its fields
    assert made.is_due(Moment(now=130.0, **seen))  # type: ignore[arg-type]  # of its fields
    # of its fields
    assert made.next_due(Moment(now=101.0, **seen)) == 130.0  # type: ignore[arg-type]


def test_it_is_said_as_text_and_joined() -> None:
    assert [
        str(parse(text)) for text in ("auto", "auto:3.5%", "auto:2%", "auto::100M", "auto:2%:100M")
    ] == [
        *("auto", "auto", "auto:2%", "auto:3.5%:100M", "auto:2%:100M"),
    ]
    # a text becomes bytes
    assert parse("auto:2%:100M") == Auto(0.02, 100 << 20) == Auto(0.02, "100M")  # type: ignore[arg-type]
    joined = Auto() | OnImprovement("loss") | Cadence(every=10, interval_s=None)
    assert str(joined) == "auto|best:loss|every:10"
    assert joined.bytes_per_s == 32e6
    chosen = joined.choose(Costs(0.1, 0.01, 0.0, 0.0, 300, 40, pace_s=0.1, size=1e6), None)
    assert chosen is not None
    assert chosen.every == 1
    for wrong in (0, 1.5, True, "much"):
        with pytest.raises(InvalidInput, match="the overhead of Auto"):
            Auto(wrong)  # type: ignore[arg-type]  # that is what is tried
    with pytest.raises(InvalidInput, match="bytes_per_s"):
        Auto(bytes_per_s=0)
