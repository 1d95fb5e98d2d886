"""Groups: one process, ranks of torch.distributed and ranks of MPI meet, exchange what is small,
and pass on what is large."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from datastates.collective import Group, MPIGroup, SoloGroup, TorchGroup
from datastates.errors import InvalidInput, Unsupported
from tests.support.jobs import Kind, job, need_mpi, run
from tests.transport.group_cases import CASES as CONFORMING

CASES = "tests.transport.group_cases"


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("torch", 3),
        pytest.param("mpi", 3, marks=need_mpi),
        ("torch", 2),
        pytest.param("mpi", 4, marks=need_mpi),
        ("torch", 4),
        pytest.param("mpi", 2, marks=need_mpi),
    ],
)
def test_ranks_exchange_and_pass_on_and_leave_the_program_alone(kind: Kind, count: int) -> None:
    said = run(count, f"{CASES}:all_cases", kind=kind, over=kind, timeout_s=120)
    assert said == [[f"{rank} of {count}", "all cases"] for rank in range(count)]


@pytest.mark.parametrize("case", CONFORMING, ids=lambda case: case.__name__)
def test_one_process_is_a_group_too(case: Callable[[Group], None]) -> None:
    case(SoloGroup())


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_others_learn_that_a_rank_is_gone(how: str) -> None:
    with job(4, f"{CASES}:one_dies", over="torch", how=how) as ranks:
        ranks.heard(3, "gone")
        for rank in range(3):
            ranks.heard(rank, "soon")
        for rank in range(4):
            ranks.kill(rank)
        assert ranks.lines()[:3] == [["unavailable True", "unavailable True", "soon"]] * 3


@need_mpi
def test_the_others_learn_that_a_rank_of_mpi_hangs() -> None:
    with job(2, f"{CASES}:one_dies", kind="mpi", over="mpi", how="hangs") as ranks:
        ranks.heard(0, "soon")
        assert ranks.heard(0, "unavailable") == "unavailable True"


@need_mpi
def test_mpiexec_ends_the_job_of_a_rank_that_died() -> None:
    with job(2, f"{CASES}:one_dies", kind="mpi", over="mpi", how="dies") as ranks:
        assert ranks.wait(0) != 0


def test_without_mpi4py_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(Unsupported, match=r"pip install 'datastates\[mpi\]'"):
        MPIGroup()


def test_a_group_of_torch_needs_one_that_is_initialised() -> None:
    with pytest.raises(InvalidInput, match="init_process_group"):
        TorchGroup()
