"""Jobs under ``datastates agent run``, and trainings that are halted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import datastates
from datastates import Config
from datastates.config import AgentMode
from datastates.lineage.states import Status
from datastates.training.halt import Halt, Halted, request, requested
from tests.agent.test_agent import folder, taken_over
from tests.support.jobs import ROOT, Say, job
from tests.support.training import make, update

__all__ = ["folder"]

_TIME_S = 150


def run_job(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``datastates agent run`` with these words, in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "datastates", "agent", "run", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_TIME_S,
        check=False,
    )


SCRIPT = """
import os, signal, sys, time
import torch
import datastates
from tests.support.training import make, update

what, start = sys.argv[1], int(os.environ["DATASTATES_RESTART"])
torch.set_num_threads(1)
model, optimizer = make()
config = datastates.Config(memory_bytes=64 << 20, durable_interval_s=None)
with datastates.open("runs", config=config) as repo:
    run = repo.track(model=model, optimizer=optimizer)
    print("start", start, "from", run.step, flush=True)
    while run.step < 12:
        if what == "deadly" and run.step == 8 and start < 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hung" and run.step == 8 and not start:
            time.sleep(1000)  # hangs here
        update(model, optimizer)
        run.capture().wait("captured")
"""


def _lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("start")]


def test_a_state_that_kills_three_processes_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_job("--restarts", "6", "--", sys.executable, "train.py", "deadly", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # it reached step 8 once by itself, then three processes began there in vain
    assert _lines(done) == [
        "start 0 from 0",
        *(f"start {start} from 8" for start in (1, 2, 3)),
        "start 4 from 7",
    ]
    assert "skipped: 3 processes in a row died before their first new state" in done.stderr
    with datastates.open(tmp_path / "runs") as repo:
        assert repo.state("main").step == 12
        (note,) = list(repo.notes)
        assert note.text.startswith("Skipped: 3 processes")
        assert any("skipped" in each.reason for each in repo.reflog("main"))


def test_a_job_that_hangs_is_named_with_its_stack_and_started_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_job("--hang", "10", "--", sys.executable, "train.py", "hung", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert _lines(done) == ["start 0 from 0", "start 1 from 8"]
    assert "(rank 0 of branch main) has captured nothing for 10 s" in done.stderr
    (line,) = [number for number, text in enumerate(SCRIPT.splitlines(), 1) if "hangs" in text]
    assert f'train.py", line {line}' in done.stderr


def test_a_job_that_always_fails_ends_with_its_status(tmp_path: Path) -> None:
    done = run_job(
        "--restarts", "1", "--", sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path
    )
    assert done.returncode == 3
    assert done.stderr.count("ended with status 3") == 2
    done = run_job("--", "no-such-program", cwd=tmp_path)
    assert done.returncode == 5
    assert "no-such-program cannot be started" in done.stderr


# --- halting ---


def train(*, repo: str, say: Say, sleep_s: float = 0.05) -> None:
    """Train until somebody halts it."""
    model, optimizer = make()
    with datastates.open(repo, config=Config(durable_interval_s=None)) as repository:
        run = repository.track(model=model, optimizer=optimizer)
        say("begun")
        while not run.should_stop:
            update(model, optimizer)
            run.capture()
            time.sleep(sleep_s)
        say("ended", run.step)
        assert repository.state("main").status is Status.DURABLE


@contextmanager
def halting(tmp_path: Path, ranks: int) -> Iterator[datastates.Repository]:
    """A running job of so many ranks, which must end at one step, with a durable state."""
    with job(ranks, "tests.agent.test_jobs:train", repo=str(tmp_path)) as running:
        for rank in range(ranks):
            running.heard(rank, "begun")
        with datastates.open(tmp_path) as repo:
            yield repo
        said = running.said()
    assert len({lines[-1] for lines in said}) == 1
    with datastates.open(tmp_path) as repo:
        assert said[0][-1] == f"ended {repo.state('main').step}"
        assert repo.state("main").status is Status.DURABLE


def halt(repo: datastates.Repository, *words: str) -> str:
    """``datastates agent halt`` with these words."""
    command = [sys.executable, "-m", "datastates", "agent", "halt", "--repo", str(repo.location)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_halt_now_after_the_same_capture(tmp_path: Path) -> None:
    with halting(tmp_path, 2) as repo:
        assert "ends after the next capture" in halt(repo, "main", "--now")


def test_a_training_halts_after_so_many_captures(tmp_path: Path) -> None:
    with halting(tmp_path, 1) as repo:
        halt(repo, "main", "--after", "3")


def test_a_training_halts_at_a_time_and_before_a_time(tmp_path: Path) -> None:
    with halting(tmp_path / "at", 1) as repo:
        halt(repo, "main", "--at", (datetime.now() - timedelta(seconds=1)).isoformat())
    with halting(tmp_path / "before", 1) as repo:
        soon = datetime.now() + timedelta(seconds=12)
        halt(repo, "main", "--before", soon.isoformat())
    assert datetime.now() < soon + timedelta(seconds=1)


def test_a_request_can_be_taken_back(tmp_path: Path) -> None:
    with halting(tmp_path, 1) as repo:
        halt(repo, "main", "--at", (datetime.now() + timedelta(hours=1)).isoformat())
        found = json.loads(halt(repo, "--list", "--json"))
        assert (found["branch"], found["kind"]) == ("main", "at")
        halt(repo, "main", "--unset")
        assert halt(repo, "--list").strip() == "no training is to halt"
        halt(repo, "main", "--now")


def test_a_loop_over_steps_ends_the_process(tmp_path: Path) -> None:
    model, optimizer = make()
    with datastates.open(tmp_path, config=Config(durable_interval_s=None)) as repo:
        seen: list[int] = []

        def train_on() -> None:
            with repo.track(model=model, optimizer=optimizer) as run:
                with repo.core.database.write() as session:
                    assert request(session, "main", Halt("after", 2)) == 1
                run.training.halt.look()
                for batch in run.steps(range(10)):
                    seen.append(batch)
                    run.capture()

        with pytest.raises(Halted) as raised:
            train_on()
        assert raised.value.code == 0
        assert seen == [0, 1]
        assert repo.state("main").status is Status.DURABLE
        with repo.core.database.read() as session:
            assert requested(session, "main") is None, "the next training goes on"
        with repo.track(model=model, optimizer=optimizer) as run:
            assert not run.should_stop
            assert run.capture().wait("captured").step == 3


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["main"], "give one of"),
        (["main", "--now", "--after", "3"], "give one of"),
        (["main", "--at", "noon"], "is no time"),
        (["other", "--now"], "no training of branch"),
        (["--now"], "name the branch"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    words: list[str], why: str, tmp_path: Path
) -> None:
    datastates.open(tmp_path).close()
    command = [sys.executable, "-m", "datastates", "agent", "halt", "--repo", str(tmp_path)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode in (3, 5)
    assert why in done.stderr


def test_a_killed_job_is_seen_in_the_status(tmp_path: Path) -> None:
    with job(1, "tests.agent.test_agent:train", repo=str(tmp_path), steps=3, hang=True) as running:
        running.heard(0, "all")
        command = [sys.executable, "-m", "datastates", "agent", "status", "--json"]
        found = json.loads(subprocess.check_output(command))
        (held,) = found["memories"]
        assert held["branches"] == [{"branch": "main", "rank": 0, "ranks": 1}]
        assert held["states"] == 3
        assert held["until"] is None
        running.kill(0, signal.SIGKILL)
        running.wait(0)
    taken_over()
    (held,) = json.loads(subprocess.check_output(command))["memories"]
    assert held["states"] == 3
    assert held["until"] > time.time()
    assert Config(agent=AgentMode.PROCESS).agent == "process"
