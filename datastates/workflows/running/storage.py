"""What the states of a study take on disk, compared with storing each of them whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates import values
from datastates.workflows.plans import arguments

from .record import start_tag, states_of

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["Storage", "storage"]


@dataclass(frozen=True, slots=True)
class Storage:
    """What a study takes on disk. ``states`` counts the states there, including the study's start; ``bytes_stored`` is the size of all
    packs that any of them needs.

    A pack that states share counts once. ``bytes_full_copies`` is the size of the states stored one by one.
    """

    states: int
    bytes_stored: int
    bytes_full_copies: int

    @property
    def ratio(self) -> float:
        """The ratio of what is stored to full copies; 1 if nothing is on disk."""
        return self.bytes_stored / self.bytes_full_copies if self.bytes_full_copies else 1.0

    def __str__(self) -> str:
        stored, full = self.bytes_stored / 2**20, self.bytes_full_copies / 2**20
        said = f"{self.states} states in {stored:,.1f} MiB on disk"
        if not self.states:
            return said
        if self.ratio > 0.99:  # small states fill pages, and states that differ everywhere share nothing
            return f"{said}, as full copies would take"
        return f"{said}; full copies would take {full:,.1f} MiB ({self.ratio:.0%})"


@values.takes(repo=arguments.repository, study=values.string)
def storage(repo: Repository, study: str) -> Storage:
    """The bytes that a study's states and its start take on disk, read from the lineage.

    :raises NotFound: there is no such study.
    """
    states = {state.uid: state for state in (repo.state(start_tag(study)), *states_of(repo, study))}
    packs: dict[str, int] = {}
    count = full = 0
    for uid, state in states.items():
        needed = {pack.name: pack.size for pack in repo.core.tiers.durable.packs(uid)}
        if needed:
            packs |= needed
            count, full = count + 1, full + state.bytes_total
    return Storage(count, sum(packs.values()), full)
