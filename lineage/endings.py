"""How trainings ended: what is recorded with a run when it ends, and how that is read later.

A training that closed without an error has ended. An error fails it; Ctrl-C, SIGTERM and the like interrupt it. A process that vanished
without a record was killed: nobody noted that at the time, so it is inferred from what was later found out about the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from datastates.system import masking

from .states import DIED, OURS, Run, Value

__all__ = ["Ending", "How", "ending_of", "facts_of"]

_HOW, _ERROR, _STEP = f"{OURS}ended", f"{OURS}error", f"{OURS}ended_at_step"
_SIGNALLED = {128 + number for number in (1, 2, 15)}  # exit codes of SIGHUP, SIGINT and SIGTERM
_LONGEST = 200  # characters kept of an error's message


class How(StrEnum):
    """How a training ended."""

    ENDED = "ended"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a training ended. If it failed or was interrupted, ``step`` is the step that it had reached; if it failed, ``error`` is the class
    of the error and the first line of its message.
    """

    how: How
    error: str | None = None
    step: int | None = None


def facts_of(error: BaseException | None, step: int) -> dict[str, Value]:
    """What is recorded of a training that an error ended at a step; nothing for one that ended well."""
    how = _how(error)
    if error is None or how is How.ENDED:
        return {}
    facts: dict[str, Value] = {_HOW: how.value, _STEP: step}
    return {**facts, _ERROR: _said(error)} if how is How.FAILED else facts


def ending_of(run: Run, died: Mapping[str, datetime], *, is_over: bool) -> Ending | None:
    """How a run ended; None while it goes on, or may. ``is_over``: its process is known to have ended.

    :param died: when processes were found dead, by uid: their trainings that were not over by then ended with them.
    """
    if run.finished_at is None:
        return Ending(How.KILLED) if is_over else None
    how, error, step = (run.config.get(key) for key in (_HOW, _ERROR, _STEP))
    if how in (How.FAILED, How.INTERRUPTED):
        return Ending(How(how), error if isinstance(error, str) else None, step if isinstance(step, int) else None)
    was_killed = run.config.get(DIED) is True or (run.process is not None and died.get(run.process) == run.finished_at)
    return Ending(How.KILLED if was_killed else How.ENDED)


def _how(error: BaseException | None) -> How:
    match error:
        case None:
            return How.ENDED
        case SystemExit():
            if not error.code:
                return How.ENDED
            return How.INTERRUPTED if error.code in _SIGNALLED else How.FAILED
        case Exception():
            return How.FAILED
        case _:  # Ctrl-C, a cancelled task
            return How.INTERRUPTED


def _said(error: BaseException) -> str:
    """The class of an error and the first line of its message, without secrets and without anything that a database could refuse."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # an error of the user's, whose methods may do anything
        text = ""
    name = type(error).__name__
    shown = "".join(each if each.isprintable() else " " for each in masking.text(f"{name}: {text}" if text else name))
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
