"""Output of all benchmarks: the machine, a table, a median with its spread."""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("datastates", "torch", "ucxx-cu12", "ucxx-cu13")


def machine() -> str:
    """One line: the machine and its load, the relevant versions, the commit, the time."""
    cores = (
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB"
    versions = ", ".join(filter(None, map(_version, _PACKAGES)))
    python = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    return (
        f"{platform.platform()}, {_processor()}, {cores}, {memory}; {python},"
        f" {versions}{_commit()}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, with columns of the necessary width."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in lines
    )


def spread(values: Sequence[float], scale: float = 1.0) -> str:
    """``median [least .. greatest]``, each times ``scale``."""
    middle, low, high = (
        short(value * scale) for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} [{low} .. {high}]"


def short(value: float) -> str:
    """About three digits: ``0.123`` as 0.12, ``12.34`` as 12.3, ``1234.5`` as 1234."""
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def out(text: str) -> None:
    """Print a line to standard output and flush."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _commit() -> str:
    """The commit of this file's repository. DATASTATES_COMMIT names it for a copy without a
    repository."""
    told = os.environ.get("DATASTATES_COMMIT", "")
    if told or shutil.which("git") is None:
        return f", commit {told}" if told else ""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ""
