"""States are written as fast as was asked for, and no faster, until the repository is closed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import datastates
from datastates import Config
from datastates.storage.durable_files import Pace, supports_direct
from datastates.storage.local import LocalTier
from datastates.system.threads import io_hook, thread_work
from datastates.testing.states import numbers, payload

MIB = 1 << 20


class Clock:
    """Time that only passes while somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def paced(bytes_per_s: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Pace, Clock]:
    clock = Clock()
    pace = Pace(bytes_per_s, clock=clock)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(pace, "_sleep", sleep)
    return pace, clock


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("bytes_per_s", [MIB, 20 * MIB, 300 * MIB])
def test_states_are_written_at_the_rate_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool, bytes_per_s: int
) -> None:
    if is_direct and not supports_direct(tmp_path):
        pytest.skip("this file system has no direct I/O")
    pace, clock = paced(bytes_per_s, monkeypatch)
    tier, written = LocalTier(tmp_path, direct=is_direct, pace=pace), list[tuple[float, int]]()

    def note(call: str, path: Path, size: int) -> None:
        if call == "write" and ".safetensors" in path.name:
            written.append((clock.now, size))

    with io_hook(note):
        for index in range(4):
            tier.put(payload(f"{index}", {"w": numbers(index + MIB) + index}))
    span = written[-1][0] - written[0][0]
    assert span > 0
    assert sum(size for _, size in written[:-1]) / span == pytest.approx(bytes_per_s, rel=0.1)
    assert max(size for _, size in written) < 2 * max(bytes_per_s // 10, 64 << 10)
    with tier.open("3") as reader:
        reader.verify()


def test_what_was_not_used_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, clock = paced(MIB, monkeypatch)
    pace.wait(Path("a"), MIB)
    clock.now += 60
    began = clock.now
    for _ in range(5):
        pace.wait(Path("a"), MIB)
    assert clock.now - began == pytest.approx(4)


def test_waiting_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, _ = paced(MIB, monkeypatch)
    with thread_work("writing") as one:
        pace.wait(Path("a"), 100 * MIB)
        one.since = 0.0
        pace.wait(Path("a"), MIB)
        assert one.call == "pace"
        assert not one.is_stalled(time.monotonic(), 5.0)


def test_in_real_time_a_state_takes_as_long_as_its_bytes(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path, pace=Pace(32 * MIB))
    began = time.monotonic()
    tier.put(payload("a", {"w": numbers(4 * MIB)}))
    # but for the last piece, a tenth of a second
    assert time.monotonic() - began >= 0.9 * (16 / 32 - 0.1)


def test_whoever_waits_goes_on_when_it_is_lifted() -> None:
    pace = Pace(1 << 16)
    pace.wait(Path("a"), 1 << 30)
    waiting = threading.Thread(target=pace.wait, args=(Path("a"), 1))
    waiting.start()
    with pace.lifted():
        with pace.lifted():
            pace.wait(Path("a"), 1 << 30)
        waiting.join(20)
        assert not waiting.is_alive()
    assert not pace.is_lifted


def test_a_repository_that_is_closed_writes_what_is_left_at_once(tmp_path: Path) -> None:
    config = Config(memory_bytes=64 * MIB, durable_interval_s=None, write_bytes_per_s=1 << 16)
    began = time.monotonic()
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(rng=False, w=numbers(4 * MIB)) as run,
    ):
        run.capture()
    assert time.monotonic() - began < 60  # at this rate it would take four minutes
    with datastates.open(tmp_path) as repo:
        assert repo.state("main").status == "durable"
