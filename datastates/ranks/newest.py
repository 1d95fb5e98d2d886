"""The newest state of a branch that is whole: the ranks of a job together read and check every part."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

import msgspec

from datastates import values
from datastates.errors import Corrupt, Unavailable
from datastates.lineage.change import refs
from datastates.lineage.search import walk
from datastates.lineage.states import State
from datastates.opening.core import Core, Opened, core_of
from datastates.store.passing import open_shared
from datastates.store.reading import of_state
from datastates.system.logs import event
from datastates.tracking.belonging import find
from datastates.tracking.together import Together
from datastates.transport.clone.groups import Group, group_of
from datastates.transport.clone.meeting import Meeting

__all__ = ["latest"]

_logger = logging.getLogger(__name__)


@values.takes(branch=values.text)
def latest(repo: Opened, branch: str = "main", *, group: Group | None = None) -> State:
    """The newest state of a branch of which every part verifies, read anew. Collective: each rank reads its share, and all get the same
    state.

    If a part is damaged, cannot be reached by any rank, or does not fit the others, all ranks go on to the state before it.

        state = datastates.ranks.latest(repo)
        run = repo.track(branch=f"from-{state.step}", start=state, model=model, optimizer=optimizer)

    :param repo: the repository, which every rank has opened.
    :param branch: the branch whose states are checked, from its head along first parents.
    :param group: the ranks; None: as for ``track``.
    :raises NotFound: there is no such branch.
    :raises Unavailable: none of its states verifies.
    """
    core, ranks = core_of(repo), Together(find() if group is None else group_of(group, "group"))
    uid = ranks.first("find the branch", partial(_head, core, branch), str)
    while uid:
        with ranks.united("look at a state"):
            state = core.state(uid)
        missing = _missing(core, state, ranks)
        why = f"of its {state.world_size} parts {', '.join(map(str, sorted(missing)))} does not verify" if missing else ""
        why = why or _misfit(core, state, ranks)
        if not why:
            return state
        if ranks.is_first:
            about = event("state.passed_over", state=uid, step=state.step, parts=sorted(missing))
            _logger.warning("branch %s: state %s (step %d) is passed over: %s", branch, uid[:10], state.step, why, extra=about)
        uid = ranks.first("find an older state", partial(_older, core, state), str)
    raise Unavailable(f"no state of branch {branch!r} verifies: bring its files back (`datastates repair --from FOLDER`), or begin anew")


def _head(core: Core, branch: str) -> str:
    with core.reading() as session:
        found = walk.nearest_restorable(session, refs.get(session, branch).state)
    return "" if found is None else found.uid


def _older(core: Core, state: State) -> str:
    if not state.parents:
        return ""
    with core.reading() as session:
        found = walk.nearest_restorable(session, state.parents[0])
    return "" if found is None else found.uid


def _missing(core: Core, state: State, ranks: Together) -> set[int]:
    """The parts that verify nowhere. One rank reads each part; the others read it only if that rank cannot."""
    parts = set(range(state.world_size))
    mine = {part for part in parts if part % ranks.size == ranks.rank}
    left = parts - _told(_sound(core, state, mine), ranks)
    return left - _told(_sound(core, state, left - mine), ranks) if left else left


def _misfit(core: Core, state: State, ranks: Together) -> str:
    """Why parts that each verify do not make this state together; empty if they do."""
    meeting, opened = Meeting(ranks.group, f"look at state {state.uid}"), partial(core.tiers.open_part, state)
    try:
        with meeting.united(), open_shared(meeting, state.uid, state.world_size, opened, rank=0) as reader:
            of_state(reader, state)
    except (Corrupt, Unavailable) as exc:
        return str(exc)
    return ""


def _told(sound: list[int], ranks: Together) -> set[int]:
    everyone = ranks.group.exchange(msgspec.msgpack.encode(sound))
    return {part for said in everyone for part in msgspec.msgpack.decode(said, type=list[int])}


def _sound(core: Core, state: State, parts: Collection[int]) -> list[int]:
    return [part for part in sorted(parts) if _is_sound(core, state, part)]


def _is_sound(core: Core, state: State, part: int) -> bool:
    try:
        with core.tiers.open_part(state, part)[0] as reader:
            reader.verify()
    except Exception as exc:  # whatever it is, the others wait for what this rank finds
        _logger.info("state %s: part %d does not verify here: %s: %s", state.uid[:10], part, type(exc).__name__, exc)
        return False
    return True
