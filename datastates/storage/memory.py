"""The memory tier: states held as slots of the arena, each distinct chunk once, however many states
have it.

Equal digests mean equal chunks only within one *party*. A party is this process (``OURS``), or one
source of clones. xxh3 finds damaged bytes, but an attacker can make two chunks with one digest.
Therefore the bytes of chunks of two parties are compared before they share a slot. An arriving
state may use our own chunks without a comparison: then it gets our bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from datastates.errors import Closed, Conflict, Corrupt, InvalidInput, NotFound, OverBudget
from datastates.lineage.states import Status
from datastates.state.digest import chunk_digest, first_chunks
from datastates.state.manifest import CHUNK_BYTES, Manifest
from datastates.system.interrupts import Mutex, checkpoint, undisturbed

from .arena import Arena
from .copying import Piece, are_equal, copy, on_threads
from .tier import Payload, Placed, Reader, Tier

if TYPE_CHECKING:
    import torch

_Key = tuple[bytes, int]
"""A chunk's digest and length."""

_K = TypeVar("_K")
_V = TypeVar("_V")

_ENTRY_BYTES = 256
"""The bytes that each chunk, metric and attribute takes as Python objects, here and in records
for the lineage (measured)."""


STATE_BYTES = 5 << 10
"""About how many bytes a state takes besides its slots, at least (measured)."""

OURS = ""
"""The party of states that were captured or made in this process."""


@dataclass(slots=True, eq=False)
class Held:
    """A slot that holds a chunk, and how many chunks of states use it.

    ``parties`` are those for which it is the chunk of this digest."""

    slot: int
    key: tuple[bytes, int]
    parties: set[str]
    uses: int = 1


@dataclass(slots=True)
class _State:
    """A state that is held. ``readers`` keep its slots when it is removed. ``yielding`` are readers
    that can release them on request. If a state came with all its ``parts``, one for each rank,
    ``manifest`` and ``chunks`` describe all parts together.
    """

    manifest: Manifest
    chunks: tuple[Held, ...]
    weight: int
    parts: tuple[Manifest, ...] = ()
    readers: int = 0
    yielding: dict[_MemoryReader, Callable[[], None]] = field(default_factory=dict)
    is_removed: bool = False

    @property
    def used_at(self) -> float:
        """The time at which it was last read."""
        return max((reader.used_at for reader in self.yielding), default=0.0)


@dataclass(frozen=True, slots=True)
class StateInSlots:
    """A state in memory, for a process that holds the memory too: the slot of each chunk in order,
    and the parties of slots that are not only ours. ``parts``: see ``MemoryTier.settle``."""

    manifest: Manifest
    slots: tuple[int, ...]
    parties: dict[int, tuple[str, ...]]
    parts: tuple[Manifest, ...] = ()


class MemoryListener(Protocol):
    """Is told what memory holds. Every call runs under the lock of the tier, and raises nothing."""

    def holds(self, state: StateInSlots) -> None:
        """Memory has taken a state, or has another manifest of it."""

    def lets_go(self, uid: str) -> None:
        """A state leaves. Its slots may be used again once this returns."""


