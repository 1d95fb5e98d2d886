"""Faults to test against: steps that fail or end the process, tiers that are slow, torn or full."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator

from datastates.content.manifest import Manifest
from datastates.errors import Unavailable, Unsupported
from datastates.store.tier import Payload, Placed, Reader, SupportsRemoval, Tier

__all__ = ["FullDiskTier", "SlowTier", "TornTier", "WrappedTier", "crash_at", "fail_at"]


def fail_at(step: str, error: BaseException | None = None, *, after: int = 0) -> Callable[[str], None]:
    """An ``on_step`` that raises when ``step`` is done, having let it pass ``after`` times; then never again."""
    left = after

    def on_step(name: str) -> None:
        nonlocal left
        if name == step:
            left -= 1
            if left == -1:
                raise error if error is not None else OSError(errno.ENOSPC, f"no space left, as asked for at {step}")

    return on_step


def crash_at(step: str, *, after: int = 0, code: int = 137) -> Callable[[str], None]:
    """An ``on_step`` that ends the process when ``step`` is done, as if it were killed: nothing is flushed or cleaned up."""
    left = after

    def on_step(name: str) -> None:
        nonlocal left
        if name == step:
            left -= 1
            if left < 0:
                os._exit(code)

    return on_step


class WrappedTier(Tier):
    """A tier around another, the same in everything; change one method to make a fault."""

    name = "wrapped"

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Calls the inner tier."""
        return self.inner.put(payload, base=base)

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Calls the inner tier."""
        return self.inner.open(uid, verify=verify)

    def uids(self) -> Iterator[str]:
        """Calls the inner tier."""
        return self.inner.uids()

    def remove(self, uid: str) -> int:
        """Calls the inner tier.

        :raises Unsupported: it removes nothing.
        """
        if not isinstance(self.inner, SupportsRemoval):
            raise Unsupported(f"the {self.inner.name} tier removes nothing")
        return self.inner.remove(uid)

    def close(self) -> None:
        """Calls the inner tier."""
        self.inner.close()


class SlowTier(WrappedTier):
    """A tier whose ``put`` has come (``is_waiting``) and goes on only when the test lets it (``go_on``)."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.is_waiting, self.go_on = threading.Event(), threading.Event()

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Wait to be let go on, then put."""
        self.is_waiting.set()
        self.go_on.wait()
        return super().put(payload, base=base)


class TornTier(WrappedTier):
    """A tier that hands on chunks whose first byte was flipped on the way, which only a check after the hop can find."""

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """A reader of torn chunks."""
        return _TornReader(self.inner.open(uid, verify=verify))


class _TornReader(Reader):
    def __init__(self, inner: Reader) -> None:
        self.inner, self.manifest = inner, inner.manifest

    def chunk(self, index: int) -> memoryview:
        data = bytearray(self.inner.chunk(index))
        data[0] ^= 1
        return memoryview(data).toreadonly()

    def span(self, start: int, length: int) -> memoryview | None:
        return None

    def close(self) -> None:
        self.inner.close()


class FullDiskTier(WrappedTier):
    """A tier that has room for ``bytes_free`` more bytes of chunks."""

    def __init__(self, inner: Tier, bytes_free: int) -> None:
        super().__init__(inner)
        self.bytes_free = bytes_free

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Put what fits.

        :raises Unavailable: it does not fit.
        """
        needed = sum(view.nbytes for view in payload.chunks)
        if needed > self.bytes_free:
            uid = payload.manifest.origin.uid
            raise Unavailable(f"state {uid} was not written: it needs {needed} bytes, {self.bytes_free} are free (no space left on device)")
        placed = super().put(payload, base=base)
        self.bytes_free -= placed.bytes_new
        return placed
