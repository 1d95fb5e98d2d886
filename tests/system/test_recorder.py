"""Counting and timing: nothing told is lost, and what is kept for a trace is bounded."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from datastates.system import telemetry
from datastates.system.telemetry import BOUNDS_S, COUNTERS, Activity, Recorder, Timing


def test_what_was_told_from_many_threads_is_all_there() -> None:
    recorder, begin = Recorder(), threading.Barrier(4)

    def tell() -> None:
        begin.wait()
        for number in range(500):
            recorder.count("bytes_new", 3)
            recorder.span("copy", 1.0, 1.0 + number / 1000)
            if number % 50 == 0:
                recorder.add_up()

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    activity = recorder.activity()

    assert activity.bytes_new == 4 * 500 * 3
    timing = activity.timing("copy")
    assert (timing.count, sum(timing.histogram)) == (2000, 2000)
    assert timing.total_s == pytest.approx(4 * sum(range(500)) / 1000)
    assert timing.least_s == 0.0
    assert timing.most_s == pytest.approx(0.499)


def test_a_time_on_a_bound_lies_within_it() -> None:
    timing = Timing("copy")
    for took_s in (*BOUNDS_S, 99.0):
        timing = timing.plus(took_s)
    assert timing.histogram == (1,) * (len(BOUNDS_S) + 1)
    assert Timing("copy").mean_s == 0.0


def test_every_number_has_a_counter() -> None:
    assert {counter.field for counter in COUNTERS} == set(Activity.__slots__) - {"timings"}


def test_a_capture_is_counted_by_its_span() -> None:
    recorder = Recorder()
    recorder.span("capture", 1.0, 2.0, "a", 7)
    assert recorder.activity().captures == 1


def test_a_trace_keeps_the_newest_spans_and_says_how_many_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MOST_SPANS", 10)
    recorder = Recorder(tmp_path / "new" / "trace.json")
    for number in range(25):
        recorder.span("copy", float(number), number + 0.5, "a", number)
    recorder.write()
    found: dict[str, Any] = json.loads((tmp_path / "new" / "trace.json").read_text())

    assert [event["args"]["step"] for event in found["traceEvents"] if event["ph"] == "X"] == list(
        range(15, 25)
    )
    assert found["otherData"] == {"earlier spans left out": 15}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["trace.json"]


def test_a_trace_that_cannot_be_written_is_logged_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    Recorder(tmp_path / "file" / "trace.json").write()
    assert "the trace was not written to" in caplog.text
