"""Dropping a state's bytes by hand: what is known of it stays, and every byte that another state needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lineage.holders import holder
from .lineage.withdraw import withdraw

if TYPE_CHECKING:
    from .repository import Repository

__all__ = ["evict"]


def evict(repository: Repository, uid: str, *, is_forced: bool = False) -> int:
    """Drop a state from this node's disk and from this process's memory; the bytes set free there, which no other state needed.

    The lineage is told first: a crash in between leaves files that nobody asks for, never a state without its bytes, and a commit that
    fails drops nothing. States of other processes and nodes keep theirs. ``is_forced`` drops a state that a ref names, but never all
    that can be restored of a branch.

    :raises Conflict: a ref or a training of this process counts on it.
    :raises NotFound: there is no such state.
    """
    repository._check_open()
    repository._settle()
    here = [("local", repository.node), ("memory", holder(repository.node, repository._run_uid))]
    running = repository._running
    with repository._database.write(durable=True) as session:
        withdraw(session, uid, here, is_forced=is_forced)
        if running is not None:
            running.check_withdrawal(uid)  # the last that may refuse
    freed = 0 if running is None else running.withdraw(uid)
    return freed + repository._local.remove(uid)
