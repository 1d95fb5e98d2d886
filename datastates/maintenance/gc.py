"""Garbage collection in a folder of packs, during other work there. Everything on which the lineage
depends stays.

The lineage records which states were given up. The manifests in the folder list the packs that are
needed. A state that is not in the lineage may be newer than a database that was restored from a
copy. Its files stay, and the report lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from datastates.errors import Conflict
from datastates.lineage.query.retained import given_up, unknown_uids
from datastates.lineage.write.parts import abandon
from datastates.lineage.write.replicas import take_turns
from datastates.system.interrupts import checkpoint

from .backup import BACKUP, unknown_to
from .core import Core
from .lease import held_in

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_AT_ONCE = 16
"""How many states are removed in one transaction, for which other writers wait."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """The result of ``gc``, or with ``is_dry_run`` its plan. Sizes are in bytes.

    ``states`` are uids of states that the lineage gave up or does not know, and whose manifests
    were still there. ``temporaries`` are files of dead writers. ``packs`` were needed by no state.
    ``rewritten`` are packs in which most bytes were not needed. ``left`` lists the files that
    stayed, with the reason.
    """

    is_dry_run: bool
    states: tuple[str, ...]
    temporaries: int
    packs: int
    rewritten: int
    bytes_temporaries: int
    bytes_packs: int
    bytes_rewritten: int
    left: tuple[str, ...]

    @property
    def bytes_freed(self) -> int:
        """The bytes freed in all."""
        return self.bytes_temporaries + self.bytes_packs + self.bytes_rewritten


def gc(
    core: Core,
    *,
    is_dry_run: bool = False,
    takes_unknown: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> GcReport:
    """Collect garbage in the folder of packs; see ``Repository.gc``.

    :raises Conflict: with ``takes_unknown``, another process is at work here, and may yet record
        such states.
    """
    core.check_open()
    core.settle()
    tell = on_progress or (lambda done, total: None)
    tier = core.tiers.durable
    if not is_dry_run:
        core.home.check_writable()
        with core.database.write() as session:
            abandon(session)
    with core.database.read() as session:
        here = tuple(dict.fromkeys(uid for uid, _ in tier.parts()))
        leftovers = _leftovers(core, session, here)
        strangers = unknown_uids(session, here)
    unknown: list[str] = []
    if takes_unknown:
        others = [run for run in held_in(core.location.packs) if run != core.run_uid]
        if others:
            raise Conflict(
                f"{len(others)} processes are at work in {core.location.packs}, the first of them"
                f" run {others[0]}: unknown files may be theirs. Wait until they have ended, or"
                " leave unknown files there"
            )
        unknown = unknown_to(core.location.packs / BACKUP, strangers)
    kept = [uid for uid in strangers if uid not in set(unknown)]
    left = []
    if kept:
        more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
        left.append(
            f"state {kept[0]}{more} in {core.home.path}, which this lineage does"
            " not know: newer than a database that was brought back from a copy"
            " (`datastates repair --lineage --replace` takes them in), or of a process that died"
            " before it recorded them (`datastates gc --unknown` deletes what the backup of the"
            " lineage does not know either)"
        )
    if is_dry_run:
        states = [*leftovers, *unknown]
        found = tier.collect(is_dry=True, without=states, tell=tell)
    else:
        states = _remove(core, leftovers, partial(_leftovers, core))
        states += _remove(core, unknown, unknown_uids)
        found = tier.collect(tell=tell)
    return GcReport(
        is_dry_run=is_dry_run,
        states=tuple(states),
        temporaries=found.temporaries,
        packs=found.packs,
        rewritten=found.rewritten,
        bytes_temporaries=found.temporary_bytes,
        bytes_packs=found.pack_bytes,
        bytes_rewritten=found.rewritten_bytes,
        left=(*found.left, *left),
    )


def _leftovers(core: Core, session: Session, uids: Sequence[str]) -> list[str]:
    return given_up(session, uids, tier=core.tiers.durable.name, node=core.home.uid or "")


def _remove(
    core: Core, uids: Sequence[str], judged: Callable[[Session, Sequence[str]], list[str]]
) -> list[str]:
    """Delete the manifests of the states that ``judged`` still returns, while no process can add
    them again. Returns their uids."""
    removed = list[str]()
    for start in range(0, len(uids), _AT_ONCE):
        checkpoint()
        with core.database.write() as session:
            take_turns(session)
            gone = judged(session, uids[start : start + _AT_ONCE])
            core.tiers.durable.forget(gone)
            removed += gone
    return removed
