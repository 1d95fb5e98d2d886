"""Live events: one poller for all listeners of a repository.

The poller is a thread, since the database is read only in threads and listeners may belong to
several event loops. It polls while there are listeners, and keeps the newest events. A listener is
only the id of the last event that it got. One that falls behind the kept events reads pages from
the database, so that nothing is missed or repeated, and no queue can grow.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from datastates.errors import Closed, DatastatesError, Unavailable
from datastates.lineage.query.names import last_event
from datastates.lineage.states import RefEvent, Run
from datastates.lineage.views import detail as events
from datastates.lineage.views.branch_rows import Branch
from datastates.lineage.views.branches import processes
from datastates.lineage.views.study_trees import ReportDetail
from datastates.maintenance.lease import PackFolder, beat_at, life_of
from datastates.thumbnails import image_of

from .models import Processes, ProcessInfo, TrainingInfo
from .routing import Refusal

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_logger = logging.getLogger(__name__)

_KEPT = 1000
_PAGE = 200
_PATIENCE_S = 10.0
_AGAIN_S = 1.0
_RETRY_S = 5


class LiveEvents:
    """The events of one repository. Safe from any thread; ``close`` ends every listener."""

    def __init__(
        self,
        read: Callable[[], AbstractContextManager[Session]],
        *,
        name: str = "",
        poll_s: float = 0.1,
        listeners_max: int = 100,
    ) -> None:
        self._read, self._name, self._poll_s, self._listeners_max = (
            read,
            name,
            poll_s,
            listeners_max,
        )
        self._lock = threading.Condition()
        self._listeners: set[Listener] = set()
        self._thread: threading.Thread | None = None
        self._look = threading.Event()
        self._newest: int | None = None
        self._kept: deque[RefEvent] = deque()
        self._kept_after = 0
        self._is_closed = False

    def listen(self, after: int | None = None) -> Listener:
        """A listener to the events after an id; without one, or with an id that never existed, to
        events from now on.

        Waits until the newest event is known. Close the listener.

        :raises Refusal: the limit of listeners is reached.
        :raises Unavailable: the database does not answer.
        """
        listener = Listener(self)
        self._enter(listener)
        try:
            newest = self._wait_for_newest()
            if after is not None and after > newest:
                with self._read() as session:
                    after = None if after > last_event(session) else after
            listener.position = newest if after is None else after
            listener.newest = max(newest, listener.position)
        except BaseException:  # an interrupt too: no caller has the listener yet
            listener.close()
            raise
        return listener

    def look(self) -> None:
        """Poll now: this process has written events."""
        self._look.set()

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for listener in self._listeners:
                listener._wake()
            self._lock.notify_all()
        self._look.set()

    # --- what listeners call ----------------------------------------------------------------------

    def _since(self, position: int) -> tuple[RefEvent, ...] | None:
        """The kept events after a position, only some of them if there are many; None if they
        must be read from the database."""
        with self._lock:
            if self._newest is None or self._newest <= position:
                return ()
            if position < self._kept_after:
                return None
            found: deque[RefEvent] = deque(maxlen=_PAGE)
            for event in reversed(self._kept):
                if event.id <= position:
                    break
                found.appendleft(event)
            return tuple(found)

    def _page(self, position: int) -> tuple[RefEvent, ...]:
        with self._read() as session:
            return events.read(
                session,
                position,
                horizon=events.Horizon(self._newest or 0, frozenset()),
                limit=_PAGE,
            ).items

    def _leave(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.discard(listener)

    # --- the thread -------------------------------------------------------------------------------

    def _enter(self, listener: Listener) -> None:
        with self._lock:
            if self._is_closed:
                raise _refusal_live("the server is about to end: connect again later")
            if len(self._listeners) >= self._listeners_max:
                raise _refusal_live(
                    f"{self._listeners_max} clients listen to events of {self._name!r}, no more"
                    " may: try again later"
                )
            self._listeners.add(listener)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"datastates-events-{self._name}", daemon=True
                )
                self._thread.start()

    def _wait_for_newest(self) -> int:
        with self._lock:
            self._lock.wait_for(lambda: self._newest is not None or self._is_closed, _PATIENCE_S)
            if self._newest is None:
                raise Unavailable(
                    f"the events of {self._name!r} could not be read within {_PATIENCE_S:.0f} s:"
                    " try again later"
                )
            return self._newest

    def _run(self) -> None:
        """Run the poller; it ends with the last listener."""
        horizon: events.Horizon | None = None
        has_failed = False
        while not self._is_done():
            pause_s = self._poll_s
            self._look.clear()
            try:
                horizon, is_more = self._poll(horizon)
                has_failed = False
                if is_more:
                    continue
            except Closed:
                self.close()
            except DatastatesError as error:
                if not has_failed:
                    _logger.warning("the events of %r cannot be read: %s", self._name, error)
                has_failed, pause_s = True, _AGAIN_S
            except Exception:  # a fault of ours too: the listeners stay, and the poller tries again
                if not has_failed:
                    _logger.exception("the events of %r cannot be read", self._name)
                has_failed = True
                pause_s = _AGAIN_S
            self._look.wait(pause_s)

    def _is_done(self) -> bool:
        with self._lock:
            if self._listeners and not self._is_closed:
                return False
            self._thread, self._newest = None, None
            self._kept.clear()
            return True

    def _poll(self, horizon: events.Horizon | None) -> tuple[events.Horizon | None, bool]:
        """Poll once: the horizon to wait for, and whether there is more to read at once."""
        with self._read() as session:
            if self._newest is None:
                horizon = (
                    events.newest_events(session)
                    if horizon is None
                    else events.settle(session, horizon)
                )
                found = None
            else:
                found = events.read(session, self._newest, horizon=horizon, limit=_PAGE)
        if found is None:
            assert horizon is not None, "the branch above made it"
            if not horizon.is_settled:
                return horizon, False
            with self._lock:
                self._newest = self._kept_after = horizon.id
                self._lock.notify_all()
            return None, True
        if found.items:
            with self._lock:
                self._kept.extend(found.items)
                while len(self._kept) > _KEPT:
                    self._kept_after = self._kept.popleft().id
                self._newest = found.items[-1].id
                for listener in self._listeners:
                    listener._wake()
        return found.horizon, len(found.items) == _PAGE or (
            found.horizon is not None and found.horizon.is_settled
        )


def _refusal_live(detail: str) -> Refusal:
    return Refusal(503, "unavailable", detail, {"Retry-After": str(_RETRY_S)})


class Listener:
    """A listener: ``position`` is the id of the last event that it got. ``next`` belongs to one
    task of an event loop."""

    def __init__(self, live: LiveEvents) -> None:
        self._live = live
        self.position = 0
        self.newest = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether no more events will come, because the server is ending."""
        return self._live._is_closed

    async def next(self, timeout_s: float) -> tuple[RefEvent, ...]:
        """The next events, at least one; none when none came within ``timeout_s``, or all is
        over."""
        self._loop = asyncio.get_running_loop()
        deadline = self._loop.time() + timeout_s
        while not self.is_over:
            self._woken.clear()
            found = self._live._since(self.position)
            if found is None:
                found = await run_in_threadpool(self._live._page, self.position)
            if found:
                self.position = found[-1].id
                return found
            try:
                async with asyncio.timeout_at(deadline):
                    await self._woken.wait()
            except TimeoutError:
                break
        return ()

    def close(self) -> None:
        self._live._leave(self)

    def _wake(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._loop.call_soon_threadsafe(self._woken.set)


# The processes that are tracking now.


def now(session: Session, home: PackFolder, *, metric: str | None = None, limit: int) -> Processes:
    """The processes that are tracking now, at most ``limit``; ``home`` is the folder in which
    leases are looked for."""
    found, metric = processes(session, partial(life_of, home=home), metric=metric)
    items = tuple(
        ProcessInfo(
            uid=each.run.uid,
            host=each.run.host,
            pid=each.run.pid,
            user=each.run.user,
            argv=each.run.argv,
            started_at=each.run.started_at,
            life=each.life,
            beat_at=beat_at(home.path, each.run.uid),
            trainings=tuple(_training(run, each.branches.get(run.uid)) for run in each.trainings),
        )
        for each in found[:limit]
    )
    return Processes(items, len(found), metric)


def _training(run: Run, branch: Branch | None) -> TrainingInfo:
    """A running training. ``branch`` is the one whose newest state it captured."""
    return TrainingInfo(
        uid=run.uid,
        branch=run.branch,
        started_at=run.started_at,
        state=None if branch is None else branch.head,
        step=None if branch is None else branch.step,
        status=None if branch is None else branch.status,
        captured_at=None if branch is None else branch.changed_at,
        steps_per_s=None if branch is None else branch.steps_per_s,
        last=None if branch is None or branch.last is None else branch.last.value,
    )


# Pictures of samples from a user's function: what it returns is checked before it is sent, and a
# few are kept.


TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""The only formats that are served as pictures: SVG may contain scripts."""

Show = Callable[[int], object]
"""Returns the picture of a sample for its index: an array, or bytes of an encoded picture."""

_KEPT_BYTES = 16 << 20
_WAIT_S = 10.0


class Pictures:
    """Calls the user's function for one picture at a time, so that it need not be safe from
    several threads."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._asking, self._lock = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes = 0

    def of(self, index: int) -> bytes:
        """The picture of a sample, encoded.

        :raises Refusal: the function failed, returned something else, or is busy.
        """
        with self._lock:
            if index in self._kept:
                self._kept.move_to_end(index)
                return self._kept[index]
        if not self._asking.acquire(timeout=_WAIT_S):
            raise _refusal_pictures("is busy with other pictures: try again")
        try:
            image = image_of(self._show(index), index)
        except Exception as error:
            # the user's function may raise anything; the log has the whole error, for the person
            # who started the server
            _logger.exception("the function that shows samples failed for sample %d", index)
            said = (
                str(error)
                if isinstance(error, DatastatesError)
                else f"it raised {type(error).__name__}"
            )
            raise _refusal_pictures(f"gave none of sample {index}: {said}") from error
        finally:
            self._asking.release()
        self._keep(index, image)
        return image

    def _keep(self, index: int, image: bytes) -> None:
        with self._lock:
            if self._kept.setdefault(index, image) is image:
                self._kept_bytes += len(image)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])


def shown(found: ReportDetail) -> ReportDetail:
    """The report with every sample marked as having a picture, since the function draws any."""
    return replace(
        found, samples=tuple(replace(sample, has_picture=True) for sample in found.samples)
    )


def _refusal_pictures(why: str) -> Refusal:
    return Refusal(503, Unavailable.kind, f"the function that shows samples {why}")
