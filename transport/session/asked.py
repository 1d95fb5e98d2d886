"""The questions of the peer: accepted as they come, answered by tasks of their own.

Ask   -> take -> _answer, _reply            answers come from ``Answers``, a few at once
Ask   -> take -> _begin_upload              a push: the description of its state follows in parts
Part  -> part -> _reply                     with the last part, the state is fetched
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from datastates.errors import DatastatesError, PeerFault
from datastates.transport.failures import describe
from datastates.transport.protocol import PART_BYTES, Answer, Digests, Failed, Message, Offer, Push, Question, Release

from .answers import Answers
from .clock import Clock
from .feed import Feed
from .life import Life
from .sending import Sending

__all__ = ["Asked"]

_AT_ONCE = 8  # questions of a peer that are answered at once; more wait
_QUESTIONS = 256  # questions that a peer may have open, the waiting ones included
_T = TypeVar("_T")


@dataclass(slots=True)
class _Upload:
    """The description of a state that a peer pushes, as far as it has come."""

    push: Push
    moved_at: float
    body: bytearray = field(default_factory=bytearray)


class Asked:
    """The peer's questions; belongs to the loop thread. ``feed`` makes the feed of a state that the peer holds open for us. Without
    ``answers`` this side serves nothing, and the peer can ask only for what this side pushes."""

    def __init__(
        self,
        answers: Answers | None,
        sending: Sending,
        *,
        life: Life,
        post: Callable[[Message], Awaitable[None]],
        clock: Clock,
        peer: str,
        feed: Callable[[int, bytes, tuple[int, ...]], Feed],
    ) -> None:
        self._answers, self._sending, self._life = answers, sending, life
        self._post, self._clock, self._peer, self._feed = post, clock, peer, feed
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._questions: set[int] = set()
        self._uploads: dict[int, _Upload] = {}
        self._refused: dict[int, int] = {}  # refused bodies that may still be arriving: how much of each is left

    @property
    def is_busy(self) -> bool:
        """Whether a question is not answered yet."""
        return bool(self._questions or self._uploads)

    @property
    def stalled_s(self) -> float:
        """The seconds for which no part has come of a push whose description is incomplete."""
        now = self._clock()
        return max((now - upload.moved_at for upload in self._uploads.values()), default=0.0)

    def take(self, number: int, question: Question) -> None:
        """Begin to answer a question.

        :raises PeerFault: its number is already in use, or too many questions are open.
        """
        if number in self._questions or len(self._questions) >= _QUESTIONS:
            problem = "twice" if number in self._questions else f"while {_QUESTIONS} others are open"
            raise PeerFault(f"{self._peer} asks question {number} {problem}")
        self._questions.add(number)
        match question:
            case Push():
                self._begin_upload(number, question)
            case Release():
                self._life.depend_on(self._reply, number, self._release, question)
            case Digests():
                self._life.depend_on(self._reply, number, self._sending.digests, question)
            case _:
                self._life.depend_on(self._answer, number, question)

    def part(self, number: int, data: bytes) -> None:
        """Take in a part of the description of a state that the peer pushes.

        :raises PeerFault: its length is wrong.
        """
        upload = self._uploads.get(number)
        left = self._refused.get(number, 0) if upload is None else upload.push.bytes - len(upload.body)
        if len(data) != min(PART_BYTES, left) or not data:
            raise PeerFault(f"{self._peer} sent {len(data)} bytes for question {number}, where {min(PART_BYTES, left)} belong")
        if upload is None:
            self._refused[number] -= len(data)
            return
        upload.body += data
        upload.moved_at = self._clock()
        if len(upload.body) == upload.push.bytes:
            del self._uploads[number]
            self._life.depend_on(self._reply, number, self._take_push, upload)

    def close(self) -> None:
        """Clean up; the session is over."""
        if self._answers is not None:
            self._answers.close(sum(upload.push.bytes for upload in self._uploads.values()))

    def _begin_upload(self, number: int, push: Push) -> None:
        """Begin a push. If it is refused, that happens before its body is accepted; parts already under way are dropped."""
        try:
            self._require(push).begin_push(push)
        except DatastatesError as exc:
            self._refused[number] = push.bytes
            if len(self._refused) > _QUESTIONS:
                del self._refused[next(iter(self._refused))]
            self._questions.discard(number)
            self._life.depend_on(self._post, Failed(number, describe(exc)))
        else:
            self._uploads[number] = _Upload(push, self._clock())

    async def _answer(self, number: int, question: Question) -> None:
        async with self._at_once:
            await self._reply(number, self._own, question)

    async def _reply(self, number: int, work: Callable[[_T], Awaitable[bytes]], matter: _T) -> None:
        try:
            body = await work(matter)
        except Exception as exc:  # whatever it was, the peer that asked must hear of it
            self._questions.discard(number)
            await self._post(Failed(number, describe(exc)))
            return
        last = max(len(body) - 1, 0) // PART_BYTES
        for part in range(last + 1):
            if part == last:
                self._questions.discard(number)
            await self._post(Answer(number, body[part * PART_BYTES : (part + 1) * PART_BYTES], part == last))

    async def _own(self, question: Question) -> bytes:
        return await self._require(question).answer(question)

    async def _take_push(self, upload: _Upload) -> bytes:
        def feed(offer: Offer, lengths: tuple[int, ...]) -> Feed:
            return self._feed(upload.push.handle, offer.manifest, lengths)

        return await self._require(upload.push).take(upload.push, upload.body, feed)

    async def _release(self, question: Release) -> bytes:
        await self._sending.release(question.handle, question.generation)
        return b""

    def _require(self, question: Question) -> Answers:
        if self._answers is None:
            raise PeerFault(f"{type(question).__name__} was asked of a side that serves nothing")
        return self._answers
