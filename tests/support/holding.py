"""Trainings that hold a branch, for tests of others that want it: each says what it did, and
takes orders from a pipe."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import datastates
from datastates import Config, Conflict, Repository, Tracker
from datastates.ranks import TorchGroup
from tests.support.training import Say

CONFIG = Config(memory_bytes=32 << 20, durable_interval_s=None)
STEPS = 5
"""So many states a training captures at first."""
DURABLE = 2
"""The step of the state that it has on disk."""


def hold(
    folder: str, say: Say, orders: str, branches: list[str] | None = None, durable: int = DURABLE
) -> None:
    """Capture ``STEPS`` states on each branch, one of them on disk, and say its pid.

    Then do what each line of ``orders`` says."""
    repo = datastates.open(folder, config=CONFIG)
    runs = {branch: begin(repo, branch) for branch in branches or ["main"]}
    for run in runs.values():
        for step in range(1, STEPS + 1):
            taken = run.capture(step=step, metrics={"loss": 1 / step})
            taken.wait("durable" if step == durable else "captured")
    say("holds", os.getpid())
    first = next(iter(runs))
    with Path(orders).open() as lines:
        for line in lines:
            match line.strip():
                case "capture":
                    say(*_captured(runs[first]))
                case "close":
                    runs.pop(first).close()
                    say("closed")
                case "drop":
                    del runs[first], run
                    gc.collect()
                    datastates.open(folder).close()  # it waits until what was dropped has ended
                    say("dropped")
                case "fork":
                    say(_said_by_child(folder))


def _said_by_child(folder: str) -> str:
    """What a forked child says that tries to track the branch too."""
    read, write = os.pipe()
    if os.fork() == 0:
        attempt(folder, lambda *words: os.write(write, " ".join(map(str, words)).encode()))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        said = lines.read()
    os.wait()
    return said


def begin(repo: Repository, branch: str = "main", **options: Any) -> Tracker:
    """Track a tensor on a branch."""
    return repo.track(branch=branch, tracked={"weight": torch.zeros(10)}, rng=False, **options)


def attempt(
    folder: str, say: Say, branch: str = "main", orders: str | None = None, **options: Any
) -> None:
    """Try to track a branch, once the pipe of the orders has a line.

    Say how that ended, and stay until the pipe is closed."""
    with ExitStack() as stack, datastates.open(folder, config=CONFIG) as repo:
        lines = None if orders is None else stack.enter_context(Path(orders).open())
        if lines is not None:
            lines.readline()
        try:
            run = begin(repo, branch, **options)
        except Conflict as error:
            say("Conflict", error)
        else:
            say("tracks", run.step)
        if lines is not None:
            lines.read()


def attempt_together(folder: str, say: Say) -> None:
    """Try to track main as one of several ranks."""
    with datastates.open(folder, config=CONFIG) as repo:
        try:
            begin(repo, group=TorchGroup())
        except Conflict as error:
            say("Conflict", error)
        else:
            say("tracks")


def save(folder: str, say: Say, orders: str) -> None:
    """Save a tree for each line of the orders."""
    with Path(orders).open() as lines:
        for _ in lines:
            datastates.save({"weight": torch.zeros(3)}, f"{folder}/main")
            say("saved")


def _captured(run: Tracker) -> tuple[object, ...]:
    try:
        return "captured", run.capture().wait().uid
    except Conflict as error:
        return "Conflict", error
