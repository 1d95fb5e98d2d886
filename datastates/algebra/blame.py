"""Which state last changed each tensor of a state, along first parents.

Manifests say most of it: a tensor whose chunks have the same digests in a state and in its parent is the same, and a tensor that alone
fills a chunk with another digest has changed. Bytes are read only where a changed chunk is shared by several tensors, and of a tensor only
the bytes in that chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from datastates.content.geometry import rebuild
from datastates.content.manifest import CHUNK_BYTES, Manifest, Shard, TensorSpec
from datastates.errors import Unavailable
from datastates.lineage.lookup import id_of
from datastates.lineage.search import walk
from datastates.lineage.states import State
from datastates.objects.report import Selection
from datastates.opening.core import Core
from datastates.store.reading import read_flat

from .diff import Change, compare, untied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datastates.store.tier import Reader

__all__ = ["Blame", "blame", "to_plain"]

_PAGE = 256  # states of the path that are looked up at once


@dataclass(frozen=True, slots=True)
class Blame:
    """A tensor, and the state that last changed a bit of it.

    ``change`` is ``changed``, ``recast`` (its dtype or shape) or ``added``: the tensor did not exist before, or the path begins there. If
    the bytes of states in between are gone, it changed at ``earliest`` or later, and at ``state`` or before; otherwise ``earliest`` is
    None. ``before`` is the uid of the state in which it was different; ``distance`` and ``old_norm`` are relative to that state, if asked
    for.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    change: Change
    state: State
    earliest: State | None = None
    before: str | None = None
    old_norm: float | None = None
    distance: float | None = None

    @property
    def relative(self) -> float | None:
        """The distance in units of the old norm; None if that is 0, or was not asked for."""
        return self.distance / self.old_norm if self.distance is not None and self.old_norm else None

    @property
    def is_merged(self) -> bool:
        """Whether the state has further parents, from one of which the tensor may come."""
        return bool(self.state.edges)


def blame(
    core: Core,
    rev: str | State,
    *,
    only: str | Sequence[str] | None = None,
    size: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Blame]:
    """See ``Repository.blame``. Two states are open at a time."""
    head = core.state(rev)
    line = _line(core, head)
    first = next(line)
    newer = _Opened(first, core.open_payload(first))
    found: dict[str, Blame] = {}
    try:
        selection = Selection(only)
        wanted = [path for path in newer.specs if selection.wants(path)]
        selection.refuse_unused(newer.specs)
        left = dict.fromkeys(wanted)
        gap: State | None = None  # the oldest of the states behind ``newer`` whose bytes are gone
        for number, state in enumerate(line, 2):
            if not left:
                break
            older = _open(core, state, newer)
            if older is None:
                gap = state
                continue
            with_gap = gap
            gap = None
            for path in newer.in_order(left):
                change = _change(older, newer, path)
                if change is not None:
                    found[path] = _told(older, newer, path, change, with_gap, size=size)
                    del left[path]
            newer.reader.close()
            newer = older
            if on_progress is not None:
                on_progress(number, head.generation + 1)
        for path in left:
            spec = newer.specs[path]
            found[path] = Blame(path, spec.shape, spec.dtype, Change.ADDED, newer.state, gap)
    finally:
        newer.reader.close()
    return [found[path] for path in wanted]


def to_plain(found: Blame) -> dict[str, object]:
    """The JSON of ``--json`` for a tensor: states by their uids and steps."""
    plain: dict[str, object] = msgspec.to_builtins(replace(found, state=None, earliest=None), enc_hook=str)  # type: ignore[arg-type]
    for name, state in (("state", found.state), ("earliest", found.earliest)):
        plain[name] = None if state is None else state.uid
        plain["step" if name == "state" else "earliest_step"] = None if state is None else state.step
    return plain | {"relative": found.relative, "merged": found.is_merged}


def _told(older: _Opened, newer: _Opened, path: str, change: Change, gap: State | None, *, size: bool) -> Blame:
    spec = newer.specs[path]
    said = Blame(path, spec.shape, spec.dtype, change, newer.state, gap, None if change is Change.ADDED else older.state.uid)
    if not size or change is Change.ADDED:
        return said
    numbers = compare(older.reader, newer.reader, older.specs[path], spec, stat=False)
    return replace(said, old_norm=numbers.old_norm, distance=numbers.distance)


