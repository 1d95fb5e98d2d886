"""The states that a training keeps with the default settings, and their cost: states of 4 kB to
1.25 GB at steps of 3 ms to 1 s.

    python benchmarks/kept.py [--states 4k 6M …] [--seconds S] [--rounds N] [--folder DIR] [--json
    FILE] [--quick] python benchmarks/kept.py --every    # durable_every=1, a state of 100 kB, steps
    of 0.9 and 3 ms: what a step takes longer

Each training runs in a separate process, which computes on one thread. A step is a fixed number of
matrix products and an update of all weights by AdamW. On a quiet machine, a step takes as long as
the table shows. The methods take turns in each round: ``plain`` keeps nothing, ``ours`` captures
each step, ``torch.save`` and ``DCP`` save as many states as ours kept in that round, evenly spaced.
Another process opens the folder after each training of ours: it counts the states that can be
restored, and reads the best one by val_loss and some others.

``files`` counts the files in the folder of packs, and the bytes on disk are their sizes. ``over``
compares the time of all steps with the same steps of ``plain``. ``at exit`` is the time that
closing takes afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from common import machine, out, short, spread, table
from torch import nn

import datastates
from datastates import Config, Status
from datastates.config import parse_bytes

dcp: Any = torch.distributed.checkpoint  # for type checkers it exports nothing

SETTINGS: dict[str, object] = {}
"""Of ``Config``. Empty means the default settings."""

STEPS_MS = {
    "4k": (3, 10),
    "240k": (3, 10),
    "6M": (18, 30, 100),
    "60M": (100, 1000),
    "1250M": (1000,),
}
QUICK_MS: dict[str, tuple[float, ...]] = {"4k": (3,), "240k": (10,), "6M": (30,)}
EVERY_MS: dict[str, tuple[float, ...]] = {"100k": (0.9, 3)}

METHODS = ("plain", "ours", "torch.save", "DCP")

READ = 8
"""The number of states that are read in addition to the best one."""

ROWS = 1000
"""The highest number of rows of a weight. A state of 4 kB has four weights, and a state of 1.25 GB
has 104."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training: its method, the bytes of its state, its steps, the products of a step, and the
    share of steps to save."""

    method: str
    state_bytes: int
    steps: int
    products: int
    folder: str
    share: float = 0.0
    settings: dict[str, object] | None = None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", nargs="+", choices=STEPS_MS, default=list(STEPS_MS))
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of a training; it has at least ten steps"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="three trainings of a second, once: under two minutes"
    )
    parser.add_argument("--every", action="store_true")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "datastates-benchmark"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        out(json.dumps(JOBS[(job := Job(**json.loads(arguments.job))).method](job)))
        return 0
    out(machine())
    if arguments.quick:
        arguments.seconds, arguments.rounds = 1.0, 1
    steps_ms = (
        EVERY_MS
        if arguments.every
        else QUICK_MS
        if arguments.quick
        else {name: STEPS_MS[name] for name in arguments.states}
    )
    methods = METHODS[:2] if arguments.every else METHODS
    settings: dict[str, object] = {"durable_every": 1} if arguments.every else SETTINGS
    out(f"settings: {settings or 'default'}; {arguments.rounds} rounds of {arguments.seconds:g} s")
    found = [
        measure(arguments, name, step_ms, methods, settings)
        for name, each in steps_ms.items()
        for step_ms in each
    ]
    out("\n" + (every_report(found) if arguments.every else report(found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    return 0


# One training, in a separate process


class Training:
    """A model of weights of equal size, whose gradients are fixed, with AdamW: a third of the
    state are the weights."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        count = job.state_bytes // 12
        width = min(ROWS, max(1, int((count / 4) ** 0.5)))
        shapes = [(width, width)] * max(1, count // width**2)
        self.model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        for weight in self.model:
            weight.grad = torch.randn_like(weight)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.products = job.products
        self._matrix = torch.randn(64, 64) / 8
        self._moved = torch.randn(64, 64)

    def compute(self) -> None:
        """The matrix products of a step, in place of forward and backward."""
        for _ in range(self.products):
            torch.mm(self._matrix, self._moved)

    def step(self) -> None:
        self.compute()
        self.optimizer.step()

    @property
    def state_bytes(self) -> int:
        return int(12 * sum(weight.numel() for weight in self.model))

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }


