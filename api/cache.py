"""Caches of costly reads of a lineage. An answer may be some seconds old. Threads in the
background renew it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from sqlalchemy import select

from datastates.compare.diff import pieces, untied
from datastates.errors import Closed, Unavailable
from datastates.lineage.schema import STATE
from datastates.lineage.states import Status
from datastates.lineage.views.graph import Skeleton
from datastates.maintenance.retention_pass import prune
from datastates.storage.reading import specs_of
from datastates.system.threads import Latch

from .models import Dropping, Forecast, TensorInfo

if TYPE_CHECKING:
    from datastates.lineage.session import Session
    from datastates.lineage.states import Note, Ref
    from datastates.maintenance.core import Core
    from datastates.maintenance.retention_pass import Pruned
    from datastates.storage.tier import Reader

SHARE = 0.05
"""The share of the time that work in the background may take."""

_SLICE_S = 0.002  # the longest that a request waits for the interpreter
_logger = logging.getLogger(__name__)


class Background:
    """Runs a task on its own thread, unless it is already running.

    Any thread may use it. ``close`` ends it early."""

    def __init__(self, name: str) -> None:
        self._name = f"datastates-{name}"
        self._closing = Latch()
        self._lock = threading.Lock()
        self._threads: dict[object, threading.Thread] = {}

    def start(self, task: object, work: Callable[[], None]) -> bool:
        """Begin ``work`` unless this ``task`` is under way; returns whether it was begun."""
        with self._lock:
            if task in self._threads or self._closing.is_set():
                return False
            thread = threading.Thread(
                target=self._run, args=(task, work), name=self._name, daemon=True
            )
            self._threads[task] = thread
            thread.start()
        return True

    def is_running(self, task: object) -> bool:
        return task in self._threads

    def pacer(self) -> Callable[[], None]:
        """A function that work in Python calls often: it sleeps so that the work takes ``SHARE`` of
        the time.

        :raises Closed: ``close`` was called.
        """
        began = time.perf_counter()

        def pause() -> None:
            nonlocal began
            spent = time.perf_counter() - began
            if spent < _SLICE_S:
                return
            if self._closing.wait(spent * (1 / SHARE - 1)):
                raise Closed("the server is closing")
            began = time.perf_counter()

        return pause

    def join(self) -> None:
        for thread in list(self._threads.values()):
            thread.join()

    def close(self) -> None:
        """Stop; work under way ends at its next pause. Idempotent."""
        self._closing.set()
        self.join()

    def _run(self, task: object, work: Callable[[], None]) -> None:
        try:
            work()
        except Closed:
            pass
        except Unavailable as error:  # the database does not answer: the next caller tries again
            _logger.warning("%s failed: %s", self._name, error)
        except Exception:
            # the work may raise anything; no caller waits for it, and the next one tries again
            _logger.exception("%s failed", self._name)
        finally:
            with self._lock:
                del self._threads[task]


# Results that are costly to read may be some seconds old. They are kept, and renewed in the
# background.


Found = TypeVar("Found")

_AT_ONCE_S = 0.05  # shorter reads are repeated for each request
_OLD_S = 30.0  # the next request reads an older result again, if that takes at most
_WAIT_S = 1.0


class Kept(Generic[Found]):
    """The result of ``read``, which is used for ``fresh_s`` seconds. Safe from any thread.

    A long read takes at most ``SHARE`` of the time. A million states are counted every quarter of
    a minute while requests come in.
    """

    def __init__(
        self,
        name: str,
        reading: Callable[[], AbstractContextManager[Session]],
        read: Callable[[Session], Found],
        *,
        fresh_s: float = 0.0,
    ) -> None:
        self._reading, self._read, self._fresh_s = reading, read, fresh_s
        self._background = Background(name)
        self._lock = threading.Lock()
        self._found: Found | None = None
        self._read_at = self._took_s = 0.0

    def of(self, session: Session) -> Found:
        """What was last found; the first caller reads it."""
        found, age_s = self._found, time.monotonic() - self._read_at
        is_old = age_s > _OLD_S and self._took_s <= _WAIT_S
        if found is None or is_old or (self._took_s <= _AT_ONCE_S and age_s >= self._fresh_s):
            with self._lock:  # callers that arrive meanwhile need not read it again
                if self._found is found:
                    self._renew(session)
                found = self._found
        elif age_s > max(self._fresh_s, self._took_s / SHARE):
            self.warm()
        assert found is not None
        return found

    def warm(self) -> None:
        self._background.start("read", self._read_again)

    def close(self) -> None:
        self._background.close()

    def _renew(self, session: Session) -> None:
        began = time.monotonic()
        self._found = self._read(session)
        self._read_at = time.monotonic()
        self._took_s = self._read_at - began

    def _read_again(self) -> None:
        with self._lock, self._reading() as session:
            self._renew(session)


# How many states of each stretch can be restored. No event reports when that changes, so it is
# read again from time to time.


_RESTORABLE_FRESH_S = 1.0
_MOST = 200_000  # states; finding the stretches of so many takes a tenth of a second
_STATUSES = [status.value for status in Status if status.is_restorable]
_IDS = select(STATE.c.id).where(STATE.c.status.in_(_STATUSES)).limit(_MOST + 1)


class Restorable(Kept[list[int]]):
    """The counts of one repository. Any thread may use it."""

    def __init__(self, reading: Callable[[], AbstractContextManager[Session]]) -> None:
        super().__init__(
            "restorable",
            reading,
            lambda session: list(session.execute(_IDS).scalars()),
            fresh_s=_RESTORABLE_FRESH_S,
        )
        self._counting = threading.Lock()
        self._counted: tuple[Skeleton, list[int], Mapping[int, int]] | None = None

    def by_node(self, session: Session, skeleton: Skeleton) -> Mapping[int, int] | None:
        """The count for each node of a skeleton; None if there are too many states to count
        within a request."""
        ids = self.of(session)
        if len(ids) > _MOST:
            return None
        with self._counting:
            if (
                self._counted is None
                or self._counted[0] is not skeleton
                or self._counted[1] is not ids
            ):
                self._counted = skeleton, ids, Counter(map(skeleton.node, ids))
            return self._counted[2]


# Norms of a state's tensors: read once, a few MiB at a time, and cached.


_TENSORS = 200_000  # how many tensors' norms are kept, over all states


class Norms:
    """Euclidean norms by state and path. Safe from any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, uid: str) -> dict[str, float] | None:
        with self._lock:
            if uid in self._kept:
                self._kept.move_to_end(uid)
            return self._kept.get(uid)

    def read(self, uid: str, reader: Reader, on_progress: Callable[[], None]) -> dict[str, float]:
        """The norms of an open state, read now. ``on_progress`` is called after each MiB or so; an
        exception from it ends the reading.

        :raises Corrupt: a chunk fails its digest.
        """
        norms: dict[str, float] = {}
        for spec in untied(reader):
            square = 0.0
            for piece in pieces(reader, spec):
                square += float(piece.dot(piece))
                on_progress()
            norms[spec.path] = math.sqrt(square)
        with self._lock:
            self._kept[uid] = norms
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _TENSORS:
                self._kept.popitem(last=False)
        return norms


