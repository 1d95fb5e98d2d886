"""Interrupts at random moments of captures, restores and closes: nothing hangs, nothing that was
durable is lost.

    python -m tests.drivers.interrupts --count 20000
    python -m tests.drivers.interrupts --count 4000 --seed 100    # a part of it: parts of other
    seeds are others, and their counts add up

A tiny training runs in a process of its own, with handlers that raise, as Ctrl-C and SIGTERM do.
Each act is begun with a timer that fires at some moment of it; what was interrupted goes on with
the same tracker, or after a while with the repository opened anew. Whatever takes longer than
``BOUND_S`` is a hang: the process ends with the stacks of all its threads, and another goes on.
When a process has had its share, has hung or has crashed, each state that it reported as durable is
read again by another and compared bit for bit.

A capture or a restore may be refused once the tracker was closed in part; whatever else is refused,
and every ``close`` that is, is an anomaly, shown with its traceback. Interrupts that a process had
are counted as it reports them, whatever became of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

import torch
from torch import nn

import datastates
from datastates import Capture, Config, DatastatesError, Repository, Status, Tracker
from datastates.errors import Closed, NotFound, Unavailable
from tests.support import warm

BOUND_S = 60.0
"""No act takes so long on the slowest of machines, unless it hangs."""

SHARE = 1000
"""Interrupts of one process."""

ANOMALIES = ("crashes", "hangs", "lost", "refused without a reason")
"""None of these is to be counted."""

_MOST_FAILURES = 10
"""So many processes that crashed or hung are enough."""

_SAY_EVERY = 20
"""Interrupts between two reports of what was done."""

_SIGNALS = {
    "SIGALRM": signal.ITIMER_REAL,
    "SIGVTALRM": signal.ITIMER_VIRTUAL,
    "SIGPROF": signal.ITIMER_PROF,
}
"""By time that goes by, and by time that the process is at work."""


@dataclass
class Training:
    """A tiny training, and what is asked of it.

    ``said`` takes a line for each state that is durable: its uid and its digest."""

    folder: Path
    said: IO[str]
    choose: random.Random
    digests: dict[str, str] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    is_acting: bool = False

    def __post_init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.repo: Repository | None = None
        self.run: Tracker | None = None

    def opened(self) -> Tracker:
        """A tracker that can be used, of a repository that may have been opened for it."""
        if self.repo is None:
            # with 1, states that are captured quickly share packs
            every = self.choose.choice([None, 1])
            self.repo = datastates.open(
                self.folder,
                config=Config(memory_bytes=32 << 20, durable_every=every, durable_interval_s=None),
            )
        if self.run is None:
            self.run = self.repo.track(model=self.model, optimizer=self.optimizer)
        return self.run

    def capture(self) -> None:
        """A step, a capture, and sometimes a wait for it."""
        run = self.opened()
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().sum().backward()
        self.optimizer.step()
        live = digest(self.model, self.optimizer)
        taken = run.capture(message=live)
        self.digests[taken.uid] = live
        self.captures.append(taken)
        if self.choose.random() < 0.2:
            taken.wait(self.choose.choice(["captured", "durable"]))

    def restore(self) -> None:
        """Some state that is there comes back."""
        run = self.opened()
        if not self._has_head():
            return  # a close was interrupted before anything was durable: the branch begins anew
        rev = self.choose.choice(["main", "main~1"])
        try:
            run.restore(rev)
        except (NotFound, Unavailable):
            if rev == "main":
                raise
            return  # given up when a close was interrupted
        if run.head is not None and run.head.message != digest(self.model, self.optimizer):
            raise AssertionError(f"what was restored is not {run.head.uid}")

    def _has_head(self) -> bool:
        return self.opened().head is not None

    def close(self) -> None:
        """The tracker ends, and sometimes the repository."""
        if self.choose.random() < 0.5 and self.run is not None:
            self.run.close()
            self.run = None
        elif self.repo is not None:
            self.repo.close()
            self.repo = self.run = None

    def drop(self) -> None:
        """Go on with another tracker, and where the repository was closed with another of those,
        without closing what there is."""
        self.run = None
        if self.repo is not None and self.repo.core.is_closed:
            self.repo = None

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """As the handlers of a user do; a signal that another thread was given may come when the
        act is over."""
        if self.is_acting:
            raise (Interrupt if number == signal.SIGALRM else Termination)(number)

    def report(self) -> None:
        """Say what is durable by now, and forget it."""
        for taken in [taken for taken in self.captures if taken.status is Status.DURABLE]:
            self.said.write(f"{taken.uid} {self.digests.pop(taken.uid)}\n")
            self.captures.remove(taken)
        self.said.flush()
        del self.captures[:-50]


class Interrupt(KeyboardInterrupt):
    """As Ctrl-C: whoever waits for what is being written gives it up."""


class Termination(SystemExit):
    """As SIGTERM: the exit, which comes next, waits for it."""


def interrupt(training: Training, count: int) -> None:
    """That many interrupts, one an act."""
    for name in _SIGNALS:
        signal.signal(getattr(signal, name), training.signalled)
    for _ in range(3):
        training.capture()
    while training.counts["interrupts"] < count:
        act = training.choose.choices(
            [training.capture, training.restore, training.close], [8, 2, 1]
        )[0]
        name, timer = training.choose.choice(list(_SIGNALS.items()))
        span = 10 ** training.choose.uniform(-5, -1.7)
        faulthandler.dump_traceback_later(BOUND_S, exit=True)
        # an interrupt inside a ``no_grad`` of torch can leave it off: a handler's user puts it on
        # again
        torch.set_grad_enabled(True)
        training.counts[act.__name__] += 1
        try:
            try:
                training.is_acting = True
                signal.setitimer(timer, span)
                act()
            except DatastatesError as error:
                _note_refusal(training, act.__name__, error)
                training.drop()
            signal.setitimer(timer, 0)
            training.is_acting = False
        except (Interrupt, Termination):
            training.is_acting = False
            training.counts["interrupts"] += 1
            training.counts[f"{act.__name__} interrupted"] += 1
            if training.counts["interrupts"] % _SAY_EVERY == 0:
                _say(training.counts)
        training.report()
    _finish(training)


def _note_refusal(training: Training, act: str, error: DatastatesError) -> None:
    training.counts[f"{act} refused: {type(error).__name__}"] += 1
    if act == "close" or not isinstance(error, Closed):
        training.counts["refused without a reason"] += 1
        traceback.print_exception(error)


def _say(counts: Counter[str]) -> None:
    sys.stdout.write(json.dumps(counts) + "\n")
    sys.stdout.flush()


def _finish(training: Training) -> None:
    if training.repo is not None:
        training.repo.close()
    training.report()
    _say(training.counts)
    faulthandler.dump_traceback_later(BOUND_S, exit=True)  # what Python does at exit is an act too


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the weights, and of the optimizer's state."""
    found = hashlib.blake2b(digest_size=12)
    entries = [entry for state in optimizer.state.values() for entry in state.values()]
    for tensor in (*model.state_dict().values(), *entries):
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def _train(folder: Path, said: Path, seed: int, count: int) -> None:
    # each tracker says where it goes on from
    logging.getLogger("datastates").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with said.open("a") as lines:
        interrupt(Training(folder, lines, random.Random(seed)), count)