def calibrate(job: Job) -> dict[str, float]:
    """The seconds of one product and of one update, the fastest of several."""
    training = Training(job)
    training.products = 100
    for _ in range(3):
        training.step()
    product_s = min(_seconds(training.compute) for _ in range(20)) / training.products
    return {
        "product_s": product_s,
        "update_s": min(_seconds(training.optimizer.step) for _ in range(5)),
    }


def plain(job: Job) -> dict[str, float]:
    training = Training(job)

    def steps() -> None:
        for _ in range(job.steps):
            training.step()

    return {"wall_s": _seconds(steps), "state_bytes": training.state_bytes}


def ours(job: Job) -> dict[str, float]:
    training = Training(job)
    # read from JSON
    repo = datastates.open(job.folder, config=Config(**(job.settings or {})))  # type: ignore[arg-type]
    run = repo.track(model=training.model, optimizer=training.optimizer)
    best_at = 3 * job.steps // 5
    began = time.perf_counter()
    for number in range(job.steps):
        training.step()
        run.capture(metrics={"val_loss": 1 + abs(number - best_at)})
    wall_s = time.perf_counter() - began
    return {"wall_s": wall_s, "exit_s": _seconds(repo.close)}


def saves(job: Job, save: Any) -> dict[str, float]:
    training, due, saved = Training(job), 0.0, 0
    began = time.perf_counter()
    for number in range(job.steps):
        training.step()
        due += job.share
        if due >= 1 - 1e-9:
            due, saved = due - 1, saved + 1
            save(training.state, f"{job.folder}/{number}")
    return {"wall_s": time.perf_counter() - began, "saved": saved}


