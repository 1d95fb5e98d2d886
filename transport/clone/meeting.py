"""Ranks that do one thing together: whoever fails says so where the others meet it next, and all raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from datastates.errors import DatastatesError
from datastates.transport.failures import revive
from datastates.transport.protocol import Failure

from .groups import Group

__all__ = ["Meeting"]

_CHARACTERS = 4 << 10
_END = b"at the end"


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: that it failed, or what they ask each other."""

    failure: Failure | None = None
    body: bytes = b""


class Meeting:
    """One thing that the ranks of a group do together; ``what`` it is, as in "could not …". Collective, on the training threads."""

    def __init__(self, group: Group, what: str) -> None:
        self.group, self._what = group, what
        self._is_over = False

    @contextmanager
    def united(self) -> Iterator[None]:
        """The block that all go through; it ends once all have.

        :raises DatastatesError: this rank's own error, as it is; or that of the first rank that failed, with its number.
        """
        with self.telling():
            yield
        self.meet()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """The block before a meeting: the others learn there what it raises, which is then raised here as it is."""
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
            self._is_over = True  # nobody is there to be told
            raise
        for rank, each in enumerate(said):
            if each.failure is not None:
                self._is_over = True
                message = f"rank {rank} of {self.group.size} could not {self._what}: {each.failure.message}"
                raise revive(msgspec.structs.replace(each.failure, message=message))
        return [each.body for each in said]

    def end(self, error: str | None = None) -> dict[int, str]:
        """Wait until all are at the end of it; by rank, what those that failed say.

        One that failed is here before the others: it says so wherever these meet, until all are here.
        """
        own = _Said(None if error is None else Failure(DatastatesError.kind, _shortened(error)), _END)
        while True:
            everyone = [_decoded(said) for said in self.group.exchange(msgspec.msgpack.encode(own))]
            if all(each is not None and each.body == _END for each in everyone):
                return {rank: each.failure.message for rank, each in enumerate(everyone) if each is not None and each.failure is not None}

    def _exchange(self, own: _Said) -> list[_Said]:
        return [msgspec.msgpack.decode(said, type=_Said) for said in self.group.exchange(msgspec.msgpack.encode(own))]


def _described(error: Exception) -> Failure:
    """An error for the other ranks, which are of the same job: they may read all of it."""
    if isinstance(error, DatastatesError):
        return Failure(error.kind, str(error)[:_CHARACTERS])
    return Failure(DatastatesError.kind, f"{type(error).__name__}: {error}"[:_CHARACTERS])


def _shortened(text: str) -> str:
    """Its beginning, and its end, where a traceback says where it was raised."""
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]}\n…\n{text[-half:]}"


def _decoded(said: bytes) -> _Said | None:
    """What a rank says in a meeting; None of what is exchanged in another form."""
    try:
        return msgspec.msgpack.decode(said, type=_Said)
    except msgspec.DecodeError:
        return None
