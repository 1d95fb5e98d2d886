"""The example of two processes: what B does after the clone is what A does, and no file carries
the state."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import warm

EXAMPLE = Path(__file__).parents[2] / "examples" / "clone_between_processes.py"
QUICK = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
LARGEST_WRITE = 64 << 10
TEMPORARY = re.escape(tempfile.gettempdir())
SMALL_BY_NAME = re.compile(
    # A's lineage
    r"/lineage\.db(-wal|-shm|-journal)?$|/packs/\.lock$|/packs/leases/|/packs/\.tmp-identity$"
    r"|/packs/\.(lineage\.backup|backing-up)$"
    r"|/\.git/(worktrees/\w+/)?index\.lock$"  # A asks for the commit
    # no file, or one that is gone at once
    rf"|^/dev/|^/proc/|^/sys/|^{TEMPORARY}(/#\d+)?( \(deleted\))?$|^{TEMPORARY}/\w{{8}}$"
)
"""What either side may open to write. UCX's segments in /dev/shm are memory that both map."""
INTERRUPTED = " <unfinished ...>"
RESUMED = re.compile(r"\d+ +<\.\.\. \w+ resumed>")


@pytest.mark.long
@pytest.mark.timeout(170)
def test_the_one_that_clones_repeats_the_next_ten_losses_and_no_file_carries_the_payload(
    tmp_path: Path,
) -> None:
    log = tmp_path / "calls"
    done = warm.run(
        [*watching(log), sys.executable, "-W", "error", str(EXAMPLE), str(tmp_path / "runs")],
        capture_output=True,
        env=QUICK,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step ") == 10
    assert done.stdout.endswith("equal, bit for bit\n")
    if not log.exists():
        pytest.skip(
            "the losses are equal; what was written was not looked at: there is no strace here, or"
            " it may trace nobody"
        )
    calls = _whole(log.read_text())
    ours, cloner = (
        calls.split(None, 1)[0],
        next(line.split()[0] for line in calls.splitlines() if '"0x1.' in line),
    )
    assert cloner != ours
    until_b_ended, after = re.split(
        rf"^{cloner} +\+\+\+ exited with 0 \+\+\+$", calls, maxsplit=1, flags=re.MULTILINE
    )

    assert {
        path for path in _opened_to_write(until_b_ended) if not SMALL_BY_NAME.search(path)
    } == set()
    assert {
        path: size for path, size in _largest_writes(until_b_ended).items() if size > LARGEST_WRITE
    } == {}
    assert any(path.endswith(".safetensors") for path in _opened_to_write(after)), (
        "the end of A writes a pack, so that this can fail"
    )


def watching(log: Path) -> list[str]:
    """The command that writes down which files a program opens and writes; nothing where that
    cannot be seen."""
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-s",
        "32",
        "-e",
        "trace=openat,creat,write",
        "-o",
        str(log),
    ]
    if (
        shutil.which("strace") is None
        or subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    ):
        return []
    log.unlink()
    return command


def _whole(calls: str) -> str:
    """What strace wrote, with each call that another one interrupted in one line, where it
    ended."""
    begun, lines = dict[str, str](), list[str]()
    for line in calls.splitlines():
        task = line.split(None, 1)[0]
        if line.endswith(INTERRUPTED):
            begun[task] = line.removesuffix(INTERRUPTED)
        elif rest := RESUMED.match(line):
            lines.append(begun.pop(task) + line[rest.end() :])
        else:
            lines.append(line)
    return "\n".join(lines)


def test_a_call_that_another_one_interrupts_is_put_together() -> None:
    assert (
        _whole(
            '7 openat(AT_FDCWD, "a", O_RDWR <unfinished ...>\n8 +++ exited with 0 +++\n7 <...'
            " openat resumed>) = 3</a>"
        )
        == '8 +++ exited with 0 +++\n7 openat(AT_FDCWD, "a", O_RDWR) = 3</a>'
    )


def _opened_to_write(calls: str) -> set[str]:
    opened = set[str]()
    for call in re.finditer(
        r'(?:openat\(.*?, |creat\()"([^"]*)"(?:, ([A-Z_|]+))?.*= \d+<([^>]*)>', calls
    ):
        if call[2] is None or "O_WRONLY" in call[2] or "O_RDWR" in call[2]:
            opened.add(call[3])
    return opened


def _largest_writes(calls: str) -> dict[str, int]:
    """By the path of what was written to; sockets, pipes and the like are no files."""
    largest = dict[str, int]()
    for call in re.finditer(r"write\(\d+<(/[^>]*)>.*= (\d+)$", calls, re.MULTILINE):
        if not call[1].startswith(("/dev/", "/proc/")):
            largest[call[1]] = max(int(call[2]), largest.get(call[1], 0))
    return largest
