"""The process of a part: runs its cases in sequence, and reports how each ended."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
import warnings
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from .case import TRACE_CHARACTERS, Case, NotBuilt, Outcome, Skip, Status
from .parts import Part
from .where import Where

if TYPE_CHECKING:
    from .place import Place


def work(part: Part, where: Where, done: Collection[str], wire: Connection, log: Path) -> None:
    """Send the names of a part's cases with their limits in seconds, and then the name and the
    outcome of each remaining case.

    The process leads a separate process group. It ends after a case that failed, because an error
    of a device would affect later cases.
    """
    os.setsid()
    try:
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
    except FileNotFoundError:
        return  # the parent was interrupted, and ends
    faulthandler.enable()  # a hang or a crash is then in the log
    warnings.simplefilter("ignore")  # the peers' own
    from .place import Place  # imports torch, which the parent does not import

    place = Place(where)
    cases = part.cases(place)
    wire.send([(case.name, case.limit_s) for case in cases])
    for case in cases:
        if case.name not in done:
            wire.send(case.name)
            outcome = _attempt(case, place)
            wire.send(outcome)
            if outcome.status is Status.FAILED:
                break
    wire.close()
    sys.stderr.flush()
    os._exit(0)  # no thread and no context of a device delays the exit


def _attempt(case: Case, place: Place) -> Outcome:
    start = time.perf_counter()
    status, why, found, trace = Status.PASSED, "", {}, ""
    try:
        found = case.run(place)
    except Skip as exc:
        status, why = Status.SKIPPED, str(exc)
    except NotBuilt as exc:
        status, why = Status.NOT_BUILT, str(exc)
    except Exception as exc:  # any error: other cases continue
        trace = "".join(traceback.format_exception(exc))[-TRACE_CHARACTERS:]
        at = traceback.extract_tb(exc.__traceback__)[-1]
        status, why = (
            Status.FAILED,
            f"{type(exc).__name__}: {_first(exc)} ({Path(at.filename).name}:{at.lineno})",
        )
    return Outcome(case.name, status, time.perf_counter() - start, why, found, trace)


def _first(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0][:1000] if lines else ""
