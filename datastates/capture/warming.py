"""Decides how much memory states take, that is how much of the arena should be warm, and has a thread that warms it little by little, and
then makes small pages huge.

Fresh memory costs the machine up to one second of a core for each GiB, whichever thread touches it first. So captures take it at once only
for small states, and for as few large ones as they can do with. After that, warm memory is used again before more memory is touched. The
rest is warmed with a small part of a core's time, however long that takes; meanwhile fewer states are kept. The thread has normal
priority: at a lower one it would now and then hold the interpreter's lock without being given a core.

If memory runs short, in the machine or in a control group, no more of it is taken: warm memory is used again, and states that may not
leave memory are written to make room.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from datastates.errors import Closed
from datastates.policy.keeping import FEWEST, UNCOUNTED_BYTES, bytes_allowed, bytes_at_once, bytes_kept, is_tight
from datastates.store.arena import Arena
from datastates.store.roles import STATE_BYTES
from datastates.system.bell import Bell
from datastates.system.interrupts import Mutex
from datastates.system.logs import event
from datastates.system.memory import available_memory_bytes

__all__ = ["Warmer"]

_logger = logging.getLogger(__name__)

_REST = 19.0
"""After it has touched a block, the thread rests for this many times as long as that took, so that it takes a twentieth of a core."""

_MERGE_REST = 59.0
"""The same after it has made a block's pages huge. Small pages cost a training that writes every state less than that work at a twentieth
of a core would, so it takes its time: a sixtieth of a core."""

_LOOK_S = 0.5
"""How often to check whether memory runs short, in seconds."""

_SHORT_S = 1.0
"""For how long no memory is touched once it has run short, in seconds."""

_REFUSED_S = 1.0
"""For how long to wait once the kernel refused to make pages huge, as it does while they are written to disk, in seconds."""


class Warmer:
    """Knows how many bytes one state of each line takes, and warms the arena for as many states as are kept. Safe from any thread.

    ``is_given``: the user chose the size of the arena, so all of it is used. ``latest`` is how many states each line should keep (None: as
    many as fit). ``available`` returns how much memory may still be taken.
    """

    def __init__(self, arena: Arena, *, is_given: bool, latest: int | None = None, available: Callable[[], int] | None = None) -> None:
        self._arena, self.is_given, self._available = arena, is_given, available or available_memory_bytes
        self._latest = latest
        self._is_tight, self._looked_at = False, -math.inf
        self._sizes: dict[str, int] = {}
        self._said: int | None = None
        self._is_closed = False
        self._lock, self._changed = Mutex(), Bell()
        self._thread = threading.Thread(target=self._run, name="datastates-arena", daemon=True)
        self._thread.start()

    def allowed(self, size: int) -> int:
        """How many bytes may be warm, including a capture of ``size``, before states that may leave memory have to."""
        with self._lock:
            if not self._sizes:
                return 0
            at_once = bytes_at_once(self._sizes.values(), self._arena.capacity, is_given=self.is_given)
            return bytes_allowed(size, warm=self._arena.warm, at_once=at_once, kept=self._kept())

    @property
    def within(self) -> int | None:
        """How many bytes may be warm, even to hold states that may not leave memory; None: all of them."""
        with self._lock:
            return self._most() if self._is_tight else None

    def look(self) -> None:
        """Check whether memory has run short, or is available again. It takes a millisecond, so it checks only now and then; never call it
        on the training thread."""
        now = time.monotonic()
        if not self._sizes or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        available = self._available() // (2 if self._is_tight else 1)  # to recover takes twice as much, or it would change all the time
        is_tight_now = is_tight(available, self._arena.warm)
        if is_tight_now == self._is_tight:
            return
        self._is_tight = is_tight_now
        if is_tight_now:
            _logger.info(
                "memory runs short: states take no more than the %d MiB that they have, and are written to disk where that is too little",
                self._arena.warm >> 20,
                extra=event("memory.short", bytes=self._arena.warm),
            )
        self._changed.ring()

    @property
    def ahead(self) -> int:
        """How many bytes will be warm in the end; what states take besides their slots is elsewhere."""
        with self._lock:
            size = sum(self._sizes.values())
            return self._kept() * size // max(1, size + STATE_BYTES * len(self._sizes))

    def expect(self, line: str, size: int) -> None:
        """Note how many bytes a state of this line takes."""
        with self._lock:
            is_more = self._sizes.get(line, -1) < size
            if is_more:
                self._sizes[line] = size
        if is_more:
            self._changed.ring()

    def forget(self, line: str) -> None:
        """Forget a line that has ended."""
        with self._lock:
            self._sizes.pop(line, None)

    def say(self, size_bytes: int) -> None:
        """Log how many states of this size are kept: once, and again if they turn out to be fewer."""
        with self._lock:
            each = sum(self._sizes.values()) + len(self._sizes) * STATE_BYTES
            fit = max(1, (self._kept() + UNCOUNTED_BYTES) // max(1, each) - 1)  # besides the one that is being captured
            kept = fit if self._latest is None else min(fit, self._latest)
            if self._said is not None and kept >= self._said:
                return
            self._said = kept
        asked = "" if self._latest in (None, kept) else f" of the {self._latest} that memory_latest asks for"
        more = "" if kept == self._latest else "; memory_bytes= of datastates.open, or DATASTATES_MEMORY, keeps more"
        _logger.log(
            logging.INFO if self._latest in (None, kept) else logging.WARNING,
            "the newest %d states (%.4g MiB each)%s are kept in memory%s",
            kept,
            size_bytes / (1 << 20),
            asked,
            more,
            extra=event("memory.kept", states=kept, state_bytes=size_bytes),
        )

    def close(self) -> None:
        """End the thread; idempotent."""
        self._is_closed = True
        self._changed.ring()
        self._thread.join()

    def _kept(self) -> int:
        kept = bytes_kept(self._sizes.values(), self._arena.capacity, is_given=self.is_given, latest=self._latest) if self._sizes else 0
        return min(kept, self._most()) if self._is_tight else kept

    def _most(self) -> int:
        """How many bytes may be warm while memory is short: those that are, and those that captures cannot do without."""
        return min(self._arena.capacity, max(self._arena.warm, FEWEST * sum(self._sizes.values())))

    def _run(self) -> None:
        try:
            while self._wait_for_need():
                self.look()
                if self._is_tight:
                    self._rest(_SHORT_S)
                    continue
                began = time.perf_counter()
                if self._arena.warm < self.ahead:
                    self._arena.warm_up()
                    self._rest(_REST * (time.perf_counter() - began))
                elif self._arena.merge_pages():
                    self._rest(_MERGE_REST * (time.perf_counter() - began))
                else:
                    self._rest(_REFUSED_S)
        except Closed:
            return  # a runner that gave up its captures does not wait for this thread

    def _wait_for_need(self) -> bool:
        """Wait until more memory should be warm than is, or until warm memory has small pages; False at the end."""
        self._changed.wait_for(lambda: self._is_closed or self._arena.warm < self.ahead or self._arena.has_small_pages)
        return not self._is_closed

    def _rest(self, seconds: float) -> None:
        self._changed.wait_for(lambda: self._is_closed, seconds)
