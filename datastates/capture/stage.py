"""Copying a state's bytes into slots: at once what may change next, behind the fence what the optimizer alone changes.

One ``Stager`` belongs to a repository and owns the thread ``datastates-stage``. Jobs are done in the order in which they were
begun, so what they are handed on to sees captures in order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import threadpoolctl  # type: ignore[import-untyped]  # it has no stubs
import torch

from datastates.errors import Torn
from datastates.store.arena import Arena
from datastates.store.pinning import DeviceRegistrar
from datastates.system.bell import Latch
from datastates.system.devices import Mark, Stream, devices
from datastates.system.interrupts import Mutex

from .edits import named
from .plan import CopyPlan, Pieces
from .tripwire import Armed

__all__ = ["CopyJob", "Stager"]

_INLINE_BYTES = 1 << 20
"""More eager bytes than this are copied by the stage thread, which is known to use one core, while the caller waits."""


@dataclass(slots=True)
class CopyJob:
    """One state on its way into ``slots``. ``is_copied`` is set once nothing reads the sources any more.

    ``error`` is written before ``is_copied`` is set. ``on_done`` runs on the stage thread after it. ``versions`` are the tripwire's
    as of the first fence, or of the end of the copy where that is earlier. ``began`` is when the stage thread took it. ``is_host_read`` is
    set once no host memory is read any more. ``numbers`` lie on devices, and belong to the job; once it is copied they are on the host.
    """

    plan: CopyPlan
    slots: list[int]
    on_done: Callable[[CopyJob], None]
    armed: Armed | None = None
    error: BaseException | None = None
    is_copied: Latch = field(default_factory=Latch)
    eager_done: Latch = field(default_factory=Latch)
    deferred: _Pairs | None = None
    events: list[tuple[torch.device, Mark]] = field(default_factory=list)
    is_host_read: Latch = field(default_factory=Latch)
    numbers: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] | None = None
    seal: Mutex = field(default_factory=Mutex)
    began: float | None = None


_Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]


class Stager:
    """Copies states into an arena. ``begin`` and ``fence`` run on the training thread, the rest on the stage thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, Stream] = {}
        self._is_pinned = False
        self._thread = threading.Thread(target=self._run, name="datastates-stage", daemon=True)
        self._thread.start()

    def begin(self, job: CopyJob, *, is_deferring: bool = True) -> None:
        """Copy now what may change next; when this returns only fenced tensors are still read.

        With ``is_deferring=False`` nothing is read any more when this returns.
        """
        job.armed = job.plan.tripwire.arm()
        if job.plan.devices or job.numbers:
            self._pin(job.plan)
            host_eager, device_eager = _by_device(_pairs(job.plan, job.slots, self._arena, job.plan.eager))
            job.deferred, device_deferred = _by_device(_pairs(job.plan, job.slots, self._arena, job.plan.deferred))
            if not job.deferred[0]:
                job.is_host_read.set()
            self._copy_from_devices(job, device_eager, device_deferred)
            _copy(host_eager)
            job.eager_done.set()
        elif job.plan.eager_bytes <= _INLINE_BYTES or torch.get_num_threads() == 1:
            _copy_eager(job.plan, job.slots, self._arena)
            job.eager_done.set()
        self._jobs.put(job)
        job.eager_done.wait()
        if not is_deferring:
            self.fence(job)

    def abandon(self, job: CopyJob, error: BaseException) -> None:
        """End a job whose ``begin`` was interrupted. It may have been handed over by then: it is finished once all the same."""
        job.error = job.error or error
        self._jobs.put(job)

    def fence(self, job: CopyJob) -> None:
        """Wait until the job reads nothing any more: the host for host memory, the current stream for device memory."""
        if job.events:
            _seal(job)
            for device, event in job.events:
                if not devices().is_recording(device):  # a graph waits for nothing outside of it; what replays it fences before
                    devices().wait(devices().current(device), event)
            job.is_host_read.wait()
        else:
            job.is_copied.wait()

    def close(self) -> None:
        """Finish what was begun and end the thread; idempotent."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _pin(self, plan: CopyPlan) -> None:
        """Pin the arena from the first state on that has something on a device, not before: registering makes a context there."""
        if not self._is_pinned and plan.devices:
            self._is_pinned = True
            self._arena.pin(DeviceRegistrar(plan.devices[0]))

    def _copy_from_devices(self, job: CopyJob, eager: _Pairs, deferred: _Pairs) -> None:
        """Enqueue device copies on side streams; the current streams wait for the eager ones, the host for none."""
        for device in dict.fromkeys(devices().of(source) for source in (*eager[1], *deferred[1], *job.numbers)):
            self._copy_from(device, job, _only(eager, device), _only(deferred, device))

    def _copy_from(self, device: torch.device, job: CopyJob, eager: _Pairs, deferred: _Pairs) -> None:
        assert job.armed is not None
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = devices().stream(device)
        current = devices().current(device)
        devices().wait(side, devices().mark(current))
        with devices().on(side):
            if eager[0]:
                _copy(eager, non_blocking=True)
                devices().wait(current, devices().mark(side))
            _copy(deferred, non_blocking=True)
            brought = [*_bring(job.armed.samples, device), *_bring(job.numbers, device)]
        job.events.append((device, devices().mark(side)))
        for source in (*eager[1], *deferred[1], *brought):
            devices().keep(source, side)

    def _run(self) -> None:
        torch.get_num_threads()  # torch sets this thread's number of OpenMP threads at its first use; then it is ours to set
        with threadpoolctl.threadpool_limits(limits=1, user_api="openmp"):
            while (job := self._jobs.get()) is not None:
                self._finish(job)
                del job  # or the last one's tensors would live until the next

    def _finish(self, job: CopyJob) -> None:
        """Runs on the stage thread."""
        if job.is_copied.is_set():
            return  # it was abandoned after it had been handed over
        job.began = time.monotonic()
        try:
            if job.error is None:
                self._copy_all(job)
        except BaseException as exc:  # whatever it is, the handle raises it, and the thread goes on
            job.error = exc
        finally:
            job.deferred = None
            job.eager_done.set()
            job.is_host_read.set()
            job.is_copied.set()
        job.on_done(job)

    def _copy_all(self, job: CopyJob) -> None:
        if not job.eager_done.is_set():
            _copy_eager(job.plan, job.slots, self._arena)
            job.eager_done.set()
        # Where everything is in host memory the views are made here: the training thread has better things to do.
        _copy(job.deferred if job.deferred is not None else _pairs(job.plan, job.slots, self._arena, job.plan.deferred))
        job.is_host_read.set()
        for _, event in job.events:
            event.synchronize()  # the one place where a host thread waits for the device
        self._check(job)

    def _check(self, job: CopyJob) -> None:
        assert job.armed is not None
        torn = job.plan.tripwire.tripped(job.armed, _seal(job), job.slots, self._arena.flat)
        if torn:
            raise Torn(
                f"{named(torn)} changed between capture() and the end of its copy, outside a tracked optimizer's step: call run.fence() "
                "before such an update; from now on these tensors are copied before capture() returns",
                paths=tuple(torn),
            )


def _seal(job: CopyJob) -> list[int]:
    """The versions before the fence opens: afterwards the optimizer bumps them rightly, on a device long before the copy is done."""
    with job.seal:
        if job.versions is None:
            job.versions = job.plan.tripwire.versions()
        return job.versions


def _only(pairs: _Pairs, device: torch.device) -> _Pairs:
    kept = [(target, source) for target, source in zip(*pairs, strict=True) if devices().of(source) == device]
    return [target for target, _ in kept], [source for _, source in kept]


def _bring(found: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Replace what is there by copies on the host, once they have arrived; what it was."""
    there = [index for index, each in enumerate(found) if devices().of(each) == device]
    brought = [found[index] for index in there]
    for index in there:
        found[index] = devices().pinned(found[index].shape, found[index].dtype).copy_(found[index], non_blocking=True)
    return brought


