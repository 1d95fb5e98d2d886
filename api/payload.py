"""A state as a safetensors file that is not stored anywhere: its header is computed, its bytes
are read and checked on demand."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio.from_thread
import msgspec
import numpy as np
import torch
from fastapi import Request, Response

from datastates.errors import Cancelled, InvalidInput, Unavailable
from datastates.files.checkpoints import Entry, header_of, in_order, words_about
from datastates.lineage.states import State
from datastates.state.geometry import dtype_of, is_whole, rebuild
from datastates.state.manifest import CHUNK_BYTES, TensorSpec
from datastates.state.report import Selection
from datastates.storage.reading import read_flat, specs_of
from datastates.storage.tier import Reader

from .routing import Refusal

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor that begins at ``start`` in the file; ``spec`` has the places of its bytes."""

    start: int
    bytes: int
    spec: TensorSpec


class StateFile:
    """The file of one open state: every tensor that ``only`` selects, under its path, in the
    layout of ``plan_export``. Each of several tied tensors is written.

    :raises InvalidInput: ``only`` selects something that is not there.
    """

    def __init__(self, reader: Reader, state: State, only: Sequence[str] | None) -> None:
        self._reader = reader
        specs = specs_of(reader)
        selection = Selection(only or None)
        chosen = {spec.path: spec for spec in specs if selection.wants(spec.path)}
        selection.refuse_unused(spec.path for spec in specs)
        if not chosen:
            raise InvalidInput(f"state {state.uid} has no tensors: there is nothing to download")
        entries = in_order(
            Entry(spec.path, dtype_of(spec.dtype), spec.shape) for spec in chosen.values()
        )
        self._header = header_of(entries, words_about(state))
        self._parts: list[_Part] = []
        self.size = len(self._header)
        for entry in entries:
            spec = chosen[entry.name]
            self._parts.append(
                _Part(self.size, entry.bytes, spec if spec.alias is None else specs[spec.alias])
            )
            self.size += entry.bytes

    def pieces(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes ``[start, end)`` of the file in pieces of about a MiB, none of them empty.

        :raises Corrupt: a chunk fails its digest; none of its bytes were returned.
        """
        gathered, count = [], 0
        for small in self._pieces(start, end):
            gathered.append(small)
            count += len(small)
            if count >= PIECE_BYTES:
                yield b"".join(gathered)
                gathered, count = [], 0
        if count:
            yield b"".join(gathered)

    def close(self) -> None:
        self._reader.close()

    def _pieces(self, start: int, end: int) -> Iterator[bytes]:
        if start < len(self._header):
            yield self._header[start:end]
        for part in self._parts:
            first, last = max(start - part.start, 0), min(end - part.start, part.bytes)
            if first < last:
                yield from (
                    _plain(self._reader, part.spec, first, last)
                    if _is_plain(part)
                    else _turned(self._reader, part.spec, first, last)
                )


def _is_plain(part: _Part) -> bool:
    """Whether the bytes are stored in row-major order, in one piece."""
    if not is_whole(part.spec):
        return False
    expected = 1
    for size, stride in zip(reversed(part.spec.shape), reversed(part.spec.strides), strict=True):
        if size != 1 and stride != expected:
            return part.bytes == 0
        expected *= size
    return True


def _plain(reader: Reader, spec: TensorSpec, first: int, last: int) -> Iterator[bytes]:
    (shard,) = spec.shards
    at, end = shard.start + first, shard.start + last
    while at < end:
        chunk, offset = divmod(at, CHUNK_BYTES)
        piece = reader.chunk(chunk)[offset : min(offset + PIECE_BYTES, offset + end - at)]
        yield bytes(piece)
        at += piece.nbytes


def _turned(reader: Reader, spec: TensorSpec, first: int, last: int) -> Iterator[bytes]:
    """The bytes of a tensor that is stored in another order, in several shards, or once for many
    elements: block by block.

    Needs memory for the whole tensor: served bytes are read, not mapped, so that a truncated file
    does not crash the server.
    """
    tensor = rebuild(read_flat(reader, spec), spec)
    item, dim, inner = tensor.element_size(), tensor.dim(), 1
    while dim > 1 and inner * tensor.shape[dim - 1] * item <= PIECE_BYTES:
        dim -= 1
        inner *= tensor.shape[dim]
    # Blocks are rows [at, at + rows) of dimension ``dim - 1``, at each index of the dimensions
    # before it.
    size, row = tensor.shape[dim - 1], inner * item
    rows = max(1, PIECE_BYTES // row)
    for outer in range(first // (size * row), -(-last // (size * row))):
        base = outer * size * row
        block = tensor[tuple(map(int, np.unravel_index(outer, tensor.shape[: dim - 1])))]
        for at in range(max(first - base, 0) // row // rows * rows, size, rows):
            begin = base + at * row
            if begin >= last:
                return
            dense = block[at : at + rows].contiguous().reshape(-1).view(torch.uint8)
            yield dense.numpy()[max(first - begin, 0) : last - begin].tobytes()


# Limits on what requests do at once, and on requests of clients that have hung up.


_LOOK_S = 0.25


class ConcurrencyLimit:
    """A limit on how many requests do something at once. Further requests wait for ``wait_s``.
    They are then refused with ``detail``, and may try again after ``retry_s``."""

    def __init__(self, at_once: int, detail: str, *, wait_s: float, retry_s: int) -> None:
        self._free = threading.BoundedSemaphore(at_once)
        self._detail, self._wait_s, self._retry_s = detail, wait_s, retry_s

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold one of the places.

        :raises Refusal: none became free in time.
        """
        if not self._free.acquire(timeout=self._wait_s):
            headers = {"Retry-After": str(self._retry_s)}
            raise Refusal(503, Unavailable.kind, self._detail, headers)
        try:
            yield
        finally:
            self._free.release()


def stop_when_gone(request: Request) -> Callable[[], None]:
    """A function that the thread of a request calls often.

    :raises Cancelled: the client has hung up.
    """
    looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked < _LOOK_S:
            return
        looked = time.monotonic()
        if anyio.from_thread.run(request.is_disconnected):
            raise Cancelled("the client hung up")

    return look


def stop_after(seconds: float, what: str, instead: str) -> Callable[[], None]:
    """A function to call often during ``what``, which must end in time; ``instead`` is the advice
    to a client when it does not.

    :raises InvalidInput: ``seconds`` have passed.
    """
    until = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > until:
            raise InvalidInput(f"{what} takes more than {seconds:g} s, and was given up: {instead}")

    return look


# The range of bytes of a request (RFC 9110, 14).


_RANGE = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.ASCII | re.IGNORECASE)


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """``[start, end)`` of something of ``size`` bytes. None means the whole: the request has no
    range, or several, or the header is no range.

    An empty range (``start == end``) cannot be satisfied: 416.
    """
    found = _RANGE.fullmatch(header or "")
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return max(size - int(last), 0), size
    if last and int(last) < int(first):
        return None
    start = min(int(first), size)
    return start, max(min(int(last) + 1, size) if last else size, start)