def dcp_save(state: dict[str, Any], path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its warning that there is one process
        dcp.save(state, checkpoint_id=path, no_dist=True)


def check(job: Job) -> dict[str, Any]:
    """The results after the process of a training ended: states that can be restored, and bytes on
    disk."""
    packs = Path(job.folder, "packs")
    with datastates.open(job.folder) as repo:
        states = repo.find("step > 0")
        kept = sorted(
            (state for state in states if state.status is Status.DURABLE),
            key=lambda state: state.step,
        )
        best = repo.find("metrics.val_loss > 0 order by metrics.val_loss limit 1")[0]
        is_best = best.status is Status.DURABLE
        for state in [
            *([best] if is_best else []),
            *random.Random(0).sample(kept, min(READ, len(kept))),
        ]:
            repo.verify(state.uid)
    files = [path for path in packs.iterdir() if path.is_file()]
    gaps = [later.step - earlier.step for earlier, later in pairwise(kept)]
    return {
        "kept": len(kept),
        "is_best": is_best,
        "files": len(files),
        "disk_bytes": sum(path.stat().st_size for path in files),
        "longest_gap": max(gaps, default=0),
    }


JOBS: dict[str, Any] = {
    "calibrate": calibrate,
    "plain": plain,
    "ours": ours,
    "torch.save": lambda job: saves(job, torch.save),
    "DCP": lambda job: saves(job, dcp_save),
    "check": check,
}


def _seconds(act: Any) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


# All of them


def run(job: Job) -> dict[str, Any]:
    words = {name: getattr(job, name) for name in Job.__slots__}
    command = [sys.executable, __file__, "--job", json.dumps(words)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{job} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(
    arguments: argparse.Namespace,
    name: str,
    step_ms: float,
    methods: tuple[str, ...],
    settings: dict[str, object],
) -> dict[str, Any]:
    """All rounds of one state and one step."""
    size = parse_bytes(name)
    costs = run(Job("calibrate", size, 0, 0, ""))
    products = max(0, round((step_ms / 1e3 - costs["update_s"]) / costs["product_s"]))
    steps = max(10, round(arguments.seconds / max(step_ms / 1e3, costs["update_s"])))
    rounds = []
    for number in range(arguments.rounds):
        share, found = 0.0, dict[str, dict[str, Any]]()
        # Ours goes before those that save the same share; each other round begins with it.
        for method in methods if number % 2 == 0 else (methods[1], *methods[2:], methods[0]):
            arguments.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                job = Job(method, size, steps, products, folder, share, settings)
                found[method] = run(job)
                if method == "ours":
                    found["check"] = run(Job("check", size, steps, products, folder))
                    share = found["check"]["kept"] / steps
        rounds.append(found)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    state_bytes = rounds[0]["plain"]["state_bytes"]
    update_ms = short(1e3 * costs["update_s"])
    out(
        f"  state {name} ({state_bytes:,} bytes), step {step_ms:g} ms: {steps} steps, {products}"
        f" products, update {update_ms} ms"
    )
    return {
        "state": name,
        "state_bytes": state_bytes,
        "step_ms": step_ms,
        "steps": steps,
        "rounds": rounds,
    }


def over(found: dict[str, Any], method: str) -> list[float]:
    return [each[method]["wall_s"] / each["plain"]["wall_s"] - 1 for each in found["rounds"]]


def report(found: list[dict[str, Any]]) -> str:
    rows = []
    for each in found:
        checks = [one["check"] for one in each["rounds"]]
        kept, files = (
            statistics.median(one["kept"] for one in checks),
            statistics.median(one["files"] for one in checks),
        )
        ratios = [
            one["disk_bytes"] / (one["kept"] * each["state_bytes"]) for one in checks if one["kept"]
        ]
        goal, reached = (
            0.05 if each["step_ms"] >= 10 else 0.25,
            statistics.median(over(each, "ours")),
        )
        rows.append(
            [
                each["state"],
                f"{each['step_ms']:g}",
                f"{kept:.0f} of {each['steps']} ({100 * kept / each['steps']:.0f} %)",
                f"{max(one['longest_gap'] for one in checks)}",
                "yes" if all(one["is_best"] for one in checks) else "NO",
                f"{files:.0f}",
                spread(ratios) if ratios else "",
                short(
                    1e3
                    * statistics.median(one["plain"]["wall_s"] for one in each["rounds"])
                    / each["steps"]
                ),
                *(spread(over(each, method), 100) for method in METHODS[1:]),
                f"{100 * goal:.0f}: {'met' if reached <= goal else 'MISSED'}",
                short(statistics.median(one["ours"]["exit_s"] for one in each["rounds"])),
            ]
        )
    head = [
        "state",
        "step ms",
        "can be restored",
        "longest gap",
        "best",
        "files",
        "bytes on disk a byte",
        "plain, ms a step",
    ]
    return table(
        [*head, "ours, over %", "torch.save, over %", "DCP, over %", "goal, over %", "at exit s"],
        rows,
    )


def every_report(found: list[dict[str, Any]]) -> str:
    rows = []
    for each in found:
        added = [
            1e3 * (one["ours"]["wall_s"] - one["plain"]["wall_s"]) / each["steps"]
            for one in each["rounds"]
        ]
        checks = [one["check"] for one in each["rounds"]]
        exit_s = [one["ours"]["exit_s"] for one in each["rounds"]]
        kept = min(one["kept"] for one in checks)
        goal = "met" if statistics.median(added) <= 1.0 else "MISSED"
        plain_ms = [1e3 * one["plain"]["wall_s"] / each["steps"] for one in each["rounds"]]
        rows.append(
            [
                f"{each['step_ms']:g}",
                spread(plain_ms),
                spread(added),
                f"1.0: {goal}",
                f"{kept} of {each['steps']}",
                spread(exit_s),
            ]
        )
    return table(
        ["step ms", "plain, ms a step", "added, ms a step", "goal", "can be restored", "at exit s"],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
