"""How a training ended is told later, however it was written: with ``with`` or without, by an
error, a signal or nothing at all."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config
from datastates.lineage.states import Ending, How
from datastates.lineage.views.branches import branches
from datastates.maintenance.lease import life_of
from datastates.maintenance.retention_pass import evict
from tests.support import warm

QUIET = Config(memory_bytes=16 << 20, durable_interval_s=None)
SCRIPT = """
import os, signal, sys
import torch
import datastates

repo = datastates.open(sys.argv[1], memory_bytes=16 << 20)
run = repo.track(weight=torch.zeros(3))
try:
    raise KeyError("this one is caught")
except KeyError:
    pass
for _ in range(3):
    run.capture().wait("durable", timeout_s=60)
{end}
"""


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("raise ValueError('no more data')", Ending(How.FAILED, "ValueError: no more data", 3)),
        ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", Ending(How.INTERRUPTED, None, 3)),
        ("os.kill(os.getpid(), signal.SIGKILL)", Ending(How.KILLED)),
        ("sys.exit(0)", Ending(How.ENDED)),
    ],
    ids=["error", "SIGTERM", "SIGKILL", "exit"],
)
def test_a_script_that_closes_nothing(tmp_path: Path, end: str, told: Ending) -> None:
    warm.run(
        [sys.executable, "-c", SCRIPT.format(end=end), str(tmp_path)],
        capture_output=True,
        timeout=120,
    )
    assert ending(tmp_path) == told


@pytest.mark.parametrize(
    "is_tracker", [True, False], ids=["the tracker's block", "the repository's block"]
)
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no more data"), Ending(How.FAILED, "ValueError: no more data", 2)),
        (KeyboardInterrupt(), Ending(How.INTERRUPTED, None, 2)),
        (None, Ending(How.ENDED)),
    ],
    ids=["error", "Ctrl-C", "end"],
)
def test_an_error_that_ends_a_block(
    tmp_path: Path, is_tracker: bool, error: BaseException | None, told: Ending
) -> None:
    with (
        nullcontext() if error is None else pytest.raises(type(error)),
        datastates.open(tmp_path, config=QUIET) as repo,
    ):
        if is_tracker:
            with repo.track(weight=torch.zeros(3)) as run:
                train(run, error)
        else:
            train(repo.track(weight=torch.zeros(3)), error)
    assert ending(tmp_path) == told


def train(run: datastates.Tracker, error: BaseException | None) -> None:
    for _ in range(2):
        run.capture()
    if error is not None:
        raise error


def ending(folder: Path) -> Ending | None:
    """That of the only branch, as the next one who opens the repository is told."""
    with datastates.open(folder, config=QUIET) as repo, repo.core.reading() as session:
        (branch,) = branches(session, living=lambda run: life_of(run, repo.core.home))
        return branch.ending


def test_the_end_of_a_training_tells_how_many_of_its_states_can_be_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "datastates")
    with datastates.open(tmp_path, config=QUIET) as repo:
        for branch, count in (("main", 4), ("main", 2), ("none", 0)):
            with repo.track(branch=branch, weight=torch.zeros(1000)) as run:
                states = [run.capture().wait("durable") for _ in range(count)]
                if count == 4:
                    evict(repo.core, states[1].uid)
    ended = [
        record for record in caplog.records if record.__dict__.get("event") == "training.ended"
    ]
    assert [(one.__dict__["captured"], one.__dict__["restorable"]) for one in ended] == [
        (4, 3),
        (2, 2),
    ]
    assert re.fullmatch(
        r"branch main: 4 captured, 3 can be restored, [\d.]+ KiB of data on disk", ended[0].message
    )
