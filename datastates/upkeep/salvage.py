"""Help when stored bytes turn out to be damaged: the nearest state that verifies, and how to go on from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice

from datastates.errors import Corrupt, NotFound, Unavailable
from datastates.lineage.change import refs
from datastates.lineage.search import walk
from datastates.lineage.states import RefKind, State
from datastates.opening.core import Core

__all__ = ["naming_a_way_on"]

_TRIED = 32
"""The most ancestors, and the most descendants, that are read: each may be of gigabytes."""


@contextmanager
def naming_a_way_on(core: Core, state: State) -> Iterator[None]:
    """Raise damage that is found inside the block with the nearest state that verifies, and with how to go on from it.

    :raises Corrupt: ``nearest`` is the uid of that state: an ancestor, else a descendant.
    """
    try:
        yield
    except Corrupt as exc:
        raise _explained(core, state, exc) from exc


def _explained(core: Core, state: State, problem: Corrupt) -> Corrupt:
    said = f"state {state.uid[:10]} (step {state.step}) is damaged: {problem}"
    sound = _nearest_sound(core, state)
    if sound is None:
        return Corrupt(
            f"{said}; no ancestor or descendant of it verifies here: bring its files back (`datastates repair --from FOLDER`), or begin on"
            " another branch"
        )
    lines = [f"{said}; the nearest state that verifies is {sound.uid[:10]} (step {sound.step}): restore that"]
    lines += [
        f"to go on from there on branch {name!r}: repo.move({name!r}, {sound.uid[:10]!r}, expected={state.uid[:10]!r}), then track it again"
        for name in _branches_at(core, state)
    ]
    return Corrupt("\n".join(lines), nearest=sound.uid)


def _nearest_sound(core: Core, state: State) -> State | None:
    """The nearest ancestor, else descendant, that can be restored here and of which every byte is right."""
    with core.database.read() as session:
        later = [each for each in walk.descendants(session, state.uid, limit=_TRIED) if each.status.is_restorable]
    tried = chain(islice(_restorable(core, state), _TRIED), later)
    return next((each for each in tried if _is_sound(core, each)), None)


def _restorable(core: Core, state: State) -> Iterator[State]:
    here: State | None = state
    while here is not None and here.parents:
        with core.database.read() as session:
            here = walk.nearest_restorable(session, here.parents[0])
        if here is not None:
            yield here


def _is_sound(core: Core, state: State) -> bool:
    try:
        with core.open_payload(state, verify=True) as reader:
            reader.verify()
    except (Corrupt, NotFound, Unavailable):
        return False
    return True


def _branches_at(core: Core, state: State) -> list[str]:
    with core.database.read() as session:
        return [ref.name for ref in refs.refs(session, RefKind.BRANCH) if ref.state == state.uid]
