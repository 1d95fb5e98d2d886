"""Copying a state's bytes into slots: at once what may change next, behind the fence what the optimizer alone changes.

One ``Stager`` belongs to a repository and owns the thread ``datastates-stage``. Jobs are done in the order in which they were
begun, so what they are handed on to sees captures in order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import threadpoolctl  # type: ignore[import-untyped]  # it has no stubs
import torch

from datastates.errors import Torn
from datastates.store.arena import Arena

from .plan import Plan
from .tripwire import Armed

__all__ = ["CopyJob", "Stager"]

_INLINE_BYTES = 1 << 20
"""More eager bytes than this are copied by the stage thread, which is known to use one core, while the caller waits."""


@dataclass(slots=True)
class CopyJob:
    """One state on its way into ``slots``. ``is_copied`` is set once nothing reads the sources any more.

    ``error`` is written before ``is_copied`` is set. ``on_done`` runs on the stage thread after it.
    """

    plan: Plan
    slots: list[int]
    on_done: Callable[[CopyJob], None]
    armed: Armed | None = None
    error: BaseException | None = None
    is_copied: threading.Event = field(default_factory=threading.Event)
    eager_done: threading.Event = field(default_factory=threading.Event)
    deferred: _Pairs | None = None
    eager: _Pairs | None = None
    event: torch.cuda.Event | None = None
    has_host_reads: bool = True


_Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]


class Stager:
    """Copies states into an arena. ``begin`` and ``fence`` run on the training thread, the rest on the stage thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.Thread(target=self._run, name="datastates-stage", daemon=True)
        self._thread.start()

    def begin(self, job: CopyJob, *, is_deferring: bool = True) -> None:
        """Copy now what may change next; when this returns only fenced tensors are still read.

        With ``is_deferring=False`` nothing is read any more when this returns.
        """
        host_eager = _pairs(job.plan, job.slots, self._arena, job.plan.eager)
        job.armed = job.plan.tripwire.arm()
        if job.plan.is_on_device:
            host_eager, device_eager = _by_device(host_eager)
            job.deferred, device_deferred = _by_device(_pairs(job.plan, job.slots, self._arena, job.plan.deferred))
            job.has_host_reads = bool(job.deferred[0])
            self._copy_from_devices(job, device_eager, device_deferred)
        if sum(map(torch.Tensor.numel, host_eager[0])) <= _INLINE_BYTES or torch.get_num_threads() == 1:
            _copy(host_eager)
            job.eager_done.set()
        else:
            job.eager = host_eager
        self._jobs.put(job)
        job.eager_done.wait()
        if not is_deferring:
            self.fence(job)

    def fence(self, job: CopyJob) -> None:
        """Wait until the job reads nothing any more: the host for host memory, the current stream for device memory."""
        if job.event is not None:
            torch.cuda.current_stream().wait_event(job.event)
            if not job.has_host_reads:
                return
        job.is_copied.wait()

    def close(self) -> None:
        """Finish what was begun and end the thread; idempotent."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _copy_from_devices(self, job: CopyJob, eager: _Pairs, deferred: _Pairs) -> None:
        """Enqueue device copies on a side stream; the current stream waits for the eager ones, the host for none."""
        sources = eager[1] or deferred[1]
        if not sources:
            return
        device = sources[0].device
        side = self._streams.setdefault(device, torch.cuda.Stream(device))
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            if eager[0]:
                _copy(eager, non_blocking=True)
                current.wait_stream(side)
            _copy(deferred, non_blocking=True)
            job.event = torch.cuda.Event(blocking=True)
            job.event.record(side)
        for source in (*eager[1], *deferred[1]):
            source.record_stream(side)

    def _run(self) -> None:
        torch.get_num_threads()  # torch sets this thread's number of OpenMP threads at its first use; then it is ours to set
        with threadpoolctl.threadpool_limits(limits=1, user_api="openmp"):
            while (job := self._jobs.get()) is not None:
                self._finish(job)

    def _finish(self, job: CopyJob) -> None:
        """Runs on the stage thread."""
        try:
            if job.eager is not None:
                _copy(job.eager)
                job.eager_done.set()
            # Where everything is in host memory the views are made here: the training thread has better things to do.
            _copy(job.deferred if job.deferred is not None else _pairs(job.plan, job.slots, self._arena, job.plan.deferred))
            if job.event is not None:
                job.event.synchronize()  # the one place where a host thread waits for the device
            self._check(job)
        except BaseException as exc:
            job.error = exc
        finally:
            job.eager = job.deferred = None
            job.eager_done.set()
            job.is_copied.set()
        job.on_done(job)

    def _check(self, job: CopyJob) -> None:
        assert job.armed is not None
        # Before the fence opens: afterwards the optimizer bumps the versions rightly.
        torn = job.plan.tripwire.tripped(job.armed, job.slots, self._arena.flat)
        if torn:
            names = ", ".join(torn[:3]) + (f" and {len(torn) - 3} more" if len(torn) > 3 else "")
            raise Torn(
                f"{names} changed between capture() and the end of its copy, outside a tracked optimizer's step: call run.fence() "
                "before such an update; from now on these tensors are copied before capture() returns",
                paths=tuple(torn),
            )


def _pairs(plan: Plan, slots: Sequence[int], arena: Arena, copies: list[list[tuple[int, torch.Tensor]]]) -> _Pairs:
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for chunk, pieces in enumerate(copies):
        if pieces:
            views = plan.targets(chunk, arena.tensor(slots[chunk]))
            for position, source in pieces:
                targets.append(views[position])
                sources.append(source)
    return targets, sources


def _by_device(pairs: _Pairs) -> tuple[_Pairs, _Pairs]:
    """Those in host memory, and those on a device."""
    host: _Pairs = ([], [])
    device: _Pairs = ([], [])
    for target, source in zip(*pairs, strict=True):
        side = device if source.is_cuda else host
        side[0].append(target)
        side[1].append(source)
    return host, device


def _copy(pairs: _Pairs, *, non_blocking: bool = False) -> None:
    """One call for all pieces: the GIL is let go once, not once a tensor."""
    if pairs[0]:
        with torch.no_grad():
            torch._foreach_copy_(pairs[0], pairs[1], non_blocking)
