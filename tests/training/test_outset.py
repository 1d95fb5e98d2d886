"""What a person is told when a training sets out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Repository
from tests.support import warm

CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository that writes only what it is asked to."""
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


SCRIPT = """
import sys, logging, torch, datastates
{setup}
with datastates.open(sys.argv[1], memory_bytes=64 << 20) as repo, repo.track(weight=torch.zeros(3)) as run:
    for epoch in run.epochs(3):
        for batch in run.steps(range(5)):
            run.capture()
            if run.step % 7 == 0:
                sys.exit()
"""


def test_a_script_that_goes_on_says_so_in_one_line_unless_logging_is_set_up_or_told_not_to(
    tmp_path: Path,
) -> None:
    setups = [
        "",
        "",
        "logging.getLogger('datastates').setLevel(logging.WARNING)",
        "logging.basicConfig()",
    ]
    said = [
        warm.run(
            [sys.executable, "-c", SCRIPT.format(setup=setup), str(tmp_path)],
            capture_output=True,
            check=True,
        ).stderr
        for setup in setups
    ]
    assert [len(lines.splitlines()) for lines in said] == [0, 1, 0, 0]
    assert said[1].startswith("datastates: branch main goes on from state ")
    assert said[1].endswith(", step 7, epoch 1\n")


def test_what_a_resumed_training_leaves_behind_is_named(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with repo.track(model=model, optimizer=optimizer, epoch=1) as run:
        run.capture()
    repo.track(model=model, branch="fork", start="main").close()
    repo.track(model=model, only="model", rng=False).close()
    assert not caplog.records
    repo.track(model=model, rng=False).close()
    assert "branch main has optimizer, epoch too, and they are not tracked now" in caplog.text


def test_a_new_branch_that_is_nearly_called_as_another_says_so(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("main", "seed-1"):
        with repo.track(weight=torch.zeros(1), branch=name) as run:
            run.capture()
    for name in ("seed-2", "other", "seed-13"):
        repo.track(weight=torch.zeros(1), branch=name).close()
    repo.track(weight=torch.zeros(1), branch="apart", start="main").close()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        repo.track(weight=torch.zeros(1), branch="mian").close()
    assert "branch 'mian' is new and begins without a state, and there is 'main'" in caplog.text