# Responses that are sent piece by piece, and end when the client has hung up.


STALLED_S = 60.0


class Streamed(Response):
    """``pieces`` as the body. ``close`` is called once, however it ends: all sent, client gone or
    stalled, or an error.

    The client bounds the memory: the next piece is produced once the one before was taken. An error
    in ``pieces`` breaks the connection, so that no client mistakes what was sent for the whole.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        *,
        close: Callable[[], object],
        headers: Mapping[str, str],
        media_type: str,
        status: int = 200,
    ) -> None:
        self.status_code, self.media_type, self.background = status, media_type, None
        self._pieces, self._close = pieces, close
        self.init_headers(headers)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send until either the pieces or the connection ends."""
        sending, leaving = (
            asyncio.ensure_future(self._send(send)),
            asyncio.ensure_future(_gone(receive)),
        )
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            try:
                # a thread that is still reading for it ends first
                await asyncio.gather(sending, leaving, return_exceptions=True)
                await self._pieces.aclose()
            finally:
                self._close()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for piece in self._pieces:
            async with asyncio.timeout(STALLED_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Responses: values as JSON, with only the requested fields. A client that already has the
# response gets 304.


_encoder = msgspec.json.Encoder(enc_hook=str)


def reply(
    value: Any,
    *,
    request: Request | None = None,
    fields: str | None = None,
    etag: str | bool | None = None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """``value`` as JSON. ``fields`` are names separated by commas, of the value or of each item of
    a page: ``uid,step,metrics.loss``.

    With ``etag`` and ``request``, a client that already has the answer gets 304 and no body. True
    computes the tag from the body.

    :raises InvalidInput: there is no such field; the error lists those that exist.
    """
    sent = dict(headers or {})
    if isinstance(etag, str) and request is not None and is_known(request, etag):
        return Response(status_code=304, headers={**sent, "ETag": etag})
    if fields:
        value, chosen = msgspec.to_builtins(value, enc_hook=str), fields.split(",")
        if {"items", "next"} <= set(value):
            value["items"] = [_pick(item, chosen) for item in value["items"]]
        else:
            value = _pick(value, chosen)
    body = _encoder.encode(value)
    if etag is True:
        etag = _tag(body)
        if request is not None and is_known(request, etag):
            return Response(status_code=304, headers={**sent, "ETag": etag})
    if etag:
        sent["ETag"] = etag
    return Response(body, status_code=status, headers=sent, media_type="application/json")


def is_known(request: Request, etag: str) -> bool:
    """Whether the client sent this tag in ``If-None-Match``.

    A proxy may have made the tag a weak one."""
    tags = [
        tag.strip().removeprefix("W/")
        for tag in request.headers.get("if-none-match", "").split(",")
    ]
    return etag in tags or "*" in tags


def etag_of(*parts: object) -> str:
    """A strong tag made of what an answer depends on."""
    return _tag(_encoder.encode(parts))


def _tag(data: bytes) -> str:
    import blake3

    return f'"{blake3.blake3(data).hexdigest(16)}"'


def _pick(item: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    picked: dict[str, Any] = {}
    for field in fields:
        name, _, key = field.strip().partition(".")
        if name not in item:
            raise InvalidInput(f"there is no field {name!r}: choose among {', '.join(item)}")
        if not key:
            picked[name] = item[name]
        elif isinstance(item[name], dict):
            picked.setdefault(name, {}).update({key: item[name][key]} if key in item[name] else {})
        else:
            raise InvalidInput(f"the field {name!r} has no parts: write {name}, not {field}")
    return picked
