"""Copies a state's bytes into slots: at once what may change next, and behind the fence what only the optimizer changes.

One ``Stager`` belongs to a repository and owns the thread ``datastates-stage``. It does jobs in the order in which they were
begun, so the next stage gets captures in order.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

import threadpoolctl  # type: ignore[import-untyped]  # it has no stubs
import torch

from datastates.content.digest import chunk_digest
from datastates.errors import Torn
from datastates.store.arena import Arena

from .crossing import Crossings, Hold, copy, host_pairs
from .edits import named
from .job import CopyJob
from .plan import CopyPlan, Pieces
from .routes import HOST, NOTHING
from .snapshots import Snapshots

__all__ = ["CopyJob", "Stager"]

_logger = logging.getLogger(__name__)

_INLINE_BYTES = 1 << 20
"""More eager bytes than this are copied by the stage thread, which is known to use one core, while the caller waits."""


class Stager:
    """Copies states into an arena. ``begin`` and ``fence`` run on the training thread, the rest on the stage thread.

    ``hold`` finds chunks in memory, so that chunks that stay the same on a device are not copied from it. ``snapshots`` takes snapshots of
    what lies on devices, if it is given.
    """

    def __init__(self, arena: Arena, hold: Hold | None = None, snapshots: Snapshots | None = None) -> None:
        self._arena = arena
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._crossings = Crossings(arena, self._take, hold, snapshots or Snapshots(0))
        self._thread = threading.Thread(target=self._run, name="datastates-stage", daemon=True)
        self._thread.start()

    def begin(self, job: CopyJob, *, is_deferring: bool = True) -> None:
        """Copy now what may change next; when this returns, only fenced tensors are still read.

        With ``is_deferring=False`` nothing is read any more when this returns.
        """
        job.armed = job.plan.tripwire.arm()
        for chunk, first, last in job.plan.gaps:
            self._arena.tensor(job.slots[chunk] + first, last - first).zero_()  # the slot may hold bytes of another state
        if job.plan.devices or job.numbers:
            self._crossings.begin(job, is_deferring=is_deferring)
            copy(host_pairs(job, self._arena, is_deferred=False))
            if not job.plan.routes.get(HOST, NOTHING).deferred:
                job.is_host_read.set()
                if all(crossing.is_apart or not job.plan.routes.get(crossing.device, NOTHING).deferred for crossing in job.crossings):
                    _seal(job)  # no copy reads the training's tensors any more
            job.eager_done.set()
        elif job.plan.eager_bytes <= _INLINE_BYTES or torch.get_num_threads() == 1:
            _copy_pieces(job.plan, job.plan.eager, job.slots, self._arena)
            job.eager_done.set()
        self._crossings.put(job)
        job.eager_done.wait()
        if not is_deferring:
            self.fence(job)

    def abandon(self, job: CopyJob, error: BaseException) -> None:
        """End a job whose ``begin`` was interrupted. Even if it was handed over by then, it is finished only once."""
        job.error = job.error or error
        self._crossings.put(job)

    def fence(self, job: CopyJob) -> None:
        """Wait until the job reads nothing any more: the host for host memory, the current stream for device memory."""
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

    def _take(self, job: CopyJob | None) -> None:
        """Hand a job to the stage thread, once its copies from devices are queued."""
        self._jobs.put(job)

    def _run(self) -> None:
        torch.get_num_threads()  # torch sets this thread's number of OpenMP threads at its first use; after that we can set it
        with threadpoolctl.threadpool_limits(limits=1, user_api="openmp"):
            while (job := self._jobs.get()) is not None:
                try:
                    self._finish(job)
                except BaseException as exc:  # a training waits for this thread at its next fence: whatever it is, the thread goes on
                    _logger.exception("the end of a copy failed; the thread that copies goes on")
                    self._give_up(job, exc)
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
            self._arena.make_real(slot for slot, pieces in zip(job.slots, job.plan.eager, strict=True) if not pieces.sources)
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
        slots = job.slots if not job.here else [job.here[chunk].slot if chunk in job.here else slot for chunk, slot in enumerate(job.slots)]
        torn = job.plan.tripwire.tripped(job.armed, _seal(job), slots, self._arena.flat)
        if job.late:
            torn += [path for path in self._changed(job) if path not in torn]
        if torn:
            raise Torn(
                f"{named(torn)} changed between capture() and the end of its copy, outside a tracked optimizer's step: call run.fence() "
                "before such an update; from now on these tensors are copied before capture() returns",
                paths=tuple(torn),
            )

    def _changed(self, job: CopyJob) -> list[str]:
        """The paths of tensors in chunks that were copied late, and do not match what their device digested when ``capture`` was called."""
        lengths = job.plan.layout.chunk_lengths
        wrong = {chunk for chunk in job.late if chunk_digest(self._arena.memory(job.slots[chunk], lengths[chunk])) != job.digests[chunk]}
        return [source.path for source in job.plan.sources if wrong.intersection(chunk for chunk, _ in source.pieces)]


def _seal(job: CopyJob) -> list[int]:
    """The versions before the fence opens: afterwards the optimizer rightly increases them, on a device long before the copy is done."""
    with job.seal:
        if job.versions is None:
            job.versions = job.plan.tripwire.versions()
        return job.versions


def _copy_pieces(plan: CopyPlan, chunks: Sequence[Pieces], slots: Sequence[int], arena: Arena) -> None:
    """Copy these pieces of a state in host memory; a run of many small tensors takes one ``cat``, which needs no views."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for chunk, pieces in enumerate(chunks):
        if not pieces.sources:
            continue
        sizes, first, last = plan.sizes[chunk], pieces.places[0], pieces.places[-1]
        if 1 < len(pieces.sources) == last - first + 1:
            torch.cat(pieces.sources, out=arena.tensor(slots[chunk] + sum(sizes[:first]), sum(sizes[first : last + 1])))
        else:
            targets += map(arena.pieces(slots[chunk], sizes).__getitem__, pieces.places)
            sources += pieces.sources
    copy((targets, sources))
