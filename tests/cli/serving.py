"""``datastates serve`` as a process, as people start it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import warm

TERMINAL = [sys.executable, "-W", "error::UserWarning", "-m", "datastates"]


def environment(**more: str) -> dict[str, str]:
    """The environment without variables of ours, but for ``more``."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")
    }
    return {**inherited, "DATASTATES_MEMORY": "128M", **more}


@contextmanager
def serving(
    *arguments: str | Path, **environ: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """``datastates serve … --json`` as a process, and what it says at first."""
    command = [*TERMINAL, "serve", *map(str, arguments), "--json"]
    with warm.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**environ),
    ) as process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], 60)
            line = process.stdout.readline() if ready else ""
            assert line, (
                process.stderr.read()
                if process.stderr and process.poll() is not None
                else "it says nothing"
            )
            yield process, json.loads(line)
        finally:
            if process.poll() is None:
                process.kill()
