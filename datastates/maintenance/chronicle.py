"""The chronicle of a lineage: a file in the folder of packs that records, besides the manifests,
what happens in the lineage.

    <packs>/chronicles/<uid of the lineage>    frames, one for each entry (``lineage/chronicle``)
    a frame    8 bytes   magic ``DSCHRON\0``
               4 bytes   version, little-endian
               8 bytes   length of the body, little-endian
               16 bytes  xxh3_128 of the body
               …         body: MessagePack, deflated
               8 bytes   length of the whole frame, little-endian, so that the last one is found
               from the end

The file only grows. The database stays the truth: a writer asks it what came after the last frame,
so a process that was killed, or that wrote nothing, loses nothing. Each frame is fsynced. Processes
take turns by a lock on the file. The next writer cuts off what a crash left half written. A damaged
frame is skipped, and ``tell_anew`` replaces the file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from datastates.errors import Conflict, DatastatesError, Unavailable
from datastates.lineage.chronicle import VERSION, Entry, Mark
from datastates.lineage.database import Database
from datastates.lineage.query.news import is_behind, news, settled
from datastates.lineage.write.clones import repository_uid
from datastates.system.files import (
    close_lockable,
    make_folder_like,
    may_read,
    open_lockable,
    open_regular,
    share,
    write_at,
)
from datastates.system.threads import Latch

_logger = logging.getLogger(__name__)

CHRONICLES = "chronicles"
"""The folder of the chronicles, inside the folder of packs; it has one file for each lineage
that uses those packs."""

_MAGIC = b"DSCHRON\0"
_HEAD = struct.Struct("<8sIQ16s")
_FOOT = struct.Struct("<Q")
_PAGE = 1000
_PATIENCE_S = 5.0  # a transaction takes milliseconds; one that takes in a large bundle, seconds
_ALL = 1 << 30
_MOST_BYTES = 1 << 30
_FULL_BYTES = 64 << 20  # a frame of more is divided
_UID = re.compile("[0-9a-f]{24}")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


@dataclass(frozen=True, slots=True)
class Chronicle:
    """All that can be read of a chronicle; ``damaged_bytes`` of it cannot. The last
    ``unfinished_bytes`` of these are no damage: a writer was killed before the end of its frame, or
    is still writing it. ``end`` is where the last readable frame ends.
    """

    lineage: str
    entries: tuple[Entry, ...]
    damaged_bytes: int
    unfinished_bytes: int = 0
    end: int = 0

    @property
    def rotten_bytes(self) -> int:
        """The number of bytes that were written whole and are damaged now."""
        return self.damaged_bytes - self.unfinished_bytes


def lineages(packs: Path) -> list[str]:
    """The uids of the lineages that have a chronicle in a folder of packs."""
    folder = packs / CHRONICLES
    return sorted(
        name for name in (os.listdir(folder) if folder.is_dir() else ()) if _UID.fullmatch(name)
    )


def chronicles(packs: Path) -> list[Chronicle]:
    """Every chronicle of a folder of packs.

    :raises Unavailable: one cannot be read, or was written by a newer version.
    """
    return [read_chronicle(packs, lineage) for lineage in lineages(packs)]


def catch_up(database: Database, packs: Path, *, pages: int = _ALL) -> bool:
    """Write what is new in the lineage to the chronicle, in at most ``pages`` frames; returns
    whether that was all.

    :raises Unavailable: a transaction goes on that may have ids below the newest
        (``search/settled``): all that is new waits for it.
    :raises OSError: the file cannot be written.
    :raises Conflict: the lineage is older than its chronicle, because it was restored from a copy.
    """
    folder, uid = _place(database, packs)
    fd = open_lockable(folder / uid, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True  # the process that holds the lock writes our news, too
        share(folder, fd)
        may_read(folder, fd)
        return _append(fd, database, pages)
    finally:
        close_lockable(fd)


def tell_anew(database: Database, packs: Path) -> None:
    """Write the whole lineage to a new chronicle, which replaces the old one once it is complete.
    For a chronicle that is damaged, or that refers to the rows of another database by their ids.

    :raises OSError: the file cannot be written.
    """
    # it imports torch, which callers that only read do without
    from datastates.storage.durable_files import (
        temporary,
    )

    folder, uid = _place(database, packs)
    with temporary(folder / uid) as file:
        os.ftruncate(file.fd, 0)  # a dead writer left it
        may_read(folder, file.fd)
        with suppress(FileNotFoundError, PermissionError):
            # the owner of the old file keeps the new one
            there = (folder / uid).stat()
            os.fchown(file.fd, there.st_uid, there.st_gid)
        _append(file.fd, database, _ALL)
        file.commit()


def _place(database: Database, packs: Path) -> tuple[Path, str]:
    """The folder of the chronicles, which is made if it is missing, and the name of this
    lineage's file in it."""
    with database.read() as session:
        uid = repository_uid(session)
    folder = packs / CHRONICLES
    make_folder_like(packs, folder)
    return folder, uid


