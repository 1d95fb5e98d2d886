"""What becomes of a capture once it was copied: the engine's own steps, one after the other.

engine thread   copied -> digest -> dedup, one capture after the other; record, a round in one transaction
writer thread   write, when the engine says so
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from datastates.content.manifest import Content
from datastates.modules.contract import Step
from datastates.modules.dedup import Dedup
from datastates.modules.digest import Digest
from datastates.modules.record import Record
from datastates.modules.work import Work, Writing
from datastates.modules.write import Write
from datastates.store.arena import Arena
from datastates.store.roles import CaptureTier, DurableTier

from .line import Staged
from .register import Books, Register

__all__ = ["Pipeline"]


class Pipeline:
    """The steps in order of priority. ``finish`` belongs to the engine thread, ``write`` to the writer thread."""

    def __init__(self, books: Books, register: Register, *, arena: Arena, memory: CaptureTier, local: DurableTier) -> None:
        self._run, self._register, self._arena = books.run, register, arena
        self._each: Sequence[Step[Work]] = (Digest(arena), Dedup(memory))
        self._record = Record(register.journal, memory, books.holder)
        self._write = Write(memory, local, register.journal)

    def finish(self, captures: Sequence[Staged]) -> list[Staged]:
        """Take a round of captures into memory and into the lineage; those that came about. The others' handles are told why not."""
        held: dict[str, tuple[Staged, Work]] = {}
        for staged in captures:
            try:
                held[staged.progress.uid] = staged, self._hold(staged)
            except BaseException as exc:  # whatever it is, the handle raises it
                self._register.fail(staged, exc)
        refused = self._record.process_all([work for _, work in held.values()])
        for uid in reversed(refused):  # the newest first
            staged, work = held.pop(uid)
            self._register.refuse(staged, work.before, refused[uid])
        return [staged for staged, _ in held.values()]

    def write(self, uid: str) -> None:
        """Make a state of the memory tier durable."""
        line = self._register.line_of(uid)
        writing = Writing(uid, None, is_of_base=False) if line is None else Writing(uid, line.related(), line.has_placed)
        self._write.process(writing)
        if line is not None and writing.manifest is not None:
            line.placed(writing.manifest)

    def _hold(self, staged: Staged) -> Work:
        """Each step for one capture, which is in memory then; its line goes on from it."""
        work = self._copied(staged)
        try:
            for step in self._each:
                step.process(work)
        except BaseException:
            self._arena.release(work.slots)
            raise
        self._register.place(work.facts.uid, staged.line)
        staged.line.tip = (work.facts.uid, work.digested().digest)
        return work

    def _copied(self, staged: Staged) -> Work:
        """What a capture is, now that its bytes are in its slots; raises what went wrong with the copy."""
        job, staged.job = staged.job, None
        assert job is not None
        if job.error is not None:
            self._arena.release(job.slots)
            raise job.error
        tip = staged.line.tip
        run = staged.line.run or self._run
        facts = replace(staged.facts, parent=None if tip is None else tip[0], run=run.uid, config=run.chosen)
        content = Content(staged.layout.skeleton, staged.values, staged.layout.tensors, ())
        return Work(facts, () if tip is None else (tip[1],), content, staged.layout.chunk_lengths, job.slots, tip)
