"""A training of small states that is killed at any moment: all that it captured until shortly
before can be restored.

python -m tests.engine.test_kills [SEEDS]    # says for each seed how much was lost
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Status
from tests.support.effort import seeds
from tests.support.forge import Forge, forge
from tests.support.training import Say, digest, make_small, update

LOST_S = 0.2
"""No capture older than this is lost when the process is killed, on a machine that is not busy
with something else. On a busy one, no more captures are lost than the training makes in that
time on a quiet one."""

STEP_S = 0.003


def train(folder: str, say: Say) -> None:
    """Small states at steps of 3 ms until somebody kills the process; says each capture's uid,
    its time and the digest of what was live."""
    torch.set_num_threads(1)
    model, optimizer = make_small()
    with (
        datastates.open(folder) as repo,
        repo.track(model=model, optimizer=optimizer) as run,
    ):
        while True:
            began = time.monotonic()
            loss = update(model, optimizer)
            taken = run.capture(metrics={"loss": loss})
            say(taken.uid, time.monotonic(), digest(model, optimizer))
            while time.monotonic() - began < STEP_S:  # as a training that computes
                pass


@dataclass(frozen=True, slots=True)
class Killed:
    """What a kill left: how many states were captured and can be restored, and the age of the
    oldest one that was lost."""

    captured: int
    restorable: int
    lost_s: float

    @property
    def is_little(self) -> bool:
        """Whether no more was lost than may be."""
        return self.lost_s <= LOST_S or self.captured - self.restorable <= LOST_S / STEP_S


def kill(jobs: Forge, folder: Path, seed: int) -> Killed:
    """Kill a training at a random moment, and restore every state that is there."""
    choose = random.Random(seed)
    job = jobs.start("tests.engine.test_kills:train", folder=str(folder))
    lines = [job.lines.readline() for _ in range(choose.randrange(1, 300))]
    threading.Event().wait(choose.uniform(0, 0.3))
    killed_at = time.monotonic()
    job.kill(signal.SIGKILL)
    lines += job.say()
    assert job.wait() == -signal.SIGKILL, jobs.errors()
    captured = [(uid, float(at), live) for uid, at, live in map(str.split, lines)]
    lost_s, restorable = 0.0, 0
    with datastates.open(folder) as repo:
        known = {state.uid: state for state in repo.log("main")} if repo.refs() else {}
        for uid, at, live in captured:
            state = known.get(uid)
            if state is None or state.status is not Status.DURABLE:
                lost_s = max(lost_s, killed_at - at)
                continue
            model, optimizer = make_small()
            repo.verify(uid)
            assert repo.restore(uid, model=model, optimizer=optimizer).restored
            assert digest(model, optimizer) == live, uid
            restorable += 1
    return Killed(len(captured), restorable, lost_s)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with forge(tmp_path_factory.mktemp("forge"), ["tests.engine.test_kills"]) as opened:
        yield opened


@pytest.mark.parametrize("seed", seeds(20))
def test_a_kill_loses_captures_of_the_last_moments_only(
    seed: int, tmp_path: Path, jobs: Forge
) -> None:
    found = kill(jobs, tmp_path, seed)
    assert found.is_little, found


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as name,
        forge(Path(name), ["tests.engine.test_kills"]) as opened,
    ):
        for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
            found = kill(opened, Path(name, f"runs-{number}"), number)
            sys.stdout.write(
                f"seed {number}: {found.restorable} of {found.captured}, lost"
                f" {found.lost_s:.3f} s\n"
            )
