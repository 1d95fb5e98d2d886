"""Garbage is collected again and again beside processes that capture and evict, and others that
read: nobody misses a byte.

    python -m tests.drivers.collecting --captures 300

Four processes train on branches of their own, make every other state durable, and evict older ones.
Two read states that are on disk, and compare them bit for bit with what was live. One collects.
Then everything is verified and read once more.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import datastates
from datastates import Config, Conflict, Status
from datastates.errors import NotFound, Unavailable
from datastates.maintenance.retention_pass import evict
from datastates.storage.local import LocalTier
from tests.drivers.crashes import restored
from tests.support.dying import BALLAST, Say, durable_in, frozen, live_of
from tests.support.forge import forge
from tests.support.training import begin, update

TRAININGS, READERS = 4, 2
CONFIG = Config(memory_bytes=32 << 20, durable_interval_s=None, retention="all")


def capture(folder: str, branch: str, captures: int, say: Say) -> None:
    """Train a branch, and drop what is older than its newest three on disk.

    Says how many were captured, and how many evicted."""
    torch.set_num_threads(1)
    kept, evicted = list[str](), 0
    with datastates.open(folder, config=CONFIG) as repo:
        ballast = torch.zeros(BALLAST)
        run, model, optimizer = begin(
            repo, branch, lambda *words: None, objects={"frozen": frozen()}, ballast=ballast
        )
        for number in range(captures):
            loss = update(model, optimizer)
            taken = run.capture(metrics={"loss": loss}, message=live_of(model, optimizer, ballast))
            if number % 2 == 0:
                kept.append(taken.wait("durable").uid)
            if len(kept) > 3:
                try:
                    evict(repo.core, kept.pop(0))
                    evicted += 1
                except Conflict:
                    continue
        run.close()
    say("captures", captures)
    say("evictions", evicted)


def read(folder: str, going: str, seed: int, say: Say) -> None:
    """Restore states that are on disk until ``going`` is gone.

    Says how many came back, and how many had been evicted meanwhile."""
    torch.set_num_threads(1)
    choose, counts = random.Random(seed), Counter[str]()
    with datastates.open(folder, config=CONFIG) as repo:
        say("beginnings", 1)
        is_over = False
        while not is_over:
            is_over = not Path(going).exists()
            there = list(durable_in(repo).items())
            for uid, live in choose.sample(there, min(3, len(there))):
                try:
                    assert restored(repo, uid) == live, uid
                    counts["reads"] += 1
                except (NotFound, Unavailable):
                    if repo.state(uid).status is Status.DURABLE:
                        raise
                    counts["reads of states that were evicted meanwhile"] += 1
    for name, number in counts.items():
        say(name.replace(" ", "_"), number)


def collect(folder: str, going: str, say: Say) -> None:
    """Collect garbage until ``going`` is gone, and once more. Says how often, and what went."""
    counts, is_over = Counter[str](), False
    with datastates.open(folder, config=CONFIG) as repo:
        say("beginnings", 1)
        while not is_over:
            is_over = counts["collections"] > 0 and not Path(going).exists()
            report = repo.gc()
            assert not report.left, report.left
            counts.update(
                collections=1,
                packs_deleted=report.packs,
                packs_rewritten=report.rewritten,
                bytes_freed=report.bytes_freed,
            )
    for name, number in counts.items():
        say(name, number)


def drive(folder: Path, captures: int, *, seed: int = 0) -> Counter[str]:
    """So many captures of each training, beside readers and collections: what was done.

    What goes wrong raises."""
    runs, going = folder / "runs", folder / "going"
    going.touch()
    datastates.open(runs).close()
    with forge(folder, ["tests.drivers.collecting"]) as smith:
        call = "tests.drivers.collecting:"
        others = [
            smith.start(f"{call}read", folder=str(runs), going=str(going), seed=seed * 10 + number)
            for number in range(READERS)
        ]
        others.append(smith.start(f"{call}collect", folder=str(runs), going=str(going)))
        lines = [job.lines.readline() for job in others]
        trainings = [
            smith.start(
                f"{call}capture", folder=str(runs), branch=f"branch-{number}", captures=captures
            )
            for number in range(TRAININGS)
        ]
        counts: Counter[str] = Counter()
        try:
            lines += [line for job in trainings for line in job.say()]
        finally:
            going.unlink()
            lines += [line for job in others for line in job.say()]
            codes = [job.wait() for job in (*trainings, *others)]
        assert not any(codes), f"ended with {codes}:\n{smith.errors()}"
    for line in lines:
        name, number = line.split()
        counts[name.replace("_", " ")] += int(number)
    return counts + _check(runs)


def _check(runs: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    with datastates.open(runs, config=CONFIG) as repo:
        assert not repo.gc().left
        assert not repo.verify().damage
        durable = durable_in(repo)
        for ref in repo.refs():
            assert ref.state in durable, ref.name
        for uid, live in durable.items():
            assert restored(repo, uid) == live, uid
            counts["states restored in the end"] += 1
    assert set(LocalTier(runs / "packs").uids()) == set(durable)
    return counts


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captures", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("datastates").setLevel(logging.ERROR)
    folder, began = Path(tempfile.mkdtemp(prefix="collecting-")), time.monotonic()
    counts = drive(folder, given.captures, seed=given.seed)
    for name, number in sorted(counts.items()):
        sys.stdout.write(f"{number:12d}  {name}\n")
    sys.stdout.write(f"{time.monotonic() - began:12.0f}  seconds\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
