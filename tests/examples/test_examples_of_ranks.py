"""The examples of several ranks, launched as a user launches them; each goes on with another
number of ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.jobs import mpiexec, need_mpi, script, torchrun
from tests.support.warm import run

EXAMPLES = Path(__file__).parents[2] / "examples"


def steps(said: str) -> list[tuple[int, int]]:
    """The step and the number of ranks of each line."""
    return [
        (int(step), int(ranks))
        for step, ranks in re.findall(r"step (\d+), (\d) ranks: loss \d\.\d{4}\n", said)
    ]


@pytest.mark.long
def test_ddp_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    name, folder = str(EXAMPLES / "ddp.py"), str(tmp_path)
    assert steps(torchrun(2, name, folder, "1", timeout_s=100)) == [
        (step, 2) for step in range(1, 9)
    ]
    assert steps(script(1, name, folder, "2", timeout_s=100)) == [
        (step, 1) for step in range(9, 25)
    ]


@pytest.mark.long
def test_fsdp_goes_on_with_more_ranks(tmp_path: Path) -> None:
    name, folder = str(EXAMPLES / "fsdp.py"), str(tmp_path)
    assert steps(script(2, name, folder, "2", timeout_s=100)) == [(1, 2), (2, 2)]
    assert steps(script(3, name, folder, "2", timeout_s=100)) == [(3, 3), (4, 3)]


@pytest.mark.long
@need_mpi
def test_data_parallel_training_over_mpi_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    name, folder = str(EXAMPLES / "mpi_data_parallel.py"), str(tmp_path)
    assert steps(mpiexec(2, name, folder, "2", timeout_s=100)) == [(1, 2), (2, 2)]
    assert steps(mpiexec(1, name, folder, "2", timeout_s=100)) == [(3, 1), (4, 1)]


@pytest.mark.long
def test_variants_of_two_ranks_fork_from_a_prefix_of_two(tmp_path: Path) -> None:
    said = run(
        [sys.executable, str(EXAMPLES / "parallel_variants.py"), str(tmp_path)],
        capture_output=True,
        timeout=110,
        check=True,
    ).stdout
    assert re.findall(r"(.*): (\d) ranks, step (\d+), loss \d\.\d{4}\n", said) == [
        ("prefix", "2", "17"),
        ("lr=0.03", "2", "33"),
        ("lr=0.001", "2", "33"),
    ]
