"""Runs parts, each in separate processes, within a budget. A part that hangs, dies or fails does
not stop other parts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from .case import TRACE_CHARACTERS, Outcome, Status
from .division import limit_s
from .parts import Part
from .where import Where
from .worker import work

START = "(start)"
"""Represents a case if a process ended before it had named any."""

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "datastates.engine.runner",
    "datastates.transport.peer",
    "datastates.transport.serving",
]


@dataclass(slots=True)
class Run:
    """The result of a run of a part.

    ``note`` is the reason why it ended early, or ""."""

    part: Part
    limit_s: float
    took_s: float
    outcomes: list[Outcome]
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Begun:
    process: BaseProcess
    wire: Connection
    log: Path

    def receive(self, until: float) -> object:
        """The next message of the process, or None after the time limit.

        :raises EOFError: the process has ended.
        """
        return self.wire.recv() if self.wire.poll(max(0.0, until - time.monotonic())) else None

    def end(self, number: int = 0) -> tuple[str, str]:
        """End the process and all processes that it started, after the given signal, if any.
        Returns how it ended, and the end of its log."""
        if self.process.pid is None:  # interrupted during its start
            self.wire.close()
            return "its process never began", ""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        self.process.join(0.5)
        code = self.process.exitcode
        for kill in (os.killpg, os.kill):  # it may not be the head of its group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.wire.close()
        said = self.log.read_text(errors="replace").strip()
        return (
            f"its process ended with {code}"
            + "".join(f": {line[:300]}" for line in said.splitlines()[-1:]),
            said[-TRACE_CHARACTERS:],
        )


def run(
    parts: Sequence[Part], where: Where, until: float, tell: Callable[[Run], None]
) -> Iterator[Run]:
    """Run parts until a time of ``time.monotonic``. Calls ``tell`` after each case.

    :raises KeyboardInterrupt: interrupted; ``tell`` was called for all finished cases.
    """
    for index, part in enumerate(parts):
        began = time.monotonic()
        found = Run(part, limit_s(until - began, [each.weight for each in parts[index:]]), 0.0, [])
        try:
            _run_part(found, where, began, tell)
        except KeyboardInterrupt:
            found.note = "interrupted"
            raise
        finally:
            found.took_s = time.monotonic() - began
            tell(found)
        yield found


def _run_part(found: Run, where: Where, began: float, tell: Callable[[Run], None]) -> None:
    until, names = began + found.limit_s, list[str]()
    try:
        while not names or len(found.outcomes) < len(names):
            if time.monotonic() >= until:
                found.note = "its time was spent"
                return
            with _begin(found, where) as begun:
                if not _follow(begun, found, names, until, tell):
                    return
    finally:
        done = {outcome.case for outcome in found.outcomes}
        found.outcomes += [
            Outcome(name, Status.NOT_REACHED, why=found.note or "interrupted")
            for name in names
            if name not in done
        ]


def _follow(
    begun: _Begun, found: Run, names: list[str], until: float, tell: Callable[[Run], None]
) -> bool:
    """Receive the outcomes of cases. Returns whether another process may continue."""
    case, began = "", time.monotonic()
    try:
        listed = begun.receive(until)
        if listed is None:
            found.outcomes.append(
                Outcome(
                    START,
                    Status.TIMED_OUT,
                    found.limit_s,
                    f"nothing began within {found.limit_s:.0f} s",
                )
            )
            return False
        assert isinstance(listed, list)
        limits = dict(listed)
        names[:] = limits
        while True:
            case, began = "", time.monotonic()
            heard = begun.receive(until)
            if heard is None:
                return True
            case = str(heard)
            outcome = begun.receive(min(until, began + limits[case]))
            took = time.monotonic() - began
            if outcome is None:
                which = "of its own" if time.monotonic() < until else "of its part"
                said = begun.end(signal.SIGABRT)[1]
                outcome = Outcome(
                    case,
                    Status.TIMED_OUT,
                    took,
                    f"the time {which} was spent after {took:.0f} s",
                    trace=said,
                )
            assert isinstance(outcome, Outcome)
            found.outcomes.append(outcome)
            tell(found)
            if outcome.status in (Status.TIMED_OUT, Status.FAILED):
                return True
    except (EOFError, OSError):
        how, said = begun.end()
        if len(found.outcomes) < len(names) and not case:
            found.note = how
            return False
        if case:
            found.outcomes.append(
                Outcome(case, Status.FAILED, time.monotonic() - began, how, trace=said)
            )
            tell(found)
        elif not names:
            found.outcomes.append(
                Outcome(START, Status.FAILED, time.monotonic() - began, how, trace=said)
            )
            return False
        return True


@contextmanager
def _begin(found: Run, where: Where) -> Iterator[_Begun]:
    # With a device each process is new. Otherwise it is forked from a process that has imported
    # torch.
    context = multiprocessing.get_context("spawn" if where.is_accelerator else "forkserver")
    if not where.is_accelerator:
        context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="datastates-gpu-") as folder:
        log, done = Path(folder) / "log", [outcome.case for outcome in found.outcomes]
        log.touch()
        process = context.Process(  # type: ignore[attr-defined]
            target=work, args=(found.part, where, done, theirs, log), daemon=False
        )
        begun = _Begun(process, ours, log)
        try:
            process.start()
            theirs.close()
            yield begun
        finally:
            if not ours.closed:
                begun.end()
