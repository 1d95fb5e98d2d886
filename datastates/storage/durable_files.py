"""Files that are complete or do not exist: names, locks, temporary files, and writes past the
page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datastates.state.manifest import LARGE_BYTES
from datastates.system.files import (
    close_lockable,
    is_at,
    is_ours,
    may_read,
    open_lockable,
    share,
    sync_folder,
)
from datastates.system.interrupts import Mutex, undisturbed
from datastates.system.threads import Notifier, at

from .pack import PAGE, PackLayout, padded

_PIECES_PER_S = 10
"""The least number of pieces written per second, if they can be that small."""

_LEAST_BYTES = 64 << 10

_SIGN_S = 1.0
"""How often a waiting writer reports that it has not stalled, in seconds."""


class Pace:
    """The pace of all writers together, who keep to ``bytes_per_s``. Safe from any thread. Unused
    bandwidth is not made up for later.

    While it is ``lifted`` no writer waits, not even one that was waiting already.
    """

    def __init__(self, bytes_per_s: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._notifier, self._lock = Notifier(), Mutex()
        self._free_at = 0.0
        self._lifts = 0

    @property
    def piece_bytes(self) -> int:
        """About how many bytes to write at a time; whole pages."""
        return max(_LEAST_BYTES, self.bytes_per_s // _PIECES_PER_S // PAGE * PAGE)

    @property
    def is_lifted(self) -> bool:
        """Whether the limit is lifted, so that no writer waits."""
        return self._lifts > 0

    def wait(self, path: Path, size: int) -> None:
        """Wait until ``size`` bytes may be written to a file, after what was allowed before."""
        if self.is_lifted:
            return
        with self._lock:
            begin = max(self._clock(), self._free_at)
            self._free_at = begin + size / self.bytes_per_s
        while (left := begin - self._clock()) > 0 and not self.is_lifted:
            at("pace", path)
            self._sleep(min(left, _SIGN_S))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lift the limit until the end of the block; such blocks of several threads may overlap."""
        with self._lock:
            self._lifts += 1
        self._notifier.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._lifts -= 1

    def _sleep(self, seconds: float) -> None:
        self._notifier.wait_for(lambda: self.is_lifted, seconds)


TEMPORARY = ".tmp-"
"""The beginning of the name of a file that is still being written; its writer holds a lock on
it."""

FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
"""The kernel's errors for a process that may not write."""

_LOCK = ".lock"
_BATCH_BYTES = 16 << 20
_BATCH_VIEWS = 512
_DIRTY_BYTES = 64 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def next_step(error: OSError) -> str:
    """The next step for a user whose file cannot be opened or mapped although it may be sound."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (`ulimit -n`), or close what this process holds open"
    if error.errno == errno.ENOMEM:
        return "free memory, or raise the limit of memory maps (`sysctl vm.max_map_count`)"
    if error.errno in FORBIDDEN:
        return "get the right to read it"
    return "see that its disk is well, and try again"


@contextmanager
def locked(root: Path, *, is_shared: bool, is_needed: bool = True) -> Iterator[None]:
    """Hold the folder's lock, against other threads and processes: shared to commit or open,
    exclusive to remove.

    Locking another user's file does not need the right to write it. Without ``is_needed``, the
    block runs even if the lock cannot be taken. That is for readers that may not write. If another
    process removes what they read, the digests show it.

    :raises PermissionError: the lock's file cannot be opened.
    """
    with undisturbed():
        try:
            at("lock", root / _LOCK)
            fd = _open_lock(root / _LOCK, is_shared=is_shared)
        except OSError as exc:
            if is_needed or exc.errno not in FORBIDDEN:
                raise
            yield
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
            yield
        finally:
            close_lockable(fd)


def _open_lock(path: Path, *, is_shared: bool) -> int:
    """Open the lock's file, for writing if that is allowed: over NFS an exclusive lock needs it."""
    try:
        return open_lockable(path, os.O_RDWR, may_have_links=True)
    except FileNotFoundError:
        fd = open_lockable(path, os.O_RDWR | os.O_CREAT, may_have_links=True)
        may_read(path.parent, fd)
        share(path.parent, fd)
        return fd
    except OSError as exc:
        if exc.errno not in FORBIDDEN or (exc.errno == errno.EROFS and not is_shared):
            raise
        return open_lockable(path)


@dataclass(slots=True)
class Temporary:
    """A file that is being written, empty and locked by us: a sweep leaves it alone while its
    writer lives."""

    fd: int
    path: Path
    final: Path
    is_committed: bool = False

    def commit(self) -> None:
        """Give the file its final name, durably. It must be fsynced before."""
        at("rename", self.path)
        os.rename(self.path, self.final)
        self.is_committed = True
        sync_folder(self.final.parent)


@contextmanager
def temporary(final: Path) -> Iterator[Temporary]:
    """A file that becomes ``final`` by ``commit``, or is gone at the end of the block.

    Waits while another writer has the same file. A file that a dead writer left is taken over.
    """
    path = final.with_name(TEMPORARY + final.name)
    fd = _create_locked(path)
    try:
        share(final.parent, fd)
        file = Temporary(fd, path, final)
        try:
            yield file
        finally:
            if not file.is_committed:
                path.unlink(missing_ok=True)
    finally:
        close_lockable(fd)


