"""Counts the function calls of an operation, and times a capture on the training thread.

    python benchmarks/calls.py [--json FILE] [--by-file OPERATION] [--rounds N]

A Linear(8, 8) with AdamW is captured, restored, found and cloned, each twice before it is counted.
``sys.setprofile`` counts the calls of Python functions inside the package, in all threads that the
operation starts or wakes. Then ``capture()`` of a three-layer MLP is timed in turns with a clone of
its tensors. Finally, a training of 1M parameters with steps of 10 ms runs in turn without captures,
with one in memory at every step, and with a blocking copy at every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import CodeType, FrameType
from typing import cast

import torch
from common import machine, out, short, spread, table

import datastates

PACKAGE = str(Path(datastates.__file__).parent)
FOLDERS = (PACKAGE, *(str(Path(PACKAGE).parent / name) for name in ("lineage", "transport", "api")))


class Counts:
    """The calls of the package's functions, by code object."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.main: Counter[CodeType] = Counter()
        self.deepest = 0
        self.active = False
        self._lock = threading.Lock()
        self._main = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not self.active or not frame.f_code.co_filename.startswith(FOLDERS):
            return
        depth, caller = 0, cast("FrameType | None", frame)
        while caller is not None:
            depth += caller.f_code.co_filename.startswith(FOLDERS)
            caller = caller.f_back
        with self._lock:
            self.calls[frame.f_code] += 1
            if threading.get_ident() == self._main:
                self.main[frame.f_code] += 1
            self.deepest = max(self.deepest, depth)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.calls.clear()
        self.main.clear()
        self.deepest = 0
        self.active = True
        try:
            yield
        finally:
            self.active = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--by-file", metavar="OPERATION", help="print the files and functions of this operation"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each timing (5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = Counts()
    threading.setprofile(counts)  # before the first import of the engine starts a thread
    sys.setprofile(counts)
    out(machine())
    rows, figures = [], dict[str, object]()
    with tempfile.TemporaryDirectory() as folder:
        for name, operation, main_only in operations(Path(folder)):
            operation()
            operation()
            with counts.counting():
                operation()
            calls = counts.main if main_only else counts.calls
            files = Counter(code.co_filename for code in calls.elements())
            figure = {
                "files": len(files),
                "functions": len(calls),
                "calls": calls.total(),
                "deepest": counts.deepest,
            }
            figures[name] = figure
            rows.append([name, *map(str, figure.values())])
            if name == arguments.by_file:
                for code, count in sorted(
                    calls.items(), key=lambda item: (item[0].co_filename, item[0].co_firstlineno)
                ):
                    out(
                        f"{count:5}"
                        f" {Path(code.co_filename).relative_to(Path(PACKAGE).parent)}:{code.co_firstlineno}"
                        f" {code.co_qualname}"
                    )
    sys.setprofile(None)
    threading.setprofile(None)
    out(table(["operation", "files", "functions", "calls", "deepest stack"], rows))
    with tempfile.TemporaryDirectory() as folder:
        figures["capture of an MLP"] = blocking(Path(folder), arguments.rounds)
        figures["training of 1M parameters"] = training(Path(folder), arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


def blocking(folder: Path, rounds: int) -> dict[str, float]:
    """The time for which ``capture`` of a three-layer MLP blocks the training thread, and the time
    of a clone."""
    step, model, optimizer = job(64)
    samples: dict[str, list[float]] = {"clone": [], "capture": []}
    with (
        datastates.open(folder / "mlp") as repo,
        repo.track(model=model, optimizer=optimizer, durable_every=1_000_000) as run,
    ):
        for number in range(100 * rounds + 30):
            step()
            for name, act in (
                ("clone", lambda: cloned(model, optimizer)),
                ("capture", lambda: run.capture(metrics={"loss": 1.0})),
            ):
                began = time.perf_counter()
                act()
                if number >= 30:
                    samples[name].append(1e3 * (time.perf_counter() - began))
    rows = [
        [name, *(short(value) for value in statistics.quantiles(found, n=10)[0::4])]
        for name, found in samples.items()
    ]
    out(table(["a three-layer MLP, ms", "10th percentile", "median", "90th percentile"], rows))
    return {name: statistics.median(found) for name, found in samples.items()}


def training(folder: Path, rounds: int) -> dict[str, float]:
    """The time of a step with captures and with a blocking copy, relative to a plain step."""
    times: dict[str, list[float]] = {"plain": [], "captures in memory": [], "blocking copy": []}
    step, model, optimizer = job(560)
    spare = torch.randn(200, 200)

    def padded() -> None:
        end = time.perf_counter() + 10e-3
        step()
        while time.perf_counter() < end:
            spare.mm(spare)

    with (
        datastates.open(folder / "training") as repo,
        repo.track(model=model, optimizer=optimizer, durable_every=1_000_000) as run,
    ):
        ways: dict[str, Callable[[], object]] = {
            "plain": lambda: None,
            "captures in memory": lambda: run.capture(metrics={"loss": 1.0}),
            "blocking copy": lambda: cloned(model, optimizer),
        }
        for round_ in range(rounds + 1):
            for name, act in ways.items():
                began = time.perf_counter()
                for _ in range(100):
                    padded()
                    act()
                if round_:  # the first clone touches the memory that the next ones use again
                    times[name].append(10 * (time.perf_counter() - began))
    rows = [
        [
            name,
            spread(found),
            spread([each / plain for each, plain in zip(found, times["plain"], strict=True)]),
        ]
        for name, found in times.items()
    ]
    out(table(["1M parameters, a step of 10 ms", "ms a step", "over plain"], rows))
    return {name: statistics.median(found) for name, found in times.items()}


def job(width: int) -> tuple[Callable[[], None], torch.nn.Module, torch.optim.Optimizer]:
    """A three-layer MLP with AdamW, and a function that trains it for a step."""
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, *map(deepcopy, layers), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(8, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step, model, optimizer


def cloned(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """A copy of every tensor of both state_dicts."""
    state = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(t for of in state.values() for t in of.values())]
    return [tensor.clone() for tensor in tensors]


def operations(folder: Path) -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Each operation with its name, and whether only the calls of the main thread count."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(4, 8)

    def step() -> datastates.Tracker:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        return run

    with datastates.open(folder / "runs") as repo, datastates.open(folder / "copy") as other:
        with repo.track(branch="main", model=model, optimizer=optimizer, durable_every=1) as run:
            yield "capture (main thread)", lambda: step().capture(metrics={"loss": 1.0}), True
            yield (
                "durable capture",
                lambda: step().capture(metrics={"loss": 1.0}).wait("durable"),
                False,
            )
        yield "find (main thread)", lambda: repo.find("metrics.loss < 2 limit 1"), True
        yield "load", lambda: repo.load("main"), False
        yield (
            "restore",
            lambda: repo.restore("main", model=model, optimizer=optimizer),
            False,
        )
        yield "tag (main thread)", tagging(repo), True
        yield "clone", cloning(repo, other), False


def tagging(repo: datastates.Repository) -> Callable[[], object]:
    names = iter(f"t{number}" for number in range(100))
    return lambda: repo.tag(next(names), "main")


def cloning(repo: datastates.Repository, other: datastates.Repository) -> Callable[[], object]:
    states = iter(repo.log("main"))

    def clone() -> None:
        with repo.serve() as server, datastates.connect(server.url) as peer:
            peer.clone(next(states), repo=other)

    return clone


if __name__ == "__main__":
    main()
