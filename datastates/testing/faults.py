"""Faults to test against: steps that fail or end the process, and disks, databases and tiers that
fail, stall or are slow.

A test switches a ``Fault`` on with ``fail``, ``stall`` or ``slow``, and off with ``mend``.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sqlalchemy import exc

from datastates.errors import Unavailable, Unsupported
from datastates.maintenance.core import core_of
from datastates.state.manifest import Manifest
from datastates.storage.tier import Payload, Placed, Reader, SupportsRemoval, Tier
from datastates.system.threads import io_hook

if TYPE_CHECKING:
    from sqlalchemy.pool import PoolProxiedConnection


def fail_at(
    step: str, error: BaseException | None = None, *, after: int = 0
) -> Callable[[str], None]:
    """An ``on_step`` that raises once when ``step`` is done, after it has let the step pass
    ``after`` times."""
    left = after

    def on_step(name: str) -> None:
        nonlocal left
        if name == step:
            left -= 1
            if left == -1:
                raise (
                    error
                    if error is not None
                    else OSError(errno.ENOSPC, f"no space left, as asked for at {step}")
                )

    return on_step


def crash_at(step: str, *, after: int = 0, code: int = 137) -> Callable[[str], None]:
    """An ``on_step`` that ends the process when ``step`` is done, as if it were killed: nothing
    is flushed or cleaned up."""
    left = after

    def on_step(name: str) -> None:
        nonlocal left
        if name == step:
            left -= 1
            if left < 0:
                os._exit(code)

    return on_step


class Fault:
    """A fault that a test switches on and off, from any thread.

    ``is_met`` is set once an operation has met the fault."""

    def __init__(self) -> None:
        self.is_met = threading.Event()
        self._mended = threading.Event()
        self._number: int | None = None
        self._bytes_per_s: float | None = None
        self._is_stalling = False
        self._lock = threading.Lock()

    def fail(self, number: int = errno.ENOSPC) -> None:
        """From now on operations fail with this error number: ``errno.EIO``, ``errno.EROFS``,
        ``errno.EDQUOT``, …"""
        self._begin(number=number)

    def stall(self) -> None:
        """From now on every operation waits, until ``mend``."""
        self._begin(is_stalling=True)

    def slow(self, bytes_per_s: float) -> None:
        """From now on at most this many bytes a second go through."""
        self._begin(bytes_per_s=bytes_per_s)

    def mend(self) -> None:
        """Remove the fault. Stalled operations continue."""
        with self._lock:
            self._number, self._bytes_per_s, self._is_stalling = None, None, False
            self._mended.set()

    def strike(self, size: int = 0) -> None:
        """Apply the fault to an operation on ``size`` bytes. Called on its thread.

        :raises OSError: the operation fails, with the number that was given to ``fail``.
        """
        with self._lock:
            number, bytes_per_s, is_stalling, mended = (
                self._number,
                self._bytes_per_s,
                self._is_stalling,
                self._mended,
            )
        if number is None and bytes_per_s is None and not is_stalling:
            return
        self.is_met.set()
        if number is not None:
            raise OSError(number, f"{os.strerror(number)}, as the test wants it")
        mended.wait(None if bytes_per_s is None else size / bytes_per_s)

    def _begin(
        self,
        *,
        number: int | None = None,
        bytes_per_s: float | None = None,
        is_stalling: bool = False,
    ) -> None:
        with self._lock:
            self._mended.set()  # operations that met the previous fault continue
            self._mended = threading.Event()
            self.is_met.clear()
            self._number, self._bytes_per_s, self._is_stalling = number, bytes_per_s, is_stalling


class FaultyDisk(Fault):
    """The disk below a folder, for the packs and manifests that this process writes there.

        import errno
        from datastates.testing import FaultyDisk

        with FaultyDisk("runs/packs") as disk, repo.track(branch="faulty", model=model) as run:
            disk.fail(errno.ENOSPC)  # or disk.stall(), disk.slow(50e6)
            capture = run.capture()
            disk.mend()
            capture.wait("durable", timeout_s=60)

    Reads work as usual.
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self._folder = Path(folder).absolute()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(io_hook(self._hinder))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.mend()

    def _hinder(self, call: str, path: Path, size: int) -> None:
        if call != "lock" and path.absolute().is_relative_to(self._folder):
            self.strike(size if call == "write" else 0)


class FaultyDatabase(Fault):
    """Faults in the database of an open repository. ``fail`` is a server that refuses connections,
    ``stall`` one that does not answer.

    ``is_met`` is set once a connection was requested.
    """

    def __init__(self, repo: object) -> None:
        super().__init__()
        self._pool = core_of(repo).database.engine.pool
        self._connect = self._pool.connect

    def __enter__(self) -> Self:
        # not an event listener: removing one breaks a thread that iterates over the listeners
        self._pool.connect = self._faulty_connect  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.connect = self._connect  # type: ignore[method-assign]  # as it was
        self.mend()

    def fail(self, number: int = errno.ECONNREFUSED) -> None:
        """From now on the database does not answer."""
        super().fail(number)

    def _faulty_connect(self) -> PoolProxiedConnection:
        try:
            self.strike()
        except OSError as error:
            raise exc.OperationalError("BEGIN", None, error) from error
        return self._connect()


class WrappedTier(Tier):
    """A tier around another tier, with the same behaviour; override one method to make a fault."""

    name = "wrapped"

    def __init__(self, inner: Tier) -> None:
        self.inner, self.holds_parts = inner, inner.holds_parts

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Calls the inner tier."""
        return self.inner.put(payload, base=base)

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Calls the inner tier."""
        return self.inner.open(uid, verify=verify)

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """Calls the inner tier."""
        return self.inner.open_part(uid, rank, verify=verify)

    def uids(self) -> Iterator[str]:
        """Calls the inner tier."""
        return self.inner.uids()

    def check(self, repository: str) -> None:
        """Calls the inner tier."""
        self.inner.check(repository)

    def remove(self, uid: str) -> int:
        """Calls the inner tier.

        :raises Unsupported: the inner tier removes nothing.
        """
        if not isinstance(self.inner, SupportsRemoval):
            raise Unsupported(f"the {self.inner.name} tier removes nothing")
        return self.inner.remove(uid)

    def close(self) -> None:
        """Calls the inner tier."""
        self.inner.close()


class FaultyTier(Fault, WrappedTier):
    """A tier around yours whose ``put`` fails, stalls or is slow. Reads work as usual."""

    def __init__(self, inner: Tier) -> None:
        Fault.__init__(self)
        WrappedTier.__init__(self, inner)

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Put, unless the fault prevents it.

        :raises Unavailable: the fault makes it fail.
        """
        size = 0 if payload.is_on_demand else sum(view.nbytes for view in payload.chunks)
        try:
            self.strike(size)
        except OSError as error:
            raise Unavailable(
                f"state {payload.manifest.origin.uid} was not put onto the {self.name} tier"
                f" ({error})"
            ) from error
        return super().put(payload, base=base)
