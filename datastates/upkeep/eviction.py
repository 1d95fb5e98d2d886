"""Dropping a state's bytes by hand: its records stay, and so does every byte that another state needs."""

from __future__ import annotations

from datastates.lineage.change.withdraw import withdraw
from datastates.lineage.search.holders import holder
from datastates.opening.core import Core
from datastates.store.tiers import CAPTURED, DURABLE, VOLATILE

__all__ = ["evict"]


def evict(core: Core, uid: str, *, is_forced: bool = False) -> int:
    """Drop a state from this folder of packs and from this process's memory; returns the bytes set free there, which no other state needed.

    If another lineage of the folder names the state, its files stay for that one.

    The lineage is told first. A crash in between leaves files that nobody asks for, never a state without its bytes; a commit that fails
    drops nothing. Other processes and folders keep their bytes. ``is_forced`` drops a state that a ref names, or the newest durable one
    behind a head that is in memory, but never the last state of a branch that can be restored, or could when processes have ended.

    :raises Conflict: a ref or a training of this process depends on it.
    :raises NotFound: there is no such state.
    """
    core.check_open()
    core.settle()
    running = core.running
    with core.database.read() as session:
        is_shared = uid in core.home.neighbours.naming(session, [uid])
    with core.database.write(durable=True) as session:
        places = [(CAPTURED, holder(core.node, core.run_uid)), (DURABLE, core.home.check_writable())]
        withdraw(session, uid, places, volatile=VOLATILE, is_forced=is_forced)
        if running is not None:
            running.check_withdrawal(uid)  # the last step that may refuse
    freed = 0 if running is None else running.withdraw(uid)
    return freed if is_shared else freed + core.tiers.durable.remove(uid)
