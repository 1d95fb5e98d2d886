"""Tells which states of a lineage can be read here, from the tiers of the repository, and why the others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from datastates.errors import NotFound, Unavailable
from datastates.lineage.change import folders, runs
from datastates.lineage.search import walk
from datastates.lineage.search.holders import replicas_of
from datastates.lineage.states import Run, State, Status
from datastates.store.tier import Tier
from datastates.store.tiers import DURABLE, VOLATILE, Tiers
from datastates.system.logs import event
from datastates.system.notices import say

from .home import Home
from .life import is_alive

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Here", "explain", "is_elsewhere", "nearest_here", "nearest_kept"]


class Here(Protocol):
    """What this process can read of a repository."""

    @property
    def home(self) -> Home:
        """Its folder of packs."""

    @property
    def tiers(self) -> Tiers:
        """Its tiers, including the user's."""

    @property
    def node(self) -> str:
        """The name of this host."""

    def holds(self, uid: str) -> bool:
        """Whether a state's bytes are on one of the tiers that answer."""


def nearest_here(here: Here, session: Session, uid: str) -> State | None:
    """The state itself, or the nearest ancestor along first parents, whose bytes are here; None if there is none."""
    found = walk.nearest_restorable(session, uid)
    while found is not None and not here.holds(found.uid):
        found = walk.nearest_restorable(session, found.parents[0]) if found.parents else None
    return found


def nearest_kept(here: Here, session: Session, state: State, *, is_told: bool = True) -> State:
    """The state itself if its bytes are here, else the nearest one by steps whose bytes are. One line in the log names it, if ``is_told``.

    :raises Unavailable: no ancestor of the state can be restored here, and no later state of its branch.
    """
    if state.status.is_restorable and here.holds(state.uid):
        return state
    kept = _nearest(state, *_around(here, session, state))
    if kept is None:
        raise explain(here, session, state)
    if is_told:
        taken = event("nearest.taken", asked=state.uid, state=kept.uid, step=kept.step)
        say(f"state {state.uid[:10]} (step {state.step}) {_why(here, session, state)}: takes {kept.uid[:10]} (step {kept.step})", taken)
    return kept


def _around(here: Here, session: Session, state: State) -> tuple[State | None, State | None]:
    """The nearest ancestor along first parents, and the nearest later state of the same branch, whose bytes are here."""
    earlier = nearest_here(here, session, state.parents[0]) if state.parents else None
    later = next(filter(here.holds, walk.later_restorable(session, state.uid)), None)
    return earlier, None if later is None else walk.state(session, later)


def _nearest(state: State, *around: State | None) -> State | None:
    """The one with the nearest step; of two that are equally near the first."""
    return min(filter(None, around), key=lambda one: abs(one.step - state.step), default=None)


def is_elsewhere(here: Here, session: Session, state: State) -> bool:
    """Whether a state that is not here may be elsewhere: in a process that is seen to live, in another folder of packs, or on a tier of the
    user's that this repository was not given or that does not answer."""
    if not state.status.is_restorable or here.holds(state.uid):
        return False
    return bool(_living(here, session, state) or _other_folders(here, session, state) or _unasked(here, session, state))


def explain(here: Here, session: Session, state: State) -> Unavailable:
    """An error to raise: why a state cannot be restored here, and the nearest states before and after it that can."""
    earlier, later = _around(here, session, state)
    nearest = _nearest(state, earlier, later)
    hint = "nor can any ancestor" if earlier is None else f"the nearest ancestor that can is {earlier.uid[:10]} (step {earlier.step})"
    if later is not None:
        hint += f"; the nearest later state that can is {later.uid[:10]} (step {later.step})"
    if nearest is not None:
        hint += f"; track, load and restore take step {nearest.step} with nearest=True"
    said = f"state {state.uid[:10]} (step {state.step}) cannot be restored: it {_why(here, session, state)}; {hint}"
    return Unavailable(said, nearest=None if nearest is None else nearest.uid, is_gone=not state.status.is_restorable)


def _why(here: Here, session: Session, state: State) -> str:
    if not state.status.is_restorable:
        return f"is {state.status}"
    if living := _living(here, session, state):
        return f"is only in the memory of another process, {living}"
    if others := _other_folders(here, session, state):
        return f"is not in {here.home.path}, but in another folder of packs: {others}"
    if unasked := _unasked(here, session, state):
        return f"is not in {here.home.path}, but on {unasked}"
    if state.status is Status.CAPTURED:
        holders = _holders(session, state)
        last = ", ".join(f"{run.pid} on {run.host}" for run in holders)
        return f"was only in the memory of another process, {last or 'unknown'}, of which nothing is to be seen here"
    return (
        f"is {state.status}, but its files are not in {here.home.path}: somebody deleted or moved them, bring them back "
        "(`datastates repair --from FOLDER`)"
    )


def _living(here: Here, session: Session, state: State) -> str:
    """The processes that hold a state in memory and are seen to live."""
    return ", ".join(f"{run.pid} on {run.host}" for run in _holders(session, state) if is_alive(run, here.home))


def _holders(session: Session, state: State) -> list[Run]:
    """The runs that reported having a state in memory."""
    uids = {one.run or state.run for one in replicas_of(session, state.uid) if one.tier in VOLATILE}
    found = []
    for uid in sorted(filter(None, uids)):
        try:
            found.append(runs.get(session, uid))
        except NotFound:
            continue
    return found


def _other_folders(here: Here, session: Session, state: State) -> str:
    """The other folders that have a state's bytes, as the lineage says. A folder that was where ours is now must have been deleted, and is
    left out."""
    home = here.home
    others = [folder for folder in folders.of_state(session, state.uid) if folder.uid != home.uid]
    there = [one for one in others if one.path != str(home.path) or not (home.is_beside or one.host == here.node)]
    return ", ".join(f"{folder.path} on {folder.host}" for folder in there)


def _unasked(here: Here, session: Session, state: State) -> str:
    """The user's tiers that hold a state as the lineage says, but that cannot be asked here."""
    said = sorted({one.tier for one in replicas_of(session, state.uid)}.difference(VOLATILE, [DURABLE]))
    given = {tier.name: tier for tier in here.tiers.further}
    lacking = [f"the {name} tier, with which it was not opened: give it by Config(tiers=[…])" for name in said if name not in given]
    away = [f"the {name} tier, which does not answer" for name in said if name in given and not _answers(given[name], state.uid)]
    return ", ".join([*lacking, *away])


def _answers(tier: Tier, uid: str) -> bool:
    try:
        tier.has(uid)
    except Unavailable:
        return False
    return True
