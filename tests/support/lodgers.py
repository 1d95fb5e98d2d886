"""Trainings that share a folder with others, for tests to look at: each says the states that it
has, then waits to be ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch

import datastates
from datastates import Config, Unavailable
from datastates.maintenance.retention_pass import evict
from datastates.storage.local import LocalTier
from datastates.testing.states import small
from tests.support.training import Say

CONFIG = Config(memory_bytes=32 << 20, durable_interval_s=None)


def become(uid: int, gid: int, umask: int = 0o022) -> None:
    """Be another user, with the umask that most have."""
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    os.umask(umask)


def lodge(
    folder: str,
    say: Say,
    how: str = "",
    branch: str = "main",
    user: list[int] | None = None,
    **options: Any,
) -> None:
    """Capture a state on disk and one in memory, and stay.

    ``how``: ``copy`` copies the whole folder first, lease and all; ``fork`` leaves a child behind
      and dies; ``die`` dies.
    """
    if user is not None:
        become(*user)
    tracked = {"weight": torch.zeros(1000)}
    repo = datastates.open(folder, config=CONFIG, **options)
    run = repo.track(tracked=tracked, branch=branch, rng=False)
    tracked["weight"].add_(1)
    kept = run.capture().wait("durable")
    tracked["weight"].add_(1)
    newest = run.capture().wait()
    if how == "copy":
        shutil.copytree(folder, Path(folder).with_name("copied"))
    if how == "fork":
        child = os.fork()
        if child == 0:
            signal.pause()
        os.setpgid(child, child)  # or it would end with the job
        say("child", child, "-")
    say("lodges", kept.uid, newest.uid)
    if how in ("fork", "die"):
        os._exit(0)
    signal.pause()


def visit(folder: str, say: Say, user: list[int], branch: str = "", **options: Any) -> None:
    """Open as another user, say what the head of ``main`` is; train on ``branch``, if there is
    one, until its state is durable."""
    become(*user)
    with datastates.open(folder, config=CONFIG, **options) as repo:
        head = repo.state("main")
        say("main", head.uid, head.status)
        if branch:
            run = repo.track(tracked={"weight": torch.ones(1000)}, branch=branch, rng=False)
            say(branch, run.capture().wait("durable").uid, "-")


def put_at_once(folder: str, say: Say, user: list[int]) -> None:
    """Put a state as another user, who would rather not wait for a lock: says whether it was
    ``put``, or ``waits``."""
    become(*user)
    lock = fcntl.flock
    fcntl.flock = lambda fd, how: lock(fd, how | fcntl.LOCK_NB)
    try:
        LocalTier(Path(folder)).put(small("s", 1))
    except Unavailable as exc:
        say("waits" if isinstance(exc.__cause__, BlockingIOError) else exc)
    else:
        say("put")


def visit_empty(folder: str, say: Say, user: list[int]) -> None:
    """Make a repository as another user, and a state in it."""
    become(*user)
    with (
        datastates.open(folder, config=CONFIG) as repo,
        repo.track(tracked={"weight": torch.ones(1000)}, rng=False) as run,
    ):
        run.capture().wait("durable")
        repo.tag("kept", "main")
    say("made")


def tidy(folder: str, say: Say, user: list[int], rev: str) -> None:
    """As another user: name a state that somebody else made, train on from it, and drop the
    bytes of a state that is named no more."""
    become(*user)
    tracked = {"weight": torch.ones(1000)}
    with datastates.open(folder, config=CONFIG) as repo:
        repo.tag("seen", rev)
        with repo.track(tracked=tracked, branch="tidy", start="seen", rng=False) as run:
            dropped = run.capture().wait("durable")
            tracked["weight"].add_(1)
            run.capture().wait("durable")
        repo.delete_ref("seen")
        evict(repo.core, dropped.uid)
        say("dropped", repo.state(dropped.uid).status)
