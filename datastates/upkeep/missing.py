"""What of a lineage can be had here: in this process's memory, or in the repository's own folder of packs; and why the rest cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates.errors import NotFound, Unavailable
from datastates.lineage.change import folders, runs
from datastates.lineage.search import walk
from datastates.lineage.search.holders import replicas_of
from datastates.lineage.states import Run, State, Status
from datastates.opening.recovery import is_alive

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.repository import Repository

__all__ = ["explain", "is_elsewhere", "nearest_here"]


def nearest_here(repository: Repository, session: Session, uid: str) -> State | None:
    """The state itself, or the newest of its first parents, whose bytes are here; None when there is none."""
    held = _in_memory(repository)
    found = walk.nearest_restorable(session, uid)
    while found is not None and found.uid not in held and not repository._local.has(found.uid):
        found = walk.nearest_restorable(session, found.parents[0]) if found.parents else None
    return found


def is_elsewhere(repository: Repository, session: Session, state: State) -> bool:
    """Whether a state that is not here can be had from somebody: a process that is seen to live, or another folder of packs."""
    if not state.status.is_restorable or state.uid in _in_memory(repository) or repository._local.has(state.uid):
        return False
    return bool(_living(repository, session, state) or _other_folders(repository, session, state))


def explain(repository: Repository, session: Session, state: State) -> Unavailable:
    """Why a state cannot be restored here, and what can; to be raised."""
    nearest = nearest_here(repository, session, state.uid)
    hint = "nor can any ancestor" if nearest is None else f"the nearest ancestor that can is {nearest.uid[:10]} (step {nearest.step})"
    said = f"state {state.uid[:10]} (step {state.step}) cannot be restored: it {_why(repository, session, state)}; {hint}"
    return Unavailable(said, nearest=None if nearest is None else nearest.uid, is_gone=not state.status.is_restorable)


def _why(repository: Repository, session: Session, state: State) -> str:
    if not state.status.is_restorable:
        return f"is {state.status}"
    if living := _living(repository, session, state):
        return f"is only in the memory of another process, {living}"
    if others := _other_folders(repository, session, state):
        return f"is not in {repository._home.path}, but in another folder of packs: {others}"
    if state.status is Status.CAPTURED:
        holders = _holders(session, state)
        last = ", ".join(f"{run.pid} on {run.host}" for run in holders)
        return f"was only in the memory of another process, {last or 'unknown'}, of which nothing is to be seen here"
    return f"is {state.status}, but its files are not in {repository._home.path}: somebody deleted or moved them, bring them back"


def _living(repository: Repository, session: Session, state: State) -> str:
    """The processes that hold a state in memory and are seen to live."""
    return ", ".join(f"{run.pid} on {run.host}" for run in _holders(session, state) if is_alive(run, repository._home))


def _holders(session: Session, state: State) -> list[Run]:
    """The runs that reported a state in their memory."""
    uids = {one.run or state.run for one in replicas_of(session, state.uid) if one.tier == "memory"}
    found = []
    for uid in sorted(filter(None, uids)):
        try:
            found.append(runs.get(session, uid))
        except NotFound:
            continue
    return found


def _other_folders(repository: Repository, session: Session, state: State) -> str:
    """Where else a state's bytes are said to be; a folder that lay where ours is now has been deleted."""
    home = repository._home
    others = [folder for folder in folders.of_state(session, state.uid) if folder.uid != home.uid]
    there = [one for one in others if one.path != str(home.path) or not (home.is_beside or one.host == repository.node)]
    return ", ".join(f"{folder.path} on {folder.host}" for folder in there)


def _in_memory(repository: Repository) -> set[str]:
    return set() if repository._memory is None else set(repository._memory.uids())
