"""The methods of a repository that check its bytes, mend them and make room."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.policy.retention import Retention, retention_of
from datastates.upkeep.loading import verify

if TYPE_CHECKING:
    from datastates.clone.peer import Peer
    from datastates.upkeep.checking import VerifyReport
    from datastates.upkeep.gc import GcReport
    from datastates.upkeep.repair import RepairReport
    from datastates.upkeep.retention import Pruned


from .opened import Opened

__all__ = ["Upkeep"]


def _peer(value: object, what: str) -> object:
    """A connected peer.

    :raises InvalidInput: it is none.
    """
    from datastates.clone.peer import Peer

    if not isinstance(value, Peer):
        raise InvalidInput(f"{what} is {values.shown(value)}: give peers, as peers=[datastates.connect(url)]")
    return value


class Upkeep(Opened):
    """Checking, making room, mending."""

    @overload
    def verify(self, rev: str | State) -> State: ...

    @overload
    def verify(
        self,
        rev: None = None,
        *,
        since: str | None = None,
        limit_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport: ...

    @values.takes(
        rev=values.optional(values.revision),
        since=values.optional(values.string),
        limit_s=values.optional(values.seconds),
        on_progress=values.optional(values.callback),
    )
    def verify(
        self,
        rev: str | State | None = None,
        *,
        since: str | None = None,
        limit_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> State | VerifyReport:
        """Read every byte of a state, and check that none has rotted and that all are as they were when the state was first exported,
        imported or verified. Without a state: read every byte in the folder of packs once, and name every damaged state, tensor and chunk.

            for damage in repo.verify().damage:
                print(damage.state, damage.tensors, damage.problem)

        :param rev: the state; None: all of them.
        :param since: go on after this uid, the ``mark`` of an earlier report.
        :param limit_s: stop after this many seconds; the report then has a ``mark``.
        :param on_progress: called with the bytes read so far, and their total.
        :raises Corrupt: a byte of the state ``rev`` is wrong; names the first.
        """
        if rev is None:
            from datastates.upkeep.checking import Limits, check_all  # few ask for it

            return check_all(self.core, Limits(since, limit_s), on_progress=on_progress)
        if since is not None or limit_s is not None:
            raise InvalidInput("since and limit_s belong to a check of everything: leave out the state, or leave out these arguments")
        state = self.state(rev)
        verify(self.core, state)
        return state

    @values.takes(dry_run=values.flag, unknown=values.flag, on_progress=values.optional(values.callback))
    def gc(self, *, dry_run: bool = False, unknown: bool = False, on_progress: Callable[[int, int], None] | None = None) -> GcReport:
        """Make room on disk: delete what crashes left, files of evicted states and packs that no state needs; rewrite packs most of whose
        bytes no state needs. Captures, restores and clones go on meanwhile, in any process. If it is interrupted, the next call finishes.

            print(repo.gc(dry_run=True).bytes_freed)

        :param dry_run: only report what would be done.
        :param unknown: also delete states that no lineage knows, because their process died before it recorded them; ``reindex`` adds
            them to the lineage instead.
        :param on_progress: called with the bytes of packs freed so far, and the total to be freed.
        :raises Conflict: another process collects in this folder; with ``unknown``, also if another process uses it at all.
        """
        from datastates.upkeep.gc import gc  # few ask for it

        return gc(self.core, is_dry_run=dry_run, takes_unknown=unknown, on_progress=on_progress)

    @values.takes(policy=values.optional(retention_of), dry_run=values.flag, on_progress=values.optional(values.callback))
    def prune(
        self, policy: Retention | str | None = None, *, dry_run: bool = False, on_progress: Callable[[int, int], None] | None = None
    ) -> Pruned:
        """Drop the bytes of durable states that a policy does not keep, on every branch; the states stay in the lineage as ``evicted``.

            report = repo.prune("latest:5 best:3:loss", dry_run=True)
            print(report, report.bytes_freed)

        Whatever the policy says, these keep their bytes: states that refs name, the newest durable state of each branch, states where
        branches forked, the best by a metric that a training was told to keep, and what another process has in memory.

        :param policy: a ``Retention`` or its text; None: what the training of each branch asked for, and what is configured for the others.
        :param dry_run: only report what would be dropped.
        :param on_progress: called with the number of states that were read so far, and about how many there are; then with the number of
            states that were dropped so far, and how many will be.
        :raises Unavailable: the repository can only be read, or another process is pruning it.
        """
        from datastates.upkeep.retention import prune, untold  # few ask for it by hand

        return prune(self.core, None if policy is None else retention_of(policy), dry_run=dry_run, tell=on_progress or untold)

    @values.takes(source=values.optional(values.path), peers=values.several(_peer), on_progress=values.optional(values.callback))
    def repair(
        self,
        *,
        source: str | os.PathLike[str] | None = None,
        peers: Sequence[Peer] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> RepairReport:
        """Check everything as ``verify`` does, and bring back what is damaged from another place that has it: this process's memory, a
        further tier, ``source``, or a peer. For each state that stays damaged the report says why, and the nearest ancestor to restore.

            print(repo.repair().hurt)

        :param source: another repository's folder, or a folder of packs, that may have the same states.
        :param peers: other processes that may have them, in memory or on disk, as ``datastates.connect`` returns them. Only damaged chunks
            are moved. A state that was never sealed is then only as good as these peers are, and is noted as cloned from them.
        :param on_progress: as in ``verify``.
        """
        from datastates.clone.place import PeerPlace
        from datastates.upkeep.repair import repair  # few ask for it

        folder = None if source is None else Path(source)
        return repair(self.core, source=folder, peers=[PeerPlace(peer) for peer in peers], on_progress=on_progress)
