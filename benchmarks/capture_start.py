"""The first half minute of a training with default settings, from ``open`` on, compared with the
same training without captures.

    python benchmarks/capture.py --part start [--rounds N] [--quick] [--size 1M|30M|100M] [--seconds
    30] [--threads 1]

Each training runs in a separate process, because each process has the cost of a start. All methods
take turns, and every step is captured. The floors are a blocking copy into touched memory, and the
bare prototype, whose copy overlaps the next step. They keep only the newest bytes. The other
library is torch.distributed.checkpoint. If torch has as many threads as there are cores, no core is
free for the background work of captures.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from capture_peers import DcpAsync, ForeachCopy, Method, Objects, Prototype
from common import out, short, spread, table
from gpt import LARGE, MEDIUM, SMALL, TINY, Trainer

import datastates

SHAPES = {"tiny": TINY, "1M": SMALL, "30M": MEDIUM, "100M": LARGE}

SIZES = ("1M", "30M", "100M")

PLAIN, DEFAULT, GIVEN = "plain", "datastates, default settings", "datastates, memory_bytes=4G"
GIVEN_BYTES = 4 << 30

OTHERS: dict[str, Callable[[], Method]] = {
    "blocking memcpy": ForeachCopy,
    "bare prototype, in memory": lambda: Prototype(durable_every=None),
    "dcp.async_save, best settings": lambda: DcpAsync(reuse=True),
}
"""The floors and the other library.

Memory that they allocate and touch before the first step is counted, as for datastates."""

WINDOW_S = 5.0
COUNTED_S = 30.0
"""The time that is compared. The training continues for a minute in total, and its memory is then
measured."""


@dataclass(slots=True)
class Started:
    """One training: the end of each step, counted from ``track``, CPU time a step, and memory at
    the end and at its peak."""

    ends_s: list[float] = field(default_factory=list)
    track_s: float = 0.0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    peak_bytes: int = 0
    said: list[str] = field(default_factory=list)

    def rates(self, until_s: float) -> list[float]:
        """Steps a second, window by window."""
        windows = [index * WINDOW_S for index in range(int(until_s / WINDOW_S))]
        return [
            sum(begin < end <= begin + WINDOW_S for end in self.ends_s) / WINDOW_S
            for begin in windows
        ]

    def worst_s(self) -> float:
        """The longest step, the first one with ``track`` included."""
        return max(after - before for before, after in pairwise([0.0, *self.ends_s]))


def train(size: str, name: str, folder: Path, seconds: float, threads: int) -> Started:
    """Train in this process and capture each step with the method of that name. ``folder`` belongs
    to the method."""
    torch.set_num_threads(threads)
    trainer = Trainer.make(SHAPES[size])
    for _ in range(5):
        _step(trainer)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    found = Started()
    method = (
        OTHERS[name]()
        if name in OTHERS
        else None
        if name == PLAIN
        else _Tracked(GIVEN_BYTES if name == GIVEN else None, found.said)
    )
    cpu, begin = time.process_time(), time.perf_counter()
    if method is not None:
        method.prepare(trainer.objects, folder)
    found.track_s = time.perf_counter() - begin
    while time.perf_counter() - begin < seconds:
        _step(trainer)
        if method is not None:
            method.capture()
        found.ends_s.append(time.perf_counter() - begin)
    found.cpu_s = (time.process_time() - cpu) / len(found.ends_s)
    found.rss_bytes, found.peak_bytes = _status("VmRSS"), _status("VmHWM")
    if method is not None:
        method.close()
    return found


class _Tracked(Method):
    """datastates as in a script: default settings, or the given budget. ``said`` collects log
    records."""

    name = "datastates"

    def __init__(self, memory_bytes: int | None, said: list[str]) -> None:
        self._memory_bytes, self._said = memory_bytes, said

    def prepare(self, objects: Objects, folder: Path) -> None:
        logging.getLogger("datastates").addHandler(_Said(self._said))
        logging.getLogger("datastates").setLevel(logging.INFO)
        self._repo = datastates.open(folder, memory_bytes=self._memory_bytes)
        self._run = self._repo.track(**objects)

    def capture(self) -> None:
        self._run.capture()

    def close(self) -> None:
        self._repo.close()


def _step(trainer: Trainer) -> None:
    trainer.backward()
    trainer.optimizer.step()


class _Said(logging.Handler):
    """Keeps log records."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.INFO)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


