"""Run tests, probes and benchmarks on a machine with a GPU in nine minutes, and write a report.

scripts/gpu [--device cuda|cpu|late] [--quick] [--part NAME ...] [--budget-s 540] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from common import machine, out

from .case import Status
from .parts import PARTS
from .report import PartReport, Report, headline, written
from .running import Run, run
from .where import KINDS, Where

ROOT = Path(__file__).parents[2]
PROVEN, TRIED = ROOT / "docs" / "gpu", ROOT / "gpu-trials"
"""The folder of reports from a GPU, and the folder of other reports."""

ASK = (
    "import sys, torch; sys.exit(0 if torch.cuda.is_available() else f'torch {torch.__version__}"
    " sees no CUDA device here')"
)


def main() -> int:
    """Run. Returns 0 if no case failed, 1 if some failed, or 130 after an interrupt."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--device",
        choices=KINDS,
        default="cuda",
        help="cpu and late go through the same parts, and prove nothing",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument(
        "--part", choices=[part.name for part in PARTS], action="append", help="these parts only"
    )
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="so long all of it may take, in seconds (540)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=(
            f"the folder of the report ({PROVEN.relative_to(ROOT)}, or {TRIED.name} without a GPU)"
        ),
    )
    options = parser.parse_args()
    where = Where(options.device, options.quick)
    if (
        where.is_accelerator
        and (
            asked := subprocess.run(
                [sys.executable, "-c", ASK], capture_output=True, text=True, check=False
            )
        ).returncode
    ):
        sys.stderr.write(
            f"{asked.stderr.strip().splitlines()[-1]}: DEVICE=cpu goes through the same parts"
            " without one\n"
        )
        return 2
    folder = options.out or (PROVEN if where.is_accelerator else TRIED)
    parts = [part for part in PARTS if part.name in (options.part or [part.name])]
    report = Report(
        f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}",
        where.kind,
        where.is_quick,
        machine(),
        options.budget_s,
    )

    def tell(found: Run) -> None:
        each = PartReport(
            found.part.name,
            found.part.title,
            found.limit_s,
            found.took_s,
            found.note,
            found.outcomes,
        )
        report.parts = [*(part for part in report.parts if part.name != each.name), each]
        report.not_reached = [part.name for part in parts if part.name not in report.outcomes]
        report.took_s = time.monotonic() - began
        written(report, folder)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        for found in run(parts, where, began + options.budget_s, tell):
            _say(found)
        report.is_whole = not any(part.note for part in report.parts)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the report says what was done\n")
        return 130
    finally:
        path = written(report, folder)
        out(f"{headline(report)}\n{path}")
    bad = (Status.FAILED, Status.TIMED_OUT)
    return int(any(case.status in bad for part in report.parts for case in part.cases))


def _say(found: Run) -> None:
    out(
        f"== {found.part.title}: {found.took_s:.0f} of {found.limit_s:.0f}"
        f" s{f', {found.note}' if found.note else ''}"
    )
    for case in found.outcomes:
        out(
            f"   {case.status.value:11} {case.took_s:6.1f} s "
            f" {case.case}{f': {case.why}' if case.why else ''}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
