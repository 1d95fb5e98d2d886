"""The memory tier: states held as slots of the arena, each distinct chunk once, however many states have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from datastates.digest import chunk_digest
from datastates.errors import Closed, Corrupt, InvalidInput, NotFound, OverBudget
from datastates.interrupts import Mutex, undisturbed
from datastates.manifest import CHUNK_BYTES, Manifest

from .arena import Arena
from .tier import Payload, Placed, Reader, Tier

__all__ = ["MemoryTier"]

_Key = tuple[bytes, int]
"""A chunk's digest and length."""

_STATE_BYTES, _CHUNK_ENTRY_BYTES = 4096, 256
"""What a state and each of its chunks take as Python objects here, in the engine, and in what the lineage is told of them (measured)."""


@dataclass(slots=True)
class _Held:
    """A slot that holds a chunk, and how many chunks of states it stands for."""

    slot: int
    uses: int


@dataclass(slots=True)
class _State:
    """A state that is held. ``readers`` keep its slots when it is removed."""

    manifest: Manifest
    keys: tuple[_Key, ...]
    weight: int
    readers: int = 0
    is_removed: bool = False


class MemoryTier(Tier):
    """States within the budget of an arena, content-addressed: equal chunks share a slot."""

    name = "memory"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._states: dict[str, _State] = {}
        self._chunks: dict[_Key, _Held] = {}
        self._shared = Counter[int]()
        self._beside = 0
        self._is_closed = False
        self._lock = Mutex()

    def adopt(self, manifest: Manifest, slots: Sequence[int]) -> Placed:
        """Take over slots that were acquired and filled, one for each chunk in order; they are not to be written again.

        Those whose chunk is held already, by another state or earlier in this one, go back to the arena at once. A state
        that is here already gives all of them back.

        :raises InvalidInput: not one slot for each chunk; the slots then stay the caller's.
        """
        keys = _keys(manifest)
        if len(slots) != len(keys):
            raise InvalidInput(f"state {manifest.origin.uid} has {len(keys)} chunks, but came with {len(slots)} slots")
        with self._lock:
            self._check_open()
            placed = self._find(manifest)
            if placed is not None:
                self._arena.release(slots)
                return placed
            surplus = [slot for key, slot in zip(keys, slots, strict=True) if not self._hold(key, slot)]
            self._arena.release(surplus)
            kept = set(slots).difference(surplus)
            return self._enter(manifest, keys, sum(key[1] for key, slot in zip(keys, slots, strict=True) if slot in kept))

    def hold(self, keys: Iterable[tuple[bytes, int]]) -> dict[tuple[bytes, int], int]:
        """Those of these chunks, by digest and length, that are here, with their slots: they stay until ``settle`` or ``let_go``."""
        with self._lock:
            self._check_open()
            return {key: self._chunks[key].slot for key in dict.fromkeys(keys) if self._use(key)}

    def let_go(self, keys: Iterable[tuple[bytes, int]]) -> None:
        """Undo ``hold``."""
        with self._lock:
            self._unuse(keys)

    def settle(self, manifest: Manifest, held: Iterable[tuple[bytes, int]], filled: Mapping[tuple[bytes, int], int]) -> Placed:
        """Take over a state whose distinct chunks are ``held``, or in slots that were acquired and filled, which are not written again.

        What somebody else brought meanwhile gives its slot back.

        :raises InvalidInput: a chunk is neither held nor filled; all of them then stay the caller's.
        """
        keys, held = _keys(manifest), list(held)
        left = set(keys).difference(held, filled)
        if left:
            raise InvalidInput(f"state {manifest.origin.uid} came without {len(left)} of its {len(set(keys))} chunks")
        with self._lock:
            self._check_open()
            return self._settle(manifest, keys, held, dict(filled))

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Copy a state into the arena; only chunks that no state here has take memory. ``base`` is not needed here.

        :raises OverBudget: it does not fit.
        """
        manifest, keys = payload.manifest, _keys(payload.manifest)
        payload.check()
        with self._lock:
            self._check_open()
            placed = self._find(manifest)
            if placed is not None:
                return placed
            used = [key for key in keys if self._use(key)]  # stays here while the rest is copied without the lock
            views = {key: view for key, view in zip(keys, payload.chunks, strict=True) if key not in self._chunks}
            try:
                slots = self._acquire(manifest, len(views))
            except BaseException:
                self._unuse(used)
                raise
        for slot, (key, view) in zip(slots, views.items(), strict=True):
            np.copyto(np.frombuffer(self._arena.memory(slot, key[1]), np.uint8), np.frombuffer(view, np.uint8))
        with self._lock:
            return self._settle(manifest, keys, used, dict(zip(views, slots, strict=True)))

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Open a state; its slots stay while the reader is open."""
        with self._lock:
            self._check_open()
            state = self._states.get(uid)
            if state is None:
                raise NotFound(f"state {uid} is not in memory, {len(self._states)} others are")
            state.readers += 1
            slots = [self._chunks[key].slot for key in state.keys]
        return _MemoryReader(self, self._arena, state, slots, verify=verify)

    def uids(self) -> Iterator[str]:
        """The uid of every state that is held."""
        with self._lock:
            return iter(list(self._states))

    def remove(self, uid: str) -> int:
        """Drop a state; slots that nothing else needs go back to the arena, or when its last reader closes."""
        with self._lock:
            state = self._states.pop(uid, None)
            return 0 if state is None else self._drop(state)

    def would_free(self, uids: Iterable[str]) -> int:
        """How many slots removing all these states would free at once."""
        with self._lock:
            states = [self._states[uid] for uid in set(uids) if uid in self._states]
            uses = Counter(key for state in states if not state.readers for key in state.keys)
            return sum(self._chunks[key].uses == count for key, count in uses.items())

    def slots_of(self, uids: Iterable[str]) -> int:
        """How many slots all these states have together, those that others share included."""
        with self._lock:
            return len({key for uid in uids if (state := self._states.get(uid)) is not None for key in state.keys})

    @property
    def bytes_held(self) -> int:
        """Payload bytes that are held, each distinct chunk once."""
        with self._lock:
            return sum(length for _, length in self._chunks)

    @property
    def slots_held(self) -> int:
        """Slots of the arena that states hold."""
        with self._lock:
            return len(self._chunks)

    @property
    def bytes_beside(self) -> int:
        """About what states take beside their slots: plain values and small arrays, manifests, what is known of them."""
        return self._beside

    def close(self) -> None:
        """Drop every state; what readers have open goes when they close. Idempotent."""
        with self._lock:
            self._is_closed = True
            states, self._states = self._states, {}
            for state in states.values():
                self._drop(state)

    def _close_reader(self, state: _State) -> None:
        with self._lock:
            state.readers -= 1
            if state.is_removed and not state.readers:
                self._unuse(state.keys)

    # All below runs under the lock

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the memory tier is closed: open the repository again")

    def _find(self, manifest: Manifest) -> Placed | None:
        state = self._states.get(manifest.origin.uid)
        return None if state is None else Placed(state.manifest, 0)

    def _acquire(self, manifest: Manifest, count: int) -> list[int]:
        slots = self._arena.acquire(count)
        if slots is None:
            raise OverBudget(
                f"state {manifest.origin.uid} needs {count * CHUNK_BYTES} bytes of memory, {self._arena.available * CHUNK_BYTES} are "
                "available: remove states, or give the repository more memory_bytes"
            )
        return slots

    def _settle(self, manifest: Manifest, keys: tuple[_Key, ...], used: list[_Key], copied: dict[_Key, int]) -> Placed:
        """Enter a state whose chunks are ``used`` already or were ``copied``; others may have brought the same meanwhile."""
        placed = self._find(manifest)
        if placed is not None:
            self._unuse(used)
            self._arena.release(copied.values())
            return placed
        fresh = {key for key, slot in copied.items() if self._hold(key, slot)}
        self._arena.release(slot for key, slot in copied.items() if key not in fresh)
        for key in (Counter(keys) - Counter(used) - Counter(copied.keys())).elements():
            self._use(key)
        return self._enter(manifest, keys, sum(length for _, length in fresh))

    def _enter(self, manifest: Manifest, keys: tuple[_Key, ...], bytes_new: int) -> Placed:
        manifest = msgspec.structs.replace(manifest, packs=(), refs=())
        weight = _weight(manifest)
        self._states[manifest.origin.uid] = _State(manifest, keys, weight)
        self._beside += weight
        for part in _shared_parts(manifest):
            self._shared[id(part)] += 1
            if self._shared[id(part)] == 1:
                self._beside += _length(part)
        return Placed(manifest, bytes_new)

    def _use(self, key: _Key) -> bool:
        """Count one more use of a chunk; False when it is not held."""
        held = self._chunks.get(key)
        if held is None:
            return False
        held.uses += 1
        return True

    def _hold(self, key: _Key, slot: int) -> bool:
        """Count one more use of a chunk; True when ``slot`` became its place."""
        if self._use(key):
            return False
        self._chunks[key] = _Held(slot, 1)
        return True

    def _drop(self, state: _State) -> int:
        state.is_removed = True
        self._beside -= state.weight
        for part in _shared_parts(state.manifest):
            self._shared[id(part)] -= 1
            if not self._shared[id(part)]:
                del self._shared[id(part)]
                self._beside -= _length(part)
        return 0 if state.readers else self._unuse(state.keys)

    def _unuse(self, keys: Iterable[_Key]) -> int:
        """Count the uses down; the bytes of chunks that nothing uses any more."""
        freed, slots = 0, []
        for key in keys:
            held = self._chunks[key]
            held.uses -= 1
            if not held.uses:
                del self._chunks[key]
                slots.append(held.slot)
                freed += key[1]
        self._arena.release(slots)
        return freed


