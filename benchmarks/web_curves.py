"""The time until the page draws curves of 8 branches of 100,000 states each that are not cached.

    python benchmarks/web_curves.py [--states N] [--branches N] [--rounds N] [--folder DIR] [--json
    FILE]

Every round has a new server, connection and browser profile, and requests the loss of 8 branches.
It does this once over HTTP in one request, and once by opening the page with them. The file may be
in the page cache. ``benchmarks/web.py`` does this as well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from branches import prepare
from common import machine, out, table
from web_parts import chromium, served

HEADS = 8
GOAL_MS = 1500.0
ALL = f"""() => document.querySelector('[data-panel=curves] [data-curves="{HEADS}"] canvas') && !document.querySelector('.reading')
  && performance.now()"""
FIRST = (
    "() => document.querySelector('[data-panel=curves] [data-curves] canvas') && performance.now()"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=1_000_000)
    parser.add_argument("--branches", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "datastates-benchmark"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    out(machine())
    found = cold_curves(
        arguments.folder, arguments.states, arguments.branches, rounds=arguments.rounds
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    return 0


def cold_curves(folder: Path, states: int, branches: int, *, rounds: int) -> dict[str, list[float]]:
    """Prints and returns the results, in milliseconds."""
    names = ["main", *(f"branch-{number}" for number in range(1, branches))][:HEADS]
    found: dict[str, list[float]] = {}
    with as_repository(prepare(folder, states, branches)) as root:
        for _ in range(rounds):
            with served(root) as base:
                found.setdefault("one request", []).append(_asked(base, names))
            with served(root) as base:
                for what, value in _drawn(base, names).items():
                    found.setdefault(what, []).append(value)
    out(_report(found, states, branches, rounds))
    return found


@contextmanager
def as_repository(path: Path) -> Iterator[Path]:
    """A copy of a lineage as a repository without bytes, in a temporary folder."""
    with tempfile.TemporaryDirectory(
        prefix="datastates-curves-", dir=path.parent, ignore_cleanup_errors=True
    ) as name:
        root = Path(name) / "runs"
        root.mkdir()
        shutil.copy(path, root / "lineage.db")
        yield root


def _asked(base: str, names: list[str]) -> float:
    query = "&".join(f"head={quote(name)}" for name in names)
    began = time.perf_counter()
    with urllib.request.urlopen(
        f"{base}/api/v1/repositories/runs/series?{query}&key=loss&points=1000", timeout=600
    ) as answer:
        answer.read()
    return (time.perf_counter() - began) * 1e3


def _drawn(base: str, names: list[str]) -> dict[str, float]:
    """Milliseconds since the navigation began. Empty if there is no browser."""
    program = chromium()
    if program is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(
            f"{base}/?view=branches&panel=curves&key=loss&curves.lines={quote(','.join(names))}",
            wait_until="commit",
        )
        first = page.wait_for_function(FIRST, timeout=120_000).json_value()
        last = page.wait_for_function(ALL, timeout=120_000).json_value()
        browser.close()
    return {"first curve on the page": float(first), "all curves on the page": float(last)}


def _report(found: dict[str, list[float]], states: int, branches: int, rounds: int) -> str:
    rows = []
    for name, times in found.items():
        middle = statistics.median(times)
        rows.append(
            [
                name,
                f"{middle:.0f} [{min(times):.0f} .. {max(times):.0f}]",
                f"{GOAL_MS:g}: {'met' if middle <= GOAL_MS else 'MISSED'}",
            ]
        )
    said = (
        f"\ncurves of {HEADS} of {branches} branches of {states // branches:,} states, cold;"
        f" milliseconds, median [min .. max] of {rounds}"
    )
    return f"{said}\n\n{table(['asked', 'took', 'goal'], rows)}"


if __name__ == "__main__":
    sys.exit(main())