def _check(folder: Path, said: Path) -> None:
    """In a process of its own: all that was said to be durable is, bit for bit; and the head can
    be restored."""
    model = Training(folder, sys.stdout, random.Random(0)).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lines = [line.split() for line in said.read_text().splitlines()]
    with datastates.open(folder) as repo:
        for uid, live in lines:
            assert repo.state(uid).status is Status.DURABLE, uid
            assert repo.restore(uid, model=model, optimizer=optimizer)
            assert digest(model, optimizer) == live, uid
        head = repo.state("main")
        repo.restore("main", model=model, optimizer=optimizer)
        assert digest(model, optimizer) == head.message, head.uid
    sys.stdout.write(str(len(lines)))


def _process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.drivers.interrupts", *map(str, arguments)]
    return warm.run(command, capture_output=True)


def drive(folder: Path, count: int, *, share: int = SHARE, seed: int = 0) -> Counter[str]:
    """So many interrupts, in processes one after the other: what was done, what hung, what was
    checked."""
    counts: Counter[str] = Counter()
    while counts["interrupts"] < count and counts["hangs"] + counts["crashes"] < _MOST_FAILURES:
        seed += 1
        said = folder / f"said-{seed}"
        said.touch()
        done = _process(
            "--train", folder / f"runs-{seed}", said, seed, min(share, count - counts["interrupts"])
        )
        if done.returncode:
            counts["hangs" if "Timeout" in done.stderr else "crashes"] += 1
            sys.stderr.write(f"process {seed} ended with {done.returncode}\n")
        sys.stderr.write(done.stderr)
        counts.update(json.loads((done.stdout.splitlines() or ["{}"])[-1]))
        checked = _process("--check", folder / f"runs-{seed}", said)
        if checked.returncode:
            counts["lost"] += 1
            sys.stderr.write(checked.stderr)
        else:
            counts["durable, read again"] += int(checked.stdout)
        sys.stderr.write(f"after process {seed}: {dict(counts)}\n")
    return counts


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=4)
    parser.add_argument("--check", nargs=2, type=Path)
    given = parser.parse_args()
    if given.train:
        _train(Path(given.train[0]), Path(given.train[1]), int(given.train[2]), int(given.train[3]))
    elif given.check:
        _check(*given.check)
    else:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            counts = drive(Path(folder), given.count, seed=given.seed)
        for name, number in sorted(counts.items()):
            sys.stdout.write(f"{number:8d}  {name}\n")
        sys.stdout.write(f"{time.monotonic() - began:8.0f}  seconds\n")


if __name__ == "__main__":
    main()
