"""What the terminal writes, letter by letter: at 80 and 200 columns, in a pipe, with nothing and
with 100,000 states.

    python -m tests.cli.test_golden

writes the files again; look at what changed before you keep it.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from datastates.lineage import Database
from tests.cli.conftest import build_lineage

GOLDEN = Path(__file__).parent / "golden"
MANY = Path(__file__).parents[2] / "benchmarks" / "many_states.py"
COMMANDS = {
    "log": ["log", "-n", "6"],
    "oneline": ["log", "--oneline"],
    "find": ["find", "metrics.loss < 0.5 order by metrics.loss", "-n", "6"],
    "refs": ["refs"],
    "branches": ["branches", "-n", "12"],
    "best": ["branches", "--best", "loss", "-n", "3"],
    "chosen": ["branches", "metrics.loss < 0.5", "--sort", "best", "-n", "3"],
}
HINTS = ("$ ", "these are", "o marks", "the best that", "nothing is", "no ", "no room")
WIDTHS = {"80": 80, "200": 200, "pipe": None}
RUN = """
import io, os, sys
from datetime import datetime, UTC
from datastates.lineage.views import text
class Frozen(datetime):
    @classmethod
    def now(cls, zone=None): return datetime(2026, 1, 5, tzinfo=UTC)
text.datetime = Frozen
class Terminal(io.TextIOWrapper):
    def isatty(self): return True
if os.environ.get("COLUMNS"): sys.stdout = Terminal(sys.stdout.buffer, encoding="utf-8")
from datastates.cli.app import app
import datastates.cli.history
for arguments in sys.stdin.read().splitlines():
    sys.stdout.write(f"$ datastates {arguments}\\n")
    sys.stdout.flush()
    try: app(eval(arguments), standalone_mode=False)
    finally: sys.stdout.flush()
"""


def written(root: Path, width: int | None) -> str:
    """What all commands write, one after the other, hints too."""
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("DATASTATES_", "COLUMNS", "FORCE_COLOR"))
    }
    environ |= {"TZ": "UTC", "NO_COLOR": "1", "TERM": "dumb"} | (
        {} if width is None else {"COLUMNS": str(width), "LINES": "50"}
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=root,
        env=environ,
        input="\n".join(repr(command) for command in COMMANDS.values()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.replace(str(root), "HERE")


def build(kind: str, root: Path) -> None:
    """A repository without states, of a few, of 100,000."""
    if kind == "few":
        build_lineage(root)
        return
    root.mkdir()
    if kind == "many":
        runpy.run_path(str(MANY))["make"](root / "lineage.db", 100_000)
    else:
        Database(f"sqlite:///{root}/lineage.db").close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["empty", "few", "many"])
def test_what_is_written_is_what_was_looked_at(kind: str, tmp_path: Path) -> None:
    build(kind, tmp_path / "runs")
    for name, width in WIDTHS.items():
        out = written(tmp_path / "runs", width)
        assert out == (GOLDEN / f"{kind}-{name}.txt").read_text(encoding="utf-8")
        lines = [line for line in out.splitlines() if not line.startswith(HINTS)]
        assert width is None or all(len(line) <= width for line in lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for each in ("empty", "few", "many"):
            build(each, Path(folder) / each)
            for place, columns in WIDTHS.items():
                (GOLDEN / f"{each}-{place}.txt").write_text(
                    written(Path(folder) / each, columns), encoding="utf-8"
                )
