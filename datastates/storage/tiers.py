"""The tiers of a repository, nearest first: from which of them a state is read, and their names in
the lineage.

    tiers.captured   takes captures and arrivals, once there is one; it is lost with its process
    tiers.durable    the repository's own folder of packs
    tiers.further    the user's tiers: each state that becomes durable is put there too

The lineage records ``tier.name`` and ``tier.node`` of each state, and is queried with ``VOLATILE``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from datastates import values
from datastates.errors import Corrupt, InvalidInput, NotFound, Unavailable, Unsupported
from datastates.lineage.states import State, Status
from datastates.state.manifest import Manifest

from .local import LocalTier
from .memory import MemoryTier
from .parallel_read import SealedChunks
from .reading import of_state, open_parts
from .remote import tier_of_url
from .tier import Payload, Reader, Tier

CAPTURED = MemoryTier.name
"""The name in the lineage of the tier that takes captures and arrivals."""

VOLATILE = frozenset({CAPTURED})
"""The names of tiers that are lost with the process that owns them."""

DURABLE = LocalTier.name
"""The name of the tier in folders of packs."""

_NAME = re.compile(r"[a-z][a-z0-9-]{0,11}")
_GIVEN = (Status.DURABLE, Status.REPLICATED, Status.EXTERNAL)


class Tiers:
    """The tiers of one repository.

    Safe from any thread. ``captured`` is None until something is captured or arrives."""

    def __init__(self, durable: LocalTier, further: Sequence[object] = ()) -> None:
        self.durable, self.further = durable, check_further(further)
        for tier in self.further:
            if isinstance(tier, LocalTier) and tier.root.samefile(durable.root):
                raise InvalidInput(
                    f"the {tier.name} tier is {tier.root}, the repository's own folder of packs:"
                    " give another folder, or none"
                )
        self.captured: MemoryTier | None = None

    def __iter__(self) -> Iterator[Tier]:
        """All tiers, nearest first."""
        return iter((*(() if self.captured is None else (self.captured,)), *self.lasting))

    @property
    def lasting(self) -> tuple[Tier, ...]:
        """The tiers that outlive this process, nearest first."""
        return (self.durable, *self.further)

    def check_parts(self, size: int) -> None:
        """Raise unless each of the user's tiers can take the parts of a job of ``size`` ranks.

        :raises Unsupported: a tier cannot.
        """
        refused = [tier.name for tier in self.further if size > 1 and not tier.holds_parts]
        if refused:
            raise Unsupported(
                f"the {refused[0]} tier holds states of one process, and this training has {size}"
                " ranks: open the repository without it, or let its class inherit"
                " datastates.storage.KeyedTier, or hold the part of each rank by itself and say"
                " holds_parts = True"
            )

    def has(self, uid: str) -> bool:
        """Whether one of the tiers that answer has a state."""
        for tier in self:
            with suppress(Unavailable):
                if tier.has(uid):
                    return True
        return False

    def open(self, state: State, *, verify: bool = True, rank: int = 0) -> Reader:
        """A state from the nearest tier that has it. Values of single ranks are read for ``rank``.

        :raises NotFound: no tier has it.
        :raises Corrupt: it is damaged there, or is not the state of the lineage.
        :raises Unavailable: a tier that may have it does not answer, and no further one has it.
        """
        return _open(iter(self), state, verify=verify, rank=rank)

    def open_part(self, state: State, rank: int, *, verify: bool = True) -> tuple[Reader, int]:
        """One part of a state from the nearest tier that has it, and how far away that is: 0 is
        this process's memory.

        :raises NotFound: no tier that answers has it; another rank may reach it.
        """
        for far, tier in enumerate(self, 1 if self.captured is None else 0):
            try:
                if state.world_size > 1:
                    return tier.open_part(state.uid, rank, verify=verify), far
                return of_state(tier.open(state.uid, verify=verify), state), far
            except (NotFound, Unavailable):
                continue
        raise NotFound(f"rank {rank} of state {state.uid} is on no tier here")

    def reopen(self, state: State, *, verify: bool = True, rank: int | None = None) -> Reader:
        """``open`` from the tiers that outlive this process, for when its memory is wanted back.
        With ``rank``, only that rank's part."""
        if rank is not None:
            return _open_part(self.lasting, state.uid, rank, verify)
        return _open(self.lasting, state, verify=verify)

    def placed(self, uid: str) -> Manifest | None:
        """The manifest of a state that is durable here, so that another state can refer to what
        they share; None if there is none."""
        try:
            return self.durable.manifest(uid)
        except (NotFound, Corrupt):
            return None

    def close(self) -> None:
        """Close the tiers that outlive this process; idempotent."""
        for tier in self.lasting:
            tier.close()


def payload_of(reader: Reader) -> Payload:
    """The payload of an open reader, to put elsewhere. Each access reads and checks the chunk. It
    has no places."""
    manifest = msgspec.structs.replace(reader.manifest, packs=(), refs=())
    if reader.is_waited_for:  # a file, which may change between two reads of a chunk
        return Payload(manifest, SealedChunks(reader), is_on_demand=True)
    return Payload(manifest, [reader.chunk(index) for index in range(len(manifest.content.chunks))])


def check_further(tiers: Sequence[object]) -> tuple[Tier, ...]:
    """The tiers that a user gave, if they can be used behind the repository's own.

    :raises InvalidInput: an item is no tier, or its name or status makes no sense there.
    """
    names = {MemoryTier.name, LocalTier.name}
    found = list[Tier]()
    for given in tiers:
        tier = tier_of_url(given) if isinstance(given, str) else given
        if not isinstance(tier, Tier):
            raise InvalidInput(
                f"tiers holds {values.shown(tier)}: give objects of a class that inherits"
                " datastates.storage.Tier, or URLs such as 's3://bucket/run'"
            )
        name = getattr(tier, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidInput(
                f"the name of {values.shown(tier)} is {name!r}: say one of 1 to 12 lower-case"
                " letters, digits and dashes"
            )
        if name in names:
            raise InvalidInput(
                f"two tiers are called {name!r}: states are found by the names of tiers, so give"
                " each one of its own, as in s3://bucket/run?name=far"
            )
        if tier.gives not in _GIVEN:
            raise InvalidInput(
                f"the {name} tier gives {tier.gives!r}: say one of"
                f" {', '.join(map(repr, map(str, _GIVEN)))}"
            )
        names.add(name)
        found.append(tier)
    return tuple(found)


def _open(tiers: Iterable[Tier], state: State, *, verify: bool, rank: int = 0) -> Reader:
    if state.world_size == 1:
        return _open_first(
            tiers, state.uid, lambda tier: of_state(tier.open(state.uid, verify=verify), state)
        )
    each = tuple(tiers)
    return of_state(
        open_parts(
            lambda part: _open_part(each, state.uid, part, verify),
            state.world_size,
            state.uid,
            rank=rank,
        ),
        state,
    )


def _open_part(tiers: Iterable[Tier], uid: str, rank: int, verify: bool) -> Reader:
    return _open_first(tiers, uid, lambda tier: tier.open_part(uid, rank, verify=verify))


def _open_first(tiers: Iterable[Tier], uid: str, opened: Callable[[Tier], Reader]) -> Reader:
    away: Unavailable | None = None
    for tier in tiers:
        try:
            return opened(tier)
        except NotFound:
            continue
        except Unavailable as exc:
            away = away or exc
    if away is not None:
        raise away
    raise NotFound(f"state {uid} is in none of the tiers")
