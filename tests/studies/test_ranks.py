"""Variants of several ranks: each forks from a state of several parts, is recorded once, and
ends as a whole when one of its ranks does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Repository
from datastates.errors import Cancelled, InvalidInput
from datastates.lineage.views.study_trees import study
from datastates.studies import Plan, Progress, SerialExecutor, Variant, explore
from datastates.studies.processes import launch
from tests.studies.parallel import RANKS, hang, model_of, pids, train
from tests.studies.studies import EVERY_STATE, all_end, faults
from tests.support import warm
from tests.support.jobs import run
from tests.support.records import clones_of

pytestmark = pytest.mark.long
HERE = "tests.studies.parallel"
ROOT = Path(__file__).parents[2]
PLAN = Plan((Variant("low", None, 2, {"lr": 1e-3}), Variant("high", None, 2, {"lr": 3e-2})))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose branch ``main`` two ranks trained, and from which they forked one by
    hand."""
    folder = tmp_path_factory.mktemp("prefix") / "runs"
    assert run(2, f"{HERE}:train_prefix", folder=str(folder)) == [["2"], ["2"]]
    return folder


@pytest.fixture
def repo(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A copy of it, in which ranks say which processes they are."""
    (tmp_path / "ranks").mkdir()
    monkeypatch.setenv(RANKS, str(tmp_path / "ranks"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    shutil.copytree(prefix, tmp_path / "runs")
    with datastates.open(tmp_path / "runs", config=EVERY_STATE) as opened:
        yield opened


def explored(repo: Repository, plan: Plan, **options: Any) -> Any:
    with SerialExecutor() as executor:
        return explore(repo, "main", plan, train, executor, study="s", progress=False, **options)


def attempts(repo: Repository) -> dict[str, int]:
    """How often each variant was tried, as the study says."""
    with repo.core.reading() as session:
        return {each.name: each.attempts for each in study(session, "s").variants}


def test_variants_of_two_ranks_fork_from_a_state_of_two_parts_and_are_recorded_once(
    repo: Repository, tmp_path: Path
) -> None:
    report = explored(repo, PLAN, ranks=2)
    assert report, report.errors
    for name, rate in (("low", 1e-3), ("high", 3e-2)):
        state = report.done[name]
        assert state.world_size == 2
        assert (state.metrics["rate@0"], state.metrics["rate@1"]) == (
            rate,
            rate,
        ), "what it sets wins over what is restored, on each rank"
        assert state.metrics["draw@0"] != state.metrics["draw@1"]
        assert report[name].set == f"lr 0.01 -> {rate:g}"
        assert [each.uid for each in repo.log(state, limit=3)][-1] == repo.state("main").uid
        assert len(repo.log(f"s/{name}")) == len(repo.log("main")) + 2
    assert len(pids(tmp_path / "ranks")) == 4
    assert attempts(repo) == {"low": 1, "high": 1}
    before = len(repo.find("step >= 0"))
    assert explored(repo, PLAN, ranks=2)
    assert (len(repo.find("step >= 0")), len(pids(tmp_path / "ranks"))) == (
        before,
        4,
    ), "nothing was trained twice"
    run(2, f"{HERE}:fork_by_hand", folder=str(tmp_path / "runs"), rate=1e-3, epochs=2)
    ours, theirs = model_of(repo, "done/s/low"), model_of(repo, "by-hand")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(ours["0.weight"], model_of(repo, "done/s/high")["0.weight"])


def test_the_first_rank_takes_the_start_from_the_explorer_s_memory_and_passes_it_on(
    repo: Repository,
) -> None:
    plan = Plan((Variant("low", None, 1, {"lr": 1e-3}),))
    report = explored(repo, plan, ranks=2, share="tcp://127.0.0.1:0")
    assert report, report.errors
    with repo.core.reading() as session:
        (clone,) = clones_of(session, repo.state("start/s").uid)
    assert clone.source.startswith("tcp://127.0.0.1:")
    run(2, f"{HERE}:fork_by_hand", folder=str(repo.location.packs.parent), rate=1e-3, epochs=1)
    ours, theirs = model_of(repo, "done/s/low"), model_of(repo, "by-hand")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_variants_of_two_ranks_need_no_shared_disk(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explorer pulls their states, whose parts cannot be pushed."""
    # on another machine, workers leave the explorer's SQLite file alone
    monkeypatch.setattr(sys.modules[explore.__module__], "node_id", lambda: "another machine")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan = Plan((Variant("low", None, 1, {"lr": 1e-3}), Variant("low-a", "low", 1, {"seed": 4})))
    report = explored(repo, plan, ranks=2)
    assert report, report.errors
    assert {state.world_size for state in report.done.values()} == {2}
    assert repo.verify("done/s/low-a").digest == report.done["low-a"].digest
    assert attempts(repo) == {"low": 1, "low-a": 1}


@pytest.mark.parametrize("ranks", [3, 1])
def test_variants_of_another_number_of_ranks_fork_from_it_too(repo: Repository, ranks: int) -> None:
    plan = Plan((Variant("low", None, 1, {"lr": 1e-3}), Variant("low-a", "low", 1, {"seed": 4})))
    report = explored(repo, plan, ranks=ranks)
    assert report, report.errors
    assert {state.world_size for state in report.done.values()} == {ranks}
    assert report["low-a"].set == ""
    if ranks > 1:
        draws = {report.done["low-a"].metrics[f"draw@{rank}"] for rank in range(ranks)}
        assert len(draws) == ranks, "a seed of its own is another one on each rank"


def test_a_rank_that_is_killed_costs_its_variant_an_attempt_and_the_others_nothing(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in faults(
        tmp_path / "faults", **{"low@1": "1:kill", "high@0": "0:kill!"}
    ).items():
        monkeypatch.setenv(key, value)
    report = explored(repo, PLAN, ranks=2)
    assert report["low"].progress is Progress.DONE
    assert report.errors == {"high": "rank 0 of 2 was killed by SIGKILL"}
    assert attempts(repo) == {"low": 2, "high": 2}
    assert len(repo.log("s/low")) == len(repo.log("main")) + 2, (
        "the epoch that was over is not repeated"
    )
    assert len(pids(tmp_path / "ranks", "low")) == 4
    assert all_end(pids(tmp_path / "ranks"))


def test_a_rank_that_raises_is_named_and_its_variant_tried_again(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in faults(tmp_path / "faults", **{"low@1": "0:raise!"}).items():
        monkeypatch.setenv(key, value)
    report = explored(repo, PLAN, ranks=2, retries=0)
    assert {each.variant for each in report if each.progress is Progress.DONE} == {"high"}
    assert report.errors["low"].startswith("rank 1 of 2: ValueError: planned for low@1\n")
    assert "in meet" in report.errors["low"]
    assert attempts(repo) == {"low": 1, "high": 1}
    assert all_end(pids(tmp_path / "ranks"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_with_the_explorer_all_ranks_end_and_the_next_call_goes_on(
    repo: Repository, tmp_path: Path, number: signal.Signals
) -> None:
    environ = os.environ | faults(
        tmp_path / "faults",
        **{"low@0": "1:hang", "low@1": "1:hang", "high@0": "1:hang", "high@1": "1:hang"},
    )
    command = [sys.executable, "-m", "tests.studies.exploring", "ranks", str(tmp_path / "runs")]
    process = warm.Popen(
        command,
        cwd=ROOT,
        env=environ,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(tmp_path / "faults" / "hangs-low@0")
        wait_for(tmp_path / "faults" / "hangs-low@1")
        process.send_signal(number)
        # its workers and their ranks hold its standard error open: they have ended as well
        said = process.communicate(timeout=120)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert number is signal.SIGKILL or "the same call goes on from here" in said
    assert pids(tmp_path / "ranks")
    assert all_end(pids(tmp_path / "ranks"))
    assert repo.state("s/low").attributes["epoch"] == 1
    report = explored(repo, PLAN, ranks=2)
    assert report, report.errors
    assert len(repo.log("s/low")) == len(repo.log("main")) + 2


def test_ranks_end_when_whoever_waits_for_them_gives_up(tmp_path: Path) -> None:
    def look() -> None:
        if len([*tmp_path.iterdir()]) == 2:
            raise Cancelled("the explorer has ended")

    with pytest.raises(Cancelled):
        launch(2, hang, str(tmp_path), "low", look=look, settle=lambda: None)
    assert all_end(int(path.name) for path in tmp_path.iterdir())


def test_what_does_not_go_together_is_refused(repo: Repository) -> None:
    from datastates.ranks import SoloGroup

    wrong: dict[str, dict[str, Any]] = {
        "ranks is 0": {"ranks": 0},
        "executor is for variants in other processes": {"group": SoloGroup()},
        "group is 2: give": {"group": 2},
    }
    for message, given in wrong.items():
        with pytest.raises(InvalidInput, match=message):
            explored(repo, PLAN, **given)
    with pytest.raises(InvalidInput, match="ranks is for variants in other processes"):
        explore(repo, "main", PLAN, train, study="s", group=SoloGroup(), ranks=2, progress=False)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.02)
