"""Something is raised at one line of functions that are named: which one the test counts through.

Some lines are no steps, as an exception there would leave out the ``__exit__`` of a ``with`` block,
which no program does to itself: the line to which a block comes back at its end, ``try:``, an
instruction that does nothing and that CPython leaves uncovered, and, from Python 3.12 on, the end
of a turn of a loop, where an exception of a tracer (but not one of a signal's handler) leaves the
function at once.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

NEVER = -1
MOST_TIMES = 3
_UNCOVERED = {
    dis.opmap[name] for name in ("NOP", *(["JUMP_BACKWARD"] if sys.version_info >= (3, 12) else []))
}


def codes_of(*places: ModuleType | Callable[..., Any]) -> frozenset[CodeType]:
    """The code of these functions, or of all functions and methods of a module, with what is
    defined inside them."""
    found: set[CodeType] = set()
    for place in places:
        if isinstance(place, ModuleType):
            owners = [
                place,
                *(
                    each
                    for each in vars(place).values()
                    if isinstance(each, type) and each.__module__ == place.__name__
                ),
            ]
            for owner in owners:
                for each in vars(owner).values():
                    if _module_of(each) == place.__name__:
                        _collect(each, found)
        else:
            _collect(place, found)
    return frozenset(found)


def _module_of(value: object) -> str | None:
    return getattr(getattr(value, "__func__", getattr(value, "fget", value)), "__module__", None)


def _collect(value: object, found: set[CodeType]) -> None:
    value = getattr(value, "__func__", getattr(value, "fget", value))
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        found.add(code)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                _collect(inner, found)


class Interruption:
    """Calls ``error``, which raises, at the ``at``-th step that a thread makes in ``codes``, once;
    ``place`` is where that was.

    A step is a line that is come to for the first, second or third time. With ``NEVER`` nothing is
    raised; ``steps`` counts either way.
    """

    def __init__(self, codes: frozenset[CodeType], at: int, error: Callable[[], object]) -> None:
        self._codes, self._at, self._error = codes, at, error
        self.steps = 0
        self._times = Counter[tuple[CodeType, int]]()
        self.place: str | None = None

    @contextmanager
    def here(self) -> Iterator[None]:
        """In this thread, as long as the block lasts."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def step(self, frame: FrameType) -> None:
        """A line comes."""
        line = frame.f_code, frame.f_lineno
        self._times[line] += 1
        if self._times[line] > MOST_TIMES:
            return
        self.steps += 1
        if self.steps == self._at + 1 and self.place is None:
            self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            self._error()

    def _enter(
        self, frame: FrameType, event: str, arg: object
    ) -> Callable[[FrameType, str, object], Any] | None:
        return _Lines(self, frame.f_code) if frame.f_code in self._codes else None


class _Lines:
    """The lines of one call."""

    def __init__(self, interruption: Interruption, code: CodeType) -> None:
        self._interruption, self._heads = interruption, _heads(code)
        self._inside: set[int] = set()

    def __call__(self, frame: FrameType, event: str, arg: object) -> _Lines:
        if event == "line":
            line = frame.f_lineno
            if line in self._inside:
                self._inside.remove(line)
            else:
                if line in self._heads:
                    self._inside.add(line)
                if frame.f_code.co_code[frame.f_lasti] not in _UNCOVERED:
                    self._interruption.step(frame)
        return self


@cache
def _heads(code: CodeType) -> frozenset[int]:
    """The lines at which ``with`` blocks begin."""
    return frozenset(
        each.positions.lineno
        for each in dis.get_instructions(code)
        if each.opname == "BEFORE_WITH"
        and each.positions is not None
        and each.positions.lineno is not None
    )
