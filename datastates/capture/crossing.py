"""Copies from devices to the host. What may change next is put aside on the device at once, and everything crosses on separate streams.

``begin`` and ``fence`` run on the training thread, which launches a few operators and waits for no device. The thread
``datastates-crossing`` queues everything else. It waits for a device only where chunks may be still, until the device has said whether they
are. So no capture is queued later than necessary.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable

import torch

from datastates.content.digest import chunk_digest
from datastates.store.arena import Arena
from datastates.store.pinning import DeviceRegistrar
from datastates.store.roles import Held
from datastates.system.devices import Mark, Stream, devices

from .digested import Digested
from .job import CopyJob, Crossing
from .routes import HOST, NOTHING, Pairs, aside_of, placed
from .snapshots import Snapshots
from .stills import Look, beside, is_within

__all__ = ["Crossings", "Hold", "copy", "host_pairs"]

_KEPT = 8
"""The number of sets of slots of which a plan remembers the copies: captures use a few by turns."""

Hold = Callable[[Iterable[tuple[bytes, int]]], dict[tuple[bytes, int], Held]]
"""The signature of ``CaptureTier.hold``."""


class Crossings:
    """The streams of an arena's captures, and the thread that queues on them. ``then`` takes each job once it is queued, in order.

    ``hold`` finds still chunks in memory, so that they need no copy; without it everything is copied. What a snapshot has is copied from
    the snapshot.
    """

    def __init__(self, arena: Arena, then: Callable[[CopyJob | None], None], hold: Hold | None, snapshots: Snapshots) -> None:
        self._arena, self._then, self._hold, self._snapshots = arena, then, hold, snapshots
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, Stream] = {}
        self._digesting: dict[torch.device, Stream] = {}
        self._thread: threading.Thread | None = None
        self._is_pinned = False

    def begin(self, job: CopyJob, *, is_deferring: bool) -> None:
        """Put aside what may change next, or copy it now; everything else may change only after a fence.

        Unless ``is_deferring``, no chunk is treated as still, since that would mean waiting for its digest.
        """
        plan = job.plan
        if not self._is_pinned and plan.devices:  # only now: registering creates a context on the device
            self._is_pinned = True
            self._arena.pin(DeviceRegistrar(plan.devices[0]))
        for device in dict.fromkeys((*plan.devices, *map(devices().of, job.numbers))):
            self._begin_on(device, job, is_deferring=is_deferring)

    def put(self, job: CopyJob | None) -> None:
        """Have a job's copies queued, and hand it on. Jobs without device copies pass through here too, so that all stay in order."""
        if self._thread is None and (job is None or not job.crossings):
            self._then(job)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="datastates-crossing", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def fence(self, job: CopyJob) -> None:
        """Make the current streams wait for the copies, and the host until these are queued. Where everything was put aside on the device,
        the streams wait for that alone."""
        for crossing in job.crossings:
            behind: Mark | None = crossing.begun
            if not crossing.is_apart:
                crossing.is_queued.wait()
                behind = crossing.arrived
            # A graph that is being recorded waits for nothing outside of it: the caller fences before it replays the graph.
            if behind is not None and not devices().is_recording(crossing.device):
                devices().wait(devices().current(crossing.device), behind)

    def finish(self, job: CopyJob) -> None:
        """Make the host wait until those of a job's copies that were queued are done."""
        for crossing in job.crossings:
            if crossing.arrived is not None:
                crossing.arrived.synchronize()  # a device wait
            if crossing.look is not None and job.error is None:
                crossing.look.learn()
                crossing.look.try_out(functools.partial(self._digest_of, job))

    def learn(self, job: CopyJob) -> None:
        """Take the digests that devices made of a job's chunks, once it is finished and known not to be torn."""
        for crossing in job.crossings:
            if crossing.digested is not None:
                job.digests |= crossing.digested.learn(crossing.lanes[0], functools.partial(self._digest_of, job))

    def end(self, job: CopyJob) -> None:
        """Release everything held for a job, whatever its outcome, once no copy reads or writes for it. Raises nothing."""
        try:
            self.finish(job)
        except BaseException as exc:  # the device may be lost: the handle raises it
            job.error = job.error or exc
        for crossing in job.crossings:
            crossing.held.clear()
        for snapshot in job.snapshots:
            snapshot.is_crossing = False

    def close(self) -> None:
        """Wait until the thread has queued everything and ended."""
        if self._thread is not None:
            self._thread.join()

    def _begin_on(self, device: torch.device, job: CopyJob, *, is_deferring: bool) -> None:
        route, current = job.plan.routes.get(device, NOTHING), devices().current(device)
        stills = job.plan.stills.get(device) if is_deferring and self._hold is not None else None
        look = None if stills is None else stills.look()
        skipped = frozenset[int]() if look is None else look.skipped
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = devices().stream(device)
        snapshot = self._snapshots.take(job.uid, job.plan, device)
        if snapshot is not None:
            job.snapshots.append(snapshot)
            job.crossings.append(Crossing(device, side, snapshot.written, snapshot.stretches, [], look, is_apart=True))
            return
        aside, held = list[tuple[int, torch.Tensor]](), list[torch.Tensor]()
        small = [source for source in route.small if not is_within(source, skipped)] if skipped else route.small
        large = [(source.start, source.flat) for source in route.large]
        if small:
            try:
                with torch.no_grad():
                    aside = aside_of(small, () if skipped else route.runs)
            except torch.OutOfMemoryError:  # copy to the host at once, which takes no room there; the training waits for it
                large += [(source.start, source.flat) for source in small]
        if skipped:
            large = [*beside(large, skipped)]
        if large:
            pairs = placed(large, job.slots, self._arena)
            held += pairs[1]
            devices().wait(side, devices().mark(current))
            try:
                with devices().on(side):
                    copy(pairs, non_blocking=True)
            except BaseException:
                devices().mark(side).synchronize()  # queued copies write to slots that are about to be given back
                raise
            devices().wait(current, devices().mark(side))
        job.crossings.append(Crossing(device, side, devices().mark(current), aside, held, look))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._queue(job)
            self._then(job)
            del job  # otherwise its tensors would live until the next job
        self._then(None)

    def _queue(self, job: CopyJob) -> None:
        for crossing in job.crossings:
            try:
                if job.error is None:
                    self._cross(crossing, job)
            except BaseException as exc:  # the handle raises it, whatever it is, and the thread goes on
                job.error = exc
            finally:
                crossing.aside = []
                crossing.arrived = crossing.arrived or _reached(crossing)
                crossing.is_queued.set()

    def _cross(self, crossing: Crossing, job: CopyJob) -> None:
        look = crossing.look
        pairs = self._placed(crossing, job)
        crossing.held += pairs[1]
        devices().wait(crossing.side, crossing.begun)
        are_known = None if look is None else self._bring_lanes(crossing, look)
        with devices().on(crossing.side):
            copy(pairs, non_blocking=True)
        self._digest(crossing, job)
        with devices().on(crossing.side):
            assert job.armed is not None
            for found in (job.armed.samples, job.numbers, crossing.lanes):
                crossing.held += _bring(found, crossing.device)
        if look is not None and are_known is not None and look.skipped:
            are_known.synchronize()  # here this thread waits for a device, and with it a fence
            self._cross_changed(crossing, look, job)
        crossing.arrived = devices().mark(crossing.side)

    def _placed(self, crossing: Crossing, job: CopyJob) -> Pairs:
        """The copies of what was put aside, and of what is deferred; of the latter the same as when these slots were used last."""
        aside, skipped = crossing.aside, frozenset[int]() if crossing.look is None else crossing.look.skipped
        deferred = () if crossing.is_apart else job.plan.routes.get(crossing.device, NOTHING).deferred
        stretches = [(source.start, source.flat) for source in deferred]
        if skipped:
            return placed(beside([*aside, *stretches], skipped), job.slots, self._arena)
        key, known = (crossing.device, tuple(job.slots)), job.plan.placed
        later = known.get(key) if stretches else ([], [])
        if later is None:
            if len(known) >= _KEPT:
                known.clear()
            later = known[key] = placed(stretches, job.slots, self._arena)
        first = placed(aside, job.slots, self._arena)
        return [*first[0], *later[0]], [*first[1], *later[1]]

    def _digest(self, crossing: Crossing, job: CopyJob) -> None:
        """Have chunks digested beside the copies, on another stream; ``side`` goes on when both are done."""
        device, plan = crossing.device, job.plan
        deferred = plan.routes.get(device, NOTHING).deferred
        if crossing.is_apart or not deferred:
            return
        digested = plan.digested.get(device)
        if digested is None:
            stills = plan.stills.get(device)
            stretches, left_out = ((source.start, source.flat) for source in deferred), () if stills is None else stills.parts
            digested = plan.digested[device] = Digested(stretches, plan.layout.chunk_lengths, left_out)
        stream = self._digesting.get(device)
        if stream is None:
            stream = self._digesting[device] = devices().stream(device)
        devices().wait(stream, crossing.begun)
        with devices().on(stream):
            lanes = digested.lanes()
        if lanes is not None:
            crossing.digested, crossing.lanes = digested, [lanes]
            devices().wait(crossing.side, devices().mark(stream))

    def _digest_of(self, job: CopyJob, chunk: int) -> bytes:
        return chunk_digest(self._arena.memory(job.slots[chunk], job.plan.layout.chunk_lengths[chunk]))

    def _bring_lanes(self, crossing: Crossing, look: Look) -> Mark:
        with devices().on(crossing.side):
            crossing.held += _bring(look.lanes, crossing.device)
        return devices().mark(crossing.side)

    def _cross_changed(self, crossing: Crossing, look: Look, job: CopyJob) -> None:
        """Hold in memory the chunks that are still, and copy those that have changed after all."""
        assert self._hold is not None
        found, lengths = look.learn(), job.plan.layout.chunk_lengths
        keys = {chunk: (found[chunk], lengths[chunk]) for chunk in look.skipped}
        held = self._hold(keys.values())
        job.held += held.values()
        job.here |= {chunk: held[key] for chunk, key in keys.items() if key in held}
        job.digests |= {chunk: found[chunk] for chunk in look.skipped}
        changed = look.skipped.difference(job.here)
        job.late |= changed
        stretches = look.stills.stretches(changed)
        if crossing.is_apart:  # copy from the snapshot: the training may have changed the tensors since
            stretches = [*beside(crossing.aside, frozenset(range(len(lengths))) - changed)]
        pairs = placed(stretches, job.slots, self._arena)
        crossing.held += pairs[1]
        with devices().on(crossing.side):
            copy(pairs, non_blocking=True)


def host_pairs(job: CopyJob, arena: Arena, *, is_deferred: bool) -> Pairs:
    """The copies from host memory for a state that is partly on devices."""
    route = job.plan.routes.get(HOST, NOTHING)
    sources = route.deferred if is_deferred else (*route.small, *route.large)
    return placed(((source.start, source.flat) for source in sources), job.slots, arena)


def copy(pairs: Pairs, *, non_blocking: bool = False) -> None:
    """Copy all pieces in one call, which releases the GIL once, not once for each tensor."""
    if pairs[0]:
        with torch.no_grad():
            torch._foreach_copy_(pairs[0], pairs[1], non_blocking)


def _reached(crossing: Crossing) -> Mark | None:
    """A mark behind everything that was queued; None if the device takes no more marks."""
    try:
        return devices().mark(crossing.side)
    except RuntimeError:
        return None


def _bring(found: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Replace the tensors on this device in ``found`` by copies on the host, which will arrive; returns the originals."""
    there = [index for index, each in enumerate(found) if devices().of(each) == device]
    brought = [found[index] for index in there]
    for index in there:
        found[index] = devices().pinned(found[index].shape, found[index].dtype).copy_(found[index], non_blocking=True)
    return brought
