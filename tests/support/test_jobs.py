"""The launcher of jobs itself: what it hears, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.jobs import Kind, Say, job, need_mpi, run

HERE = "tests.support.test_jobs"


def add_up(value: int, say: Say) -> None:
    """A collective of the ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    say("rank", dist.get_rank(), "of", dist.get_world_size(), "total", int(total))


def name_itself(say: Say) -> None:
    """MPI is there."""
    from mpi4py import MPI

    say(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())


def fall_silent(say: Say) -> None:
    """Wait for a signal that ends it."""
    say("pid", os.getpid())
    signal.pause()


def fail(say: Say) -> None:
    """One rank raises."""
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has had enough")
    say("well")


def test_ranks_find_each_other_and_what_they_say_is_heard_by_rank() -> None:
    assert run(2, f"{HERE}:add_up", value=5) == [["rank 0 of 2 total 15"], ["rank 1 of 2 total 15"]]


@need_mpi
def test_ranks_of_mpiexec_too() -> None:
    assert run(2, f"{HERE}:name_itself", kind="mpi") == [["0 2"], ["1 2"]]


@pytest.mark.parametrize("kind", ["env", pytest.param("mpi", marks=need_mpi)])
def test_a_job_that_does_not_end_is_killed_at_its_limit_and_nothing_of_it_is_left(
    kind: Kind,
) -> None:
    with job(2, f"{HERE}:fall_silent", kind=kind, timeout_s=60) as ranks:
        pids = [int(ranks.heard(rank, "pid").split()[1]) for rank in range(2)]
        ranks.ends_at = 0.0
        with pytest.raises(pytest.fail.Exception, match="did not end in time"):
            ranks.said()
    assert not any(map(_is_alive, pids))


def test_one_rank_is_killed_and_the_others_are_not() -> None:
    with job(2, f"{HERE}:fall_silent", kind="env", timeout_s=60) as ranks:
        for rank in range(2):
            ranks.heard(rank, "pid")
        ranks.kill(1)
        assert ranks.wait(1) == -signal.SIGKILL
        ranks.kill(0, signal.SIGTERM)
        assert ranks.wait(0) == -signal.SIGTERM


def test_the_error_of_a_rank_is_shown() -> None:
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        run(2, f"{HERE}:fail", kind="env", timeout_s=60)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
