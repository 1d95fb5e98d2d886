"""Copies of states into slots of an arena: from devices (``DeviceCopies``), and from the host
(``Stager``).

``CopyJob`` is one state, as the copying threads pass it to each other. Memory that may change next
is copied at once. Memory that only the optimizer changes is copied behind the fence.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import threadpoolctl  # type: ignore[import-untyped]  # it has no stubs
import torch

from datastates.errors import Torn
from datastates.state.device_digest import is_ready
from datastates.state.digest import chunk_digest
from datastates.storage.arena import Arena, DeviceRegistrar, Registrar
from datastates.storage.memory import Held
from datastates.system.devices import Mark, Stream, devices
from datastates.system.interrupts import Mutex
from datastates.system.threads import Latch

from .device_copies import (
    HOST,
    NOTHING,
    DeviceDigests,
    FrozenCheck,
    Pairs,
    Snapshot,
    Snapshots,
    aside_of,
    beside,
    is_within,
    placed,
)
from .plan import CopyPlan, Pieces
from .tear_check import Armed, named


@dataclass(slots=True)
class DeviceCopy:
    """A job's copies from one device. The mark ``begun`` is behind everything that the copies must
    see. ``aside`` has what was put aside, with its places in the state's stream of bytes.

    ``held`` has the tensors that copies read, until they are done. ``arrived`` is the mark behind
    the last copy, once ``is_queued``. ``look`` has the digests of chunks that may be still. Its
    ``lanes`` arrive with the other copies, unless a caller waits for them sooner. ``digested`` and
    its ``lanes`` are of chunks that the device digests as they cross. With ``is_apart``, everything
    is put aside, and the copies read nothing that the training changes.
    """

    device: torch.device
    side: Stream
    begun: Mark
    aside: list[tuple[int, torch.Tensor]]
    held: list[torch.Tensor]
    look: FrozenCheck | None = None
    is_apart: bool = False
    digested: DeviceDigests | None = None
    lanes: list[torch.Tensor] = field(default_factory=list)
    arrived: Mark | None = None
    is_queued: Latch = field(default_factory=Latch)


@dataclass(slots=True)
class CopyJob:
    """One state on its way into ``slots``. ``is_copied`` is set once nothing reads the sources any
    more.

    ``error`` is written before ``is_copied`` is set. ``on_done`` runs on the stage thread after
    that. ``versions`` are the tripwire's, as of the first fence or of the end of the copy,
    whichever is earlier. ``began`` is when the stage thread took the job. ``is_host_read`` is set
    once no host memory is read any more. ``numbers`` belong to the job. They are on devices until
    it is copied, then on the host. ``digests`` has the digests of chunks that their device
    digested. ``here`` has still chunks that were not copied because memory has them, which it does
    as long as they are ``held``. ``late`` are still chunks that were copied after all.
    ``snapshots`` are the copies of the state ``uid`` that stay on devices, until memory has the
    state.
    """

    plan: CopyPlan
    slots: list[int]
    on_done: Callable[[CopyJob], None]
    armed: Armed | None = None
    error: BaseException | None = None
    is_copied: Latch = field(default_factory=Latch)
    eager_done: Latch = field(default_factory=Latch)
    crossings: list[DeviceCopy] = field(default_factory=list)
    is_host_read: Latch = field(default_factory=Latch)
    numbers: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] | None = None
    seal: Mutex = field(default_factory=Mutex)
    began: float | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    here: dict[int, Held] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    uid: str = ""
    snapshots: list[Snapshot] = field(default_factory=list)


# --- Copies from devices to the host ---
# What may change next is put aside on the device at once. Everything crosses on separate streams.


_KEPT = 8
"""The number of sets of slots of which a plan remembers the copies: captures use a few by turns."""

Hold = Callable[[Iterable[tuple[bytes, int]]], dict[tuple[bytes, int], Held]]
"""The signature of ``MemoryTier.hold``."""


class DeviceCopies:
    """The streams of an arena's captures, and the thread that queues on them. ``then`` takes each
    job once it is queued, in order.

    ``hold`` finds still chunks in memory, so that they need no copy. Without it everything is
    copied. Tensors in a snapshot are copied from the snapshot.
    """

    def __init__(
        self,
        arena: Arena,
        then: Callable[[CopyJob | None], None],
        hold: Hold | None,
        snapshots: Snapshots,
    ) -> None:
        self._arena, self._then, self._hold, self._snapshots = arena, then, hold, snapshots
        self._jobs: queue.SimpleQueue[CopyJob | Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, Stream] = {}
        self._digesting: dict[torch.device, Stream] = {}
        self._thread: threading.Thread | None = None

    def prepare(self, tensors: Iterable[torch.Tensor], size: int) -> None:
        """Do on the thread what the first capture of ``size`` bytes needs: memory that is real and
        registered, streams and compiled kernels. Does nothing if no tensor is on a device."""
        there = {devices().of(each): each for each in tensors if devices().is_on(each)}
        if there:
            registrar = DeviceRegistrar(next(iter(there)))
            self._pass(functools.partial(self._prepare, there, registrar, size))

    def _prepare(
        self, there: Mapping[torch.device, torch.Tensor], registrar: Registrar, size: int
    ) -> None:
        try:
            for device, tensor in there.items():
                is_ready(tensor)  # compiles on its own thread
                self._side(device)
            while self._jobs.empty() and self._arena.warm < size and self._arena.warm_up():
                pass  # a capture that comes meanwhile touches the remaining memory
            self._arena.pin(registrar)
        except Exception:  # the first capture tries again, and its handle raises it
            _logger.debug("the first capture could not be prepared", exc_info=True)

    def begin(self, job: CopyJob, *, is_deferring: bool) -> None:
        """Put aside what may change next, or copy it now; everything else may change only after a
        fence.

        Unless ``is_deferring``, no chunk is treated as still, since that would mean waiting for its
        digest.
        """
        for device in dict.fromkeys((*job.plan.devices, *map(devices().of, job.numbers))):
            self._begin_on(device, job, is_deferring=is_deferring)

    def put(self, job: CopyJob | None) -> None:
        """Have a job's copies queued, and hand it on.

        Jobs without device copies pass through here too, so that all stay in order."""
        if self._thread is None and (job is None or not job.crossings):
            self._then(job)
        else:
            self._pass(job)

    def _pass(self, job: CopyJob | Callable[[], None] | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="datastates-crossing", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def fence(self, job: CopyJob) -> None:
        """Make the current streams wait for the copies, and the host until these are queued. If
        everything was put aside on the device, the streams wait for that alone."""
        for crossing in job.crossings:
            behind: Mark | None = crossing.begun
            if not crossing.is_apart:
                crossing.is_queued.wait()
                behind = crossing.arrived
            # A graph that is being recorded waits for nothing outside of it: the caller fences
            # before it replays the graph.
            if behind is not None and not devices().is_recording(crossing.device):
                devices().wait(devices().current(crossing.device), behind)

    def finish(self, job: CopyJob) -> None:
        """Make the host wait until the queued copies of a job are done."""
        for crossing in job.crossings:
            if crossing.arrived is not None:
                crossing.arrived.synchronize()  # a device wait
            if crossing.look is not None and job.error is None:
                crossing.look.learn()
                crossing.look.try_out(functools.partial(self._digest_of, job))

    def learn(self, job: CopyJob) -> None:
        """Take the digests that devices made of a job's chunks, once it is finished and known
        not to be torn."""
        for crossing in job.crossings:
            if crossing.digested is not None:
                job.digests |= crossing.digested.learn(
                    crossing.lanes[0], functools.partial(self._digest_of, job)
                )

    def end(self, job: CopyJob) -> None:
        """Release everything held for a job, whatever its outcome, once no copy reads or writes
        for it. Raises nothing."""
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
        side = self._side(device)
        snapshot = self._snapshots.take(job.uid, job.plan, device)
        if snapshot is not None:
            job.snapshots.append(snapshot)
            job.crossings.append(
                DeviceCopy(
                    device, side, snapshot.written, snapshot.stretches, [], look, is_apart=True
                )
            )
            return
        aside, held = list[tuple[int, torch.Tensor]](), list[torch.Tensor]()
        small = (
            [source for source in route.small if not is_within(source, skipped)]
            if skipped
            else route.small
        )
        large = [(source.start, source.flat) for source in route.large]
        if small:
            try:
                with torch.no_grad():
                    aside = aside_of(small, () if skipped else route.runs)
            except torch.OutOfMemoryError:
                # copy to the host at once, which takes no memory there; the training waits for it
                large += [(source.start, source.flat) for source in small]
        if skipped:
            large = [*beside(large, skipped)]
        if large:
            self._arena.pin(DeviceRegistrar(device))
            pairs = placed(large, job.slots, self._arena)
            held += pairs[1]
            devices().wait(side, devices().mark(current))
            try:
                with devices().on(side):
                    copy(pairs, non_blocking=True)
            except BaseException:
                devices().mark(
                    side
                ).synchronize()  # queued copies write to slots that are about to be given back
                raise
            devices().wait(current, devices().mark(side))
        job.crossings.append(DeviceCopy(device, side, devices().mark(current), aside, held, look))

    def _side(self, device: torch.device) -> Stream:
        return self._streams.get(device) or self._streams.setdefault(
            device, devices().stream(device)
        )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, CopyJob):
                self._queue(job)
                self._then(job)
            else:
                job()
            del job  # otherwise its tensors would live until the next job
        self._then(None)

    def _queue(self, job: CopyJob) -> None:
        for crossing in job.crossings:
            try:
                if job.error is None:
                    if crossing.device in job.plan.devices:
                        # on this thread, because it may take as long as to touch all memory
                        self._arena.pin(DeviceRegistrar(crossing.device))
                    self._cross(crossing, job)
            except BaseException as exc:
                # the handle raises any error, and the thread continues
                job.error = exc
            finally:
                crossing.aside = []
                crossing.arrived = crossing.arrived or _reached(crossing)
                crossing.is_queued.set()

    def _cross(self, crossing: DeviceCopy, job: CopyJob) -> None:
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

    def _placed(self, crossing: DeviceCopy, job: CopyJob) -> Pairs:
        """The copies of what was put aside, and of what is deferred; of the latter the same as
        when these slots were used last."""
        aside, skipped = (
            crossing.aside,
            (frozenset[int]() if crossing.look is None else crossing.look.skipped),
        )
        deferred = (
            () if crossing.is_apart else job.plan.routes.get(crossing.device, NOTHING).deferred
        )
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

    def _digest(self, crossing: DeviceCopy, job: CopyJob) -> None:
        """Have chunks digested in parallel with the copies, on another stream. ``side`` continues
        when both are done."""
        device, plan = crossing.device, job.plan
        deferred = plan.routes.get(device, NOTHING).deferred
        if crossing.is_apart or not deferred:
            return
        digested = plan.digested.get(device)
        if digested is None:
            stills = plan.stills.get(device)
            stretches, left_out = (
                ((source.start, source.flat) for source in deferred),
                (() if stills is None else stills.parts),
            )
            digested = plan.digested[device] = DeviceDigests(
                stretches, plan.layout.chunk_lengths, left_out
            )
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
        return chunk_digest(
            self._arena.memory(job.slots[chunk], job.plan.layout.chunk_lengths[chunk])
        )

    def _bring_lanes(self, crossing: DeviceCopy, look: FrozenCheck) -> Mark:
        with devices().on(crossing.side):
            crossing.held += _bring(look.lanes, crossing.device)
        return devices().mark(crossing.side)

    def _cross_changed(self, crossing: DeviceCopy, look: FrozenCheck, job: CopyJob) -> None:
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
        if crossing.is_apart:
            # copy from the snapshot: the training may have changed the tensors since
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


def _reached(crossing: DeviceCopy) -> Mark | None:
    """A mark behind everything that was queued; None if the device takes no more marks."""
    try:
        return devices().mark(crossing.side)
    except RuntimeError:
        return None


def _bring(found: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Replace the tensors on this device in ``found`` by copies on the host, which will arrive;
    returns the originals."""
    there = [index for index, each in enumerate(found) if devices().of(each) == device]
    brought = [found[index] for index in there]
    for index in there:
        found[index] = (
            devices()
            .pinned(found[index].shape, found[index].dtype)
            .copy_(found[index], non_blocking=True)
        )
    return brought


