"""Settles what dead processes left behind: their bytes on disk, the states lost with their memory, their files.

Only the opener's own folder of packs counts as evidence: a path that a run recorded may now belong to another repository.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from datastates.lineage.change import record, runs
from datastates.lineage.database import Database
from datastates.store.roles import DurableTier
from datastates.store.tier import Placed
from datastates.store.tiers import VOLATILE
from datastates.system.logs import event

from .home import Home
from .lease import LEASES
from .life import is_dead

__all__ = ["recover"]

_logger = logging.getLogger(__name__)


def recover(database: Database, local: DurableTier, home: Home) -> list[runs.Recovered]:
    """Settle the runs of this folder whose process died, whatever its host was called; returns which branches moved back, and to where.

    A state that its process had written completely, without recording it, becomes durable. All others that were only in memory become
    ``lost``, and branches move back to what can be restored. If nothing may be written, a copy of an SQLite lineage is settled and read
    instead; a lineage on a server stays as it is.
    """
    if home.uid is None or (home.read_only is not None and database.read_only is None):
        return []
    with database.read() as session:
        dead = [run for run in runs.unfinished(session) if is_dead(run, home)]
        unheard = {uid: digest for run in dead for uid, digest in runs.in_memory(session, run.uid, volatile=VOLATILE).items()}
        parts = {part: digest for run in dead for part, digest in runs.parts_in_memory(session, run.uid, volatile=VOLATILE).items()}
    if not dead:
        return []
    with database.write(durable=True, in_copy=True) as session:
        for (uid, rank), placed in _whole({**{(uid, 0): digest for uid, digest in unheard.items()}, **parts}, local).items():
            record.mark(session, uid, local.gives, tier=local.name, node=home.uid, rank=rank, bytes=placed.bytes_new)
        recovered = runs.recover(session, [run.uid for run in dead], volatile=VOLATILE)
    if home.read_only is not None:
        return recovered
    local.sweep()
    for run in dead:
        with suppress(PermissionError):  # another user owns the file, in a folder with the sticky bit
            (home.path / LEASES / run.uid).unlink(missing_ok=True)
    for item in recovered:
        where = "nothing of it is left, so the name is free" if item.new is None else f"it is back at {item.new[:10]}"
        back = event("branch.moved_back", branch=item.branch, state=item.new, reason="the process died")
        _logger.warning("branch %s: its newest states died with their process; %s", item.branch, where, extra=back)
    return recovered


def _whole(unheard: dict[tuple[str, int], str], local: DurableTier) -> dict[tuple[str, int], Placed]:
    """The parts, by uid and rank, that are whole on disk, of those that the lineage knows in memory only; ``unheard`` has their digests."""
    return {part: placed for part, placed in local.whole_parts(unheard).items() if placed.manifest.digest == unheard[part]}
