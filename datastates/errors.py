"""Every error that datastates raises on purpose, grouped by what a handler would do.

    DatastatesError
    ├── InvalidInput (ValueError)       the caller's argument is wrong: change it
    │   ├── SyntaxProblem               a revision or a query does not parse; points at the column
    │   └── Unsupported                 an object that has no safe encoding, named by its path
    ├── NotFound (LookupError)          no such state, ref, run or repository
    │   └── Ambiguous                   a uid prefix that fits several states
    ├── Conflict                        another caller was first: read again, then decide
    ├── Corrupt                         bytes that fail their digest: restore the ancestor it names
    ├── Torn                            a capture whose sources changed while they were copied
    ├── Dirty                           live objects are half old, half new: resume the clone, or
    │                                   restore them
    ├── Unauthorized (PermissionError)  the token is missing or wrong
    ├── PeerFault                       a peer broke the protocol, or speaks another version
    ├── Unavailable                     known, but its bytes are gone or a service does not answer
    │   ├── Disconnected (ConnectionError)  a peer died, stopped or cannot be reached: try again, or
    │   │                                   another one
    │   └── OverBudget                  it does not fit the memory budget
    ├── ProcessorFailed                 a user's processor raised; the state is kept
    ├── Cancelled                       the caller cancelled a transfer
    └── Closed (RuntimeError)           the repository or tracker was closed

``kind`` is stable: the web API, ``--json`` and the exit codes of the terminal are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

__all__ = [
    "Ambiguous",
    "Cancelled",
    "Closed",
    "Conflict",
    "Corrupt",
    "DatastatesError",
    "Dirty",
    "Disconnected",
    "InvalidInput",
    "NotFound",
    "OverBudget",
    "PeerFault",
    "ProcessorFailed",
    "SyntaxProblem",
    "Torn",
    "Unauthorized",
    "Unavailable",
    "Unsupported",
]


class DatastatesError(Exception):
    """The base class; catch it to catch everything that datastates raises on purpose.

    ``trouble`` names the reason if many things fail for one reason. Errors with the same
    ``trouble`` report the same problem.
    """

    kind: ClassVar[str] = "error"
    trouble: str | None = None

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, Any]]:
        """Pickle the error whole: a pool that cannot read back what a worker raised breaks, or
        waits for ever."""
        return _again, (type(self), self.args), self.__dict__

    def repeats(self, said: BaseException) -> bool:
        """Whether this error reports what another one has reported already."""
        return self is said or (
            self.trouble is not None
            and isinstance(said, DatastatesError)
            and said.trouble == self.trouble
        )


class InvalidInput(DatastatesError, ValueError):
    """The caller's argument is wrong. The message has the right form."""

    kind = "invalid-input"


class SyntaxProblem(InvalidInput):
    """A revision or a query that does not parse.

    ``text`` is what was read, ``column`` the 1-based position of the problem, ``expected`` what may
    stand there. The message shows the text with a caret below the column.
    """

    kind = "syntax"

    def __init__(
        self, message: str, *, text: str, column: int, expected: tuple[str, ...] = ()
    ) -> None:
        self.text, self.column, self.expected = text, column, expected
        hint = f"\nexpected {', '.join(expected)}" if expected else ""
        super().__init__(f"{message} at column {column}\n  {text}\n  {' ' * (column - 1)}^{hint}")


class Unsupported(InvalidInput):
    """An object that cannot be encoded safely; the message names its path and type."""

    kind = "unsupported"


class NotFound(DatastatesError, LookupError):
    """No such state, ref, run or repository; the message lists the nearest names."""

    kind = "not-found"


class Ambiguous(NotFound):
    """A uid prefix that fits several states."""

    kind = "ambiguous"


class Conflict(DatastatesError):
    """A ref moved, or a name was taken, since the caller last looked."""

    kind = "conflict"


class Corrupt(DatastatesError):
    """Stored bytes fail their digest; the message names the file, the offset and what they belong
    to.

    ``nearest`` is the uid of the nearest state that verifies, if a state was being restored and
    there is one.
    """

    kind = "corrupt"
    nearest: str | None = None

    def __init__(self, message: str, *, nearest: str | None = None) -> None:
        self.nearest = nearest
        super().__init__(message)


class Torn(DatastatesError):
    """Tensors were changed between the call of ``capture`` and the end of their copy; ``paths``
    names all of them."""

    kind = "torn"
    paths: tuple[str, ...] = ()

    def __init__(self, message: str, *, paths: tuple[str, ...] = ()) -> None:
        self.paths = paths
        super().__init__(message)


class Unavailable(DatastatesError):
    """A state whose bytes are gone (evicted, lost), or a service that does not answer.

    ``nearest`` is the uid of the nearest state of its branch that can be restored, by steps, if
    there is one. With ``is_gone``, waiting does not help.
    """

    kind = "unavailable"
    nearest: str | None = None
    is_gone: bool = False

    def __init__(
        self,
        message: str,
        *,
        nearest: str | None = None,
        is_gone: bool = False,
        trouble: str | None = None,
    ) -> None:
        self.nearest, self.is_gone, self.trouble = nearest, is_gone, trouble
        super().__init__(message)


class Dirty(DatastatesError):
    """Live objects are half old, half new after a clone in place failed; the message names them
    and how to make them whole."""

    kind = "dirty"


class Unauthorized(DatastatesError, PermissionError):
    """The token is missing or wrong, on one side or the other."""

    kind = "unauthorized"


class PeerFault(DatastatesError):
    """A peer broke the protocol: it sent garbage or a length out of bounds, or speaks another
    version. The connection is closed."""

    kind = "peer-fault"


class Disconnected(Unavailable, ConnectionError):
    """A peer died, stopped answering, or cannot be reached; the message names it, and how long we
    waited."""

    kind = "disconnected"


class ProcessorFailed(DatastatesError):
    """A user's processor raised on a state; the message names both, and ``__cause__`` is what it
    raised.

    The state is unaffected."""

    kind = "processor-failed"


class Cancelled(DatastatesError):
    """The caller cancelled a transfer."""

    kind = "cancelled"


class OverBudget(Unavailable):
    """Something does not fit the memory budget. The message has the needed bytes."""

    kind = "over-budget"


class Closed(DatastatesError, RuntimeError):
    """The repository or tracker was closed, or belongs to the parent of a forked process."""

    kind = "closed"


def _again(kind: type[DatastatesError], args: tuple[object, ...]) -> DatastatesError:
    error = kind.__new__(kind, *args)
    error.args = args  # without __init__, which makes the message out of more than the message
    return error
