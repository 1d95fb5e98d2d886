"""Captures for long, with retention: memory, open files, threads, bytes on disk and the time of a
capture stay what they were.

    python -m tests.drivers.soak --count 50000
    python -m tests.drivers.soak --count 100000 --every 1 --retention "all at-most:20M" --small

A tiny training captures at every step, and each tenth state becomes durable; retention drops most
of them again. With ``--small`` a state has 3.9 kB, and with ``--every 1`` all states become
durable, in packs that they share. Now and then the process is measured. Between two passes of
retention the folder grows by what became durable meanwhile: what it keeps is measured after one
more pass, and the most that it took before one is said. A busy machine makes the time of a capture
longer: beside it stands its processor time, and that of everything that it brings with it, on all
threads.

Of what is measured a line is fitted by least squares, the first tenth left out: it is flat where it
rises by less than a twentieth of its mean from there to the end, or by less than twice what its
noise explains. Up to eight connections to the lineage are kept open: by as many files as those
have, descriptors may rise. The lineage grows by design (what is known of a state stays when its
bytes go): of that the bytes a capture are said.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import datastates
from datastates import Config, Repository
from datastates.maintenance import keeper
from tests.support.training import make, make_small, update

RETENTION = "latest:8"
SAMPLES = 50
FLAT = 0.05
"""Of its mean: so much it may rise, from the end of the first tenth to the end."""

POOLED = 16
"""The files of eight connections to SQLite: its database and its log."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process takes after so many captures.

    Times are of those since the last sample: medians; of ``all_cpu_us`` the mean."""

    captures: int
    resident_mib: float
    descriptors: float
    threads: float
    files: float
    disk_mib: float
    kept_mib: float
    lineage_mib: float
    pass_cpu_ms: float
    capture_us: float
    capture_cpu_us: float
    all_cpu_us: float


FIELDS = (
    "resident_mib",
    "descriptors",
    "threads",
    "files",
    "kept_mib",
    "pass_cpu_ms",
    "capture_us",
    "capture_cpu_us",
    "all_cpu_us",
)


@dataclass(frozen=True, slots=True)
class Trend:
    """The line through what was measured: its mean, by how much it rises over the whole, and the
    standard error of that."""

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


def is_flat(name: str, found: Trend) -> bool:
    """Whether a field does not rise; descriptors may, by those of connections that are kept
    open."""
    return found.is_flat or (name == "descriptors" and found.rise < POOLED)


def run(
    folder: Path,
    count: int,
    *,
    samples: int = SAMPLES,
    retention: str = RETENTION,
    durable_every: int = 10,
    is_small: bool = False,
    tell: Callable[[Sample], object] = lambda sample: None,
) -> list[Sample]:
    """So many captures, measured so many times; ``tell`` is called with each sample."""
    torch.set_num_threads(1)
    model, optimizer = make_small() if is_small else make()
    config = Config(
        memory_bytes=48 << 20,
        durable_every=durable_every,
        durable_interval_s=None,
        retention=retention,
    )
    found, took, each = list[Sample](), list[tuple[float, float]](), count // samples
    with (
        datastates.open(folder, config=config) as repo,
        repo.track(model=model, optimizer=optimizer, keep_best="loss") as training,
    ):
        spent = time.process_time()
        for number in range(1, each * samples + 1):
            loss = update(model, optimizer)
            began, busy = time.perf_counter(), time.thread_time()
            training.capture(metrics={"loss": loss})
            took.append((time.perf_counter() - began, time.thread_time() - busy))
            if number % each == 0:
                found.append(
                    _measured(repo, folder, number, took, (time.process_time() - spent) / each)
                )
                tell(found[-1])
                took.clear()
                spent = time.process_time()
    return found


def _measured(
    repo: Repository, folder: Path, captures: int, took: Sequence[tuple[float, float]], spent: float
) -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    # without that of the folder itself
    descriptors, threads = (
        len(os.listdir("/proc/self/fd")) - 1,
        threading.active_count(),
    )
    disk, began = (
        _bytes(folder / "packs", "*.safetensors", "*.manifest") / (1 << 20),
        time.thread_time(),
    )
    repo.prune()
    return Sample(
        captures,
        pages * resource.getpagesize() / (1 << 20),
        descriptors,
        threads,
        len(os.listdir(folder / "packs")),
        disk,
        _bytes(folder / "packs", "*.safetensors", "*.manifest") / (1 << 20),
        _bytes(folder, "*.db*") / (1 << 20),
        (time.thread_time() - began) * 1e3,
        statistics.median(wall for wall, _ in took) * 1e6,
        statistics.median(busy for _, busy in took) * 1e6,
        spent * 1e6,
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


def _say(sample: Sample) -> None:
    names = ("captures", "files", "disk_mib", "lineage_mib", *FIELDS)
    sys.stdout.write(" ".join(f"{name}={getattr(sample, name):.6g}" for name in names) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument(
        "--pass-seconds",
        type=float,
        default=keeper.LEAST_S,
        help="between two passes of retention, at least",
    )
    parser.add_argument(
        "--every", type=int, default=10, help="each how manieth state becomes durable"
    )
    parser.add_argument("--retention", default=RETENTION)
    parser.add_argument("--small", action="store_true", help="states of 3.9 kB")
    given = parser.parse_args()
    keeper.LEAST_S = given.pass_seconds
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "samples": given.samples,
            "retention": given.retention,
            "durable_every": given.every,
            "is_small": given.small,
        }
        samples = run(Path(folder), given.count, **options, tell=_say)
    for name, found in trends(samples).items():
        verdict = "flat" if is_flat(name, found) else "RISES"
        sys.stdout.write(
            f"{name:14s} mean {found.mean:10.2f}  rises by {found.rise:9.3f} +- {found.error:.3f} "
            f" {verdict}\n"
        )
    first, last = samples[len(samples) // 10], samples[-1]
    grown = (last.lineage_mib - first.lineage_mib) * (1 << 20) / (last.captures - first.captures)
    most = max(sample.disk_mib for sample in samples)
    sys.stdout.write(f"the folder took {most:.0f} MiB at most, between two passes\n")
    sys.stdout.write(
        f"the lineage grows by {grown:.0f} bytes a capture; {time.monotonic() - began:.0f}"
        " seconds\n"
    )


if __name__ == "__main__":
    main()
