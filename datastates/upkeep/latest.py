"""The newest state of a branch that counts: every part of it verifies, byte for byte, on some tier that somebody can open.

A process by itself asks ``latest``. The ranks of a job share the work: each looks at its parts of a candidate (``problems_of``), and they
go on to the next older one together where one of them found a problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from datastates.errors import Corrupt, NotFound, Unavailable
from datastates.lineage.change.parts import part_digests
from datastates.lineage.search import revision, walk
from datastates.lineage.states import State
from datastates.opening.core import Core

__all__ = ["candidates", "latest", "problems_of"]

_MOST = 16
"""So many restorable states of a branch are looked at; older ones are no better than asking for help."""


def candidates(core: Core, branch: str, most: int = _MOST) -> list[State]:
    """The newest states of a branch that are restorable as far as the lineage knows, the newest first. Every rank has the same list.

    :raises NotFound: there is no such branch.
    """
    with core.reading() as session:
        head = revision.resolve(session, branch)
        found: list[State] = []
        for state in walk.log(session, head.uid):
            if state.status.is_restorable:
                found.append(state)
            if len(found) == most:
                break
        return found


def problems_of(core: Core, state: State, *, rank: int = 0, size: int = 1) -> tuple[str, ...]:
    """What is wrong with those parts of a state that rank ``rank`` of ``size`` looks at: every ``size``-th, from its own on; nothing, if
    all of them are here and every byte is as it was captured.
    """
    with core.database.read() as session:
        digests = part_digests(session, state.uid)
    return tuple(_problems(core, state, digests, range(rank, state.world_size, size)))


def latest(core: Core, branch: str, most: int = _MOST) -> State | None:
    """The newest state of a branch of which all parts verify, as far as this process can open them; None where none does.

    :raises NotFound: there is no such branch.
    """
    return next((state for state in candidates(core, branch, most) if not problems_of(core, state)), None)


def _problems(core: Core, state: State, digests: tuple[str, ...], ranks: range) -> Iterator[str]:
    for rank in ranks:
        try:
            reader, _ = core.tiers.open_part(state, rank)
            with reader:
                found, known = reader.manifest.digest, digests[rank] if rank < len(digests) else None
                if known not in (None, found):
                    yield f"rank {rank} of state {state.uid}: its digest is {found[:16]}, the lineage knows {str(known)[:16]}"
                else:
                    reader.verify()
        except NotFound:
            yield f"rank {rank} of state {state.uid}: its part is not here"
        except (Corrupt, Unavailable) as exc:
            yield f"rank {rank} of state {state.uid}: {exc}"