def tensors_of(reader: Reader, norms: dict[str, float] | None) -> list[TensorInfo]:
    """The records of all tensors, in tree order, from the manifest. A tied tensor has the bytes
    of the one it is tied to."""
    specs = specs_of(reader)
    return [
        TensorInfo(
            path=spec.path,
            dtype=placed.dtype,
            shape=placed.shape,
            bytes=sum(shard.length for shard in placed.shards),
            tied_to=None if spec.alias is None else specs[spec.alias].path,
            norm=None if norms is None else norms[spec.path],
        )
        for spec, placed in zip(specs, untied(reader), strict=True)
    ]


# What retention would drop next. It is computed from the folder and the lineage, which reads
# every manifest, and so kept for a while.


_FORECASTS_FRESH_S = 2.0


class Forecasts:
    """The forecasts of one repository.

    Safe from any thread. Computing takes at most ``SHARE`` of the time, however often callers
    ask."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._found: Pruned | None = None
        self._ends_at = 0.0

    def of(self, limit: int) -> Forecast:
        """The first states that would be dropped, at most ``limit``, as last computed."""
        with self._lock:  # callers that arrive meanwhile need not compute it again
            found = self._found
            if found is None or time.monotonic() >= self._ends_at:
                began = time.monotonic()
                found = self._found = prune(self._core, dry_run=True)
                now = time.monotonic()
                self._ends_at = now + max(_FORECASTS_FRESH_S, (now - began) / SHARE)
        going = tuple(
            Dropping(each.uid, each.branch, each.step, each.bytes, each.reason)
            for each in found.dropped[:limit]
        )
        return Forecast(
            found.policy,
            going,
            len(found.dropped),
            found.bytes_before,
            found.bytes_after,
            found.kept,
        )


# The ETags of refs and notes, which the server sends, and which clients return in ``If-Match``.


def etag_of_ref(ref: Ref) -> str:
    """The ETag of a ref.

    Its version alone would not do: a name that is deleted and made again begins with 1 again."""
    return f'"{ref.kind}-{ref.version}-{ref.state}"'


def etag_of_note(note: Note) -> str:
    """The ETag of a note: the time of its last edit, or else of its creation, as a JSON string."""
    return msgspec.json.encode(note.edited_at or note.created_at).decode()