def start(
    folder: Path,
    *,
    quick: bool,
    rounds: int,
    sizes: Sequence[str] = SIZES,
    seconds: float = 60.0,
    threads: int = 1,
) -> dict[str, Any]:
    """All methods in turns, ``rounds`` times. Returns the counted time, and the memory after a
    minute."""
    sizes, seconds = (("tiny",), 2 * WINDOW_S) if quick else (sizes, seconds)
    found: dict[str, dict[str, list[Started]]] = {}
    for size in sizes:
        names = [PLAIN, *OTHERS, DEFAULT, *([GIVEN] if size == "30M" else [])]
        found[size] = {name: [] for name in names}
        for index in range(rounds):
            for name in names if index % 2 == 0 else reversed(names):
                one = _in_a_process(size, name, folder / f"{size}-{index}", seconds, threads)
                found[size][name].append(one)
                rates = " ".join(short(rate) for rate in one.rates(seconds))
                sys.stderr.write(
                    f"{size}, round {index + 1} of {rounds}: {name}: {rates} steps/s\n"
                )
        out(
            f"\n# {size} parameters, {threads} threads of torch on {len(os.sched_getaffinity(0))}"
            " cores"
        )
        _report(size, found[size], min(seconds, COUNTED_S), seconds)
    return {size: msgspec.to_builtins(each) for size, each in found.items()}


def _in_a_process(size: str, name: str, folder: Path, seconds: float, threads: int) -> Started:
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        __file__,
        size,
        name,
        str(folder),
        str(seconds),
        f"--threads={threads}",
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(folder, ignore_errors=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Started)


def _report(size: str, found: dict[str, list[Started]], counted_s: float, seconds: float) -> None:
    plain = found[PLAIN]
    out(
        f"\n## {size} parameters: the first {counted_s:.0f} s, a capture at every step; median [min"
        f" .. max] of {len(plain)} rounds\n"
    )
    windows = [
        f"{index * WINDOW_S:.0f}-{(index + 1) * WINDOW_S:.0f} s"
        for index in range(int(counted_s / WINDOW_S))
    ]
    rows = []
    for name, runs in found.items():
        rates = zip(*(run.rates(counted_s) for run in runs), strict=True)
        worst = spread([run.worst_s() for run in runs], 1e3)
        rows.append(
            [
                name,
                *(spread(rate) for rate in rates),
                worst,
                spread([run.cpu_s for run in runs], 1e3),
            ]
        )
    out(table(["steps/s", *windows, "worst step, ms", "CPU ms a step"], rows) + "\n")
    for name in (name for name in found if name != PLAIN):
        pairs = list(zip(plain, found[name], strict=True))
        walls = spread([_wall(*pair, 0.0, counted_s) for pair in pairs])
        later = (
            spread([_wall(*pair, counted_s, seconds) for pair in pairs])
            if seconds > counted_s
            else "not measured"
        )
        more, peak = (
            spread(
                [(getattr(ours, key) - getattr(theirs, key)) / (1 << 20) for theirs, ours in pairs]
            )
            for key in ("rss_bytes", "peak_bytes")
        )
        out(
            f"{name}: wall time / plain for the same steps: {walls}; from {counted_s:.0f} to"
            f" {seconds:.0f} s: {later}"
        )
        out(f"  memory above the plain one after {seconds:.0f} s: {more} MiB; peak: {peak} MiB")
        said = "; ".join(found[name][0].said) or "nothing"
        out(
            "  what comes before the first step took"
            f" {spread([run.track_s for run in found[name]], 1e3)} ms; it said: {said}"
        )


def _wall(plain: Started, captured: Started, begin_s: float, end_s: float) -> float:
    """The slowdown in an interval of time, for the steps that both trainings made, counted by the
    captured training."""
    first = sum(end <= begin_s for end in captured.ends_s)
    last = sum(end <= end_s for end in captured.ends_s)
    took = (captured.ends_s[last - 1] if last else end_s) - (
        captured.ends_s[first - 1] if first else 0.0
    )
    rate = sum(begin_s < end <= end_s for end in plain.ends_s) / (end_s - begin_s)
    return took * rate / max(1, last - first)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One training in this process; its steps as JSON.")
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("name", choices=[PLAIN, *OTHERS, DEFAULT, GIVEN])
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    out(
        msgspec.json.encode(
            train(options.size, options.name, options.folder, options.seconds, options.threads)
        ).decode()
    )