class _MemoryReader(Reader):
    """A state in memory, opened. Its views are the slots themselves, read-only."""

    def __init__(self, tier: MemoryTier, arena: Arena, state: _State, slots: list[int], *, verify: bool) -> None:
        self.manifest = state.manifest
        self._tier, self._arena, self._state, self._slots = tier, arena, state, slots
        self._unverified = set(range(len(slots))) if verify else set[int]()
        self._is_closed = False
        self._lock = Mutex()

    def chunk(self, index: int) -> memoryview:
        """One chunk, as it lies in its slot."""
        self._check_open()
        chunk, slot = self.manifest.content.chunks[index], self._slots[index]
        view = self._arena.memory(slot, chunk.length).toreadonly()
        if index in self._unverified:
            if chunk_digest(view) != chunk.digest:
                raise Corrupt(
                    f"state {self.manifest.origin.uid}: chunk {index} fails its digest in memory (slot {slot}): restore another state"
                )
            self._unverified.discard(index)
        return view

    def span(self, start: int, length: int) -> memoryview | None:
        """A view where the slots of its chunks follow each other, and may be copied to a device in one go."""
        self._check_open()
        touched = self.chunks_of(start, length)
        slots = self._slots[touched.start : touched.stop]
        if not slots:
            return memoryview(b"")
        if slots != list(range(slots[0], slots[0] + len(slots))) or not self._arena.is_joint(slots[0], slots[-1]):
            return None
        for index in touched:
            self.chunk(index)
        offset = start % CHUNK_BYTES
        return self._arena.memory(slots[0], offset + length)[offset:].toreadonly()

    def close(self) -> None:
        """Let go of the slots."""
        with undisturbed():
            with self._lock:
                if self._is_closed:
                    return
                self._is_closed = True
            self._tier._close_reader(self._state)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"the reader of state {self.manifest.origin.uid} is closed: open the state again")


def _keys(manifest: Manifest) -> tuple[_Key, ...]:
    return tuple((chunk.digest, chunk.length) for chunk in manifest.content.chunks)


def _weight(manifest: Manifest) -> int:
    """Bytes of a state beside its slots, but for what it shares with others of its layout."""
    origin, content = manifest.origin, manifest.content
    said = len(origin.message or "") + sum(len(value) for value in origin.attributes.values() if isinstance(value, str))
    entries = len(origin.metrics) + len(origin.attributes) + len(content.chunks)
    return _STATE_BYTES + said + entries * _CHUNK_ENTRY_BYTES + _length(content.values)


def _shared_parts(manifest: Manifest) -> tuple[msgspec.Raw, msgspec.Raw]:
    """The same objects for every state that was captured by one plan."""
    return manifest.content.skeleton, manifest.content.tensors


def _length(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes
