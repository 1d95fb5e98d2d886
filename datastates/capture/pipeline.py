"""The engine's own steps, one after the other, for a capture that was copied.

engine thread   copied -> digest -> dedup, one capture after the other (``enter``); ``commit`` does what comes after
writer thread   write, when the engine says so
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from datastates.content.manifest import Content
from datastates.errors import Conflict
from datastates.modules.contract import Step
from datastates.modules.dedup import Dedup
from datastates.modules.digest import Digest
from datastates.modules.work import Work, Writing
from datastates.modules.write import Write
from datastates.store.arena import Arena
from datastates.store.roles import CaptureTier, DurableTier
from datastates.system.recorder import Recorder

from .line import Staged
from .register import Books, Register
from .stage import CopyJob

__all__ = ["Pipeline"]


class Pipeline:
    """The steps in order of priority. ``enter`` and ``leave`` belong to the engine thread, ``write`` to the writer thread."""

    def __init__(
        self, books: Books, register: Register, *, arena: Arena, memory: CaptureTier, local: DurableTier, recorder: Recorder
    ) -> None:
        self._recorder = recorder
        self._run, self._register, self._arena, self._memory = books.run, register, arena, memory
        self._each: Sequence[Step[Work]] = (Digest(arena), Dedup(memory))
        self._write = Write(memory, local, register.journal, recorder)

    def enter(self, staged: Staged) -> None:
        """Take a capture into memory, each step in turn; its line goes on from it. If this raises, ``leave`` undoes it.

        :raises Torn: or any other error of the copy.
        """
        job, uid = staged.job, staged.progress.uid
        assert job is not None
        if job.error is not None:
            raise job.error
        if self._memory.has(uid):
            raise Conflict(f"there is a state {uid} already: every capture needs a uid of its own")
        work = staged.work = self._begun(staged, job)
        for step in self._each:
            began = time.monotonic()
            step.process(work)
            self._recorder.span(step.name, began, time.monotonic(), uid, work.facts.step)
        for snapshot in job.snapshots:
            snapshot.digest = work.digested().digest
        self._recorder.count("snapshots", bool(job.snapshots))
        self._let_go(job)
        self._recorder.count("bytes_copied", sum(work.lengths) - sum(map(work.lengths.__getitem__, job.here)))
        self._recorder.count("bytes_new", work.bytes_new)
        self._register.place(uid, staged.line)
        if staged.line.part is None:
            staged.line.tip = (uid, work.digested().digest)

    def leave(self, staged: Staged) -> None:
        """Undo ``enter``, as far as it got: memory gives the capture back, and its line goes on from the state before it."""
        line, work, uid = staged.line, staged.work, staged.progress.uid
        if work is not None:
            self._memory.remove(uid)
        if staged.job is not None:
            self._let_go(staged.job)
            self._arena.take_back(staged.job.slots)  # those that memory did not take
        if work is not None and line.tip is not None and line.tip[0] == uid:
            line.tip = work.before

    def write(self, uids: Sequence[str]) -> int:
        """Make states of the memory tier durable: all of them, or none; returns how many bytes that added to the disk."""
        lines = {uid: self._register.line_of(uid) for uid in uids}
        group = [
            Writing(uid, None, is_of_base=False) if line is None else Writing(uid, line.related(), line.has_placed)
            for uid, line in lines.items()
        ]
        self._write.process(group)
        for writing in group:
            line = lines[writing.uid]
            if line is not None and writing.manifest is not None:
                line.placed(writing.manifest)
        return sum(writing.size for writing in group)

    def _let_go(self, job: CopyJob) -> None:
        """Release what was held for a state in flight, now that the memory tier has it or never will."""
        job.snapshots.clear()
        if job.held:
            held, job.held = job.held, []
            self._memory.let_go(held)

    def _begun(self, staged: Staged, job: CopyJob) -> Work:
        """The work on a capture whose bytes are in its slots."""
        tip, part = staged.line.tip, staged.line.part
        run = staged.line.run or self._run
        content, lengths = Content(staged.layout.skeleton, staged.values, staged.layout.tensors, ()), staged.layout.chunk_lengths
        if part is not None:
            facts = replace(staged.facts, run=run.uid, config=run.chosen)
            work = Work(facts, (), content, lengths, job.slots, tip, rank=part.rank, reduce=staged.line.reduce, form=staged.form)
        else:
            facts = replace(staged.facts, parent=None if tip is None else tip[0], run=run.uid, config=run.chosen)
            work = Work(facts, () if tip is None else (tip[1],), content, lengths, job.slots, tip)
        work.known, work.is_from_device = job.digests, bool(job.plan.devices)
        return work
