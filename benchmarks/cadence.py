"""CheckFreq's interval on a slowed disk, compared with fixed intervals by the overhead of the
training.

Each method has a separate training and repository. The methods take turns: some warm-up steps, then
timed steps. Every method captures each step, so what is compared is writing alone; ``never`` writes
nothing and is the floor. The disk is slowed by ``FaultyDisk``: each call that writes takes as long
as its bytes would. With ``--device-ms`` forward and backward are a wait of that length, as for a
host whose accelerator computes. The optimizer's step and the captures are real. The result then
depends mostly on the disk, and a busy machine disturbs it less.

    python benchmarks/cadence.py --megabytes 50 200 --rounds 3 --steps 60
    python benchmarks/cadence.py --device-ms 60
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import machine, out, short, spread, table
from gpt import Trainer

import datastates
from datastates import Cadence, CheckFreq, Config, Repository, Tracker
from datastates.demo.model import Shape
from datastates.policy.contract import Policy
from datastates.testing import FaultyDisk

SHAPE = Shape(layers=3, heads=4, width=192, context=64, vocabulary=2_000)
"""1.7M parameters; with AdamW 21 MB."""

ROOM = 4.2
"""The number of states in the memory of each training. It is small, so that waiting for the disk
soon delays the training."""


@dataclass
class Method:
    """A training and its turns: seconds a step, and the number of states that waited for the disk
    at the end of each."""

    name: str
    trainer: Trainer
    repo: Repository
    run: Tracker
    device_s: float
    took_s: list[float] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)

    def step(self) -> None:
        if self.device_s:
            threading.Event().wait(self.device_s)
        else:
            self.trainer.backward()
        self.trainer.optimizer.step()
        self.run.capture()

    def turn(self, lead: int, steps: int) -> None:
        for _ in range(lead):
            self.step()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.took_s.append((time.perf_counter() - began) / steps)
        self.behind.append(self.repo.core.runner().pending_writes)
        self.repo.core.runner().drain()


class Methods:
    """The methods of one disk. Closes their repositories."""

    def __init__(self, folder: Path, device_s: float) -> None:
        self._folder, self._device_s = folder, device_s
        self.size = 3 * sum(
            parameter.nbytes for parameter in Trainer.make(SHAPE).model.parameters()
        )
        self._open: list[Repository] = []

    def make(self, name: str, policy: Policy) -> Method:
        trainer = Trainer.make(SHAPE)
        config = Config(memory_bytes=int(ROOM * self.size), cadence=policy, direct_io=False)
        repo = datastates.open(self._folder / name.replace(" ", "-"), config=config)
        self._open.append(repo)
        return Method(name, trainer, repo, repo.track(**trainer.objects), self._device_s)

    def close(self) -> None:
        for repo in self._open:
            repo.close()


def measure(megabytes: float, rounds: int, steps: int, share: float, device_s: float) -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        FaultyDisk(name) as disk,
        closing(Methods(Path(name), device_s)) as methods,
    ):
        disk.slow(megabytes * 1e6)
        chosen = methods.make("checkfreq", CheckFreq(share))
        learnt = learn(chosen)
        choice = chosen.run.cadence
        costs = choice.costs
        assert costs is not None, f"nothing was chosen in {learnt} steps"
        bound = math.ceil(costs.write_s / costs.interval_s)
        intervals = sorted(
            {
                max(1, each)
                for each in (bound // 2, bound - 2, bound - 1, bound, bound + 1, 2 * bound)
            }
        )
        never = methods.make("never", Cadence(None, None))
        fixed = {every: methods.make(f"every {every}", Cadence(every, None)) for every in intervals}
        out(
            f"\n{megabytes:g} MB/s, {methods.size / 1e6:.0f} MB a state: CheckFreq chose after"
            f" {learnt} captures; now {choice.why}"
        )
        turns = [never, chosen, *fixed.values()]
        for round_ in range(rounds):
            for method in turns[round_ % len(turns) :] + turns[: round_ % len(turns)]:
                gc.collect()
                method.turn(min(2 * bound, steps), steps)
        report(never, chosen, fixed, share)
        disk.mend()


def learn(method: Method, most: int = 2000) -> int:
    """Train until the interval is chosen and several writes have confirmed it. Returns the number
    of steps of the choice."""
    count = 0
    while method.run.cadence.costs is None and count < most:
        method.step()
        count += 1
    first = count
    while count < most:
        costs = method.run.cadence.costs
        done = method.run.training.line.costs
        if costs is None or done is None or done.writes >= 12:
            break
        method.step()
        count += 1
    method.repo.core.runner().drain()
    return first


def report(never: Method, chosen: Method, fixed: dict[int, Method], share: float) -> None:
    def over(method: Method) -> list[float]:
        return [took / floor - 1 for took, floor in zip(method.took_s, never.took_s, strict=True)]

    rows = [
        [
            method.name,
            spread(method.took_s, 1e3),
            spread(over(method), 100),
            f"{statistics.median(method.behind):g}",
        ]
        for method in (never, chosen, *fixed.values())
    ]
    out(
        table(
            ["cadence", "ms a step", f"overhead % (asked: {100 * share:g})", "states behind"], rows
        )
    )
    kept = [every for every, method in fixed.items() if statistics.median(over(method)) <= share]
    at = chosen.run.cadence.every
    best = (
        f"the shortest fixed interval within the share: {min(kept)}"
        if kept
        else "no fixed interval kept the share"
    )
    out(
        f"CheckFreq: every {at} captures, overhead {short(100 * statistics.median(over(chosen)))}"
        f" %; {best}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--megabytes",
        type=float,
        nargs="+",
        default=[50.0, 200.0],
        help="what the disk writes in a second",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps that are timed in each turn")
    parser.add_argument(
        "--device-ms", type=float, default=0.0, help="wait so long instead of forward and backward"
    )
    parser.add_argument("--share", type=float, default=0.035)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    out(machine())
    for megabytes in chosen.megabytes:
        measure(megabytes, chosen.rounds, chosen.steps, chosen.share, chosen.device_ms / 1e3)


if __name__ == "__main__":
    main()
