"""What the engine needs of the two tiers that every repository has, beyond the contract of a tier.

    CaptureTier    takes captures and arrivals: it takes over slots of the arena, and shares equal
                   chunks
    DurableTier    the repository's own folder of packs: it lists the packs that a state needs, and
                   the files that crashes left

``tiers`` makes them; code outside ``store`` knows only these roles.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from datastates.state.digest import Sound
from datastates.state.manifest import Manifest, PackInfo

from .dedup import Places
from .garbage import Collected, Moved, Place
from .tier import Payload, Placed, Reader, Tier

STATE_BYTES = 5 << 10
"""About how many bytes a state takes besides its slots, at least (measured)."""

OURS = ""
"""The party of states that were captured or made in this process."""


@dataclass(slots=True, eq=False)
class Held:
    """A slot that holds a chunk, and how many chunks of states use it.

    ``parties`` are those for which it is the chunk of this digest."""

    slot: int
    key: tuple[bytes, int]
    parties: set[str]
    uses: int = 1


class CaptureTier(Tier):
    """A tier in slots of an arena.

    ``on_let_go`` is called when the last reader of a removed state has closed, on its thread."""

    on_let_go: Callable[[], None]

    @abstractmethod
    def adopt(self, manifest: Manifest, slots: list[int]) -> Placed:
        """Take over slots that were acquired and filled here, one for each chunk in order; the
        caller must not write to them again.

        The list is empty afterwards, so that a caller that gives back its contents gives back
        nothing of the tier's. Slots whose chunk is held already, by another state or earlier in
        this one, go back to the arena at once. If the state is here already, all go back.

        :raises InvalidInput: there is not one slot for each chunk; the slots then stay the
            caller's.
        """

    @abstractmethod
    def finish(self, manifest: Manifest) -> None:
        """Replace the manifest of a part that is held, now that the state's place in the lineage is
        known; nothing if the part has left.

        A reader that is open already keeps the old manifest.
        """

    @abstractmethod
    def hold(
        self, keys: Iterable[tuple[bytes, int]], party: str = OURS
    ) -> dict[tuple[bytes, int], Held]:
        """Hold those of these chunks, by digest and length, that are ours or the party's; they
        stay until ``settle`` or ``let_go``."""

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
        """Take over a state whose distinct chunks are ``held``, or in slots that were acquired and
        ``filled``, which the caller must not write to again.

        Both dicts are empty afterwards, like the list of ``adopt``. ``party`` is the source of the
        filled chunks. Those that are equal, byte by byte, to what another party brought give their
        slots back. ``parts`` are the manifests, by rank, of a state of several ranks whose parts
        all come at once: ``manifest`` is that of all together, and each part can be opened by
        itself.

        :raises InvalidInput: a chunk is neither held nor filled; all of them then stay the
            caller's.
        :raises Conflict: a state of this uid with other bytes is here; all chunks then stay the
            caller's, too.
        """

    @abstractmethod
    def remove(self, uid: str) -> int:
        """Drop a state; returns the bytes freed.

        Slots that nothing else needs go back to the arena, now or when its last reader closes."""

    @abstractmethod
    def recall(self, size: int) -> bool:
        """Tell readers that memory is wanted back, until that will free ``size`` bytes; returns
        whether any reader was told. Only readers of removed states that give way are told, the
        one that read least recently first."""

    @abstractmethod
    def ranks(self, uid: str) -> Sequence[int]:
        """The ranks whose parts of a state are held; for a state of one part that is rank 0.

        :raises NotFound: it is not here.
        """

    @abstractmethod
    def bytes_of(self, uids: Iterable[str]) -> int:
        """The bytes of the chunks of all these states together, including chunks that others
        share."""

    @property
    @abstractmethod
    def slots_held(self) -> int:
        """The number of slots of the arena that states hold, one for each distinct chunk."""

    @property
    @abstractmethod
    def bytes_beside(self) -> int:
        """About how many bytes states take besides their slots: plain values and small arrays,
        manifests, and records of them."""


@dataclass(frozen=True, slots=True)
class Put:
    """A state to write to a folder of packs; see ``DurableTier.put``."""

    payload: Payload
    base: Manifest | None = None
    is_of_base: bool = False


class DurableTier(Tier):
    """A folder of packs, which several processes and lineages may use."""

    @abstractmethod
    def put(
        self, payload: Payload, *, base: Manifest | None = None, is_of_base: bool = False
    ) -> Placed:
        """Write a state; on return it is durable.

        ``is_of_base``: this process captured both this state and ``base`` in one training, and put
          ``base`` here itself. Only then does a
        digest suffice to refer to chunks of ``base``; otherwise the bytes are compared.

        :raises Conflict: another state with this uid is here.
        :raises Unsupported: its manifest holds something that could not be read again.
        :raises Unavailable: the disk is full or fails; nothing of the state is left.
        """

    @abstractmethod
    def put_all(self, puts: Sequence[Put]) -> list[Placed]:
        """Write several states, in the order of their captures; all of them are durable on return,
        or none is.

        :raises DatastatesError: as ``put``, for one of them; nothing of any of them is left then.
        """

    @abstractmethod
    def stage(
        self,
        payload: Payload,
        *,
        known: Places | None = None,
        likely: Places | None = None,
        is_sharing: bool = True,
    ) -> AbstractContextManager[Staged]:
        """A state that is written but not visible. ``commit`` makes it visible; otherwise nothing
        of it is left at the end of the block.

        ``known`` are places of its chunks that need no comparison, in packs that are here or are
        committed earlier. The bytes at ``likely`` places are compared, as are those that
        ``is_sharing`` finds in other states.

        :raises Conflict: another state with this uid is here.
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
        """``manifest``, for callers that also need the tensors."""

    @abstractmethod
    def packs(self, uid: str) -> tuple[PackInfo, ...]:
        """The packs that a state needs, which only its manifest says; none if the manifest is
        not here, or is damaged."""

    @abstractmethod
    def whole(self, uids: Iterable[str]) -> dict[str, Placed]:
        """The states that are durable here with every pack, as their ``put`` would have returned
        them; its process may have died."""

    @abstractmethod
    def whole_parts(self, parts: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Placed]:
        """``whole`` for the parts of any ranks, by uid and rank."""

    @abstractmethod
    def remove(self, uid: str) -> int:
        """Delete the manifests of all parts of a state, then the packs that no other manifest in
        the folder needs; returns the payload bytes freed.
        """

    @abstractmethod
    def discard(self, packs: Iterable[str]) -> None:
        """Delete those of these packs that no manifest needs, in one pass."""

    @abstractmethod
    def hurrying(self) -> AbstractContextManager[None]:
        """Write as fast as the disk can until the end of the block, whatever the pace, because a
        caller wants to end."""

    @abstractmethod
    def files(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """The files that each state here needs, by its uid: names and sizes, including files
        that others need too."""

    @abstractmethod
    def sweep(self) -> list[Path]:
        """Delete what crashes left behind: temporary files that no process writes, packs that no
        manifest needs. Returns what went."""

    @abstractmethod
    def forget(self, uids: Iterable[str]) -> None:
        """Delete the manifests of states at once, of all their parts that are here; ``collect``
        removes what they needed."""

    @abstractmethod
    def collect(
        self,
        *,
        is_dry: bool = False,
        without: Iterable[str] = (),
        tell: Callable[[int, int], None] = ...,
    ) -> Collected:
        """``sweep``, and rewrite packs most of whose bytes no manifest needs; a few files at a
        time, while everything else goes on.

        ``is_dry`` only looks, as if the states ``without`` were removed. ``tell`` is called with
        the bytes of packs freed so far, and the total.

        :raises Conflict: another process collects in this folder.
        """

    @abstractmethod
    def mend(
        self,
        uid: str,
        rank: int,
        bad: Collection[Place],
        moved: Moved,
        chunk: Callable[[Reader, int], memoryview],
    ) -> None:
        """Write the chunks of a state that lie at ``bad`` places anew, with the bytes that
        ``chunk`` returns. Its manifest then names the new places, and so does ``moved``, for the
        states that share them. Wherever this is interrupted, the state is as before, or mended.
        """

    @property
    @abstractmethod
    def bytes_stored(self) -> int:
        """The total size of all packs in the folder, of whichever lineage."""


class Staged(Protocol):
    """A state that ``DurableTier.stage`` has written.

    ``was_here``: the state was here already, so nothing was written."""

    @property
    def was_here(self) -> bool: ...

    def places(self) -> Iterable[tuple[PackInfo, int]]:
        """The place of each chunk once it is committed."""

    def commit(self) -> Placed | None:
        """Make it visible and durable. None if a pack that it shares, or the state that was here,
        was removed or replaced meanwhile: stage it again then.
        """

    def undo(self) -> None:
        """Undo ``commit``; does nothing if the state was here before."""
