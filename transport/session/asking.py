"""The questions of one end of a session, and their answers as they come in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from datastates.errors import DatastatesError, Disconnected, PeerFault
from datastates.transport.failures import again, revive
from datastates.transport.protocol import PART_BYTES, Answer, Ask, Failed, Message, Part, Question

__all__ = ["Asking"]

_AT_ONCE = 64


@dataclass(slots=True)
class _Pending:
    done: asyncio.Future[bytes]
    limit: int
    asked_at: float
    touched_at: float
    is_push: bool
    body: bytearray = field(default_factory=bytearray)


class Asking:
    """Our questions, by id. An answer to a question that was given up is dropped; an answer to one never asked is the peer's fault."""

    def __init__(self, post: Callable[[Message], Awaitable[None]], clock: Callable[[], float], peer: str) -> None:
        self._post, self._clock, self._peer = post, clock, peer
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._pending: dict[int, _Pending] = {}
        self._next = 0

    async def ask(self, question: Question, *, limit: int, offer: bytes = b"") -> bytes:
        """The whole body of the answer, of at most ``limit`` bytes. ``offer`` is sent after a ``Push``."""
        async with self._room:
            now = self._clock()
            pending = _Pending(asyncio.get_running_loop().create_future(), limit, now, now, is_push=bool(offer))
            number, self._next = self._next, self._next + 1
            self._pending[number] = pending
            try:
                await self._post(Ask(number, question))
                for start in range(0, len(offer), PART_BYTES):
                    if pending.done.done():  # refused before all of it was sent
                        break
                    await self._post(Part(number, offer[start : start + PART_BYTES]))
                return await pending.done
            finally:
                del self._pending[number]
                if not pending.done.cancel() and not pending.done.cancelled():
                    pending.done.exception()  # marks it as retrieved, also when posting failed first

    def answered(self, message: Answer) -> None:
        """Take in a part of an answer.

        :raises PeerFault: it answers no question, or the parts are longer than allowed, or shorter than a part of a longer answer must be.
        """
        pending = self._find(message.id)
        if not message.is_last and len(message.data) != PART_BYTES:
            raise PeerFault(f"{self._peer} answers in a part of {len(message.data)} bytes, where each but the last has {PART_BYTES}")
        if pending is None:
            return
        if len(pending.body) + len(message.data) > pending.limit:
            raise PeerFault(f"{self._peer} answers with more than the {pending.limit} bytes that were asked for")
        pending.body += message.data
        pending.touched_at = self._clock()
        if message.is_last:
            pending.done.set_result(bytes(pending.body))

    def failed(self, message: Failed) -> None:
        """Take in an error as the answer to a question.

        :raises PeerFault: it answers no question.
        """
        pending = self._find(message.id)
        if pending is not None:
            pending.done.set_exception(revive(message.failure))

    def touch(self) -> None:
        """Note that the peer works on what is pushed to it: it wants a chunk that it has not wanted before."""
        for pending in self._pending.values():
            if pending.is_push:
                pending.touched_at = self._clock()

    def expire(self, silent_s: float, total_s: float) -> None:
        """Give up questions whose answer had no further part for ``silent_s``, or is not complete within ``total_s``.

        A push lasts for as long as the peer keeps asking for its chunks.
        """
        now = self._clock()
        for pending in self._pending.values():
            if pending.done.done():
                continue
            if now - pending.touched_at > silent_s:
                problem = f"has not answered for {silent_s:g} s"
            elif now - pending.asked_at > total_s and not pending.is_push:
                problem = f"has sent {len(pending.body)} bytes of an answer in {total_s:g} s and does not come to its end"
            else:
                continue
            pending.done.set_exception(Disconnected(f"{self._peer} is alive, but {problem}: try again later"))

    def fail(self, error: DatastatesError) -> None:
        """Fail all open questions; the session is over."""
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(again(error))

    def _find(self, number: int) -> _Pending | None:
        if number >= self._next:
            raise PeerFault(f"{self._peer} answers question {number}, which was never asked")
        pending = self._pending.get(number)
        return None if pending is None or pending.done.done() else pending
