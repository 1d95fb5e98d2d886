"""The first half minute of a training with default settings, from ``track`` on, beside the same training without captures.

    python benchmarks/capture.py --part start [--rounds N] [--quick]

Each training has a process of its own, as each that starts pays anew. Plain and captured take turns; every step is captured.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from common import out, short, spread, table
from gpt import LARGE, MEDIUM, SMALL, TINY, Trainer

__all__ = ["start"]

SHAPES = {"tiny": TINY, "1M": SMALL, "30M": MEDIUM, "100M": LARGE}

WINDOW_S = 5.0
COUNTED_S = 30.0
"""What is compared; the training goes on to the end of a minute, when its memory is looked at."""


@dataclass(slots=True)
class Started:
    """One training: when each step ended, counted from ``track``, and what memory and CPU it had taken by its end."""

    ends_s: list[float] = field(default_factory=list)
    track_s: float = 0.0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    peak_bytes: int = 0
    said: list[str] = field(default_factory=list)

    def rates(self, until_s: float) -> list[float]:
        """Steps a second, window by window."""
        windows = [index * WINDOW_S for index in range(int(until_s / WINDOW_S))]
        return [sum(begin < end <= begin + WINDOW_S for end in self.ends_s) / WINDOW_S for begin in windows]

    def worst_s(self) -> float:
        """The longest step, the first one with ``track`` included."""
        return max(after - before for before, after in pairwise([0.0, *self.ends_s]))


def train(size: str, folder: Path | None, seconds: float) -> Started:
    """Train in this process, captured into a repository where there is a folder for it."""
    trainer = Trainer.make(SHAPES[size])
    for _ in range(5):
        _step(trainer)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    found = Started()
    if folder is not None:
        import datastates  # what it takes is part of what is measured

        logging.getLogger("datastates").addHandler(_Said(found.said))
        logging.getLogger("datastates").setLevel(logging.INFO)
        repo = datastates.open(folder)
    cpu, begin = time.process_time(), time.perf_counter()
    if folder is not None:
        run = repo.track(**trainer.objects)
    found.track_s = time.perf_counter() - begin
    while (now := time.perf_counter() - begin) < seconds:
        _step(trainer)
        if folder is not None:
            run.capture()
        found.ends_s.append(time.perf_counter() - begin)
    found.cpu_s = (time.process_time() - cpu) / now
    found.rss_bytes, found.peak_bytes = _status("VmRSS"), _status("VmHWM")
    if folder is not None:
        repo.close()
    return found


def _step(trainer: Trainer) -> None:
    trainer.backward()
    trainer.optimizer.step()


class _Said(logging.Handler):
    """Keeps what was logged."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.INFO)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


def start(folder: Path, *, quick: bool, rounds: int, sizes: Sequence[str] = ("1M", "30M", "100M"), seconds: float = 60.0) -> dict[str, Any]:
    """Plain and captured by turns, ``rounds`` times; the counted time, and the memory after a minute."""
    sizes, seconds = (("tiny",), 2 * WINDOW_S) if quick else (sizes, seconds)
    found: dict[str, dict[str, list[Started]]] = {}
    for size in sizes:
        found[size] = {"plain": [], "captured": []}
        for index in range(rounds):
            for name in ("plain", "captured") if index % 2 == 0 else ("captured", "plain"):
                one = _in_a_process(size, folder / f"{size}-{index}" if name == "captured" else None, seconds)
                found[size][name].append(one)
                rates = " ".join(short(rate) for rate in one.rates(seconds))
                sys.stderr.write(f"{size}, round {index + 1} of {rounds}: {name}: {rates} steps/s\n")
        _report(size, found[size], min(seconds, COUNTED_S), seconds)
    return {size: msgspec.to_builtins(pair) for size, pair in found.items()}


def _in_a_process(size: str, folder: Path | None, seconds: float) -> Started:
    command = [sys.executable, __file__, size, str(seconds), *([] if folder is None else [str(folder)])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Started)


def _report(size: str, found: dict[str, list[Started]], counted_s: float, seconds: float) -> None:
    rounds = len(found["plain"])
    out(f"\n## {size} parameters: the first {counted_s:.0f} s, a capture at every step; median [min .. max] of {rounds} rounds\n")
    windows = [f"{index * WINDOW_S:.0f}-{(index + 1) * WINDOW_S:.0f} s" for index in range(int(counted_s / WINDOW_S))]
    rows = []
    for name, runs in found.items():
        rates = zip(*(run.rates(counted_s) for run in runs), strict=True)
        worst = spread([run.worst_s() for run in runs], 1e3)
        rows.append([name, *(spread(rate) for rate in rates), worst, spread([run.cpu_s for run in runs])])
    out(table(["steps/s", *windows, "worst step, ms", "cores used"], rows))
    pairs = list(zip(found["plain"], found["captured"], strict=True))
    walls = [sum(plain.rates(counted_s)) / sum(captured.rates(counted_s)) for plain, captured in pairs]
    later = [plain.rates(seconds)[-1] / captured.rates(seconds)[-1] for plain, captured in pairs]
    more = [(captured.rss_bytes - plain.rss_bytes) / (1 << 20) for plain, captured in pairs]
    peaks = [(captured.peak_bytes - plain.peak_bytes) / (1 << 20) for plain, captured in pairs]
    out(
        f"\nwall time for the same steps, captured / plain: {spread(walls)}; in the last {WINDOW_S:.0f} of {seconds:.0f} s: {spread(later)}"
    )
    out(f"memory above the plain one after {seconds:.0f} s: {spread(more)} MiB; peak: {spread(peaks)} MiB")
    out(f"track took {spread([run.track_s for run in found['captured']], 1e3)} ms; it said: {'; '.join(found['captured'][0].said)}")
    if not walls or statistics.median(walls) <= 0:
        raise SystemExit("no step was made: give it more time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One training in this process; its steps as JSON.")
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("seconds", type=float)
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    out(msgspec.json.encode(train(options.size, options.folder, options.seconds)).decode())
