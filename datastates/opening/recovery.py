"""What dead processes left behind: their bytes on disk, their lost states in memory, their files.

Only what lies in the opener's own folder of packs says anything: whatever path a run recorded may now be another repository's.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from datastates.lineage.change import record, runs
from datastates.lineage.database import Database
from datastates.lineage.show.branches import Life
from datastates.lineage.states import Run
from datastates.store.roles import DurableTier
from datastates.store.tier import Placed
from datastates.store.tiers import VOLATILE

from .home import FOLDER, Home
from .lease import LEASES, Seen, look
from .whereabouts import is_running

__all__ = ["is_alive", "is_dead", "life_of", "recover"]

_logger = logging.getLogger(__name__)


def recover(database: Database, local: DurableTier, home: Home) -> list[runs.Recovered]:
    """Settle the runs of this folder whose process died, whatever its host was called: which branches went back, and to where.

    A state that its process had written to the end without saying so is durable. All else that was only in memory is
    ``lost``, and branches go back to what can be restored. Nothing is settled where nothing may be written.
    """
    if home.read_only is not None or home.uid is None:
        return []
    with database.read() as session:
        dead = [run for run in runs.unfinished(session) if is_dead(run, home)]
        unheard = {uid: digest for run in dead for uid, digest in runs.in_memory(session, run.uid, volatile=VOLATILE).items()}
    if not dead:
        return []
    with database.write(durable=True) as session:
        for uid, placed in _whole(unheard, local).items():
            record.mark(session, uid, local.gives, tier=local.name, node=home.uid, bytes=placed.bytes_new)
        recovered = runs.recover(session, [run.uid for run in dead], volatile=VOLATILE)
    local.sweep()
    for run in dead:
        with suppress(PermissionError):  # another user's, in a folder with the sticky bit
            (home.path / LEASES / run.uid).unlink(missing_ok=True)
    for item in recovered:
        where = "nothing of it is left, so the name is free" if item.new is None else f"it is back at {item.new[:10]}"
        _logger.warning("branch %s: its newest states died with their process; %s", item.branch, where)
    return recovered


def is_dead(run: Run, home: Home) -> bool:
    """Whether the process of a run that did not finish has certainly ended, as far as this folder is concerned.

    That its lease is free says so, whatever host wrote it. A copy of a lease says so where the lineage was copied with it: that
    process writes to the original. A lease that is missing says nothing; then only the kernel can, if the process was one of ours to see.
    """
    folder = run.config.get(FOLDER)
    if folder is not None and folder != home.uid:
        return False
    seen = look(home.path, run.process or run.uid)
    if seen is Seen.HELD:
        return False
    if seen is Seen.COPY and home.is_beside:
        return True
    running = is_running(run)
    if seen is Seen.FREE:
        return running is not True
    return running is False and folder is not None


def is_alive(run: Run, home: Home) -> bool:
    """Whether the process of a run is seen to live. What is neither alive nor dead is unknown."""
    if run.finished_at is not None or is_dead(run, home):
        return False
    return look(home.path, run.process or run.uid) is Seen.HELD or is_running(run) is True


def life_of(run: Run, home: Home) -> Life:
    """What is known of a run's process."""
    if run.finished_at is not None or is_dead(run, home):
        return Life.ENDED
    return Life.RUNNING if is_alive(run, home) else Life.UNKNOWN


def _whole(unheard: dict[str, str], local: DurableTier) -> dict[str, Placed]:
    """Those states which the lineage knows in memory only, by uid and digest, that are whole on disk."""
    return {uid: placed for uid, placed in local.whole(unheard).items() if placed.manifest.digest == unheard[uid]}