class MemoryTier(Tier):
    """States within the budget of an arena, content-addressed: equal chunks share a slot.

    ``on_released`` is called when the last reader of a removed state has closed, on its thread."""

    name = "memory"
    gives = Status.CAPTURED

    def __init__(self, arena: Arena, node: str = "") -> None:
        self._arena, self.node = arena, node
        self._states: dict[str, _State] = {}
        self._lingering: dict[int, _State] = {}  # removed, but still kept by readers
        self.on_released: Callable[[], None] = lambda: None
        self._listener: MemoryListener | None = None
        self._chunks: dict[_Key, list[Held]] = {}
        self._shared = Counter[int]()
        self._beside = 0
        self._is_closed = False
        self._lock = Mutex()

    @property
    def capacity(self) -> int:
        """The bytes that fit in all."""
        return self._arena.capacity

    def set_listener(
        self, listener: MemoryListener, begin: Callable[[list[StateInSlots]], None]
    ) -> None:
        """Tell a listener of every state from now on. ``begin`` is called with those that are here
        already, under the lock."""
        with self._lock:
            begin([_in_slots(state) for state in self._states.values()])
            self._listener = listener

    def take_over(self, states: Sequence[StateInSlots]) -> None:
        """Take in states that are in the arena already, because another process left them there.

        The arena and this tier must be empty.

        :raises InvalidInput: they do not fit the arena.
        """
        slots: dict[int, Held] = {}
        with self._lock:
            self._check_open()
            for state in states:
                for key, slot in zip(_keys(state.manifest), state.slots, strict=True):
                    held = slots.setdefault(slot, Held(slot, key, {OURS}, 0))
                    if held.key != key:
                        raise InvalidInput(f"slot {slot} has two chunks")
                    held.uses += 1
                    if slot in state.parties:
                        held.parties = set(state.parties[slot])
            self._arena.occupy({slot: held.key[1] for slot, held in slots.items()})
            for held in slots.values():
                self._chunks.setdefault(held.key, []).append(held)
            for state in states:
                chunks = tuple(slots[slot] for slot in state.slots)
                self._enter(state.manifest, chunks, (), state.parts)

    def adopt(self, manifest: Manifest, slots: list[int]) -> Placed:
        """Take over slots that were acquired and filled here, one for each chunk in order; the
        caller must not write to them again.

        The list is empty afterwards, so that a caller that gives back its contents gives back
        nothing of the tier's. Slots whose chunk is held already, by another state or earlier in
        this one, go back to the arena at once. If the state is here already, all go back.

        :raises InvalidInput: there is not one slot for each chunk; the slots then stay the
            caller's.
        """
        keys = _keys(manifest)
        if len(slots) != len(keys):
            raise InvalidInput(
                f"state {manifest.origin.uid} has {len(keys)} chunks, but came with {len(slots)}"
                " slots"
            )
        with self._lock:
            self._check_open()
            placed = self._find(manifest)
            if placed is None:
                with self._wholly(manifest):
                    chunks = tuple(
                        self._place(key, slot, OURS) for key, slot in zip(keys, slots, strict=True)
                    )
                    placed = self._enter(manifest, chunks, slots)
                    taken = {chunk.slot for chunk in chunks}
                    # the last step: after it nothing is undone
                    slots[:] = [slot for slot in slots if slot not in taken]
            self._arena.take_back(slots)
            return placed

    def finish(self, manifest: Manifest) -> None:
        """Replace the manifest of a part that is held, now that the state's place in the lineage is
        known; nothing if the part has left.

        A reader that is open already keeps the old manifest.
        """
        with self._lock:
            state = self._states.get(manifest.origin.uid)
            if state is not None:
                weight = _weight(manifest)
                self._beside += weight - state.weight
                state.manifest, state.weight = manifest, weight
                self._tell(state)

    def hold(
        self, keys: Iterable[tuple[bytes, int]], party: str = OURS
    ) -> dict[tuple[bytes, int], Held]:
        """Hold the chunks, by digest and length, that are ours or the party's. They stay until
        ``settle`` or ``release``."""
        with self._lock:
            self._check_open()
            found = {key: self._known(key, party) for key in dict.fromkeys(keys)}
            held = {key: chunk for key, chunk in found.items() if chunk is not None}
            for chunk in held.values():
                chunk.uses += 1
            return held

    def release(self, held: Iterable[Held]) -> None:
        with self._lock:
            self._unuse(held)

    def settle(
        self,
        manifest: Manifest,
        held: dict[tuple[bytes, int], Held],
        filled: dict[tuple[bytes, int], int],
        party: str = OURS,
        parts: Sequence[Manifest] = (),
    ) -> Placed:
        """Take over a state whose distinct chunks are ``held``, or in slots that were acquired and
        ``filled``, which the caller must not write to again.

        Both dicts are empty afterwards, like the list of ``adopt``. ``party`` is the source of the
        filled chunks. A filled chunk gives its slot back if another party brought the same bytes.
        ``parts`` are the manifests, by rank, of a state of several ranks whose parts all come at
        once. ``manifest`` describes all parts together, and each part can be opened alone.

        :raises InvalidInput: a chunk is neither held nor filled; all of them then stay the
            caller's.
        :raises Conflict: a state of this uid with other bytes is here; all chunks then stay the
            caller's, too.
        """
        keys = _keys(manifest)
        left = set(keys).difference(held, filled)
        if left:
            raise InvalidInput(
                f"state {manifest.origin.uid} came without {len(left)} of its {len(set(keys))}"
                " chunks"
            )
        with self._lock:
            self._check_open()
            with self._wholly(manifest, held, filled):
                placed = self._settle(manifest, keys, held, filled, party, tuple(parts))
            self._arena.take_back(filled)
            return placed

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Copy a state of ours into the arena; only chunks that no state of ours has take memory.
        ``base`` is ignored.

        :raises OverBudget: it does not fit.
        """
        manifest, keys = payload.manifest, _keys(payload.manifest)
        payload.check()
        with self._lock:
            self._check_open()
            placed = self._find(manifest)
            if placed is not None:
                return placed
        # held while the other chunks are copied without the lock
        held, filled = (
            self.hold(keys),
            dict[_Key, int](),
        )
        try:
            views = {
                key: view for key, view in zip(keys, payload.chunks, strict=True) if key not in held
            }
            lengths = [length for _, length in views]
            filled.update(zip(views, self._acquire(manifest, lengths), strict=True))
            for key, slot in filled.items():
                np.copyto(
                    np.frombuffer(self._arena.memory(slot, key[1]), np.uint8),
                    np.frombuffer(views[key], np.uint8),
                )
            return self.settle(manifest, held, filled)
        except BaseException:
            self.release(held.values())
            self._arena.take_back(filled)
            raise

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Open a state; its slots stay while the reader is open."""
        return self._open(uid, None, verify=verify)

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """``open`` for one rank's part of a state that came with all its parts, or of which only
        this part is here."""
        return self._open(uid, rank, verify=verify)

    def ranks(self, uid: str) -> Sequence[int]:
        """The ranks whose parts of a state are held; for a state of one part that is rank 0.

        :raises NotFound: it is not here.
        """
        with self._lock:
            return _ranks(self._find_held(uid))

    def _open(self, uid: str, rank: int | None, *, verify: bool) -> Reader:
        with self._lock:
            self._check_open()
            state = self._find_held(uid)
            if rank is not None and rank not in _ranks(state):
                raise NotFound(
                    f"rank {rank} of state {uid} is not in memory, rank"
                    f" {', '.join(map(str, _ranks(state)))} is"
                )
            manifest, chunks = state.manifest, state.chunks
            if rank is not None and state.parts:
                first = first_chunks(state.parts)
                manifest, chunks = state.parts[rank], chunks[first[rank] : first[rank + 1]]
            state.readers += 1
            slots = [chunk.slot for chunk in chunks]
        return _MemoryReader(self, self._arena, state, manifest, slots, verify=verify)

    def has(self, uid: str) -> bool:
        with self._lock:
            return uid in self._states

    def uids(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._states))

    def remove(self, uid: str) -> int:
        """Drop a state; returns the bytes freed.

        Slots that no other state needs go back to the arena, now or when its last reader closes."""
        with self._lock:
            state = self._states.pop(uid, None)
            return 0 if state is None else self._drop(state)

    def bytes_of(self, uids: Iterable[str]) -> int:
        """The bytes of the chunks of all these states together, including chunks that others
        share."""
        with self._lock:
            return _bytes_of(
                {
                    chunk
                    for uid in uids
                    if (state := self._states.get(uid)) is not None
                    for chunk in state.chunks
                }
            )

    def recall(self, size: int) -> bool:
        """Ask readers of removed states to close, until that will free ``size`` bytes. The least
        recently used readers come first. Returns whether there was any."""
        told: list[Callable[[], None]] = []
        with self._lock:
            uses = Counter[Held]()
            for state in sorted(self._lingering.values(), key=lambda each: each.used_at):
                if len(state.yielding) < state.readers:
                    continue
                told += state.yielding.values()
                uses.update(state.chunks)
                if (
                    _bytes_of(chunk for chunk, number in uses.items() if chunk.uses == number)
                    >= size
                ):
                    break
        for tell in told:
            tell()
        return bool(told)

    @property
    def bytes_held(self) -> int:
        """The payload bytes held, counting each distinct chunk once."""
        with self._lock:
            return sum(length * len(held) for (_, length), held in self._chunks.items())

    @property
    def slots_held(self) -> int:
        """The number of slots of the arena that states hold."""
        with self._lock:
            return sum(map(len, self._chunks.values()))

    @property
    def bytes_beside(self) -> int:
        """About how many bytes states take in addition to their slots: plain values and small
        arrays, manifests, and records of them."""
        return self._beside

    def close(self) -> None:
        """Drop every state; slots that readers have open are released when these close.

        Idempotent."""
        with self._lock:
            self._is_closed = True
            states, self._states = self._states, {}
            for state in states.values():
                self._drop(state)

    def _close_reader(self, reader: _MemoryReader, state: _State) -> None:
        with self._lock:
            state.readers -= 1
            state.yielding.pop(reader, None)
            is_last = state.is_removed and not state.readers
            if is_last:
                self._lingering.pop(id(state), None)
                self._unuse(state.chunks)
        if is_last:
            self.on_released()

    # All below runs under the lock

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the memory tier is closed: open the repository again")

    def _find_held(self, uid: str) -> _State:
        state = self._states.get(uid)
        if state is None:
            raise NotFound(f"state {uid} is not in memory, {len(self._states)} others are")
        return state

    def _find(self, manifest: Manifest) -> Placed | None:
        state = self._states.get(manifest.origin.uid)
        return None if state is None else Placed(state.manifest, 0)

    def _acquire(self, manifest: Manifest, lengths: Sequence[int]) -> list[int]:
        slots = self._arena.acquire(lengths)
        if slots is None:
            raise OverBudget(
                f"state {manifest.origin.uid} needs {sum(lengths)} bytes of memory,"
                f" {self._arena.available} are available: remove states, or give the repository"
                " more memory_bytes"
            )
        return slots

    @contextmanager
    def _wholly(self, manifest: Manifest, *given: dict[_Key, Any]) -> Iterator[None]:
        """A block that takes a state in wholly or, on an error, restores what is known of states
        and chunks, and what was ``given``.

        No slot may go back to the arena inside the block, since that cannot be undone.
        """
        uid, keys, parts = (
            manifest.origin.uid,
            _keys(manifest),
            [id(part) for part in _shared_parts(manifest)],
        )
        state, beside, shared = (
            self._states.get(uid),
            self._beside,
            {part: self._shared[part] for part in parts},
        )
        chunks = {key: {chunk: chunk.uses for chunk in self._chunks.get(key, ())} for key in keys}
        copies = [each.copy() for each in given]
        try:
            yield
        except BaseException:
            self._beside = beside
            if state is None and self._listener is not None:
                self._listener.lets_go(uid)
            _put_back(self._states, {uid: state})
            _put_back(self._shared, {part: count or None for part, count in shared.items()})
            _put_back(self._chunks, {key: list(before) or None for key, before in chunks.items()})
            for chunk, uses in chain.from_iterable(before.items() for before in chunks.values()):
                chunk.uses = uses  # its parties need no undoing: they remain true
            for each, copy in zip(given, copies, strict=True):
                each.clear()
                each.update(copy)
            raise

    def _settle(
        self,
        manifest: Manifest,
        keys: tuple[_Key, ...],
        held: dict[_Key, Held],
        filled: dict[_Key, int],
        party: str,
        parts: tuple[Manifest, ...],
    ) -> Placed:
        """Enter a state whose chunks are ``held`` already or were ``filled``; others may have
        brought the same chunks meanwhile.

        The caller gives the slots that are left in ``filled`` back to the arena.
        """
        here = self._states.get(manifest.origin.uid)
        if here is not None:
            slots = {**{key: chunk.slot for key, chunk in held.items()}, **filled}
            if parts and not here.parts:
                rank, uid = here.manifest.origin.rank, manifest.origin.uid
                raise Conflict(
                    f"this process holds the part of rank {rank} of state {uid}, which it captured:"
                    " restore the state, or clone it into live objects; another process can take"
                    " in all parts"
                )
            self._check_same(here, manifest, slots)
            filled.update((chunk.key, chunk.slot) for chunk in self._unused(held.values()))
            held.clear()
            return Placed(here.manifest, 0)
        distinct = {**held, **{key: self._place(key, slot, party) for key, slot in filled.items()}}
        for key, count in Counter(keys).items():
            distinct[key].uses += count - 1
        placed = self._enter(manifest, tuple(distinct[key] for key in keys), filled.values(), parts)
        for key in [key for key, slot in filled.items() if distinct[key].slot == slot]:
            del filled[key]
        held.clear()
        return placed

    def _check_same(self, here: _State, manifest: Manifest, slots: Mapping[_Key, int]) -> None:
        """Compare the bytes of two states whose uid and digest are equal, since the earlier one
        may be forged."""
        is_same = here.manifest.digest == manifest.digest and all(
            chunk.key in slots and self._are_equal(chunk.slot, slots[chunk.key], chunk.key[1])
            for chunk in here.chunks
        )
        if not is_same:
            raise Conflict(
                f"another state of the uid {manifest.origin.uid} is in memory, of digest"
                f" {here.manifest.digest[:16]} and other bytes: one of them is forged; drop the one"
                " that is not to be trusted"
            )

    def _enter(
        self,
        manifest: Manifest,
        chunks: tuple[Held, ...],
        slots: Iterable[int],
        parts: tuple[Manifest, ...] = (),
    ) -> Placed:
        """Register a state; ``slots`` were brought for it, and it keeps those with its chunks."""
        kept = {chunk.slot: chunk.key[1] for chunk in chunks}
        bytes_new = sum(kept[slot] for slot in kept.keys() & slots)
        manifest = msgspec.structs.replace(manifest, packs=(), refs=(), bytes_new=0)
        weight = _weight(manifest) + sum(
            _weight(part) + sum(map(_length, _shared_parts(part))) for part in parts
        )
        own = tuple(msgspec.structs.replace(part, packs=(), refs=(), bytes_new=0) for part in parts)
        self._states[manifest.origin.uid] = state = _State(manifest, chunks, weight, own)
        self._tell(state)
        self._beside += weight
        for part in _shared_parts(manifest):
            self._shared[id(part)] += 1
            if self._shared[id(part)] == 1:
                self._beside += _length(part)
        return Placed(manifest, bytes_new)

    def _known(self, key: _Key, party: str) -> Held | None:
        """A chunk of this digest that is the party's, or ours."""
        held = self._chunks.get(key, ())
        return next(
            (chunk for chunk in held if party in chunk.parties),
            next((chunk for chunk in held if OURS in chunk.parties), None),
        )

    def _place(self, key: _Key, slot: int, party: str) -> Held:
        """Count one more use of a chunk that the party has in ``slot``; the slot becomes its
        place if no equal chunk is here."""
        held = self._chunks.setdefault(key, [])
        for chunk in held:
            if party in chunk.parties or self._are_equal(chunk.slot, slot, key[1]):
                chunk.parties.add(party)
                chunk.uses += 1
                return chunk
        held.append(Held(slot, key, {party}))
        return held[-1]

    def _are_equal(self, one: int, other: int, length: int) -> bool:
        return one == other or are_equal(
            self._arena.memory(one, length), self._arena.memory(other, length)
        )

    def _tell(self, state: _State) -> None:
        if self._listener is not None:
            self._listener.holds(_in_slots(state))

    def _drop(self, state: _State) -> int:
        state.is_removed = True
        if self._listener is not None:
            self._listener.lets_go(state.manifest.origin.uid)
        self._beside -= state.weight
        for part in _shared_parts(state.manifest):
            self._shared[id(part)] -= 1
            if not self._shared[id(part)]:
                del self._shared[id(part)]
                self._beside -= _length(part)
        if state.readers:
            self._lingering[id(state)] = state
            return 0
        return self._unuse(state.chunks)

    def _unuse(self, chunks: Iterable[Held]) -> int:
        """Count the uses down, and give back the slots of chunks that nothing uses any more;
        returns the bytes freed."""
        unused = self._unused(chunks)
        self._arena.release(chunk.slot for chunk in unused)
        return _bytes_of(unused)

    def _unused(self, chunks: Iterable[Held]) -> list[Held]:
        """Count the uses down; returns the chunks that nothing uses any more, which are
        forgotten."""
        unused = []
        for chunk in chunks:
            chunk.uses -= 1
            if not chunk.uses:
                self._chunks[chunk.key].remove(chunk)
                if not self._chunks[chunk.key]:
                    del self._chunks[chunk.key]
                unused.append(chunk)
        return unused


