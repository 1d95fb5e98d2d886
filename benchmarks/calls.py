"""How much of the package one operation runs: its files, functions and calls, and the deepest
stack.

    python benchmarks/calls.py [--json FILE] [--by-file OPERATION]

A Linear(8, 8) with AdamW is captured, restored, found and cloned, each twice before it is counted.
``sys.setprofile`` counts the calls of Python functions inside the package, in all threads that the
operation starts or wakes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import cast

import torch
from common import machine, out, table

import datastates

PACKAGE = str(Path(datastates.__file__).parent)
FOLDERS = (PACKAGE, *(str(Path(PACKAGE).parent / name) for name in ("lineage", "transport", "api")))


class Counts:
    """The calls of the package's functions while it counts, by code object."""

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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = Counts()
    threading.setprofile(counts)  # before the first import of the engine starts a thread
    sys.setprofile(counts)
    out(machine())
    rows, figures = [], {}
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
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


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