# --- Copies on the host, and the order of all copies ---


_logger = logging.getLogger(__name__)

SMALL_BYTES = 512 << 10
"""States of at most this many bytes are copied before ``capture`` returns."""

_INLINE_BYTES = 1 << 20
"""More eager bytes than this are copied by the stage thread, which is known to use one core,
while the caller waits."""


class Stager:
    """Copies states into an arena. ``begin`` and ``fence`` run on the training thread, all other
    methods on the stage thread.

    ``hold`` finds chunks in memory, so that chunks that stay the same on a device are not copied
    from it. ``snapshots``, if given, takes snapshots of tensors on devices.
    """

    def __init__(
        self, arena: Arena, hold: Hold | None = None, snapshots: Snapshots | None = None
    ) -> None:
        self._arena = arena
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._unfinished = 0
        """How many jobs the stage thread has, which must come before any later one."""
        self._turn = Mutex()
        self._crossings = DeviceCopies(arena, self._take, hold, snapshots or Snapshots(0))
        self._thread = threading.Thread(target=self._run, name="datastates-stage", daemon=True)
        self._thread.start()

    def prepare(self, tensors: Iterable[torch.Tensor], size: int) -> None:
        """Prepare the first capture of tensors on devices, in the background."""
        self._crossings.prepare(tensors, size)

    def begin(self, job: CopyJob, *, is_deferring: bool = True) -> None:
        """Copy now what may change next; when this returns, only fenced tensors are still read.

        With ``is_deferring=False`` nothing is read any more when this returns. A small state in
        host memory is copied at once, as that takes less time than to wake the stage thread.
        """
        plan = job.plan
        is_here = not plan.devices and not job.numbers
        if is_here and plan.layout.bytes_total <= SMALL_BYTES and not self._unfinished:
            self._finish_here(job)
            return
        try:
            job.armed = plan.tripwire.arm()
        except torch.OutOfMemoryError:  # no edit could be noticed, so nothing is copied later
            job.armed, is_deferring = Armed(plan.tripwire.versions(), []), False
        self._zero_gaps(job)
        if plan.devices or job.numbers:
            self._crossings.begin(job, is_deferring=is_deferring)
            copy(host_pairs(job, self._arena, is_deferred=False))
            if not job.plan.routes.get(HOST, NOTHING).deferred:
                job.is_host_read.set()
                if all(
                    crossing.is_apart or not job.plan.routes.get(crossing.device, NOTHING).deferred
                    for crossing in job.crossings
                ):
                    _seal(job)  # no copy reads the training's tensors any more
            job.eager_done.set()
        elif job.plan.eager_bytes <= _INLINE_BYTES or torch.get_num_threads() == 1:
            _copy_pieces(job.plan, job.plan.eager, job.slots, self._arena)
            job.eager_done.set()
        self._put(job)
        job.eager_done.wait()
        if not is_deferring:
            self.fence(job)

    def abandon(self, job: CopyJob, error: BaseException) -> None:
        """End a job whose ``begin`` was interrupted.

        Even if it was handed over by then, it is finished only once."""
        job.error = job.error or error
        self._put(job)

    def fence(self, job: CopyJob) -> None:
        """Wait until the job reads nothing any more: the host for host memory, the current
        stream for device memory."""
        if job.crossings:
            _seal(job)
            self._crossings.fence(job)
            job.is_host_read.wait()
        else:
            job.is_copied.wait()

    def close(self) -> None:
        """Finish what was begun and end the thread; idempotent."""
        if self._thread.is_alive():
            self._crossings.put(None)
            self._crossings.close()
            self._thread.join()

    def _finish_here(self, job: CopyJob) -> None:
        """Copy a whole state on the caller's thread, while no other code can change it."""
        job.began = time.monotonic()
        try:
            for pieces in (job.plan.eager, job.plan.deferred):
                _copy_pieces(job.plan, pieces, job.slots, self._arena)
            self._zero_gaps(job)
        except BaseException as exc:  # the handle raises it, whatever it is
            job.error = exc
        finally:
            for latch in (job.eager_done, job.is_host_read, job.is_copied):
                latch.set()
        job.on_done(job)

    def _zero_gaps(self, job: CopyJob) -> None:
        """Clear what no tensor fills: the slots may hold bytes of another state."""
        for chunk, first, last in job.plan.gaps:
            self._arena.tensor(job.slots[chunk] + first, last - first).zero_()

    def _put(self, job: CopyJob) -> None:
        with self._turn:
            self._unfinished += 1
        self._crossings.put(job)

    def _take(self, job: CopyJob | None) -> None:
        """Hand a job to the stage thread, once its copies from devices are queued."""
        self._jobs.put(job)

    def _run(self) -> None:
        # torch sets this thread's number of OpenMP threads at its first use; after that we can set
        # it
        torch.get_num_threads()
        with threadpoolctl.threadpool_limits(limits=1, user_api="openmp"):
            while (job := self._jobs.get()) is not None:
                try:
                    self._finish(job)
                except BaseException as exc:
                    # a training waits for this thread at its next fence: after any error, the
                    # thread continues
                    _logger.exception("the end of a copy failed; the thread that copies goes on")
                    self._give_up(job, exc)
                with self._turn:
                    self._unfinished -= 1
                del job  # otherwise its tensors would live until the next job

    def _give_up(self, job: CopyJob, error: BaseException) -> None:
        """End a job that could not be ended."""
        job.error = job.error or error
        if not job.is_copied.is_set():  # nobody was told yet
            for latch in (job.eager_done, job.is_host_read, job.is_copied):
                latch.set()
            job.on_done(job)

    def _finish(self, job: CopyJob) -> None:
        """Runs on the stage thread."""
        if job.is_copied.is_set():
            return  # the job was abandoned after it was handed over
        job.began = time.monotonic()
        try:
            if job.error is None:
                self._copy_all(job)
        except BaseException as exc:  # the handle raises it, whatever it is, and the thread goes on
            job.error = exc
        finally:
            self._crossings.end(job)
            job.eager_done.set()
            job.is_host_read.set()
            job.is_copied.set()
        job.on_done(job)

    def _copy_all(self, job: CopyJob) -> None:
        if not job.eager_done.is_set():
            _copy_pieces(job.plan, job.plan.eager, job.slots, self._arena)
            job.eager_done.set()
        if not job.crossings:
            self._arena.make_real(
                slot
                for slot, pieces in zip(job.slots, job.plan.eager, strict=True)
                if not pieces.sources
            )
        if job.crossings:
            copy(host_pairs(job, self._arena, is_deferred=True))
        else:  # the views are made here, to spare the training thread
            _copy_pieces(job.plan, job.plan.deferred, job.slots, self._arena)
        job.is_host_read.set()
        self._crossings.finish(job)
        self._check(job)
        self._crossings.learn(job)

    def _check(self, job: CopyJob) -> None:
        assert job.armed is not None
        slots = (
            job.slots
            if not job.here
            else [
                job.here[chunk].slot if chunk in job.here else slot
                for chunk, slot in enumerate(job.slots)
            ]
        )
        torn = job.plan.tripwire.tripped(job.armed, _seal(job), slots, self._arena.flat)
        if job.late:
            torn += [path for path in self._changed(job) if path not in torn]
        if torn:
            raise Torn(
                f"{named(torn)} changed between capture() and the end of its copy, outside a"
                " tracked optimizer's step: call run.fence() before such an update; from now on"
                " these tensors are copied before capture() returns",
                paths=tuple(torn),
            )

    def _changed(self, job: CopyJob) -> list[str]:
        """The paths of tensors in chunks that were copied late, and do not match what their
        device digested when ``capture`` was called."""
        lengths = job.plan.layout.chunk_lengths
        wrong = {
            chunk
            for chunk in job.late
            if chunk_digest(self._arena.memory(job.slots[chunk], lengths[chunk]))
            != job.digests[chunk]
        }
        return [
            source.path
            for source in job.plan.sources
            if wrong.intersection(chunk for chunk, _ in source.pieces)
        ]


def _seal(job: CopyJob) -> list[int]:
    """The versions before the fence opens: afterwards the optimizer rightly increases them, on a
    device long before the copy is done."""
    with job.seal:
        if job.versions is None:
            job.versions = job.plan.tripwire.versions()
        return job.versions


def _copy_pieces(
    plan: CopyPlan, chunks: Sequence[Pieces], slots: Sequence[int], arena: Arena
) -> None:
    """Copy these pieces of a state in host memory; a run of many small tensors takes one
    ``cat``, which needs no views."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for chunk, pieces in enumerate(chunks):
        if not pieces.sources:
            continue
        sizes, first, last = plan.sizes[chunk], pieces.places[0], pieces.places[-1]
        if 1 < len(pieces.sources) == last - first + 1:
            torch.cat(
                pieces.sources,
                out=arena.tensor(slots[chunk] + sum(sizes[:first]), sum(sizes[first : last + 1])),
            )
        else:
            targets += map(arena.pieces(slots[chunk], sizes).__getitem__, pieces.places)
            sources += pieces.sources
    copy((targets, sources))
