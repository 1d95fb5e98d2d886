"""The questions of one end of a session, and their answers as they come in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from datastates.errors import DatastatesError, Disconnected, PeerFault

from .failures import again, revive
from .protocol import PART_BYTES, Answer, Ask, Failed, Message, Part, Question

__all__ = ["Asking"]

_AT_ONCE = 64


@dataclass(slots=True)
class _Pending:
    done: asyncio.Future[bytes]
    limit: int
    touched_at: float
    body: bytearray = field(default_factory=bytearray)


class Asking:
    """Questions by id. An answer to one that was given up is dropped; one that was never asked is the peer's fault."""

    def __init__(self, post: Callable[[Message], Awaitable[None]], clock: Callable[[], float], peer: str) -> None:
        self._post, self._clock, self._peer = post, clock, peer
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._pending: dict[int, _Pending] = {}
        self._next = 0

    async def ask(self, question: Question, *, limit: int, offer: bytes = b"") -> bytes:
        """The whole body of the answer, of at most ``limit`` bytes. ``offer`` travels behind a ``Push``."""
        async with self._room:
            pending = _Pending(asyncio.get_running_loop().create_future(), limit, self._clock())
            number, self._next = self._next, self._next + 1
            self._pending[number] = pending
            try:
                await self._post(Ask(number, question))
                for start in range(0, len(offer), PART_BYTES):
                    await self._post(Part(number, offer[start : start + PART_BYTES]))
                return await pending.done
            finally:
                del self._pending[number]
                if not pending.done.cancel() and not pending.done.cancelled():
                    pending.done.exception()  # looked at, also when posting failed first

    def answered(self, message: Answer) -> None:
        """A part of an answer is here.

        :raises PeerFault: to no question, or the parts are longer than allowed.
        """
        pending = self._find(message.id)
        if pending is None:
            return
        if len(pending.body) + len(message.data) > pending.limit:
            raise PeerFault(f"{self._peer} answers with more than the {pending.limit} bytes that were asked for")
        pending.body += message.data
        pending.touched_at = self._clock()
        if message.is_last:
            pending.done.set_result(bytes(pending.body))

    def failed(self, message: Failed) -> None:
        """A question was answered by an error.

        :raises PeerFault: to no question.
        """
        pending = self._find(message.id)
        if pending is not None:
            pending.done.set_exception(revive(message.failure))

    def touch(self) -> None:
        """The peer works on what it was asked (it wants chunks of what is pushed to it)."""
        for pending in self._pending.values():
            pending.touched_at = self._clock()

    def expire(self, patience_s: float) -> None:
        """Give up questions of which nothing was heard for so long."""
        for pending in self._pending.values():
            if self._clock() - pending.touched_at > patience_s and not pending.done.done():
                pending.done.set_exception(
                    Disconnected(f"{self._peer} is alive, but has not answered for {patience_s:g} s: try again later")
                )

    def fail(self, error: DatastatesError) -> None:
        """The session is over."""
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(again(error))

    def _find(self, number: int) -> _Pending | None:
        if number >= self._next:
            raise PeerFault(f"{self._peer} answers question {number}, which was never asked")
        pending = self._pending.get(number)
        return None if pending is None or pending.done.done() else pending
