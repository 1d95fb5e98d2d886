"""The cost of a capture at every step in the loops of frameworks, compared with a plain loop and
with the framework's own checkpoints.

    python benchmarks/integrations.py [--part accelerate] [--model tiny|small|medium] [--rounds 7]
    [--steps 20] [--json FILE] [--folder DIR]

A part is a framework: a module in this folder, named in ``PARTS``, whose ``ways()`` are its loops
with and without captures. All ways of a part and the plain loop take some steps in turn, round
after round, in one process. Each way is compared with its floor, the same loop without captures,
directly before and after it. The result is the wall and CPU time of the steps. ``points`` is the
overhead of a way minus the overhead of the plain loop with the same cadence.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine, out, short, spread, table
from gpt import MEDIUM, SMALL, TINY
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import datastates
from datastates.config import Config
from datastates.demo.model import GPT, Shape

PARTS = {
    "accelerate": "integrations_accelerate",
    "transformers": "integrations_transformers",
    "lightning": "integrations_lightning",
    "dcp": "integrations_dcp",
    "files": "integrations_files",
}
"""The module of each framework."""

MODELS = {"tiny": TINY, "small": SMALL, "medium": MEDIUM}
WARM_UP = 5

Steps = Iterator[object]
"""A training: each ``next`` makes one step, and captures if the way captures.

``close`` of the generator ends it."""


Save = Callable[[dict[str, Any], Path, int], object]
"""Saves the state of a step, by its number, in a folder."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all ways train alike."""

    shape: Shape
    batch: int = 4

    def model(self) -> GPT:
        """The model, the same for all.

        Its weights are not tied: a Trainer's own checkpoints refuse tied weights of a plain module.
        """
        torch.manual_seed(0)
        model = GPT(self.shape)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model

    def optimizer(self, model: GPT) -> AdamW:
        """Its optimizer."""
        return AdamW(model.parameters(), lr=1e-4)

    def data(self) -> TensorDataset:
        """Random tokens; enough batches that no epoch of it ends in a round."""
        length = min(self.shape.context, 128) + 1
        return TensorDataset(torch.randint(0, self.shape.vocabulary, (512 * self.batch, length)))

    def loader(self) -> DataLoader[Any]:
        """Shuffled, without workers."""
        return DataLoader(self.data(), batch_size=self.batch, shuffle=True)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train.

    ``floor`` names the same loop without captures, and is None for such a loop. ``like`` names the
    way of the plain loop."""

    name: str
    begin: Callable[[Setting, Path], Steps]
    floor: str | None = None
    like: str | None = None


class Turns:
    """A training in a framework's loop, on a separate thread. Each ``next`` makes one step."""

    def __init__(self) -> None:
        self._asked, self._made = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._error: BaseException | None = None

    def wait(self) -> bool:
        """Called at the begin of a step, after all work of the last step. Returns whether the
        training should end."""
        self._made.release()
        self._asked.acquire()
        return self._is_over

    def steps(self, train: Callable[[], None]) -> Steps:
        """Each ``next`` makes one."""

        def run() -> None:
            try:
                train()
            except BaseException as exc:  # wake the thread that waits for a step
                self._error = exc
            finally:
                self._made.release()

        thread = threading.Thread(target=run, name="trainer")
        thread.start()
        self._made.acquire()
        try:
            while True:
                self._asked.release()
                self._made.acquire()
                if self._error is not None:
                    raise self._error
                yield None
        finally:
            self._is_over = True
            self._asked.release()
            thread.join()


@dataclass(slots=True)
class Round:
    """Seconds a step: wall, and CPU of the process."""

    wall_s: float
    cpu_s: float


