"""Captures for long, with retention: memory, open files, threads, bytes on disk and the time of a capture stay what they were.

    python -m tests.drivers.soak --count 50000

A tiny training captures at every step, and each tenth state becomes durable; retention drops most of them again. Now and then
the process is measured. Of what is measured a line is fitted by least squares, the first tenth left out: it is flat where it rises by less
than a twentieth of its mean from there to the end, or by less than twice what its noise explains. The lineage grows by
design (what is known of a state stays when its bytes go): of that the bytes a capture are said.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import datastates
from datastates import Config
from datastates.upkeep import keeper
from tests.support.training import make, update

RETENTION = "latest:8 every:5000"
SAMPLES = 50
FLAT = 0.05
"""Of its mean: so much it may rise, from the end of the first tenth to the end."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process takes after so many captures; ``capture_us`` is the median of those since the last sample."""

    captures: int
    resident_mib: float
    descriptors: float
    threads: float
    disk_mib: float
    lineage_mib: float
    capture_us: float


FIELDS = ("resident_mib", "descriptors", "threads", "disk_mib", "capture_us")


@dataclass(frozen=True, slots=True)
class Trend:
    """The line through what was measured: its mean, by how much it rises over the whole, and the standard error of that."""

    mean: float
    rise: float
    error: float

    @property
    def is_flat(self) -> bool:
        """Whether it rises by next to nothing, or by no more than noise explains."""
        return self.rise <= max(FLAT * self.mean, 2 * self.error)


def trend(values: Sequence[float]) -> Trend:
    """Through values at equal distances, by least squares."""
    count, mean = len(values), statistics.fmean(values)
    at = [index - (count - 1) / 2 for index in range(count)]
    spread = sum(x * x for x in at)
    slope = sum(x * y for x, y in zip(at, values, strict=True)) / spread
    rest = sum((y - mean - slope * x) ** 2 for x, y in zip(at, values, strict=True))
    return Trend(mean, slope * (count - 1), (rest / (count - 2) / spread) ** 0.5 * (count - 1))


def trends(samples: Sequence[Sample]) -> dict[str, Trend]:
    """Of each field, the first tenth left out."""
    settled = samples[len(samples) // 10 :]
    return {name: trend([getattr(sample, name) for sample in settled]) for name in FIELDS}


def run(folder: Path, count: int, *, samples: int = SAMPLES, retention: str = RETENTION, durable_every: int = 10) -> list[Sample]:
    """So many captures, measured so many times."""
    torch.set_num_threads(1)
    model, optimizer = make()
    config = Config(memory_bytes=48 << 20, durable_every=durable_every, durable_interval_s=None, retention=retention)
    found, took, each = list[Sample](), list[float](), count // samples
    with datastates.open(folder, config=config) as repo, repo.track(model=model, optimizer=optimizer, keep_best="loss") as training:
        for number in range(1, each * samples + 1):
            loss = update(model, optimizer)
            began = time.perf_counter()
            training.capture(metrics={"loss": loss})
            took.append(time.perf_counter() - began)
            if number % each == 0:
                found.append(_measured(folder, number, took))
                took.clear()
    return found


def _measured(folder: Path, captures: int, took: list[float]) -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        captures,
        pages * resource.getpagesize() / (1 << 20),
        len(os.listdir("/proc/self/fd")) - 1,  # without that of the folder itself
        threading.active_count(),
        _bytes(folder / "packs", "*.safetensors", "*.manifest") / (1 << 20),
        _bytes(folder, "*.db*") / (1 << 20),
        statistics.median(took) * 1e6,
    )


def _bytes(folder: Path, *patterns: str) -> int:
    """Files may go meanwhile."""
    total = 0
    for pattern in patterns:
        for path in folder.glob(pattern):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--pass-seconds", type=float, default=keeper.LEAST_S, help="between two passes of retention, at least")
    given = parser.parse_args()
    keeper.LEAST_S = given.pass_seconds
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        samples = run(Path(folder), given.count, samples=given.samples)
    for sample in samples[:: max(1, len(samples) // 10)]:
        sys.stdout.write(" ".join(f"{name}={getattr(sample, name):.6g}" for name in ("captures", "lineage_mib", *FIELDS)) + "\n")
    for name, found in trends(samples).items():
        verdict = "flat" if found.is_flat else "RISES"
        sys.stdout.write(f"{name:14s} mean {found.mean:10.2f}  rises by {found.rise:9.3f} +- {found.error:.3f}  {verdict}\n")
    first, last = samples[len(samples) // 10], samples[-1]
    grown = (last.lineage_mib - first.lineage_mib) * (1 << 20) / (last.captures - first.captures)
    sys.stdout.write(f"the lineage grows by {grown:.0f} bytes a capture; {time.monotonic() - began:.0f} seconds\n")


if __name__ == "__main__":
    main()