def _append(fd: int, database: Database, pages: int) -> bool:
    end, mark = _end(fd)
    for _ in range(pages):
        found = _untold(database, mark)
        if found is None:
            return True
        frame, mark = _frame(found[1]), found[0]
        write_at(fd, frame, end)  # if this fails, the next writer cuts off what was written
        os.fsync(fd)
        end += len(frame)
    return False


def _untold(database: Database, mark: Mark) -> tuple[Mark, bytes] | None:
    """What came after ``mark``, encoded, and the mark after that; None if nothing did. It is a
    page, or less if that is too large."""
    until, most = settled(database, timeout_s=_PATIENCE_S), _PAGE
    while True:
        with database.read() as session:
            if is_behind(session, mark):
                raise Conflict(
                    "the lineage is older than what its folder of packs was told of it: it was"
                    " brought back from a copy; `datastates reindex --replace` adds what it lacks"
                )
            entry = news(session, mark, most=most, until=until)
        if entry is None:
            return None
        encoded = _encoder.encode(entry)
        if len(encoded) <= _FULL_BYTES or most == 1:
            return entry.mark, encoded
        most //= 2


def _frame(encoded: bytes) -> bytes:
    body = zlib.compress(encoded, 1)
    head = _HEAD.pack(_MAGIC, VERSION, len(body), xxhash.xxh3_128_digest(body))
    return head + body + _FOOT.pack(len(head) + len(body) + _FOOT.size)


def _end(fd: int) -> tuple[int, Mark]:
    """Where the next frame begins, and the mark of the last one.

    Bytes after that one are of an unfinished frame, and are cut off."""
    size = os.fstat(fd).st_size
    last = _last(fd, size)
    if last is not None:
        return size, last.mark
    end, mark = 0, Mark()
    for at, length, entry in _frames(fd, size):
        end, mark = at + length, entry.mark
    os.ftruncate(fd, end)
    return end, mark


def _last(fd: int, size: int) -> Entry | None:
    if size < _HEAD.size + _FOOT.size:
        return None
    (length,) = _FOOT.unpack(os.pread(fd, _FOOT.size, size - _FOOT.size))
    found = _at(fd, size - length, size) if length <= size else None
    return None if found is None or found[0] != length else found[1]


def _frames(fd: int, size: int, at: int = 0) -> Iterator[tuple[int, int, Entry]]:
    """Every frame from ``at`` on that is whole: its offset, its length and its entry.

    Bytes between whole frames are skipped."""
    while 0 <= at < size:
        found = _at(fd, at, size)
        if found is None:
            at = _next(fd, at + 1, size)
        else:
            yield at, *found
            at += found[0]


def _next(fd: int, start: int, size: int) -> int:
    """The offset at which the next frame may begin; -1 if there is none."""
    while start < size:
        piece = os.pread(fd, 1 << 20, start)
        found = piece.find(_MAGIC)
        if found >= 0:
            return start + found
        if len(piece) < len(_MAGIC):
            return -1
        start += len(piece) - len(_MAGIC) + 1
    return -1


def _at(fd: int, at: int, size: int) -> tuple[int, Entry] | None:
    """The length and the entry of the frame at this offset, if a whole one begins there.

    :raises Unavailable: a newer version wrote it.
    """
    head = os.pread(fd, _HEAD.size, at)
    if len(head) < _HEAD.size:
        return None
    magic, version, length, digest = _HEAD.unpack(head)
    whole = _HEAD.size + length + _FOOT.size
    if magic != _MAGIC or length > _MOST_BYTES or at + whole > size:
        return None
    body = os.pread(fd, length, at + _HEAD.size)
    if len(body) != length or xxhash.xxh3_128_digest(body) != digest:
        return None
    if version != VERSION:
        raise Unavailable(
            f"the chronicle of this folder has version {version}, this datastates reads version"
            f" {VERSION}: upgrade datastates"
        )
    try:
        return whole, _decoder.decode(_inflated(body))
    except (msgspec.DecodeError, zlib.error, RecursionError):
        return None


