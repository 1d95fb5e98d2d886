"""Fresh processes for tests, quickly: one process imports torch once, and forks a child for each
job.

A child has done nothing before its job: no tracker, no random number, no thread. It ends as a
script does, exit handlers and all. ``Forge`` is the side of the tests; run as a script this file is
the other one.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from . import warm

ROOT = Path(__file__).parents[2]


class Job:
    """A child at work; what it says comes line by line."""

    def __init__(self, forge: Forge, pid: int, lines: IO[str]) -> None:
        self.forge, self.pid, self.lines = forge, pid, lines

    def wait(self) -> int:
        """Its exit code; minus the signal that ended it. No process of its group outlives this."""
        self.lines.close()
        return int(self.forge.ask(wait=self.pid))

    def kill(self, number: int) -> None:
        """Send a signal. The pid is the child's until ``wait``."""
        os.kill(self.pid, number)

    def say(self) -> list[str]:
        """All that it says from here on, once it has ended."""
        return self.lines.read().splitlines()


class Forge:
    """Starts jobs: ``start("tests.module:function", …)`` calls it with keyword arguments and
    ``say``, which writes a line."""

    def __init__(self, folder: Path, imports: Sequence[str] = ()) -> None:
        self.folder = folder
        self._count = 0
        command = [sys.executable, "-m", "tests.support.forge", *imports]
        self._process = warm.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        """One request, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, call: str, **arguments: Any) -> Job:
        """A child that makes this call; its errors are in ``<folder>/errors``."""
        self._count += 1
        fifo = self.folder / f"said-{self._count}"
        os.mkfifo(fifo)
        pid = self.ask(
            call=call, arguments=arguments, fifo=str(fifo), errors=str(self.folder / "errors")
        )
        return Job(self, pid, fifo.open())

    def run(self, call: str, **arguments: Any) -> list[str]:
        """All that a job said that ended well."""
        job = self.start(call, **arguments)
        lines = job.say()
        code = job.wait()
        assert code == 0, f"{call} ended with {code}:\n{self.errors()}"
        return lines

    def errors(self) -> str:
        """What all jobs wrote to stderr."""
        path = self.folder / "errors"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """End the process; its jobs have ended."""
        self._process.communicate()


@contextmanager
def forge(folder: Path, imports: Sequence[str] = ()) -> Iterator[Forge]:
    """A forge that ends with the block; ``imports`` are modules that no job is to import for
    itself."""
    opened = Forge(folder, imports)
    try:
        yield opened
    finally:
        opened.close()


def _serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            os.waitid(os.P_PID, request["wait"], os.WEXITED | os.WNOWAIT)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(request["wait"], signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _work(**request)
                return
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _work(call: str, arguments: dict[str, Any], fifo: str, errors: str) -> None:
    """In the child; what this raises ends it as it ends a script.

    A worker of torch's loader never notices the end of a process that was killed while the worker
    began: it is no reason to wait.
    """
    os.setpgid(0, 0)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    fd = os.open(fifo, os.O_WRONLY)
    os.register_at_fork(after_in_child=lambda: os.close(fd))
    module, name = call.split(":")
    getattr(importlib.import_module(module), name)(
        **arguments, say=lambda *words: os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    )


def _import() -> None:
    """What every job would import for itself, seconds each time; making an optimizer imports
    torch's compiler."""
    import tempfile

    import torch

    import datastates

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with tempfile.TemporaryDirectory() as folder, datastates.open(folder) as repo:
        repo.refs()
        repo.find("step >= 0")


if __name__ == "__main__":
    _import()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    _serve()
