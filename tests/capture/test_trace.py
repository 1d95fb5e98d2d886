"""The trace of a real training: spans nest, lie on the threads that did it, and name their steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import datastates
from datastates import Config

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
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [{**event, "thread": names[event["tid"]]} for event in events if event["ph"] == "X"]


def test_the_spans_of_a_training_nest_on_the_threads_that_did_it(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    config = Config(memory_bytes=64 << 20, durable_every=2, durable_interval_s=None, trace=tmp_path / "trace.json")
    with datastates.open(tmp_path / "runs", config=config) as repo, repo.track(model=model) as run:
        for _ in range(6):
            with torch.no_grad():
                model.weight.add_(1)
            run.capture()
        uids = {state.step: state.uid for state in repo.log("main")}
    found = spans(tmp_path / "trace.json")

    assert {span["name"]: span["thread"] for span in found} == THREADS
    steps = defaultdict(list)
    for span in found:
        steps[span["name"]].append(span["args"]["step"])
        assert span["args"]["state"] == uids[span["args"]["step"]]
        assert span["dur"] >= 0
    for each in ("capture", "copy", "digest", "dedup"):
        assert steps[each] == [1, 2, 3, 4, 5, 6]
    assert steps["write"] == steps["put"] == steps["mark"]
    assert {1, 3, 5, 6} <= set(steps["write"]), "every second, and the head"
    ends: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for span in found:  # sorted: one that holds another comes before it
        began = round(span["ts"] * 1000)  # nanoseconds: one ends in the very one in which the next begins
        ended, held = began + round(span["dur"] * 1000), ends[span["thread"]]
        while held and held[-1][0] <= began:
            held.pop()
        assert not held or ended <= held[-1][0], "a span lies in another, or beside it"
        assert (held[-1][1] if held else None) == WITHIN.get(span["name"])
        held.append((ended, span["name"]))


def test_a_training_that_ctrl_c_ends_leaves_its_trace(tmp_path: Path) -> None:
    environ = os.environ | {"DATASTATES_TRACE": "trace-{pid}.json", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "runs")], cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL)
    assert process.wait(timeout=120) != 0
    found = spans(tmp_path / f"trace-{process.pid}.json")
    assert {"capture", "record", "write"} <= {span["name"] for span in found}


def test_no_trace_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    with datastates.open(tmp_path / "runs") as repo, repo.track(weight=torch.ones(8)) as run:
        run.capture()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