def is_abandoned(path: Path, *, removes: bool = False) -> bool:
    """Whether no process writes this temporary file any more; False if it cannot be opened.

    With ``removes`` the file is deleted then, and the result is whether that was done.
    """
    try:
        fd = open_lockable(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if removes and not is_at(fd, path):
            return False
        if removes:
            path.unlink()
    except OSError:  # held, or another user's; over NFS, another user's file cannot be locked
        return False
    finally:
        close_lockable(fd)
    return True


def supports_direct(root: Path) -> bool:
    """Whether files in this folder can be written past the page cache; it tries."""
    path = root / f"{TEMPORARY}probe-{secrets.token_hex(8)}"
    page = mmap.mmap(-1, PAGE)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        return bool(_O_DIRECT) and os.pwrite(fd, page, 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def write_file(fd: int, path: Path, data: bytes) -> None:
    """Fill an empty file and make it durable."""
    _write(fd, path, [memoryview(data)], 0)
    _sync(fd, path)


def write_chunks(
    fd: int,
    path: Path,
    layout: PackLayout,
    chunks: Iterable[memoryview],
    *,
    is_direct: bool,
    pace: Pace | None = None,
) -> None:
    """Fill an empty file with a header and chunks, with zeros between them as in the layout, and
    make it durable.

    The space is allocated first. So a full disk is noticed before anything is written, and the file
    is contiguous. Direct writes use memory that starts at a page as it is, and a buffer for
    everything else. Other writes are synced every 64 MiB. With more dirty bytes in the page cache,
    the kernel would make every writer of the machine wait. With a ``pace`` the writes keep to that
    rate, and are synced each second.
    """
    _allocate(fd, path, layout.size)
    is_direct = is_direct and layout.has_pages
    if is_direct:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
    views = _pages(layout.header, chunks) if is_direct else _plain(layout.header, chunks)
    most = _BATCH_BYTES if pace is None else min(_BATCH_BYTES, pace.piece_bytes)
    dirty = _DIRTY_BYTES if pace is None else min(_DIRTY_BYTES, pace.bytes_per_s)
    offset = synced = 0
    pieces = (view[at : at + most] for view in views for at in range(0, view.nbytes, most))
    for batch in _batches(pieces, most):
        if pace is not None:
            pace.wait(path, sum(view.nbytes for view in batch))
        offset = _write(fd, path, batch, offset)
        if not is_direct and offset - synced >= dirty:
            at("sync", path, offset - synced)
            os.fdatasync(fd)
            synced = offset
    if offset > layout.size:  # the last page was written whole
        os.ftruncate(fd, layout.size)
    _sync(fd, path)


def _create_locked(path: Path) -> int:
    while True:
        at("open", path)
        fd = open_lockable(path, os.O_RDWR | os.O_CREAT, may_have_links=True)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if is_ours(fd, path):
                os.ftruncate(fd, 0)
                return fd
        except BaseException:
            close_lockable(fd)
            raise
        close_lockable(fd)


def _allocate(fd: int, path: Path, size: int) -> None:
    at("allocate", path, size)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def _sync(fd: int, path: Path) -> None:
    at("sync", path, os.fstat(fd).st_size)
    os.fsync(fd)


def _plain(header: bytes, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    zeros = memoryview(bytes(PAGE))
    yield memoryview(header)
    for chunk in chunks:
        yield chunk
        if gap := padded(chunk.nbytes) - chunk.nbytes:
            yield zeros[:gap]


def _pages(header: bytes, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """The header and the chunks in whole pages of memory; small chunks, which come last, share
    pages."""
    yield _copied(header)
    small = list[bytes]()
    for chunk in chunks:
        if chunk.nbytes < LARGE_BYTES:
            small.append(bytes(chunk).ljust(padded(chunk.nbytes), b"\0"))
            continue
        if np.frombuffer(chunk, np.uint8).ctypes.data % PAGE:
            yield _copied(chunk)
            continue
        whole = chunk.nbytes // PAGE * PAGE
        if whole:
            yield chunk[:whole]
        if whole < chunk.nbytes:
            yield _copied(chunk[whole:])
    if small:
        yield _copied(b"".join(small))


def _copied(data: bytes | memoryview) -> memoryview:
    pages = mmap.mmap(-1, -(-len(data) // PAGE) * PAGE)
    pages[: len(data)] = data
    return memoryview(pages)


def _batches(views: Iterator[memoryview], most: int) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    total = 0
    for view in views:
        batch.append(view)
        total += view.nbytes
        if len(batch) == _BATCH_VIEWS or total >= most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _write(fd: int, path: Path, views: list[memoryview], offset: int) -> int:
    """Write all of it. A short write is continued where it stopped.

    Returns the offset after the last byte."""
    while views:
        at("write", path, sum(view.nbytes for view in views))
        done = os.pwritev(fd, views, offset)
        if not done:
            raise OSError(errno.EIO, f"nothing was written at offset {offset}")
        offset += done
        while views and done >= views[0].nbytes:
            done -= views.pop(0).nbytes
        if done:
            views[0] = views[0][done:]
    return offset
