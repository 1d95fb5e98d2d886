"""A clone of one state by all ranks of a job at once: each asks the sources for its share, and passes on what the others want too."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import msgspec

from datastates.errors import Conflict
from datastates.lineage.states import State
from datastates.objects.homes import wait_for_copies
from datastates.objects.redivision import Redivision
from datastates.objects.report import RestoreReport
from datastates.store.passing import open_shared
from datastates.store.reading import of_state
from datastates.system.interrupts import undisturbed
from datastates.transport import loop
from datastates.transport.clone.groups import Group
from datastates.transport.clone.meeting import Meeting
from datastates.upkeep.direct import restore_from

from .landing import join_parts
from .landing.untrusted import distrusting
from .parts import fetch_part
from .reading import PeerReader
from .sources import OpenState, Sources
from .transfer import Cloned, Progress

__all__ = ["clone_together"]


class _Chosen(msgspec.Struct, frozen=True, array_like=True):
    """The state that all ranks clone."""

    uid: str
    digest: str


def clone_together(
    sources: Sources,
    rev: str,
    into: Mapping[str, object],
    group: Group,
    *,
    only: str | Sequence[str] | None,
    strict: bool,
    on_progress: Progress | None,
) -> Cloned:
    """Clone the state that ``rev`` names for rank 0 into the live objects of every rank; collective, on the training threads.

    If one rank fails, all fail, and no object of any rank has changed.
    """
    began, meeting = time.monotonic(), Meeting(group, f"clone {rev}")
    with meeting.united(), undisturbed():
        chosen = _chosen(sources, rev, meeting)
        wait_for_copies(into)
        opened = loop.run(sources.open(chosen.uid))
        try:
            if opened.state.digest != chosen.digest:
                raise Conflict(f"{opened.source} has another state of the uid {chosen.uid} than rank 0 found: clone from the same peer")
            with distrusting():
                return _clone(opened, into, meeting, began, only=only, strict=strict, on_progress=on_progress, timeout_s=sources.timeout_s)
        finally:
            loop.run(opened.close())


def _chosen(sources: Sources, rev: str, meeting: Meeting) -> _Chosen:
    """The state that rank 0 finds."""
    body = b""
    if meeting.group.rank == 0:
        state = next(iter(loop.run(sources.resolve(rev)).values()))
        body = msgspec.msgpack.encode(_Chosen(state.uid, state.digest))
    return msgspec.msgpack.decode(meeting.meet(body)[0], type=_Chosen)


def _clone(
    opened: OpenState,
    into: Mapping[str, object],
    meeting: Meeting,
    began: float,
    *,
    only: str | Sequence[str] | None,
    strict: bool,
    on_progress: Progress | None,
    timeout_s: float,
) -> Cloned:
    state, group = opened.state, meeting.group
    own = Redivision(state.world_size, group.rank, group.size)
    readers = _readers(opened, own, timeout_s, on_progress)
    with ExitStack() as stack:
        for reader in readers:
            stack.callback(reader.close)
        shared = stack.enter_context(open_shared(meeting, state.uid, state.world_size, lambda rank: (readers[rank], 1), rank=own.source))
        report = restore_from(of_state(shared, state), into, only=only, strict=strict, own=own, meeting=meeting)
    return _cloned(state, report, readers, began)


def _readers(opened: OpenState, own: Redivision, timeout_s: float, on_progress: Progress | None) -> list[PeerReader]:
    """A reader for each part."""
    if opened.parts is None:
        return [PeerReader(opened.manifest.manifest, partial(opened.fetch, timeout_s=timeout_s, on_progress=on_progress))]
    if own.source:
        join_parts(opened.manifest.parts, rank=own.source)  # their values were not looked at yet
    counted = _Counted(on_progress)
    return [
        PeerReader(part.manifest, partial(fetch_part, part=part, timeout_s=timeout_s, on_progress=counted.of(part.rank)))
        for part in opened.parts.parts
    ]


def _cloned(state: State, report: RestoreReport, readers: Sequence[PeerReader], began: float) -> Cloned:
    moved = sum((Counter(reader.bytes_by_source) for reader in readers), Counter[str]())
    return Cloned(state, report, moved.total(), time.monotonic() - began, dict(moved))


class _Counted:
    """What this rank asked for of all parts, and how much of it is here; used on the loop thread."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress = on_progress
        self._parts: dict[int, tuple[int, int]] = {}

    def of(self, part: int) -> Callable[[int, int], None] | None:
        """A callback that is told how far one part is."""
        return None if self._on_progress is None else partial(self._hear, part)

    def _hear(self, part: int, done: int, total: int) -> None:
        assert self._on_progress is not None
        self._parts[part] = done, total
        self._on_progress(sum(done for done, _ in self._parts.values()), sum(total for _, total in self._parts.values()))
