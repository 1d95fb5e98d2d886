"""Repositories and trackers that nobody closes, and cells that are run again: heads become
durable, nothing is kept for ever."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Conflict, Repository, Status
from datastates.engine import outbox
from datastates.errors import Closed
from datastates.storage.arena import _arenas
from datastates.system.at_exit import end_later, settle

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where repositories are opened that the test does not close."""
    yield tmp_path / "runs"
    gc.collect()
    settle()


def train(folder: Path, model: nn.Module | None = None, steps: int = 3) -> tuple[str, float]:
    """As a script has it: no ``with``, no ``close``; the uid of the head and what its weights
    sum up to."""
    model = nn.Linear(200, 200) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repo = datastates.open(folder, config=QUIET)
    run = repo.track(model=model, optimizer=optimizer)
    for _ in range(steps):
        model(torch.ones(200)).sum().backward()
        optimizer.step()
        capture = run.capture()
    return capture.uid, float(sum(parameter.detach().sum() for parameter in model.parameters()))


def collect_until(expected: set[str]) -> None:
    """``gc.collect`` returns at once while another thread collects, so this collects until only
    the expected threads are left."""
    deadline = time.monotonic() + 60
    while True:
        gc.collect()
        settle()
        if threads() == expected or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def threads() -> set[str]:
    return {
        thread.name for thread in threading.enumerate() if thread.name.startswith("datastates-")
    } - {"datastates-end"}


@pytest.mark.parametrize("is_kept", [False, True], ids=["all dropped", "model kept"])
def test_what_a_function_opened_and_did_not_close_is_ended_when_it_returns(
    folder: Path, is_kept: bool
) -> None:
    before = threads()
    model = nn.Linear(200, 200)
    kept = [model] if is_kept else []
    uid, total = train(folder, model)
    del model
    collect_until(before)
    assert threads() == before
    assert all(arena._is_closed for arena in _arenas)
    with datastates.open(folder, config=QUIET) as repo:
        assert repo.state("main").uid == uid
        assert repo.state(uid).status is Status.DURABLE
        loaded = repo.load(uid)["model"]
        assert float(loaded["weight"].sum() + loaded["bias"].sum()) == pytest.approx(total)
        again = repo.track(model=kept[0] if kept else nn.Linear(200, 200))
        assert again.step == 3


def test_a_repository_that_was_deleted_can_be_opened_again_at_once(folder: Path) -> None:
    weight = torch.zeros(300)
    for expected in range(4):
        repo = datastates.open(folder, config=QUIET)
        run = repo.track(weight=weight)
        assert run.step == expected
        weight += 1
        run.capture()
        del repo, run
        gc.collect()
    with datastates.open(folder, config=QUIET) as last:
        assert last.load("main")["weight"].tolist() == [4.0] * 300


def test_a_tracker_that_was_dropped_leaves_a_durable_head_and_neither_its_model_nor_its_hooks(
    folder: Path,
) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        model = nn.Linear(200, 200)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = repo.track(model=model, optimizer=optimizer)
        capture = run.capture()
        weak = weakref.ref(run)
        del run
        gc.collect()
        assert weak() is None
        settle()
        repo.core.drain()
        assert repo.state(capture.uid).status is Status.DURABLE
        repo.track(model=model, optimizer=optimizer)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        gone = weakref.ref(model.weight)
        del model, optimizer
        gc.collect()
        assert gone() is None


SCRIPT = """
    import gc, sys, torch, datastates
    def main():
        repo = datastates.open(sys.argv[1], memory_bytes=64 << 20)
        run = repo.track(weight=(weight := torch.zeros(300)))
        for _ in range(3):
            weight += 1
            run.capture()
        return weight
    {how}
"""


@pytest.mark.parametrize("how", ["main()", "gc.disable(); kept = main()", "main(); 1 / 0"])
def test_a_script_without_with_in_a_function_loses_no_head(tmp_path: Path, how: str) -> None:
    script = textwrap.dedent(SCRIPT).format(how=how)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == ("1 / 0" in how), done.stderr
    assert "failed" not in done.stderr
    with datastates.open(tmp_path) as repo:
        assert not repo.recovered
        assert repo.load("main")["weight"].tolist() == [3.0] * 300