class _MemoryReader(Reader):
    """A state in memory, opened. Its views are the slots themselves, read-only."""

    def __init__(
        self,
        tier: MemoryTier,
        arena: Arena,
        state: _State,
        manifest: Manifest,
        slots: list[int],
        *,
        verify: bool,
    ) -> None:
        self.manifest = manifest
        self._tier, self._arena, self._state, self._slots = tier, arena, state, slots
        self._unverified = set(range(len(slots))) if verify else set[int]()
        self._lock = Mutex()
        self.used_at = time.monotonic()

    def when_wanted(self, tell: Callable[[], None]) -> None:
        with self._tier._lock:
            self._state.yielding[self] = tell

    def chunk(self, index: int) -> memoryview:
        self._check_open()
        self.used_at = time.monotonic()
        chunk, slot = self.manifest.content.chunks[index], self._slots[index]
        view = self._arena.memory(slot, chunk.length).toreadonly()
        if index in self._unverified:
            if chunk_digest(view) != chunk.digest:
                raise Corrupt(
                    f"state {self.manifest.origin.uid}: chunk {index} fails its digest in memory"
                    f" (slot {slot}): restore another state"
                )
            self._unverified.discard(index)
        return view

    def span(self, start: int, length: int) -> memoryview | None:
        """A view if the slots of its chunks follow each other, and may be copied to a device in
        one go."""
        self._check_open()
        touched = self.chunks_of(start, length)
        slots = self._slots[touched.start : touched.stop]
        if not slots:
            return memoryview(b"")
        if slots != [
            slots[0] + number * CHUNK_BYTES for number in range(len(slots))
        ] or not self._arena.is_joint(slots[0], slots[-1]):
            return None
        for index in touched:
            self.chunk(index)
        offset = start % CHUNK_BYTES
        return self._arena.memory(slots[0], offset + length)[offset:].toreadonly()

    def check(self, indices: Sequence[int]) -> None:
        self._check_open()
        on_threads(
            [index for index in indices if index in self._unverified],
            self.chunk,
            between=checkpoint,
        )

    def read_pieces(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        """See ``SupportsParallelRead``; nothing is checked twice, since chunks in our own memory do
        not change."""
        self.check(list(pieces))

        def copy_pieces(index: int) -> None:
            data = self.chunk(index)
            for piece in pieces[index]:
                copy(piece.memory, data[piece.offset :][: piece.memory.nbytes])

        on_threads(list(pieces), copy_pieces)

    def pinned(self, chunks: Sequence[int]) -> list[torch.Tensor] | None:
        """See ``Reader``: their slots, once the arena is registered with a device."""
        if not self._arena.is_pinned:
            return None
        self._arena.register()  # states that came from elsewhere may be in newer memory
        self.check(chunks)
        runs: list[tuple[int, int]] = []
        for index in chunks:
            slot, length = self._slots[index], self.manifest.content.chunks[index].length
            begin, end = runs[-1] if runs else (slot, -1)
            is_whole = not (end - begin) % CHUNK_BYTES
            if end == slot and is_whole and self._arena.is_joint(begin, slot):
                runs[-1] = begin, slot + length
            else:
                runs.append((slot, slot + length))
        return [self._arena.tensor(begin, end - begin) for begin, end in runs]

    def close(self) -> None:
        with undisturbed():
            with self._lock:
                if self._is_closed:
                    return
                self._is_closed = True
            self._tier._close_reader(self, self._state)


def _in_slots(state: _State) -> StateInSlots:
    parties = {
        chunk.slot: tuple(chunk.parties) for chunk in state.chunks if chunk.parties != {OURS}
    }
    slots = tuple(chunk.slot for chunk in state.chunks)
    return StateInSlots(state.manifest, slots, parties, state.parts)


def _bytes_of(chunks: Iterable[Held]) -> int:
    return sum(chunk.key[1] for chunk in chunks)


def _ranks(state: _State) -> Sequence[int]:
    return range(len(state.parts)) if state.parts else (state.manifest.origin.rank,)


def _keys(manifest: Manifest) -> tuple[_Key, ...]:
    return tuple((chunk.digest, chunk.length) for chunk in manifest.content.chunks)


def _put_back(known: dict[_K, _V], before: Mapping[_K, _V | None]) -> None:
    """Restore what was known of these keys before; None means that nothing was."""
    for key, value in before.items():
        if value is None:
            known.pop(key, None)
        else:
            known[key] = value


def _weight(manifest: Manifest) -> int:
    """The bytes of a state in addition to its slots, without what it shares with others of its
    layout."""
    origin, content = manifest.origin, manifest.content
    said = len(origin.message or "") + sum(
        len(value) for value in origin.attributes.values() if isinstance(value, str)
    )
    entries = len(origin.metrics) + len(origin.attributes) + len(content.chunks)
    return STATE_BYTES + said + entries * _ENTRY_BYTES + _length(content.values)


def _shared_parts(manifest: Manifest) -> tuple[msgspec.Raw, msgspec.Raw]:
    """The parts of a manifest that are the same objects for every state captured by one plan."""
    return manifest.content.skeleton, manifest.content.tensors


def _length(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes
