"""What the engine needs of the two tiers that every repository has, beyond the contract of a tier.

    CaptureTier    captures and arrivals come into it: it takes over slots of the arena, and shares equal chunks
    DurableTier    the repository's own folder of packs: it says which packs a state needs, and what is left of crashes

``tiers`` makes the ones that there are; code outside ``store`` knows these roles alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from datastates.content.digest import Sound
from datastates.content.manifest import Manifest, PackInfo

from .collecting import Collected
from .placing import Places
from .rewriting import Moved, Place
from .tier import Payload, Placed, Reader, Tier

__all__ = ["OURS", "CaptureTier", "DurableTier", "Held", "Staged"]

OURS = ""
"""The party of what was captured or made in this process."""


@dataclass(slots=True, eq=False)
class Held:
    """A slot that holds a chunk, and how many chunks of states it stands for. ``parties`` are those whose chunk of this digest it is."""

    slot: int
    key: tuple[bytes, int]
    parties: set[str]
    uses: int = 1


class CaptureTier(Tier):
    """A tier of slots of an arena. ``on_let_go`` is called when the last reader of a state that was removed has closed, on its thread."""

    on_let_go: Callable[[], None]

    @abstractmethod
    def adopt(self, manifest: Manifest, slots: list[int]) -> Placed:
        """Take over slots that were acquired and filled here, one for each chunk in order; they are not to be written again.

        The list is empty afterwards: whoever gives back what is in it gives nothing back that is the tier's. Those whose chunk is held
        already, by another state or earlier in this one, go back to the arena at once. A state that is here already gives all of them back.

        :raises InvalidInput: not one slot for each chunk; the slots then stay the caller's.
        """

    @abstractmethod
    def finish(self, manifest: Manifest) -> None:
        """A state is held whose part this is, and what its manifest says of its place in the lineage is known now; nothing where it left.

        Whoever reads the part already keeps what it was.
        """

    @abstractmethod
    def hold(self, keys: Iterable[tuple[bytes, int]], party: str = OURS) -> dict[tuple[bytes, int], Held]:
        """Hold those of these chunks, by digest and length, that are ours or the party's: they stay until ``settle`` or ``let_go``."""

    @abstractmethod
    def let_go(self, held: Iterable[Held]) -> None:
        """Undo ``hold``."""

    @abstractmethod
    def settle(
        self,
        manifest: Manifest,
        held: dict[tuple[bytes, int], Held],
        filled: dict[tuple[bytes, int], int],
        party: str = OURS,
        parts: Sequence[Manifest] = (),
    ) -> Placed:
        """Take over a state whose distinct chunks are ``held``, or in slots that were acquired and filled, which are not written again.

        Both are empty afterwards, as the list of ``adopt``.
        ``party`` is the source of the filled ones. Those that are equal, byte by byte, to what somebody else brought give their
        slots back. ``parts`` are the manifests, by rank, of a state of several ranks, all of which come at once: ``manifest`` is what they
        make together, and each can be opened by itself.

        :raises InvalidInput: a chunk is neither held nor filled; all of them then stay the caller's.
        :raises Conflict: a state of this uid is here, of other bytes; likewise.
        """

    @abstractmethod
    def remove(self, uid: str) -> int:
        """Drop a state; slots that nothing else needs go back to the arena, or when its last reader closes. The bytes set free."""

    @abstractmethod
    def recall(self, count: int) -> bool:
        """Tell readers that memory is wanted back, until ``count`` slots come of it: readers that give way, of states that were removed,
        the one that read least recently first. Returns whether anybody was told."""

    @abstractmethod
    def ranks(self, uid: str) -> Sequence[int]:
        """The ranks whose parts of a state are held; of a state of one part that is 0.

        :raises NotFound: it is not here.
        """

    @abstractmethod
    def slots_of(self, uids: Iterable[str]) -> int:
        """The number of slots of all these states together, including those that others share."""

    @property
    @abstractmethod
    def slots_held(self) -> int:
        """Slots of the arena that states hold."""

    @property
    @abstractmethod
    def bytes_beside(self) -> int:
        """About what states take beside their slots: plain values and small arrays, manifests, what is known of them."""


