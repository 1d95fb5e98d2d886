"""The trace of a real training: spans nest, lie on the threads that did it, and name their
steps."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Config
from datastates.system.telemetry import Span, write_trace

THREADS = {
    "capture": "MainThread",
    "copy": "datastates-stage",
    "round": "datastates-engine",
    "digest": "datastates-engine",
    "dedup": "datastates-engine",
    "record": "datastates-engine",
    "write": "datastates-writer",
    "put": "datastates-writer",
    "mark": "datastates-writer",
}
WITHIN = {"digest": "round", "dedup": "round", "record": "round", "put": "write", "mark": "write"}

SCRIPT = """
import sys, torch, datastates
repo = datastates.open(sys.argv[1], config=datastates.Config.from_environment())
run = repo.track(weight=torch.ones(8))
run.capture().wait("durable")
raise KeyboardInterrupt
"""


def spans(path: Path) -> list[dict[str, Any]]:
    """The spans of a file, each with the name of its thread."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    return [{**event, "thread": names[event["tid"]]} for event in events if event["ph"] == "X"]


def problems(path: Path) -> list[str]:
    """What of the rules of Chrome's trace events a file breaks, as Perfetto reads them: each event
    is of a known phase, names a process and a thread, and has times in microseconds; names of
    threads are given once; and the complete events of a thread lie within or beside each other,
    compared in nanoseconds that floats were cut to: what overlaps otherwise is dropped.
    """
    trace = json.loads(path.read_text(), parse_constant=lambda name: f"no number: {name}")
    found = [
        f"{key} is no key of a trace"
        for key in trace.keys() - {"traceEvents", "displayTimeUnit", "otherData"}
    ]
    found += [] if trace["displayTimeUnit"] in ("ms", "ns") else ["displayTimeUnit"]
    names: dict[tuple[int, int], str] = {}
    open_: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, event in enumerate(trace["traceEvents"]):
        found += [f"event {number}: {problem}" for problem in _shape(event)]
        place = event.get("pid"), event.get("tid")
        if event.get("name") == "thread_name":
            found += [f"event {number}: its thread has a name"] if place in names else []
            names[place] = event["args"]["name"]
        if event.get("ph") != "X" or _shape(event):
            continue
        found += [] if place in names else [f"event {number}: its thread has no name"]
        began = int(event["ts"] * 1000)
        ended, held = began + int(event["dur"] * 1000), open_[place]
        while held and held[-1] <= began:
            held.pop()
        if held and ended > held[-1]:
            found.append(f"event {number}: it overlaps another one of its thread")
        held.append(ended)
    return found


def _shape(event: dict[str, Any]) -> list[str]:
    """What is wrong with one event by itself."""
    phases = {
        "M": {"name", "ph", "pid", "tid", "args"},
        "X": {"name", "ph", "cat", "ts", "dur", "pid", "tid", "args"},
    }
    wanted = phases.get(event.get("ph", ""))
    if wanted is None:
        return ["its phase is none of ours"]
    if event.keys() != wanted:
        return [f"it has {sorted(event)}"]
    kinds = {"name": str, "cat": str, "pid": int, "tid": int, "args": dict, "ts": int, "dur": int}
    wrong = [key for key in event.keys() & kinds.keys() if type(event[key]) is not kinds[key]]
    if wrong:
        return [f"{wrong} are of another type"]
    return ["it ends before it begins"] if event.get("dur", 0) < 0 else []


