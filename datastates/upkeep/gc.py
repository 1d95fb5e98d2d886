"""Making room in a folder of packs, beside whatever else goes on there: garbage goes, and what the lineage counts on stays.

The lineage says which states were given up, the manifests in the folder say which packs are needed. A state that is not in the lineage may
be another lineage's, or newer than a database that was brought back from a copy: its files stay, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datastates.lineage.change.withdraw import take_turns
from datastates.lineage.search.leftovers import given_up, unheard_of
from datastates.opening.core import Core
from datastates.store.collecting import Collected
from datastates.system.interrupts import checkpoint

__all__ = ["GcReport", "gc"]

_AT_ONCE = 16
"""So many states are removed in one transaction, for which other writers wait."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """What ``gc`` did, or with ``is_dry_run`` would do; sizes are in bytes.

    ``states`` are uids of states that the lineage gave up earlier and whose manifests were still there, ``temporaries`` files that nobody
    writes any more, ``packs`` those that no state needs, ``rewritten`` packs most of whose bytes nobody needed. ``left`` says what stayed,
    and why.
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
        """All of it together."""
        return self.bytes_temporaries + self.bytes_packs + self.bytes_rewritten


def gc(core: Core, *, is_dry_run: bool = False, on_progress: Callable[[int, int], None] | None = None) -> GcReport:
    """Make room in the folder of packs; see ``Repository.gc``."""
    core.check_open()
    core.settle()
    tell = on_progress or (lambda done, total: None)
    tier = core.tiers.durable
    if is_dry_run:
        leftovers, strangers = _judged(core, tuple(tier.uids()))
        return _report(core, leftovers, strangers, tier.collect(is_dry=True, without=leftovers, tell=tell), is_dry_run=True)
    core.home.check_writable()
    leftovers, strangers = _judged(core, tuple(tier.uids()))
    return _report(core, _remove(core, leftovers), strangers, tier.collect(tell=tell))


def _judged(core: Core, uids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the states in the folder that were given up, and those of which the lineage knows nothing."""
    with core.database.read() as session:
        gone = given_up(session, uids, tier=core.tiers.durable.name, node=core.home.uid or "")
        return gone, unheard_of(session, uids)


def _remove(core: Core, uids: Sequence[str]) -> list[str]:
    """Delete the manifests of those that are still given up, while nobody can bring them again; which."""
    tier, removed = core.tiers.durable, list[str]()
    for start in range(0, len(uids), _AT_ONCE):
        checkpoint()
        with core.database.write() as session:
            take_turns(session)
            gone = given_up(session, uids[start : start + _AT_ONCE], tier=tier.name, node=core.home.check_writable())
            tier.forget(gone)
            removed += gone
    return removed


def _report(core: Core, states: list[str], strangers: list[str], found: Collected, *, is_dry_run: bool = False) -> GcReport:
    return GcReport(
        is_dry_run=is_dry_run,
        states=tuple(states),
        temporaries=found.temporaries,
        packs=found.packs,
        rewritten=found.rewritten,
        bytes_temporaries=found.temporary_bytes,
        bytes_packs=found.pack_bytes,
        bytes_rewritten=found.rewritten_bytes,
        left=(*found.left, *_unknown(core, strangers)),
    )


def _unknown(core: Core, strangers: list[str]) -> list[str]:
    if not strangers:
        return []
    more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
    return [
        f"state {strangers[0]}{more} in {core.home.path}, which this lineage does not know: another lineage's, or newer than a database "
        "that was brought back from a copy (`datastates reindex --replace` takes them in), or of a process that died before it told of them"
    ]
