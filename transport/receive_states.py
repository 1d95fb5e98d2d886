"""A clone into the memory tier of a repository: its chunks come into slots of the arena, unless
they are here already."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from datastates.config import BackPressure
from datastates.engine.commit import IncomingState
from datastates.errors import (
    Closed,
    Conflict,
    Corrupt,
    DatastatesError,
    InvalidInput,
    NotFound,
    OverBudget,
    Unavailable,
)
from datastates.lineage.states import NewState, Ref, RefKind, State
from datastates.lineage.write import clones, refs
from datastates.maintenance.core import Core
from datastates.state.digest import chunk_digest, first_chunks
from datastates.state.manifest import CHUNK_BYTES, Chunk
from datastates.storage.arena import Arena
from datastates.storage.copying import are_equal
from datastates.storage.memory import Held, MemoryTier
from datastates.storage.tier import Placed, Reader, Tier
from datastates.system.at_exit import end_later
from datastates.system.interrupts import undisturbed

from .contract import Sink
from .untrusted import CheckedManifest

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_Key = tuple[bytes, int]
"""A chunk's digest and length."""


class StateSink(Sink):
    """Receives a state into ``memory``. Make, adopt and abandon it on any thread but the loop's,
    because these may wait.

    A sink that is lost, for example to an interrupt, gives everything back once nothing (such as a
    data plane) refers to it any more.

    ``acquire`` returns slots of ``arena``; it waits for memory as a capture does, or raises
    OverBudget. ``party`` is the sender of the state. Chunks in memory that are ours, or came from
    the same party, are used in place, and stay here. ``relatives`` are uids of states that are ours
    or the party's. Their chunks on ``lender`` are read from there. Each other distinct chunk is
    requested once.

    :raises OverBudget: the state can never fit.
    """

    def __init__(
        self,
        checked: CheckedManifest,
        memory: MemoryTier,
        arena: Arena,
        acquire: Callable[[Sequence[int]], Sequence[int] | None],
        *,
        party: str = "a peer",
        lender: Tier | None = None,
        relatives: Iterable[str] = (),
    ) -> None:
        self.manifest = manifest = checked.manifest
        self.parts = checked.parts
        self.lengths = checked.lengths
        self._memory, self._arena = memory, arena
        first: dict[_Key, int] = {}
        for index, chunk in enumerate(manifest.content.chunks):
            first.setdefault(_key(chunk), index)
        size = sum(length for _, length in first)
        if size > arena.capacity:
            raise OverBudget(
                f"state {manifest.origin.uid} takes {size} bytes, the memory budget has"
                f" {arena.capacity}: open the repository with memory_bytes of at least"
                f" {-(-size // CHUNK_BYTES) * CHUNK_BYTES}"
            )
        self._lock = threading.Lock()
        self._is_ended = False
        self.party = party
        self._held: dict[_Key, Held] = {}
        self._slots: dict[_Key, int] = {}
        weakref.finalize(
            self,
            end_later,
            partial(_give_back, memory, arena, self._held, self._slots),
            os.getpid(),
        ).atexit = False
        try:
            with undisturbed():
                self._held.update(memory.hold(first, party))
                self._slots.update(
                    self._acquire([key for key in first if key not in self._held], acquire)
                )
        except BaseException:
            self.abandon()
            raise
        self._missing = {first[key]: None for key in self._slots}
        self._arriving: set[int] = set()
        self._pending = set(self._slots)
        if lender is not None and self._slots:
            try:
                self._read(lender, dict.fromkeys(relatives), first)
            except BaseException:
                self.abandon()
                raise
        self.bytes_missing = sum(self.lengths[index] for index in self._missing)
        """The bytes that have to move in all; the rest was here."""

    def missing(self) -> Sequence[int]:
        """One chunk for each digest that is neither here nor on its way."""
        with self._lock:
            return list(self._missing)

    def buffers(self, index: int) -> Sequence[memoryview]:
        with self._lock:
            if self._is_ended:
                raise Closed("the clone has ended: begin another one")
            del self._missing[index]
            self._arriving.add(index)
        return [self._slot(index)]

    def accept(self, index: int) -> bool:
        is_right = chunk_digest(self._slot(index)) == self.manifest.content.chunks[index].digest
        self._settle(index, is_accepted=is_right)
        return is_right

    def forget(self, index: int) -> None:
        self._settle(index, is_accepted=False)

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        """The slot of an accepted chunk; None before, and after ``adopt`` (open the state then)
        or ``abandon``."""
        key = _key(self.manifest.content.chunks[index])
        with self._lock:
            return (
                None if self._is_ended or key in self._pending else [self._slot(index).toreadonly()]
            )

    def adopt(self) -> Placed:
        """Make the state, whose chunks are all here, one of the memory tier's. ``abandon`` gives
        back what the tier did not take.

        :raises Unavailable: chunks are missing.
        :raises Conflict: a state of the same uid and another content is there.
        """
        with self._lock:
            if self._is_ended:
                raise Closed("the clone has ended: begin another one")
            if self._pending:
                raise Unavailable(
                    f"{len(self._pending)} chunks of state {self.manifest.origin.uid} are still"
                    " missing: resume the clone"
                )
            placed = self._memory.settle(
                self.manifest, self._held, self._slots, self.party, self.parts
            )
            self._is_ended = True
        return placed

    def abandon(self) -> None:
        """Release everything; no buffer is written any more.

        Idempotent; does nothing after ``adopt``."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
        _give_back(self._memory, self._arena, self._held, self._slots)

    def _acquire(
        self, keys: Sequence[_Key], acquire: Callable[[Sequence[int]], Sequence[int] | None]
    ) -> dict[_Key, int]:
        lengths = [length for _, length in keys]
        slots = acquire(lengths) if keys else []
        if slots is None:
            raise OverBudget(
                f"state {self.manifest.origin.uid} needs {sum(lengths)} bytes of memory, which are"
                " not free"
            )
        return dict(zip(keys, slots, strict=True))

    def _read(self, lender: Tier, relatives: Iterable[str], first: dict[_Key, int]) -> None:
        """Copy chunks that relatives have on disk; chunks that cannot be read are requested."""
        for uid in relatives:
            if not self._missing:
                return
            with suppress(NotFound, Corrupt, Unavailable):
                for rank in count():
                    with lender.open_part(uid, rank) as reader:
                        self._read_from(reader, first)
                        if rank + 1 == reader.manifest.origin.world_size:
                            break

    def _read_from(self, reader: Reader, first: dict[_Key, int]) -> None:
        for place, chunk in enumerate(reader.manifest.content.chunks):
            index = first.get(_key(chunk))
            if index is None or index not in self._missing:
                continue
            try:
                found = reader.chunk(place)
            except DatastatesError:
                continue
            np.copyto(np.frombuffer(self._slot(index), np.uint8), np.frombuffer(found, np.uint8))
            del self._missing[index]
            self._pending.discard(_key(chunk))

    def _slot(self, index: int) -> memoryview:
        chunk = self.manifest.content.chunks[index]
        slot = self._slots.get(_key(chunk))
        return self._arena.memory(
            self._held[_key(chunk)].slot if slot is None else slot, chunk.length
        )

    def _settle(self, index: int, *, is_accepted: bool) -> None:
        with self._lock:
            self._arriving.remove(index)
            if is_accepted:
                self._pending.discard(_key(self.manifest.content.chunks[index]))
            else:
                self._missing[index] = None


def _give_back(
    memory: MemoryTier, arena: Arena, held: dict[_Key, Held], slots: dict[_Key, int]
) -> None:
    """Give back chunks and slots once: what was given back, or adopted, is in neither any more."""
    with undisturbed():
        memory.release(held.values())
        held.clear()
        arena.release(slots.values())
        slots.clear()


def _key(chunk: Chunk) -> _Key:
    return chunk.digest, chunk.length


# Recording a state from another process in a repository: first in its memory, then in its lineage.


_logger = logging.getLogger(__name__)


def make_room(
    core: Core,
    checked: CheckedManifest,
    *,
    party: str,
    relatives: Iterable[str] = (),
    acquire: Callable[[Sequence[int]], Sequence[int] | None] | None = None,
) -> StateSink:
    """A sink for the chunks of a state in the repository's arena. May wait for memory, as a capture
    does, unless ``acquire`` gets it.

    ``party`` is the sender, as ``land`` will record it. Parents and ``relatives`` that are on disk
    lend the state their chunks, if they were captured here or came from the same party.

    :raises OverBudget: the state can never fit.
    """
    with core.database.read() as session:
        sound = clones.trusted(
            session, dict.fromkeys((*checked.manifest.origin.parents, *relatives)), party=party
        )
    engaged = core.engage()

    def wait(lengths: Sequence[int]) -> Sequence[int] | None:
        return engaged.runner.slots.acquire(lengths, BackPressure.WAIT)

    return StateSink(
        checked,
        engaged.memory,
        engaged.arena,
        acquire or wait,
        party=party,
        lender=core.tiers.durable,
        relatives=sound,
    )


def abandon(core: Core, sink: StateSink) -> None:
    """Free the memory of a clone that ended without being recorded."""
    with undisturbed():
        sink.abandon()
        if core.running is not None:
            core.running.slots.release([])  # wakes captures that wait for memory


def missing_ancestry(core: Core, states: Sequence[State]) -> list[State]:
    """The states that the repository does not have."""
    with core.database.read() as session:
        here = clones.known(session, (state.uid for state in states))
    return [state for state in states if state.uid not in here]


def lacks_parents(core: Core, states: Sequence[State]) -> bool:
    """Whether some parent of these states is neither among them nor in the repository."""
    wanted = {parent for state in states for parent in state.parents}.difference(
        state.uid for state in states
    )
    with core.database.read() as session:
        return len(clones.known(session, wanted)) < len(wanted)


def land(
    core: Core,
    sink: StateSink,
    state: State,
    *,
    ancestry: Sequence[State],
    tags: Sequence[Ref],
    came: clones.Provenance,
) -> State:
    """Make a state whose chunks are all here one of the repository's, with the ancestry and tags
    that came with it.

    An interrupt is raised once the state is in the lineage, in memory and known to the engine.

    :raises Conflict: a state of the same uid and another digest is here.
    """
    engaged = core.engage()
    runner, run = engaged.runner, engaged.run.uid

    def record(session: Session, new: NewState) -> State:
        clones.import_ancestry(session, ancestry, came.runs)
        parts = [
            (part.digest, sum(chunk.length for chunk in part.content.chunks)) for part in sink.parts
        ]
        bytes_new = new.bytes_new
        return clones.arrive(
            session,
            state,
            run=run,
            tier=new.tier,
            node=core.node,
            bytes_new=bytes_new,
            came=came,
            parts=parts,
        )

    with undisturbed():
        _check_on_disk(core, sink)
        now = runner.commits.adopt_incoming(
            IncomingState(state.facts, state.digest, state.bytes_total, sink.adopt), record
        )
    make_tags(core, tags)
    runner.refs_changed()
    return now


def _check_on_disk(core: Core, sink: StateSink) -> None:
    """Raise unless the state on disk is the same, because memory is read before disk. A state that
    was damaged on disk may come again.

    :raises Conflict: it is not the same.
    """
    uid, parts = sink.manifest.origin.uid, sink.parts or (sink.manifest,)
    for rank, first in enumerate(first_chunks(parts)[:-1]):
        with (
            suppress(Corrupt, NotFound, Unavailable),
            core.tiers.durable.open_part(uid, rank) as reader,
        ):
            if reader.manifest.digest != parts[rank].digest or not all(
                are_equal(reader.chunk(index), piece)
                for index in range(len(reader.manifest.content.chunks))
                for piece in sink.pieces(first + index) or ()
            ):
                raise Conflict(
                    f"another state of the uid {uid} is on disk here, of other bytes: one of them"
                    " is forged; drop the one that is"
                )


def make_tags(core: Core, tags: Sequence[Ref]) -> None:
    """Take over tags.

    Tags whose name is taken, or whose state is not here, are left out with a warning. Branches
    are not taken over."""
    left: list[str] = []
    for tag in tags:
        if tag.kind is not RefKind.TAG:
            continue
        try:
            with core.database.write(durable=True) as session:
                refs.tag(session, tag.name, tag.state, message=tag.message)
        except (Conflict, InvalidInput, NotFound) as exc:
            left.append(f"{tag.name[:255]!r} ({exc})")
    if left:
        _logger.warning(
            "of %d tags %d were not taken over: %s%s",
            len(tags),
            len(left),
            "; ".join(left[:3]),
            "; …" if left[3:] else "",
        )