def test_a_trace_of_a_real_training_is_valid(tmp_path: Path) -> None:
    """A model that is large enough for copies behind the fence, memory for few states, writes
    and a clone beside it."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    config = Config(
        memory_bytes=80 << 20,
        durable_every=3,
        durable_interval_s=None,
        trace=tmp_path / "trace.json",
        retention="latest:2",
    )
    with (
        datastates.open(tmp_path / "runs", config=config) as repo,
        repo.track(model=model, optimizer=optimizer) as run,
    ):
        for step in range(40):
            optimizer.zero_grad()
            model(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
            run.capture(metrics={"loss": 1 / (step + 1)})
            if step % 10 == 9:
                repo.tag(f"at-{step}", run.head)
    assert problems(tmp_path / "trace.json") == []
    assert len(spans(tmp_path / "trace.json")) > 200


def test_spans_that_touch_in_a_nanosecond_do_not_overlap_in_the_file(tmp_path: Path) -> None:
    """As floats of microseconds some of them would, once they are cut to nanoseconds."""
    choose = random.Random(5)
    told = []
    for _ in range(2000):
        began = choose.uniform(1e4, 1e6)
        middle, ended = began + choose.uniform(0, 1e-3), began + choose.uniform(1e-3, 2e-3)
        told += [
            Span("outer", 1, "a", began, ended, "", None),
            Span("one", 1, "a", began, middle, "", None),
        ]
        told.append(Span("two", 1, "a", middle, ended, "", None))
    kept = [told[at : at + 3] for at in range(0, len(told), 3)]
    write_trace(
        tmp_path / "trace.json",
        [span for group in sorted(kept, key=lambda group: group[0].began)[::20] for span in group],
    )
    assert problems(tmp_path / "trace.json") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda event: event | {"ts": event["ts"] + event["dur"] - 1, "dur": 2}, "overlaps"),
        (lambda event: event | {"ph": "B"}, "phase"),
        (lambda event: event | {"dur": -1}, "ends before"),
        (lambda event: event | {"ts": str(event["ts"])}, "another type"),
        (lambda event: {key: value for key, value in event.items() if key != "tid"}, "it has"),
        (lambda event: event | {"tid": 99}, "no name"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_found(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], problem: str
) -> None:
    path = tmp_path / "trace.json"
    write_trace(
        path, [Span("one", 1, "a", 1.0, 2.0, "", None), Span("two", 1, "a", 2.0, 3.0, "", None)]
    )
    assert problems(path) == []
    trace = json.loads(path.read_text())
    first = next(index for index, event in enumerate(trace["traceEvents"]) if event["ph"] == "X")
    trace["traceEvents"].insert(first + 1, change(trace["traceEvents"][first]))
    path.write_text(json.dumps(trace))
    assert problem in " ".join(problems(path))


def test_the_spans_of_a_training_nest_on_the_threads_that_did_it(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    config = Config(
        memory_bytes=64 << 20,
        durable_every=2,
        durable_interval_s=None,
        trace=tmp_path / "trace.json",
    )
    with datastates.open(tmp_path / "runs", config=config) as repo, repo.track(model=model) as run:
        for _ in range(6):
            with torch.no_grad():
                model.weight.add_(1)
            run.capture()
        uids = {state.step: state.uid for state in repo.log("main")}
    found = spans(tmp_path / "trace.json")

    assert problems(tmp_path / "trace.json") == []
    assert {span["name"]: span["thread"] for span in found} == THREADS
    steps = defaultdict(list)
    for span in found:
        steps[span["name"]].append(span["args"]["step"])
        assert span["args"]["state"] == uids[span["args"]["step"]]
        assert span["dur"] >= 0
    for each in ("capture", "copy", "digest", "dedup"):
        assert steps[each] == [1, 2, 3, 4, 5, 6]
    assert steps["write"] == steps["put"] == steps["mark"]
    assert steps["write"][-1] == 6, "a span for each group, with the step of its newest state"
    ends: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for span in found:  # sorted: one that holds another comes before it
        # nanoseconds: one ends in the very one in which the next begins
        began = round(span["ts"] * 1000)
        ended, held = began + round(span["dur"] * 1000), ends[span["thread"]]
        while held and held[-1][0] <= began:
            held.pop()
        assert not held or ended <= held[-1][0], "a span lies in another, or beside it"
        assert (held[-1][1] if held else None) == WITHIN.get(span["name"])
        held.append((ended, span["name"]))


def test_a_training_that_ctrl_c_ends_leaves_its_trace(tmp_path: Path) -> None:
    environ = os.environ | {"DATASTATES_TRACE": "trace-{pid}.json", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")],
        cwd=tmp_path,
        env=environ,
        stderr=subprocess.DEVNULL,
    )
    assert process.wait(timeout=120) != 0
    found = spans(tmp_path / f"trace-{process.pid}.json")
    assert {"capture", "record", "write"} <= {span["name"] for span in found}


def test_no_trace_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    with datastates.open(tmp_path / "runs") as repo, repo.track(weight=torch.ones(8)) as run:
        run.capture()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
