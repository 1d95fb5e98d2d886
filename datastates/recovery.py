"""What processes left behind that died: their bytes on disk, their states in memory that are gone, their files."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path

from .lease import is_held
from .lineage import record, runs
from .lineage.database import Database
from .lineage.states import Run, Status
from .store.local import LocalTier
from .store.tier import Placed

__all__ = ["LEASES", "PACKS", "recover"]

_log = logging.getLogger("datastates")

LEASES = "leases"
"""The folder of the leases, beside the packs."""

PACKS = "datastates.packs"
"""Where the record of a run says in which folder its packs are."""


def recover(database: Database, local: LocalTier, node: str) -> list[runs.Recovered]:
    """Settle the runs of this host whose process died: which branches went back, and to where.

    A state that its process had written to the end without saying so is durable. All else that was only in memory is
    ``lost``, and branches go back to what can be restored.
    """
    with database.read() as session:
        dead = [run for run in runs.unfinished(session, node) if not is_held(_packs(run) / LEASES, run.uid)]
        unheard = {run.uid: runs.in_memory(session, run.uid) for run in dead}
    if not dead:
        return []
    whole = _whole(dead, unheard, local)
    with database.write(durable=True) as session:
        for uid, placed in whole.items():
            packs = [(pack.name, pack.size) for pack in placed.manifest.packs]
            record.mark(session, uid, Status.DURABLE, tier="local", node=node, bytes=placed.bytes_new, packs=packs)
        recovered = runs.recover(session, [run.uid for run in dead])
    local.sweep()
    for run in dead:
        (local.root / LEASES / run.uid).unlink(missing_ok=True)
    for item in recovered:
        where = "nothing of it is left, so the name is free" if item.new is None else f"it is back at {item.new[:10]}"
        _log.warning("branch %s: its newest states died with their process; %s", item.branch, where)
    return recovered


def _whole(dead: list[Run], unheard: dict[str, dict[str, str]], local: LocalTier) -> dict[str, Placed]:
    """Of the states that the lineage knows in memory only, those that are whole in the folder of their run's packs."""
    wanted: defaultdict[Path, dict[str, str]] = defaultdict(dict)
    for run in dead:
        wanted[_packs(run)].update(unheard[run.uid])
    found: dict[str, Placed] = {}
    for folder, digests in wanted.items():
        if not folder.is_dir():
            continue
        tier = local if folder.samefile(local.root) else LocalTier(folder)
        found.update((uid, placed) for uid, placed in tier.whole(digests).items() if placed.manifest.digest == digests[uid])
    return found


def _packs(run: Run) -> Path:
    return Path(str(run.config.get(PACKS)))
