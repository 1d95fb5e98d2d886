"""A state on its way through the engine's own steps: what each step reads, and what it adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from datastates.content.manifest import Content, Manifest
from datastates.lineage.change.reduction import FIRST, Reduce
from datastates.lineage.states import NewState, StateFacts
from datastates.store.tier import Tier

from .entry import Entry

__all__ = ["Work", "Writing"]


@dataclass(slots=True)
class Work:
    """A state whose bytes are in ``slots``, one for each of ``lengths``.

    ``parent_digests`` are those of ``facts.parents``. ``content`` lacks the chunks, which ``digest`` adds (``manifest``); ``before`` is the
    tip of its line, on which the state depends. The maker of this object owns the slots until ``dedup`` takes them out of the list;
    ``bytes_new`` of them were then new in memory. There is an ``entry`` once the lineage may have heard of the state. ``rank`` says whose
    part of several it is, ``reduce`` how the metrics of all of them are combined, ``form`` what they have in common. ``known`` are chunks
    that were digested before: those that the memory tier holds need not be in their slots. ``is_from_device``: a device computes, and cores
    of the host are free.
    """

    facts: StateFacts
    parent_digests: tuple[str, ...]
    content: Content
    lengths: Sequence[int]
    slots: list[int]
    before: tuple[str, str] | None = None
    manifest: Manifest | None = None
    bytes_new: int = 0
    entry: Entry | None = None
    rank: int | None = None
    reduce: Reduce = FIRST
    form: str = ""
    known: Mapping[int, bytes] = field(default_factory=dict)
    is_from_device: bool = False

    def digested(self) -> Manifest:
        """The manifest, once ``digest`` has made it."""
        assert self.manifest is not None, "digest comes first"
        return self.manifest

    def be_told(self, tier: Tier, holder: str) -> Entry:
        """The ``entry`` for the journal, now that the state is in a tier of which ``holder`` names the place."""
        digest, total = self.digested().digest, sum(self.lengths)
        new = NewState(self.facts, digest, tier.gives, bytes_total=total, bytes_new=self.bytes_new, tier=tier.name, node=holder)
        self.entry = Entry(new, self.before, self.rank, self.reduce, self.form)
        return self.entry


@dataclass(slots=True)
class Writing:
    """A state of the memory tier that has to be written.

    ``base`` is a manifest on disk that shares as much as is known; ``is_of_base``: both are captures of one line of this process.
    ``manifest`` is what was written, with its places, once it was, and ``size`` is how many bytes that added to the disk.
    """

    uid: str
    base: Manifest | None
    is_of_base: bool
    manifest: Manifest | None = None
    size: int = 0
