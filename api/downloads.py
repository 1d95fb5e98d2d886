"""A resumable download: piece by piece, each checked before it is written."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import httpx

from datastates.errors import Conflict, Corrupt, DatastatesError, PeerFault
from datastates.system.regular import open_regular

from .answers import checked, disconnected, error_of
from .content_digest import is_as_said

__all__ = ["download"]

PIECE_BYTES = 16 << 20
_WAIT_S = 0.2
_AWAY = {502, 504}


def download(http: httpx.Client, path: str, params: Mapping[str, Any], target: Path, *, patience_s: float) -> Path:
    """Write the content of ``path`` to ``target``; see ``Client.download``."""
    head = _patiently(http, "HEAD", path, params, {}, patience_s)
    etag, size = head.headers["etag"], int(head.headers["content-length"])
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{hashlib.sha256(etag.encode()).hexdigest()[:12]}.part")
    with os.fdopen(open_regular(part, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab") as out:
        _lock(out, target)
        if out.tell() > size:
            out.truncate(0)
            out.seek(0)
        while out.tell() < size:
            start, end = out.tell(), min(out.tell() + PIECE_BYTES, size)
            asked = {"Range": f"bytes={start}-{end - 1}", "If-Range": etag, "Want-Content-Digest": "blake3=10, sha-256=1"}
            out.write(_verified(_patiently(http, "GET", path, params, asked, patience_s), start, end))
        out.flush()
        os.fsync(out.fileno())
        part.replace(target)
    _sync_folder(target.parent)
    return target


def _patiently(
    http: httpx.Client, method: str, path: str, params: Mapping[str, Any], headers: Mapping[str, str], patience_s: float
) -> httpx.Response:
    """The answer, waiting for the server to come back if need be; a request that the server broke off is sent again."""
    began = time.monotonic()
    while True:
        try:
            answer = http.request(method, path, params=params, headers=headers)
            if answer.is_error and method == "HEAD":  # an answer to HEAD does not say why
                said = http.get(path, params=params, headers={"Range": "bytes=0-0"})
                answer = said if said.is_error else answer
        except httpx.TransportError as error:
            problem: DatastatesError = disconnected(str(http.base_url), error)
            problem.__cause__ = error
        else:
            if answer.status_code not in _AWAY and "retry-after" not in answer.headers:
                return checked(answer)
            problem = error_of(answer)
        if time.monotonic() - began + _WAIT_S > patience_s:
            raise problem
        time.sleep(_WAIT_S)


def _verified(answer: httpx.Response, start: int, end: int) -> bytes:
    if answer.status_code != 206 or not answer.headers.get("content-range", "").startswith(f"bytes {start}-{end - 1}/"):
        raise Conflict(f"{answer.url} is not what it was when the download began: begin it again")
    is_good = is_as_said(answer.content, answer.headers.get("content-digest", ""))
    if is_good is None:
        raise PeerFault(f"{answer.url} came without a digest: is it datastates, of this version?")
    if not is_good:
        raise Corrupt(f"{answer.url}: bytes {start}-{end} did not arrive as they were sent: download again, it goes on from there")
    return answer.content


def _lock(out: IO[bytes], target: Path) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Conflict(f"another process is downloading to {target}: wait for it, or choose another path") from None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)  # makes the new name durable
    finally:
        os.close(fd)
