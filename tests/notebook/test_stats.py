"""What ``repo.stats()`` says of a training is what it did; OpenTelemetry reads the same."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry import metrics
from torch import nn

import datastates
from datastates import BackPressure, Config
from datastates.engine import commit
from datastates.system.telemetry import Activity
from datastates.testing import FaultyDisk

MIB = 1 << 20
QUIET = Config(memory_bytes=64 * MIB, durable_interval_s=None)


class Changing(nn.Module):
    """One tensor of 8 MiB, of which the first half never changes: a chunk of 4 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(2 * MIB, dtype=torch.float32))

    def change(self) -> None:
        """Change the second half."""
        with torch.no_grad():
            self.weight[MIB:].add_(1)


def test_the_numbers_are_what_a_training_did(tmp_path: Path) -> None:
    model = Changing()
    with datastates.open(tmp_path, config=QUIET) as repo:
        assert repo.stats().activity == Activity()
        with repo.track(model=model, rng=False) as run:
            for _ in range(3):
                model.change()
                run.capture().wait("durable")
            repo.core.runner().drain()
            stats = repo.stats()
        done = stats.activity

        assert (stats.lineage.states, stats.lineage.statuses, stats.trouble) == (
            3,
            {"durable": 3},
            None,
        )
        assert (
            done.captures,
            done.recorded,
            done.written,
            done.failed,
            done.skipped,
            done.retries,
        ) == (3, 3, 3, 0, 0, 0)
        assert 3 * 8 * MIB <= done.bytes_copied < 3 * 8 * MIB + 4096
        assert 16 * MIB <= done.bytes_new < 16 * MIB + 4096, (
            "the half that does not change is new once"
        )
        assert 16 * MIB <= done.bytes_written <= stats.bytes_stored < 17 * MIB
        assert done.chunks_shared == 2
        assert {
            timing.stage: timing.count for timing in done.timings if timing.stage != "round"
        } == dict.fromkeys(
            ("capture", "copy", "digest", "dedup", "record", "put", "mark", "write"), 3
        )
        assert all(0 < timing.least_s <= timing.mean_s <= timing.most_s for timing in done.timings)
        assert "here 3 captures: 24.0 MiB copied" in str(stats)


def test_what_goes_wrong_is_counted(tmp_path: Path) -> None:
    config = Config(memory_bytes=24 * MIB, durable_interval_s=None, back_pressure=BackPressure.SKIP)
    model = Changing()
    with (
        datastates.open(tmp_path, config=config) as repo,
        FaultyDisk(repo.location.packs) as disk,
        repo.track(model=model, rng=False) as run,
    ):
        disk.fail()
        tagged = run.capture()
        repo.tag("kept", tagged.wait())
        assert disk.is_met.wait(60)
        with pytest.raises(TimeoutError):
            tagged.wait("durable", timeout_s=0.01)
        while not repo.stats().activity.retries or repo.stats().trouble is None:
            threading.Event().wait(0.01)
        disk.mend()
        tagged.wait("durable", timeout_s=60)
        captures = []
        for _ in range(6):
            model.weight.data.add_(1)
            captures.append(run.capture())
            repo.flush()
        done = repo.stats().activity
        assert done.skipped == sum(capture.is_skipped for capture in captures)
        assert done.captures + done.skipped == 7
        assert done.evicted > 0


def test_a_capture_that_comes_to_nothing_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Changing()
    with datastates.open(tmp_path, config=QUIET) as repo, repo.track(model=model, rng=False) as run:
        with monkeypatch.context() as patch:
            patch.setattr(commit, "digest", _failing)
            capture = run.capture()
            with pytest.raises(OSError, match="as the test wants it"):
                capture.wait(timeout_s=60)
        with pytest.raises(OSError, match="as the test wants it"):
            run.capture()
        run.capture().wait(timeout_s=60)
        done = repo.stats().activity
    assert (done.captures, done.recorded, done.failed) == (2, 1, 1)


def _failing(work: object, arena: object) -> None:
    raise OSError("as the test wants it")


class Reading(metrics.NoOpMeter):
    """Keeps the callbacks that it is given, and calls them when it is asked."""

    def __init__(self) -> None:
        super().__init__("test")
        self.made: dict[str, tuple[Sequence[Callable[[Any], Any]], str]] = {}

    def create_observable_counter(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> Any:
        self.made[name] = (callbacks, unit)
        return super().create_observable_counter(name, callbacks, unit, description)

    def read(self, name: str) -> list[tuple[float, str | None]]:
        """The values of one instrument, each with its stage."""
        found = [each for callback in self.made[name][0] for each in callback(None)]
        return [(each.value, each.attributes.get("stage")) for each in found]


def test_opentelemetry_reads_the_same_numbers_and_keeps_no_repository(tmp_path: Path) -> None:
    meter = Reading()
    with datastates.open(tmp_path, config=QUIET) as repo:
        repo.instrument(meter)
        assert meter.read("datastates.captures") == []
        with repo.track(weight=torch.ones(8)) as run:
            run.capture().wait("durable")
            repo.core.runner().drain()
            done = repo.stats().activity
            assert meter.read("datastates.captures") == [(1, None)]
            assert meter.read("datastates.bytes.written") == [(done.bytes_written, None)]
            assert (done.timing("put").total_s, "put") in meter.read("datastates.stage.time")
        assert meter.made["datastates.bytes.copied"][1] == "By"
    gone = weakref.ref(repo.core)
    del repo, run
    gc.collect()
    assert gone() is None
    assert meter.read("datastates.captures") == []
