"""Variants in processes of their own, some of which die: nothing finished is repeated, nobody's
bytes change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastates import Repository, Status
from datastates.studies import (
    Plan,
    Processes,
    Progress,
    SerialExecutor,
    Variant,
    explore,
    read_study,
)
from tests.studies.exploring import pool
from tests.studies.studies import EVERY_STATE, all_end, counts, essence, faults, prefix, train, tree
from tests.support import warm
from tests.support.records import clones_of

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
PLAN = tree()


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository with a prefix on ``main``, in which every state becomes durable."""
    with prefix(tmp_path / "runs", config=EVERY_STATE) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the plan gives in one process when nothing goes wrong."""
    with prefix(tmp_path_factory.mktemp("expected") / "runs") as repo, SerialExecutor() as executor:
        assert explore(repo, "main", PLAN, train, executor, study="s", progress=False)
        return essence(repo, "s", PLAN)


class Exploring:
    """An explorer in a process of its own; it ends with the test, and its workers with it."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "tests.studies.exploring", *arguments]
        options: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        self.process = warm.Popen(
            command, cwd=ROOT, env=os.environ | environment, start_new_session=True, **options
        )

    def end(self, number: int) -> str:
        """Send it a signal; what it had said on standard error, once it and its workers have
        ended."""
        self.process.send_signal(number)
        return self.said()

    def said(self) -> str:
        """What it says on standard error until it and its workers end."""
        try:
            return str(self.process.communicate(timeout=120)[1])
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise

    def close(self) -> None:
        """Kill what is left of it, which is something only in a test that fails."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Exploring]]:
    """Starts an explorer of the test's repository."""
    begun: list[Exploring] = []

    def begin(kind: str, **places: str) -> Exploring:
        begun.append(
            Exploring(kind, str(tmp_path / "runs"), **faults(tmp_path / "faults", **places))
        )
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def wait_for(path: Path) -> str:
    """What a variant that hangs wrote."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.02)
    return path.read_text()


def test_variants_in_parallel_give_what_one_process_gives_and_change_nobody_s_bytes(
    repo: Repository, expected: dict[str, Any]
) -> None:
    before = {state.uid: (state.digest, files_of(repo, state.uid)) for state in repo.log("main")}
    report = explore(repo, "main", PLAN, train, study="s", progress=False)
    assert report
    assert essence(repo, "s", PLAN) == expected
    assert {
        state.uid: (state.digest, files_of(repo, state.uid)) for state in repo.log("main")
    } == before
    everything = {
        state.uid: (state.digest, files_of(repo, state.uid)) for state in repo.find("step >= 0")
    }
    assert len(everything) == 1 + sum(variant.epochs for variant in PLAN.variants)
    more = Plan(
        (
            *PLAN.variants,
            Variant("low-c", "low", 1, {"seed": 3}),
            Variant("low-d", "low", 1, {"seed": 4}),
        )
    )
    assert explore(repo, "main", more, train, study="s", progress=False)
    for uid, (digest, files) in everything.items():
        assert repo.verify(uid).digest == digest
        assert files_of(repo, uid) == files
    assert len(repo.find("step >= 0")) == len(everything) + 2


def test_a_killed_worker_costs_nobody_anything(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    for key, value in faults(tmp_path / "faults", low="1:kill", high_a="0:kill").items():
        monkeypatch.setenv(key, value)
    report = explore(repo, "main", PLAN, train, study="s", progress=False)
    assert report, report.errors
    assert essence(repo, "s", PLAN) == expected
    moves = {
        variant.name: [event.reason for event in repo.reflog(f"s/{variant.name}")]
        for variant in PLAN.variants
    }
    assert moves == {
        variant.name: [*["capture"] * variant.epochs, "branch"] for variant in PLAN.variants
    }


def test_a_variant_that_kills_its_worker_each_time_fails_alone(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in faults(tmp_path / "faults", low="0:kill!").items():
        monkeypatch.setenv(key, value)
    report = explore(repo, "main", PLAN, train, study="s", progress=False)
    assert {each.variant for each in report if each.progress is Progress.DONE} == {"high", "high-a"}
    assert {each.variant for each in report if each.progress is Progress.SKIPPED} == {
        "low-a",
        "low-b",
    }
    assert "its worker process died" in report.errors["low"]


def test_a_pool_that_breaks_is_made_anew_by_its_recipe(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    for key, value in faults(tmp_path / "faults", low="1:kill").items():
        monkeypatch.setenv(key, value)
    assert explore(repo, "main", PLAN, train, pool, study="s", progress=False)
    assert essence(repo, "s", PLAN) == expected


def test_a_pool_that_breaks_without_a_recipe_is_reported_and_the_rest_goes_on_with_another(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    for key, value in faults(tmp_path / "faults", low="1:kill").items():
        monkeypatch.setenv(key, value)
    with pool() as executor:
        report = explore(repo, "main", PLAN, train, executor, study="s", progress=False)
    assert "the executor is broken: pass a function that makes one" in report.errors["low"]
    assert explore(repo, "main", PLAN, train, pool, study="s", progress=False)
    assert essence(repo, "s", PLAN) == expected


@pytest.mark.parametrize("kind", ["own", "pool"])
def test_after_the_explorer_was_killed_nothing_finished_is_repeated(
    repo: Repository,
    tmp_path: Path,
    expected: dict[str, Any],
    start: Callable[..., Exploring],
    kind: str,
) -> None:
    exploring = start(kind, low_a="0:hang", high_a="0:hang")
    pids = [int(wait_for(tmp_path / "faults" / f"hangs-{name}")) for name in ("low-a", "high-a")]
    before = counts(repo)
    assert {"done/s/low", "done/s/high"} <= set(before)
    # its workers hold its standard error open: they have ended as well
    exploring.end(signal.SIGKILL)
    assert all_end(pids)
    assert explore(repo, "main", PLAN, train, study="s", progress=False)
    assert essence(repo, "s", PLAN) == expected
    after = counts(repo)
    finished = {name for name in before if name.startswith("done/")}
    finished |= {name.removeprefix("done/") for name in finished} | {"start/s", "main"}
    assert {name: after[name] for name in finished} == {name: before[name] for name in finished}
    assert after[""] == 1 + sum(variant.epochs for variant in PLAN.variants)


def test_a_half_done_variant_goes_on_from_its_last_state_after_the_explorer_was_killed(
    repo: Repository, tmp_path: Path, expected: dict[str, Any], start: Callable[..., Exploring]
) -> None:
    exploring = start("own", low="1:hang", high="1:hang")
    pids = [int(wait_for(tmp_path / "faults" / f"hangs-{name}")) for name in ("low", "high")]
    half = {name: repo.state(f"s/{name}") for name in ("low", "high")}
    for pid in pids:
        # at the same moment as the explorer: nobody says anything to anybody
        os.kill(pid, signal.SIGKILL)
    exploring.end(signal.SIGKILL)
    assert {name: state.status for name, state in half.items()} == dict.fromkeys(
        half, Status.DURABLE
    )
    assert explore(repo, "main", PLAN, train, study="s", progress=False)
    assert essence(repo, "s", PLAN) == expected
    assert {name: repo.state(f"done/s/{name}~1") for name in half} == half


def test_ctrl_c_leaves_everything_resumable_and_says_so(
    repo: Repository, tmp_path: Path, expected: dict[str, Any], start: Callable[..., Exploring]
) -> None:
    exploring = start("own", low="1:hang", high="1:hang")
    for name in ("low", "high"):
        wait_for(tmp_path / "faults" / f"hangs-{name}")
    said = exploring.end(signal.SIGINT)
    assert "study s is interrupted" in said
    assert "0 of 5 variants are done; the same call goes on from here" in said
    assert {each.variant: each.epochs for each in read_study(repo, "s", PLAN) if each.epochs} == {
        "low": 1,
        "high": 1,
    }
    assert explore(repo, "main", PLAN, train, study="s", progress=False)
    assert essence(repo, "s", PLAN) == expected


@pytest.mark.parametrize(
    ("number", "kind", "how"),
    [
        (signal.SIGTERM, "own", "hang"),
        (signal.SIGTERM, "own", "block"),
        (signal.SIGHUP, "pool", "hang"),
        (signal.SIGTERM, "pool", "block"),
        (signal.SIGINT, "own", "block"),
    ],
)
def test_a_signal_ends_a_study_in_seconds_though_its_variants_hang(
    repo: Repository,
    tmp_path: Path,
    start: Callable[..., Exploring],
    number: int,
    kind: str,
    how: str,
) -> None:
    exploring = start(kind, low=f"1:{how}", high=f"1:{how}")
    pids = [int(wait_for(tmp_path / "faults" / f"hangs-{name}")) for name in ("low", "high")]
    exploring.process.send_signal(number)
    # about 11 s alone; the gate runs four workers on two cores, and a driver that waits never ends
    exploring.process.wait(60)
    said = exploring.said()
    assert "0 of 5 variants are done; the same call goes on from here" in said
    assert all_end(pids)
    assert exploring.process.returncode == (
        128 + number if number != signal.SIGINT else -signal.SIGINT
    )
    assert {each.variant: each.epochs for each in read_study(repo, "s", PLAN) if each.epochs} == {
        "low": 1,
        "high": 1,
    }
    assert explore(repo, "main", PLAN, train, study="s", progress=False)


def test_workers_take_the_start_from_the_explorer_s_memory(
    repo: Repository, expected: dict[str, Any]
) -> None:
    pytest.importorskip("ucxx", reason="UCXX is not installed: pip install ucxx-cu13")
    assert explore(repo, "main", PLAN, train, study="s", share="ucx://127.0.0.1:0", progress=False)
    assert essence(repo, "s", PLAN) == expected
    with repo.core.database.read() as session:
        arrived = clones_of(session, repo.state("start/s").uid)
    assert arrived
    assert all(clone.source.startswith("ucx://127.0.0.1:") and clone.run for clone in arrived)


def test_a_study_on_a_database_server_is_the_same(
    tmp_path: Path, postgresql_url: str, expected: dict[str, Any]
) -> None:
    with prefix(postgresql_url, packs=tmp_path / "packs", config=EVERY_STATE) as repo:
        assert explore(repo, "main", PLAN, train, study="s", progress=False)
        assert essence(repo, "s", PLAN) == expected
        before = counts(repo)
        assert explore(repo, "main", PLAN, train, study="s", progress=False)
        assert counts(repo) == before


def test_the_process_that_was_free_last_gets_the_next_call() -> None:
    with Processes(2) as pool:
        both = [pool.submit(os.getpid) for _ in range(2)]
        last = both[1].result() if both[0].result() == both[1].result() else None
        pid = pool.submit(os.getpid).result()
        assert last in (None, pid)
        assert {pool.submit(os.getpid).result() for _ in range(3)} == {pid}


def files_of(repo: Repository, uid: str) -> dict[str, bytes]:
    """A state's files, byte for byte."""
    return {path.name: path.read_bytes() for path in repo.location.packs.glob(f"{uid}.*")}
