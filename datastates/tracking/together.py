"""The ranks of one training act as one: they agree on where it begins and on what went wrong, and one of them moves the branch.

Each method is collective, and belongs to the training thread. A rank that fails tells the others before it raises, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.opening.core import Core
from datastates.transport.clone.groups import EXCHANGE_BYTES, Group
from datastates.transport.clone.meeting import Meeting

__all__ = ["Together"]

T = TypeVar("T")


class Together:
    """The ranks of a group, as one training uses them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that does what is done only once."""
        return self.rank == 0

    @contextmanager
    def united(self, what: str) -> Iterator[None]:
        """A block that every rank goes through; it ends once all ranks have ended it, with or without an error. ``what`` says what they
        do in it, as in "could not …".

        :raises DatastatesError: this rank's own error, as it is; or that of the first rank that failed, with its number.
        """
        if self.size == 1:
            yield
            return
        with Meeting(self.group, what).united():
            yield

    def first(self, what: str, work: Callable[[], T], kind: type[T]) -> T:
        """The result of the work, on every rank; rank 0 does the work, and the result is a ``kind``.

        :raises DatastatesError: the error of rank 0.
        """
        if self.size == 1:
            return work()
        meeting = Meeting(self.group, what)
        if not self.is_first:
            return msgspec.msgpack.decode(meeting.meet()[0], type=kind)
        with meeting.telling():
            found = work()
        meeting.meet(msgspec.msgpack.encode(found))
        return found

    def ended(self, what: str, error: str | None) -> dict[int, str]:
        """Wait until every rank has come to the end of ``what`` they did together; returns the errors of those that failed, by rank.

        A rank that failed comes here before the others. They hear of it wherever they meet until they arrive here too.
        """
        if self.size == 1:
            return {} if error is None else {0: error}
        return Meeting(self.group, what).end(error)

    def state(self, core: Core, rev: str | State, *, nearest: bool = False, **terms: object) -> State:
        """The state that ``rev`` names for rank 0, on every rank, to restore it on these terms; ``nearest`` as in ``Core.state``.

        Ranks that give another text for the revision must mean the same state. A branch may move meanwhile: they look only the uid up.

        :raises InvalidInput: the ranks give different states, or different terms; the error is the same on each.
        """
        if self.size == 1:
            return core.state(rev, nearest=nearest)
        said = values.revision(rev)
        theirs, uid = self.first("find the state", lambda: (said, core.state(said, nearest=nearest).uid), tuple[str, str])
        with self.united("find the state"):
            state = core.state(uid)
            own = uid if said == theirs else core.state(said, nearest=nearest).uid
        self.same(
            {"the state": own, "nearest": nearest, **terms},
            task="restore the same",
            advice="let all ranks call restore with the same state and the same other arguments",
        )
        return state

    def same(
        self,
        what: Mapping[str, object],
        *,
        task: str = "track the same training",
        advice: str = "let all ranks call track with the same arguments, or give those that train something else, as the stages of a"
        " pipeline do, a group and a branch of their own",
    ) -> None:
        """Raise unless all ranks give the same value under each name, as their ``task`` needs; ``advice`` says what to do about it.

        :raises InvalidInput: they do not; the error is the same on each.
        """
        if self.size == 1:
            return
        own = {name: str(value) for name, value in what.items()}
        everyone = [msgspec.msgpack.decode(said, type=dict[str, str]) for said in self.group.exchange(_fit(own))]
        for name in sorted({name for said in everyone for name in said}):
            for rank, said in enumerate(everyone):
                if said.get(name) != everyone[0].get(name):
                    raise InvalidInput(
                        f"the ranks of this job do not {task}: {name} is {everyone[0].get(name)} on rank 0 and"
                        f" {said.get(name)} on rank {rank}; {advice}"
                    )


def _fit(said: Mapping[str, str]) -> bytes:
    """The encoded texts, small enough for one exchange: texts that are too long are cut, which still shows most differences."""
    encoded = msgspec.msgpack.encode(said)
    if len(encoded) <= EXCHANGE_BYTES:
        return encoded
    most = EXCHANGE_BYTES // (8 * len(said))
    return msgspec.msgpack.encode({name[:255]: value[:most] for name, value in said.items()})