# The states


@dataclass(slots=True)
class _Opened:
    """A state whose payload is open, and its tensors by path; those of a state of the same layout are reused."""

    state: State
    reader: Reader
    like: _Opened | None = None
    layout: bytes = field(init=False)
    specs: Mapping[str, TensorSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.layout = bytes(self.manifest.content.tensors)
        is_alike = self.like is not None and self.like.layout == self.layout
        self.specs = self.like.specs if is_alike and self.like is not None else {spec.path: spec for spec in untied(self.reader)}
        self.like = None

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    def in_order(self, paths: Mapping[str, None]) -> list[str]:
        """The paths in the order of the bytes, so that tensors that share a chunk follow each other."""
        return sorted(paths, key=lambda path: self.specs[path].shards[0].start if self.specs[path].shards else 0)


def _open(core: Core, state: State, like: _Opened) -> _Opened | None:
    """The opened state; None if its bytes are gone, or are not here."""
    if not state.status.is_restorable:
        return None
    try:
        return _Opened(state, core.open_payload(state), like)
    except Unavailable:
        return None


def _line(core: Core, head: State) -> Iterator[State]:
    """The state and its first parents; each page is read in a transaction of its own."""
    following: str | None = head.uid
    while following is not None:
        with core.database.read() as session:
            ids = [id_ for id_, _ in islice(walk.first_parents(session, id_of(session, following), 0), _PAGE)]
            page = walk.states(session, ids)
        yield from page
        following = page[-1].facts.parent if len(page) == _PAGE else None


# One tensor of two states


def _change(older: _Opened, newer: _Opened, path: str) -> Change | None:
    """How a tensor of ``newer`` differs from that of ``older``; None if it does not differ."""
    old, new = older.specs.get(path), newer.specs[path]
    if old is None:
        return Change.ADDED
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return Change.RECAST
    lies_alike = (old.strides, len(old.shards)) == (new.strides, len(new.shards)) and all(map(_lies_alike, old.shards, new.shards))
    if not lies_alike:
        same = torch.equal(_bits(older.reader, old), _bits(newer.reader, new))
    else:
        same = all(_is_same(older.reader, here, newer.reader, there) for here, there in zip(old.shards, new.shards, strict=True))
    return None if same else Change.CHANGED


def _lies_alike(here: Shard, there: Shard) -> bool:
    return (here.offset, here.shape, here.start % CHUNK_BYTES) == (there.offset, there.shape, there.start % CHUNK_BYTES)


def _is_same(before: Reader, here: Shard, after: Reader, there: Shard) -> bool:
    """Whether two shards that lie alike in their chunks hold the same bytes; chunks that others share are read."""
    lefts, rights = before.manifest.content.chunks, after.manifest.content.chunks
    shift = here.start // CHUNK_BYTES - there.start // CHUNK_BYTES
    shared: list[tuple[int, int]] = []
    for index in after.chunks_of(there.start, there.length):
        if lefts[index + shift] == rights[index]:
            continue
        begin, end = max(there.start, index * CHUNK_BYTES), min(there.start + there.length, (index + 1) * CHUNK_BYTES)
        if end - begin == rights[index].length and lefts[index + shift].length == rights[index].length:
            return False
        shared.append((begin, end - begin))
    return all(_are_equal(before, begin + shift * CHUNK_BYTES, after, begin, length) for begin, length in shared)


def _are_equal(before: Reader, start: int, after: Reader, begin: int, length: int) -> bool:
    left, right = np.empty(length, np.uint8), np.empty(length, np.uint8)
    before.gather(start, left.data)
    after.gather(begin, right.data)
    return bool(np.array_equal(left, right))


def _bits(reader: Reader, spec: TensorSpec) -> torch.Tensor:
    """The bytes of the elements, in the order of the indices."""
    flat = rebuild(read_flat(reader, spec), spec).detach().resolve_conj().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
