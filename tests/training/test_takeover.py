"""A branch is trained by one process: another one is refused, or takes it over if it says so."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import pytest

import datastates
from datastates import Conflict
from datastates.errors import InvalidInput
from tests.support import jobs
from tests.support.forge import Forge, Job, forge
from tests.support.holding import CONFIG, DURABLE, STEPS, begin


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts trainings."""
    with forge(tmp_path_factory.mktemp("forge"), ["tests.support.holding"]) as opened:
        yield opened


class Holder:
    """A training in a process of its own."""

    def __init__(self, job: Job, orders: IO[str]) -> None:
        self.job, self._orders = job, orders
        self.pid = job.pid

    def tell(self, order: str) -> None:
        """Tell it what to do."""
        print(order, file=self._orders, flush=True)

    def told(self, order: str) -> str:
        """What it says when it was told to do something."""
        self.tell(order)
        return self.job.lines.readline().strip()

    def kill(self) -> None:
        """End it by SIGKILL, and wait until it has ended."""
        self.job.kill(signal.SIGKILL)
        self.job.wait()


@contextmanager
def holding(
    smith: Forge, folder: Path, call: str = "hold", **arguments: object
) -> Iterator[Holder]:
    """A training that holds its branches as long as the block."""
    pipe = folder.with_name(f"orders-{secrets.token_hex(4)}")
    os.mkfifo(pipe)
    job = smith.start(
        f"tests.support.holding:{call}", folder=str(folder), orders=str(pipe), **arguments
    )
    if call == "hold":
        assert job.lines.readline().split() == ["holds", str(job.pid)], smith.errors()
    with pipe.open("w") as orders:
        holder = Holder(job, orders)
        try:
            yield holder
        finally:
            if not job.lines.closed:
                holder.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a repository."""
    return tmp_path / "runs"


def test_a_branch_that_another_process_trains_is_refused_and_the_other_goes_on(
    smith: Forge, folder: Path
) -> None:
    with holding(smith, folder) as holder, datastates.open(folder, config=CONFIG) as repo:
        with pytest.raises(Conflict) as refused:
            begin(repo)
        said = str(refused.value)
        assert (
            f"'main' is held by process {holder.pid} on {socket.gethostname()} since"
            f" {datetime.now(UTC):%Y-%m-%d}" in said
        )
        assert "takeover=True" in said
        assert holder.told("capture").startswith("captured")
        begin(repo, "other").capture().wait()


def test_a_branch_without_a_state_is_held_too(folder: Path, smith: Forge) -> None:
    with datastates.open(folder, config=CONFIG) as repo:
        run = begin(repo)
        (said,) = smith.run("tests.support.holding:attempt", folder=str(folder))
        assert said.startswith(f"Conflict branch 'main' is held by process {os.getpid()}")
        run.capture().wait()


def test_a_branch_that_is_taken_over_refuses_what_the_other_process_captures(
    smith: Forge, folder: Path
) -> None:
    with holding(smith, folder) as holder, datastates.open(folder, config=CONFIG) as repo:
        with begin(repo, takeover=True) as run:
            assert run.step == DURABLE
            said = holder.told("capture")
            assert said.startswith(
                f"Conflict branch 'main' was taken over by process {os.getpid()} on"
                f" {socket.gethostname()}"
            )
            uid = run.capture().wait("durable").uid
            assert holder.told("capture").startswith("Conflict")
        assert repo.state("main").uid == uid
        assert any(event.reason.startswith("takeover") for event in repo.reflog("main"))


def test_a_branch_that_is_taken_back_refuses_the_one_that_took_it(
    smith: Forge, folder: Path
) -> None:
    with holding(smith, folder) as holder, datastates.open(folder, config=CONFIG) as repo:
        run = begin(repo, takeover=True)
        (said,) = smith.run("tests.support.holding:attempt", folder=str(folder), takeover=True)
        assert said == f"tracks {DURABLE}"
        with pytest.raises(Conflict, match="was taken over by process"):
            run.capture().wait()
        assert holder.told("capture").startswith("Conflict")
        with pytest.raises(Conflict):
            run.close()


def test_a_branch_of_which_nothing_is_on_disk_begins_anew_when_it_is_taken_over(
    smith: Forge, folder: Path
) -> None:
    with (
        holding(smith, folder, durable=0) as holder,
        datastates.open(folder, config=CONFIG) as repo,
    ):
        run = begin(repo, takeover=True)
        assert (run.step, run.head) == (0, None)
        uid = run.capture().wait("durable").uid
        assert holder.told("capture").startswith("Conflict")
        assert [state.uid for state in repo.log("main")] == [uid]


def test_takeover_changes_nothing_where_nobody_holds_the_branch(smith: Forge, folder: Path) -> None:
    with datastates.open(folder, config=CONFIG) as repo:
        with begin(repo, takeover=True) as run:
            uid = run.capture().wait().uid
        with begin(repo, takeover=True) as run:
            assert run.head is not None
            assert run.head.uid == uid


def test_a_process_that_was_killed_holds_nothing_for_a_repository_that_was_open_before(
    smith: Forge, folder: Path
) -> None:
    with holding(smith, folder) as holder, datastates.open(folder, config=CONFIG) as repo:
        holder.kill()
        assert begin(repo).step == DURABLE


@pytest.mark.parametrize(("order", "step"), [("close", STEPS), ("drop", STEPS)])
def test_a_tracker_that_was_closed_or_collected_releases_its_branch_alone(
    smith: Forge, folder: Path, order: str, step: int
) -> None:
    with (
        holding(smith, folder, branches=["main", "other"]) as holder,
        datastates.open(folder, config=CONFIG) as repo,
    ):
        assert holder.told(order) in ("closed", "dropped")
        with pytest.raises(Conflict, match="'other' is held"):
            begin(repo, "other")
        assert begin(repo).step == step


def test_a_forked_child_does_not_take_the_branch_of_its_parent(smith: Forge, folder: Path) -> None:
    with holding(smith, folder) as holder:
        assert holder.told("fork").startswith(
            f"Conflict branch 'main' is held by process {holder.pid}"
        ), smith.errors()
        assert holder.told("capture").startswith("captured")


def test_of_two_that_begin_at_once_one_gets_the_branch(smith: Forge, folder: Path) -> None:
    datastates.open(folder, config=CONFIG).close()
    with holding(smith, folder, "attempt") as one, holding(smith, folder, "attempt") as other:
        one.tell("begin")
        other.tell("begin")
        said = [each.job.lines.readline().split()[0] for each in (one, other)]
    assert sorted(said) == ["Conflict", "tracks"], smith.errors()


def test_ranks_are_refused_together_and_begin_once_the_holder_is_dead(
    smith: Forge, folder: Path
) -> None:
    with holding(smith, folder) as holder:
        said = jobs.run(2, "tests.support.holding:attempt_together", folder=str(folder))
        assert [line[0].split()[0] for line in said] == ["Conflict", "Conflict"]
        assert all(f"process {holder.pid}" in line[0] for line in said)
        holder.kill()
    assert jobs.run(2, "tests.support.holding:attempt_together", folder=str(folder)) == [
        ["tracks"],
        ["tracks"],
    ]


def test_processes_that_save_take_turns_on_a_branch(smith: Forge, folder: Path) -> None:
    with holding(smith, folder, "save") as one, holding(smith, folder, "save") as other:
        assert [each.told("save") for each in (one, other, one)] == ["saved"] * 3
    with datastates.open(folder) as repo:
        assert len(repo.log("main")) == 3


def test_takeover_is_true_or_false(folder: Path) -> None:
    with (
        datastates.open(folder, config=CONFIG) as repo,
        pytest.raises(InvalidInput, match="takeover"),
    ):
        begin(repo, takeover="yes")