def own_loop(cadence: Mapping[str, Any] | None) -> Callable[[Setting, Path], Steps]:
    """The plain loop. ``cadence`` are options of ``track``; None captures nothing."""

    def begin(setting: Setting, folder: Path) -> Steps:
        model = setting.model()
        optimizer, loader = setting.optimizer(model), setting.loader()

        def update(tokens: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(tokens)
            loss.backward()
            optimizer.step()
            return loss

        if cadence is None:
            while True:
                for (tokens,) in loader:
                    yield update(tokens)
        config = Config(retention="latest:3")
        with (
            datastates.open(folder, config=config) as repo,
            repo.track(model=model, optimizer=optimizer, **cadence) as run,
        ):
            while True:
                for (tokens,) in run.steps(loader):
                    yield run.capture(metrics={"loss": update(tokens)})

    return begin


def saving(setting: Setting, folder: Path, save: Save | None) -> Steps:
    """A loop that passes its whole state to ``save`` at each step, if there is one."""
    folder.mkdir(exist_ok=True, parents=True)
    model = setting.model()
    optimizer, loader = setting.optimizer(model), setting.loader()
    step = 0
    while True:
        for (tokens,) in loader:
            optimizer.zero_grad()
            loss: torch.Tensor = model(tokens)
            loss.backward()
            optimizer.step()
            step += 1
            if save is not None:
                save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    },
                    folder,
                    step,
                )
            yield loss


MEMORY: dict[str, Any] = {}
DURABLE: dict[str, Any] = {"durable_every": 1}
OWN = [
    Way("own loop", own_loop(None)),
    Way("own loop, datastates", own_loop(MEMORY), "own loop"),
    Way("own loop, datastates, every step durable", own_loop(DURABLE), "own loop"),
]


def measure(
    ways: Sequence[Way], setting: Setting, folder: Path, rounds: int, count: int
) -> dict[str, list[Round]]:
    """Each way in turn, ``rounds`` times after a warm-up turn, with its floor before and after."""
    trainings = {
        way.name: way.begin(setting, folder / str(number)) for number, way in enumerate(ways)
    }
    for training in trainings.values():
        _take(training, WARM_UP)
    found: dict[str, list[Round]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in (way for way in ways if way.floor is not None):
            before = _take(trainings[str(way.floor)], count)
            here = _take(trainings[way.name], count)
            after = _take(trainings[str(way.floor)], count)
            found[str(way.floor)] += [before, after]
            found[way.name].append(
                Round(
                    here.wall_s / ((before.wall_s + after.wall_s) / 2),
                    here.cpu_s / ((before.cpu_s + after.cpu_s) / 2),
                )
            )
    for training in trainings.values():
        with suppress(AttributeError):
            training.close()  # type: ignore[attr-defined]  # generators have it
    return found


def _take(training: Steps, count: int) -> Round:
    os.sync()  # dirty pages of another way must not slow the next one
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(training)
    return Round((time.perf_counter() - wall) / count, (time.process_time() - cpu) / count)


def report(ways: Sequence[Way], found: Mapping[str, list[Round]]) -> dict[str, Any]:
    """Prints a table. Returns its values, by way."""
    rows, said = [], dict[str, Any]()
    for way in ways:
        walls, cpus = (
            [each.wall_s for each in found[way.name]],
            [each.cpu_s for each in found[way.name]],
        )
        if way.floor is None:
            rows.append([way.name, f"{spread(walls, 1e3)} ms", f"{spread(cpus, 1e3)} ms", ""])
            said[way.name] = {"step_ms": statistics.median(walls) * 1e3}
            continue
        wall, cpu = ([100 * (each - 1) for each in ratios] for ratios in (walls, cpus))
        points = (
            ""
            if way.like is None
            else short(statistics.median(wall) - said[way.like]["wall_percent"])
        )
        rows.append([way.name, f"{spread(wall)} %", f"{spread(cpu)} %", points])
        said[way.name] = {
            "wall_percent": statistics.median(wall),
            "cpu_percent": statistics.median(cpu),
            "points": points,
        }
    out(table(["way", "wall a step, or over its floor", "CPU", "points"], rows))
    return said


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    out(machine())
    said = {}
    for part in chosen.part or PARTS:
        ways: list[Way] = [*OWN, *importlib.import_module(PARTS[part]).ways()]
        folder = Path(tempfile.mkdtemp(prefix="integrations-", dir=chosen.folder))
        try:
            out(f"\n{part}: GPT {chosen.model}, {chosen.rounds} rounds of {chosen.steps} steps")
            said[part] = report(
                ways,
                measure(ways, Setting(MODELS[chosen.model]), folder, chosen.rounds, chosen.steps),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
