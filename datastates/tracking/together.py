"""The ranks of one training act as one: they agree on where it begins and on what went wrong, and one of them moves the branch.

Each method is collective, and belongs to the training thread. A rank that fails says so before it raises, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from datastates.errors import DatastatesError, InvalidInput
from datastates.transport.clone.groups import EXCHANGE_BYTES, Group
from datastates.transport.failures import revive
from datastates.transport.protocol import Failure

__all__ = ["Together"]

T = TypeVar("T")
_CHARACTERS = 4 << 10


class _Said(msgspec.Struct, frozen=True):
    """What a rank tells the others: that it failed, or what it found."""

    failure: Failure | None = None
    found: msgspec.Raw = msgspec.Raw(b"\xc0")


class Together:
    """The ranks of a group, as one training sees them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    @contextmanager
    def united(self, what: str) -> Iterator[None]:
        """A block that every rank goes through; it ends once all have, well or with an error. ``what`` they do, as in "could not …".

        :raises DatastatesError: this rank's own error, as it is; or that of the first rank that failed, with its number.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except Exception as exc:
            self._tell(_Said(_described(exc)))
            raise
        self._heed(what, self._tell(_Said()))

    def first(self, what: str, work: Callable[[], T], kind: type[T]) -> T:
        """Rank 0 does the work, and all get what it found, a ``kind``.

        :raises DatastatesError: the error of rank 0.
        """
        if self.size == 1:
            return work()
        if self.is_first:
            try:
                found = work()
            except Exception as exc:
                self._tell(_Said(_described(exc)))
                raise
            self._tell(_Said(found=msgspec.Raw(msgspec.msgpack.encode(found))))
            return found
        everyone = self._tell(_Said())
        self._heed(what, everyone)
        return msgspec.msgpack.decode(everyone[0].found, type=kind)

    def same(self, what: Mapping[str, object]) -> None:
        """Raise unless all ranks say the same under each name.

        :raises InvalidInput: they do not; the same error on each.
        """
        if self.size == 1:
            return
        own = {name: str(value) for name, value in what.items()}
        everyone = [msgspec.msgpack.decode(said, type=dict[str, str]) for said in self.group.exchange(_fit(own))]
        for name in sorted({name for said in everyone for name in said}):
            for rank, said in enumerate(everyone):
                if said.get(name) != everyone[0].get(name):
                    raise InvalidInput(
                        f"the ranks of this job do not track the same training: {name} is {everyone[0].get(name)} on rank 0 and"
                        f" {said.get(name)} on rank {rank}; let all ranks call track with the same arguments"
                    )

    def _tell(self, own: _Said) -> list[_Said]:
        return [msgspec.msgpack.decode(said, type=_Said) for said in self.group.exchange(msgspec.msgpack.encode(own))]

    def _heed(self, what: str, everyone: list[_Said]) -> None:
        for rank, said in enumerate(everyone):
            if said.failure is not None and rank != self.rank:
                message = f"rank {rank} of {self.size} could not {what}: {said.failure.message}"
                raise revive(msgspec.structs.replace(said.failure, message=message))


def _described(error: Exception) -> Failure:
    """An error for the other ranks, which are of the same job: they may read all of it."""
    if isinstance(error, DatastatesError):
        return Failure(error.kind, str(error)[:_CHARACTERS])
    return Failure(DatastatesError.kind, f"{type(error).__name__}: {error}"[:_CHARACTERS])


def _fit(said: Mapping[str, str]) -> bytes:
    """What fits an exchange: texts that are too long are cut, which still tells most differences apart."""
    encoded = msgspec.msgpack.encode(said)
    if len(encoded) <= EXCHANGE_BYTES:
        return encoded
    most = EXCHANGE_BYTES // (8 * len(said))
    return msgspec.msgpack.encode({name[:255]: value[:most] for name, value in said.items()})