def _pairs(plan: CopyPlan, slots: Sequence[int], arena: Arena, copies: Sequence[Pieces]) -> _Pairs:
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for chunk, pieces in enumerate(copies):
        if pieces.sources:
            targets += map(plan.targets(chunk, arena.tensor(slots[chunk])).__getitem__, pieces.places)
            sources += pieces.sources
    return targets, sources


def _copy_eager(plan: CopyPlan, slots: Sequence[int], arena: Arena) -> None:
    """Copy from host memory what is not deferred; a chunk of many small tensors by one ``cat``, which needs no views."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for chunk, pieces in enumerate(plan.eager):
        if not pieces.sources:
            continue
        slot = arena.tensor(slots[chunk])
        if 1 < len(pieces.sources) == len(plan.sizes[chunk]):
            torch.cat(pieces.sources, out=slot[: plan.layout.chunk_lengths[chunk]])
        else:
            targets += map(plan.targets(chunk, slot).__getitem__, pieces.places)
            sources += pieces.sources
    _copy((targets, sources))


def _by_device(pairs: _Pairs) -> tuple[_Pairs, _Pairs]:
    """The tensors in host memory, and those on a device."""
    host: _Pairs = ([], [])
    device: _Pairs = ([], [])
    for target, source in zip(*pairs, strict=True):
        side = device if devices().is_on(source) else host
        side[0].append(target)
        side[1].append(source)
    return host, device


def _copy(pairs: _Pairs, *, non_blocking: bool = False) -> None:
    """One call for all pieces: the GIL is let go once, not once a tensor."""
    if pairs[0]:
        with torch.no_grad():
            torch._foreach_copy_(pairs[0], pairs[1], non_blocking)