LEFT_OPEN = """
    import sys, torch, datastates
    from datastates.state import in_place
    sampler = datastates.PermutationSampler(6)
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2, sampler=sampler)
    repo = datastates.open(sys.argv[1], memory_bytes=64 << 20)
    run = repo.track(weight=torch.zeros(300), sampler=sampler)
    epochs = run.epochs(2)
    next(epochs)
    steps = run.steps(loader)
    next(steps)
    run.capture()
    class Writing:
        half = None
    writing = Writing()
    writing.half = torch.zeros(3)
    in_place.mark([("half", writing.half)], writing)
    del writing
    # What a module of others keeps is collected late, once ours have lost their globals.
    torch.late = epochs, steps
"""


def test_a_loop_and_a_restore_that_did_not_end_make_no_noise_at_the_exit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LEFT_OPEN), str(tmp_path)]
    done = subprocess.run(command, timeout=300, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


CELL = """
import datastates, torch
repo = datastates.open(folder, config=config)
weight = torch.zeros(300)
run = repo.track(weight=weight)
for _ in range(2):
    weight += 1
    run.capture()
"""


def test_a_cell_that_is_run_again_goes_on_from_the_head(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"folder": folder, "config": QUIET}
    for times in range(1, 4):
        exec(CELL, names)  # what a notebook does
        run: datastates.Tracker = names["run"]  # type: ignore[assignment]
        assert run.step == 2 * times
        assert names["weight"].tolist() == [2.0 * times] * 300  # type: ignore[attr-defined]
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "branch main is tracked anew in this process: the earlier tracker ends here and takes no"
        " more captures"
    ] * 2
    run.close()
    names.clear()


def test_the_earlier_tracker_says_that_it_gave_way(folder: Path, tmp_path: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        first = repo.track(weight=(weight := torch.zeros(3)))
        side = repo.track(branch="side", weight=torch.zeros(3))
        weight += 1
        first.capture().wait()
        with pytest.raises(Conflict, match="resume=True"):
            repo.track(weight=torch.zeros(3), resume=False)
        uid = first.capture().uid  # whoever was refused has ended nothing
        second = repo.track(weight=(fresh := torch.zeros(3)))
        assert fresh.tolist() == [1, 1, 1]
        assert second.head is not None
        assert second.head.uid == uid
        for use in (first.capture, lambda: first.restore("main")):
            with pytest.raises(
                Closed, match="gave way to another that was made for branch main in this process"
            ):
                use()
        first.close()
        side.capture().wait()
        second.capture().wait()


def test_neither_another_branch_nor_a_copy_of_the_repository_takes_over(
    folder: Path, tmp_path: Path
) -> None:
    with datastates.open(folder, config=QUIET) as repo, repo.track(weight=torch.zeros(3)) as run:
        run.capture().wait("durable")
        shutil.copytree(folder, tmp_path / "copy")
        with (
            datastates.open(tmp_path / "copy", config=QUIET) as copy,
            copy.track(weight=torch.zeros(3)) as other,
        ):
            other.capture()
            run.capture().wait()
        os.symlink(folder, tmp_path / "link")
        with Repository(datastates.open(tmp_path / "link").location, QUIET) as linked:
            linked.track(weight=torch.zeros(3)).capture()
            with pytest.raises(Closed, match="gave way"):
                run.capture()


def test_an_interrupt_at_any_line_of_a_finalizer_leaves_nobody_waiting(folder: Path) -> None:
    datastates.open(folder, config=QUIET).track(
        weight=torch.zeros(3), rng=False
    ).close()  # from here on a thread ends things
    for line in range(12):
        left = line

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename == outbox.__file__:
                left -= event == "line"
                if left < 0:
                    raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            end_later(gc.enable, os.getpid())
        except KeyboardInterrupt:
            assert left < 0
        finally:
            sys.settrace(None)
        waiting = threading.Thread(target=settle, daemon=True)
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive(), f"interrupted at line {line}"
