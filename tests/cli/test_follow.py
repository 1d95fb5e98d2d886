"""``log --follow``: states come as they are recorded, and it ends without a word."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastates.cli.history import _arriving
from datastates.lineage import Database
from datastates.lineage.write import record
from tests.cli.conftest import Invoke, uid
from tests.support.lineages import told

TERMINAL = [sys.executable, "-m", "datastates", "log", "--follow"]


@pytest.fixture
def lineage(root: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{root}/lineage.db")
    yield opened
    opened.close()


def capture(database: Database, name: str, parent: str, branch: str, step: int) -> None:
    with database.write() as session:
        record.record(
            session, told(name, "d" * 64, parent, branch, None, step, metrics={"loss": 0.5})
        )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    return process.stdout.readline() if ready else "nothing came"


def test_new_states_appear_as_they_are_recorded_and_ctrl_c_is_quiet(
    root: Path, lineage: Database
) -> None:
    command = [*TERMINAL, "-n", "1"]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert line(process) == f"{uid('1', 8)[:10]} (main) step 8\n"
        capture(lineage, "e" * 24, uid("f", 6), "fork", 7)
        capture(lineage, "d" * 24, uid("1", 8), "main", 9)
        assert line(process) == f"{'d' * 10} (main) step 9  loss=0.5\n", (
            "and nothing of the other branch"
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)

    assert (process.returncode, out, err) == (130, "", "")


def test_all_branches_are_followed_by_name(root: Path, lineage: Database) -> None:
    command = [*TERMINAL, "--all", "-n", "1"]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert line(process) == f"main: {uid('1', 8)[:10]} (main) step 8\n"
        capture(lineage, "e" * 24, uid("f", 6), "fork", 7)
        assert line(process) == f"fork: {'e' * 10} (fork) step 7  loss=0.5\n"
        process.terminate()


@pytest.mark.parametrize(
    ("branch", "steps"), [(None, [1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 8]), ("fork", [1, 2, 3, 4, 5, 6])]
)
def test_zero_shows_all_states_before_the_new_ones(
    lineage: Database, branch: str | None, steps: list[int]
) -> None:
    looks = _arriving(lineage, branch, 0)
    assert [state.step for state in next(looks)] == steps
    capture(lineage, "e" * 24, uid("f", 6), "fork", 7)
    assert [state.uid for state in next(looks)] == ["e" * 24]


def test_a_reader_that_goes_away_ends_it(root: Path) -> None:
    with subprocess.Popen(
        [*TERMINAL, "-n", "1"], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "step 8" in line(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_what_is_no_branch_is_told(root: Path, invoke: Invoke) -> None:
    failed = invoke("log", "warm", "--follow")

    assert failed.code == 5
    assert "fork, main" in failed.err
