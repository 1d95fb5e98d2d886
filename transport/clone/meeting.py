"""Something that several ranks do together: a rank that fails says so at the next meeting, and all ranks raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from datastates.errors import DatastatesError
from datastates.transport.failures import Failure, revive

from .groups import Group

__all__ = ["Meeting"]

_CHARACTERS = 4 << 10
_END = b"at the end"


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: that it failed, or its part of the exchange."""

    failure: Failure | None = None
    body: bytes = b""


class Meeting:
    """One thing that the ranks of a group do together; ``what`` names it, as in "could not …". Collective, on the training threads."""

    def __init__(self, group: Group, what: str) -> None:
        self.group, self._what = group, what
        self._is_over = False

    @contextmanager
    def united(self) -> Iterator[None]:
        """The block that all ranks run; it ends once all of them have finished it.

        :raises DatastatesError: this rank's own error, as it is; or that of the first rank that failed, with its number.
        """
        with self.telling():
            yield
        self.meet()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """The block before a meeting: an error in it is told to the other ranks at the meeting, and then raised here as it is."""
        try:
            yield
        except Exception as exc:
            if not self._is_over:
                self._is_over = True
                self._exchange(_Said(_described(exc)))
            raise

    def meet(self, body: bytes = b"") -> list[bytes]:
        """What every rank says, once all are here and none has failed."""
        try:
            said = self._exchange(_Said(body=body))
        except BaseException:
            self._is_over = True  # no rank is left to be told
            raise
        for rank, each in enumerate(said):
            if each.failure is not None:
                self._is_over = True
                message = f"rank {rank} of {self.group.size} could not {self._what}: {each.failure.message}"
                raise revive(msgspec.structs.replace(each.failure, message=message))
        return [each.body for each in said]

    def end(self, error: str | None = None) -> dict[int, str]:
        """Wait until all ranks reach the end; returns, by rank, what those that failed say.

        A rank that failed arrives before the others: it repeats its error wherever they meet, until all are here.
        """
        own = _Said(None if error is None else Failure(DatastatesError.kind, _shortened(error)), _END)
        while True:
            everyone = [_decoded(said) for said in self.group.exchange(msgspec.msgpack.encode(own))]
            if all(each is not None and each.body == _END for each in everyone):
                return {rank: each.failure.message for rank, each in enumerate(everyone) if each is not None and each.failure is not None}

    def _exchange(self, own: _Said) -> list[_Said]:
        return [msgspec.msgpack.decode(said, type=_Said) for said in self.group.exchange(msgspec.msgpack.encode(own))]


def _described(error: Exception) -> Failure:
    """An error, described for the other ranks. They are of the same job, so they may read all of it."""
    if isinstance(error, DatastatesError):
        return Failure(error.kind, str(error)[:_CHARACTERS])
    return Failure(DatastatesError.kind, f"{type(error).__name__}: {error}"[:_CHARACTERS])


def _shortened(text: str) -> str:
    """The beginning of a text, and its end, where a traceback says where the error was raised."""
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]}\n…\n{text[-half:]}"


def _decoded(said: bytes) -> _Said | None:
    """What a rank says in a meeting; None if the bytes are an exchange of another form."""
    try:
        return msgspec.msgpack.decode(said, type=_Said)
    except msgspec.DecodeError:
        return None