class DurableTier(Tier):
    """A folder of packs, which several processes and lineages may use."""

    @abstractmethod
    def put(self, payload: Payload, *, base: Manifest | None = None, is_of_base: bool = False) -> Placed:
        """Write a state; on return it is durable.

        ``is_of_base``: this process captured both this state and ``base``, which it put here itself, in one training. Only then is a digest
        enough to refer to what ``base`` has; else the bytes are compared.

        :raises Conflict: another state of the uid is here.
        :raises Unsupported: its manifest holds what could not be read again.
        :raises Unavailable: the disk is full or fails; nothing of the state is left.
        """

    @abstractmethod
    def stage(
        self, payload: Payload, *, known: Places | None = None, likely: Places | None = None, is_sharing: bool = True
    ) -> AbstractContextManager[Staged]:
        """A state that is written and not visible: ``commit`` makes it so, else nothing of it is left at the end of the block.

        ``known`` are places of its chunks that need no comparing, in packs that are here or are committed before; ``likely`` ones are
        compared, as are those that ``is_sharing`` finds with other states.

        :raises Conflict: another state of the uid is here.
        """

    @abstractmethod
    def manifest(self, uid: str) -> Manifest:
        """The manifest of a state, checked.

        :raises NotFound: it is not here.
        :raises Corrupt: it is damaged, or another state's.
        """

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, int]]:
        """The uid and the rank of every manifest that is here, whole or not."""

    @abstractmethod
    def part_manifest(self, uid: str, rank: int) -> Manifest:
        """``manifest`` of any rank."""

    @abstractmethod
    def sound(self, uid: str) -> Sound:
        """``manifest``, for whoever goes on to look at the tensors."""

    @abstractmethod
    def packs(self, uid: str) -> tuple[PackInfo, ...]:
        """The packs that a state needs, as its manifest says, which is all that says so; none where it is not here, or is damaged."""

    @abstractmethod
    def whole(self, uids: Iterable[str]) -> dict[str, Placed]:
        """The states that are durable here with every pack, as their ``put`` would have said: its process may have died."""

    @abstractmethod
    def whole_parts(self, parts: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Placed]:
        """``whole`` of the parts of any ranks, by uid and rank."""

    @abstractmethod
    def remove(self, uid: str) -> int:
        """Delete a state's manifests, those of all its parts, then the packs that no other manifest in the folder needs. The payload
        bytes set free.
        """

    @abstractmethod
    def discard(self, packs: Iterable[str]) -> None:
        """Delete those of these packs that no manifest needs, in one pass."""

    @abstractmethod
    def hurrying(self) -> AbstractContextManager[None]:
        """Write as fast as the disk takes it until the end of the block, whatever was asked for: somebody wants to end."""

    @abstractmethod
    def files(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """The files that each state here needs, by its uid: names and sizes, those included that others need too."""

    @abstractmethod
    def sweep(self) -> list[Path]:
        """Delete what crashes left behind: temporary files that nobody writes, packs that no manifest needs. What it deleted."""

    @abstractmethod
    def forget(self, uids: Iterable[str]) -> None:
        """Delete the manifests of states, of all their parts that are here, at once; what they needed is left to ``collect``."""

    @abstractmethod
    def collect(self, *, is_dry: bool = False, without: Iterable[str] = (), tell: Callable[[int, int], None] = ...) -> Collected:
        """``sweep``, and packs most of whose bytes no manifest needs are rewritten; a few files at a time, beside everything else.

        ``is_dry`` only looks, as if the states ``without`` were removed. ``tell`` is called with the bytes of packs set free so far, and
        all of them.

        :raises Conflict: another process does it in this folder.
        """

    @abstractmethod
    def mend(self, uid: str, rank: int, bad: Collection[Place], moved: Moved, chunk: Callable[[Reader, int], memoryview]) -> None:
        """Write the chunks of a state that lie at ``bad`` places anew, with the bytes that ``chunk`` gives, and let its manifest name the
        new places, which ``moved`` learns, for the states that share them. Whatever ends it, the state is as it was, or mended.
        """

    @property
    @abstractmethod
    def bytes_stored(self) -> int:
        """The sizes of all packs in the folder together, whichever lineage they belong to."""


class Staged(Protocol):
    """A state that ``DurableTier.stage`` has written. ``was_here``: there was nothing to write."""

    was_here: ClassVar[bool]

    def places(self) -> Iterable[tuple[PackInfo, int]]:
        """The place of each chunk once it is committed."""

    def commit(self) -> Placed | None:
        """Make it visible and durable; None when a pack that it shares, or the state that was here, was removed or replaced
        meanwhile: stage it again.
        """

    def undo(self) -> None:
        """Take back what ``commit`` did; nothing where the state was here before."""
