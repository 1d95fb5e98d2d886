"""The guide to the web API is true: its commands run, in order, against a real server, and
answer with the status that it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import datastates
from tests.support import warm

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "api.md").read_text()
ADDRESS = "http://127.0.0.1:8642"
TOKEN = "admin-" + "a" * 20
PROGRAMS = ("bash", "curl", "jq")

# A command that is refused ends the script, unless it asks for the status; what --max-time ends was
# to end.
CURL = """
set -euo pipefail
curl() {
  case " $* " in *http_code*) command curl "$@"; return;; esac
  local rc=0; command curl --fail-with-body "$@" || rc=$?
  case " $* $rc" in *--max-time*" 23"|*--max-time*" 28") rc=0;; esac
  [ $rc = 0 ] || echo "curl $* ended with $rc" >&2
  return $rc
}
"""


def blocks(text: str, language: str = "sh") -> list[str]:
    """The commands, one text a fenced block."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def statuses(text: str) -> list[str]:
    """The statuses that the commands say they get, in order."""
    return re.findall(r"http_code.* # (\d{3})$", text, re.MULTILINE)


@contextmanager
def served(folder: Path, *options: str, **environ: str) -> Iterator[str]:
    """The address of a real server of a repository, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "datastates",
        "serve",
        "http://127.0.0.1:0",
        "--repo",
        str(folder),
        "--json",
        *options,
    ]
    env = {
        key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")
    } | environ
    with warm.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"].rstrip("/")
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository ``runs``: ``main`` with a fork, and a tag where they part."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    with datastates.open(tmp_path / "runs", memory_bytes=64 << 20) as repo:
        for branch, start in (("main", None), ("fork", "warm")):
            with repo.track(model=model, branch=branch, start=start, durable_every=1) as run:
                for step in range(6):
                    with torch.no_grad():
                        model.weight.add_(0.1)
                    run.capture(metrics={"loss": 1 / (1 + step)}, attributes={"seed": 3}).wait(
                        "durable"
                    )
            if branch == "main":
                repo.tag("warm", "main~3")
    return tmp_path / "runs"


@pytest.mark.long
@pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=f"needs {', '.join(PROGRAMS)}")
def test_every_command_of_the_guide_works(folder: Path, tmp_path: Path) -> None:
    reading, tokens, writing = GUIDE.partition("\n## Tokens\n")
    assert tokens
    with ExitStack() as stack:
        open_to_all = stack.enter_context(served(folder))
        guarded = stack.enter_context(served(folder, DATASTATES_WEB_TOKENS=f"admin:{TOKEN}"))
        first = "\n".join(blocks(reading)).replace(ADDRESS, open_to_all)
        second = "\n".join(
            [f"API={guarded}/api/v1", "RUNS=$API/repositories/runs", *blocks(writing)]
        ).replace(ADDRESS, guarded)
        done = run(CURL + first + second, tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if re.fullmatch(r"\d{3}", line)] == statuses(
        GUIDE
    ), done.stdout + done.stderr


def test_the_python_of_the_guide_works(folder: Path, tmp_path: Path) -> None:
    (code,) = blocks(GUIDE, "python")
    with served(folder) as address:
        command = [sys.executable, "-W", "error", "-c", code.replace(ADDRESS, address)]
        done = warm.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3, done.stdout


def test_the_guide_has_commands_for_what_it_lists() -> None:
    assert len(blocks(GUIDE)) >= 25
    assert {"400", "304", "206", "401", "201", "409", "428", "412", "204", "404"} <= set(
        statuses(GUIDE)
    )
    assert "# 4" not in "".join(line for line in GUIDE.splitlines() if "http_code" not in line), (
        "a status that nothing compares"
    )


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The script in bash, its trace on standard error so that a failure says which command it
    was."""
    environ = {**os.environ, "TOKEN": TOKEN}
    command = ["bash", "-x", "-c", script]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
