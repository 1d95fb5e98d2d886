"""A state that comes into a repository from another process: into its memory, then into its lineage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from datastates.config import BackPressure
from datastates.content.manifest import Manifest
from datastates.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from datastates.lineage.change import clones, refs
from datastates.lineage.states import Ref, RefKind, State
from datastates.store.comparing import are_equal
from datastates.system.interrupts import undisturbed

from .landing import StateSink

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["abandon", "lacks_parents", "land", "make_room", "make_tags", "missing_ancestry"]

_log = logging.getLogger("datastates")


def make_room(
    repository: Repository,
    manifest: Manifest,
    *,
    party: str,
    relatives: Iterable[str] = (),
    acquire: Callable[[int], Sequence[int] | None] | None = None,
) -> StateSink:
    """Room for the chunks of a state in the repository's arena. May wait for room, as a capture does, unless ``acquire`` gets it.

    ``party`` is whoever it comes from, as ``land`` will record it. Parents and ``relatives`` that are on disk lend it their chunks, those
    that were captured here or came from the same party.

    :raises OverBudget: it can never fit.
    """
    with repository.core.database.read() as session:
        sound = clones.trusted(session, dict.fromkeys((*manifest.origin.parents, *relatives)), party=party)
    runner = repository.core.runner()
    memory, arena = repository.core.memory, repository.core.arena
    assert memory is not None, "the runner made it"
    assert arena is not None, "the runner made it"

    def wait(count: int) -> Sequence[int] | None:
        return runner.acquire(count, BackPressure.WAIT)

    return StateSink(manifest, memory, arena, acquire or wait, party=party, local=repository.core.local, relatives=sound)


def abandon(repository: Repository, sink: StateSink) -> None:
    """A clone ended without landing: its memory is free again."""
    sink.abandon()
    if repository.core.running is not None:
        repository.core.running.release([])  # tells captures that wait for room


def missing_ancestry(repository: Repository, states: Sequence[State]) -> list[State]:
    """Those of some states that the repository does not have."""
    with repository.core.database.read() as session:
        here = clones.known(session, (state.uid for state in states))
    return [state for state in states if state.uid not in here]


def lacks_parents(repository: Repository, states: Sequence[State]) -> bool:
    """Whether some parent of these states is neither among them nor in the repository."""
    wanted = {parent for state in states for parent in state.parents}.difference(state.uid for state in states)
    with repository.core.database.read() as session:
        return len(clones.known(session, wanted)) < len(wanted)


def land(
    repository: Repository,
    sink: StateSink,
    state: State,
    *,
    ancestry: Sequence[State],
    tags: Sequence[Ref],
    source: str,
    source_repository: str,
    bytes_moved: int,
) -> State:
    """Make a state whose chunks are all here one of the repository's, with what is told of its ancestry and tags.

    An interrupt is raised once the state is in the lineage, in memory and known to the engine.

    :raises Conflict: a state of the same uid and another digest is here.
    """
    with undisturbed():
        now = _arrive(repository, sink, state, ancestry, source, source_repository, bytes_moved)
    make_tags(repository, tags)
    if tags:
        repository.core.runner().refs_changed()
    return now


def _arrive(
    repository: Repository, sink: StateSink, state: State, ancestry: Sequence[State], source: str, source_repository: str, bytes_moved: int
) -> State:
    memory = repository.core.memory
    assert memory is not None, "the sink came from it"
    was_here = state.uid in set(memory.uids())
    _check_on_disk(repository, sink)
    placed = sink.adopt()
    try:
        with repository.core.database.write(durable=True) as session:  # nobody would tell it again
            clones.import_ancestry(session, ancestry)
            now = clones.arrive(
                session,
                state,
                run=repository.core.run_uid,
                tier=memory.name,
                node=repository.node,
                bytes_new=placed.bytes_new,
                source=source,
                source_repository=source_repository,
                bytes_moved=bytes_moved,
            )
    except BaseException:
        if not was_here:
            memory.remove(state.uid)
        raise
    repository.core.runner().adopt(state.uid)
    return now


def _check_on_disk(repository: Repository, sink: StateSink) -> None:
    """Memory is read before disk, so both must hold the same. A state that has rotted on disk may come again.

    :raises Conflict: it is not.
    """
    uid = sink.manifest.origin.uid
    if not repository.core.local.has(uid):
        return
    try:
        with repository.core.local.open(uid) as reader:
            if reader.manifest.digest == sink.manifest.digest and all(
                are_equal(reader.chunk(index), piece) for index in range(len(sink.lengths)) for piece in sink.pieces(index) or ()
            ):
                return
    except (Corrupt, NotFound, Unavailable):
        return
    raise Conflict(f"another state of the uid {uid} is on disk here, of other bytes: one of them is forged; drop the one that is")


def make_tags(repository: Repository, tags: Sequence[Ref]) -> None:
    """Take over tags; those whose name is taken, or that name nothing here, are left out with a warning. Branches are not taken over."""
    left: list[str] = []
    for tag in tags:
        if tag.kind is not RefKind.TAG:
            continue
        try:
            with repository.core.database.write(durable=True) as session:
                refs.tag(session, tag.name, tag.state, message=tag.message)
        except (Conflict, InvalidInput, NotFound) as exc:
            left.append(f"{tag.name[:255]!r} ({exc})")
    if left:
        _log.warning("of %d tags %d were not taken over: %s%s", len(tags), len(left), "; ".join(left[:3]), "; …" if left[3:] else "")