def _inflated(body: bytes) -> bytes:
    inflater = zlib.decompressobj()
    found = inflater.decompress(body, _MOST_BYTES)
    if inflater.unconsumed_tail:
        raise zlib.error("it grows beyond all bounds")
    return found


def read_chronicle(
    packs: Path, lineage: str, start: int = 0, *, take: Callable[[Entry], None] | None = None
) -> Chronicle:
    """What can be read of the chronicle of a lineage from ``start`` on, which is 0 or the end of a
    frame.

    ``take`` gets the entries one by one, and the chronicle that is returned has none then: all of
    them together may need much memory.

    :raises Unavailable: it cannot be read, or was written by a newer version.
    """
    path = packs / CHRONICLES / lineage
    try:
        fd = open_regular(path)
    except OSError as exc:
        raise Unavailable(
            f"{path} cannot be read ({exc.strerror}): it says what the lineage was; move it away to"
            " do without it"
        ) from exc
    entries: list[Entry] = []
    end, damaged = start, 0
    try:
        size = os.fstat(fd).st_size
        for at, length, entry in _frames(fd, size, start):
            (take or entries.append)(entry)
            damaged += at - end + (_foot(fd, at + length) != length) * _FOOT.size
            end = at + length
        unfinished = 0 if _ends_whole(fd, end, size) else size - end
    finally:
        os.close(fd)
    return Chronicle(lineage, tuple(entries), damaged + size - end, unfinished, end)


def _foot(fd: int, end: int) -> int:
    """The length of the frame that ends at ``end``, as its last bytes give it."""
    return int(_FOOT.unpack(os.pread(fd, _FOOT.size, end - _FOOT.size))[0])


def _ends_whole(fd: int, end: int, size: int) -> bool:
    """Whether the bytes after the last readable frame were written to their end, judging by
    their last 8; true if there are none."""
    if size - end < _FOOT.size:
        return size == end
    length = _foot(fd, size)
    return length == size - end or (
        length < size - end and os.pread(fd, len(_MAGIC), size - length) == _MAGIC
    )


# The thread that keeps the chronicle of a lineage while a process captures: at most ten seconds
# late, and captures never wait for it.


_EVERY_S = 10.0
_PAUSE_S = 1.0
"""The pause between two pages of a lineage that has no chronicle yet, in seconds: a million
states take a quarter of an hour, and no training notices."""

_LAST_PAGES = 5
_MOST_S = 10.0


def tell_now(database: Database, packs: Path) -> None:
    """Bring the chronicle up to date after changes without captures, if the folder has chronicles.

    Errors are ignored: it can wait."""
    if (packs / CHRONICLES).is_dir():
        with suppress(DatastatesError, OSError):
            catch_up(database, packs, pages=_LAST_PAGES)


class Chronicler:
    """Keeps the chronicle from now on; ``close`` writes what is left, up to five pages. It has
    no reference to a repository."""

    def __init__(self, database: Database, packs: Path) -> None:
        self._database, self._packs = database, packs
        self._ends = Latch()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="datastates-chronicle", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread once it has written what is new.

        If the folder stalls, wait for ``timeout_s`` (None: ten seconds) at most."""
        self._ends.set()
        self._thread.join(_MOST_S if timeout_s is None else timeout_s)

    def _run(self) -> None:
        while not self._ends.is_set():
            is_all = self._tell(1)
            self._ends.wait(_EVERY_S if is_all else _PAUSE_S)
        self._tell(_LAST_PAGES)

    def _tell(self, pages: int) -> bool:
        """Write up to ``pages`` frames; returns whether nothing is left that could be written
        now."""
        try:
            return catch_up(self._database, self._packs, pages=pages)
        except (DatastatesError, OSError) as exc:
            if str(exc) != self._said:  # log each trouble once
                self._said = str(exc)
                _logger.log(
                    logging.WARNING if isinstance(exc, Conflict) else logging.INFO,
                    "the chronicle waits: %s",
                    exc,
                )
            return True
        except Exception:  # a defect of ours here must not end a training
            _logger.exception("the chronicle is not kept")
            return True
