"""Many processes train with one repository at once: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Config, Repository, Status
from tests.support.contending import MOVE_EVERY, RACE_EVERY
from tests.support.effort import effort
from tests.support.forge import Forge, forge

PROCESSES, CAPTURES = effort(8, 4), effort(200, 100)

Tell = Callable[[str, object], None]


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts trainings."""
    with forge(tmp_path_factory.mktemp("forge")) as opened:
        yield opened


@pytest.mark.long
def test_nothing_is_lost_when_many_trainings_capture_into_one_folder(
    smith: Forge, tmp_path: Path, record_property: Tell
) -> None:
    reports = train_together(smith, tmp_path, str(tmp_path / "runs"), None, record_property)
    with datastates.open(tmp_path / "runs") as repo:
        check(repo, reports)


@pytest.mark.long
def test_nothing_is_lost_when_many_trainings_capture_into_one_server(
    smith: Forge, tmp_path: Path, postgresql_url: str, record_property: Tell
) -> None:
    reports = train_together(
        smith, tmp_path, postgresql_url, str(tmp_path / "packs"), record_property
    )
    with datastates.open(postgresql_url, packs=tmp_path / "packs") as repo:
        check(repo, reports)


@pytest.mark.parametrize("is_training", [True, False], ids=["while it captures", "while it rests"])
def test_a_tag_of_another_process_makes_a_state_in_this_ones_memory_durable(
    smith: Forge, tmp_path: Path, is_training: bool
) -> None:
    marked = threading.Event()
    config = Config(
        memory_bytes=64 << 20,
        durable_interval_s=None,
        on_step=lambda step: marked.set() if step == "marked-durable" else None,
    )
    tracked = {"weight": torch.zeros(1000)}
    with datastates.open(tmp_path, config=config) as repo, repo.track(tracked=tracked) as run:
        first = run.capture().wait()
        tracked["weight"].add_(1)
        run.capture().wait()
        assert smith.run(
            "tests.support.contending:tag", url=str(tmp_path), name="theirs", uid=first.uid
        ) == [first.uid]
        deadline = time.monotonic() + 30
        while not marked.wait(0.05 if is_training else 30) and time.monotonic() < deadline:
            run.capture()
        assert {
            state.uid for state in repo.find("step >= 0") if state.status is Status.DURABLE
        } == {first.uid}
        assert torch.equal(repo.load("theirs")["tracked"]["weight"], torch.zeros(1000))


def train_together(
    smith: Forge, folder: Path, url: str, packs: str | None, tell: Tell
) -> dict[str, Any]:
    """What each training reports; they begin together, in a repository that the first of them
    makes."""
    begin = folder / "begin"
    begin.touch()
    names = [f"training-{number}" for number in range(PROCESSES)]
    jobs = {
        name: smith.start(
            "tests.support.contending:train",
            url=url,
            packs=packs,
            name=name,
            captures=CAPTURES,
            begin=str(begin),
        )
        for name in names
    }
    for job in jobs.values():
        assert job.lines.readline() == "ready\n", smith.errors()
    began = time.perf_counter()
    begin.unlink()
    said = {name: job.say() for name, job in jobs.items()}
    wall_s = time.perf_counter() - began
    assert [job.wait() for job in jobs.values()] == [0] * PROCESSES, smith.errors()
    assert smith.errors() == ""
    reports = {name: json.loads(lines[-1]) for name, lines in said.items()}
    _tell(url, reports, wall_s, tell)
    return reports


def check(repo: Repository, reports: dict[str, Any]) -> None:
    """Every state is listed as it was captured, every branch can be gone on with, every move of
    the shared refs is in order."""
    assert not repo.recovered
    for name, report in reports.items():
        log = repo.log(name)
        assert {state.uid: state.metrics["loss"] for state in log} == report["states"]
        assert [state.uid for state in log] == list(report["states"])[::-1]
        assert [state.step for state in log] == list(range(CAPTURES, 0, -1))
        for key, value in repo.load(name, only="model")["model"].items():
            assert torch.equal(value, torch.tensor(report["weight"][key]))
    found = {state.uid: state.metrics["loss"] for state in repo.find("metrics.loss >= 0")}
    assert found == {
        uid: loss for report in reports.values() for uid, loss in report["states"].items()
    }
    _check_shared(repo, reports)
    for ref in repo.refs():
        assert repo.verify(ref.name).status is Status.DURABLE


def _check_shared(repo: Repository, reports: dict[str, Any]) -> None:
    events = repo.reflog("shared")[::-1]
    moved = [uid for report in reports.values() for uid in report["moves"]]
    assert len(moved) == PROCESSES * (CAPTURES // MOVE_EVERY)
    assert sorted(event.new or "" for event in events) == sorted(moved)
    assert [event.old for event in events] == [None, *(event.new for event in events[:-1])]
    won = sorted(tag for report in reports.values() for tag in report["won"])
    assert won == sorted(f"race-{number}" for number in range(RACE_EVERY - 1, CAPTURES, RACE_EVERY))


def _tell(url: str, reports: dict[str, Any], wall_s: float, tell: Tell) -> None:
    """The latency of ``record``, for whoever reads the report of the tests."""
    took = sorted(each for report in reports.values() for each in report["took"])
    assert 0 < len(took) <= PROCESSES * CAPTURES, "one transaction records several captures"
    figures = {
        "p50_ms": statistics.median(took) * 1e3,
        "p99_ms": took[len(took) * 99 // 100] * 1e3,
        "max_ms": took[-1] * 1e3,
    }
    figures["wall_s"] = wall_s
    for name, value in figures.items():
        tell(name, round(value, 2))
    shown = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
    sys.stdout.write(
        f"\n{PROCESSES} x {CAPTURES} captures, {url.split(':')[0] if '://' in url else 'folder'}:"
        f" record {shown}\n"
    )
