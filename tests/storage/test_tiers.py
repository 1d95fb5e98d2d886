"""Tiers together: the nearest that has a state is read, and what users give has to fit behind
the repository's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from datastates.errors import Closed, Corrupt, DatastatesError, InvalidInput, NotFound, Unavailable
from datastates.lineage import State, Status
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from datastates.storage.local import LocalTier
from datastates.storage.memory import MemoryTier
from datastates.storage.reading import HeldReader
from datastates.storage.tier import (
    Payload,
    Placed,
    Reader,
    SupportsDirectWrite,
    SupportsManifests,
    SupportsRemoval,
    Tier,
)
from datastates.storage.tiers import VOLATILE, Tiers, payload_of
from datastates.testing import TierSuite, WrappedTier
from datastates.testing.states import chunks_of, small, stream


class Archive(Tier):
    """Keeps whatever it was given, in a dict: it removes nothing, and each state's chunks are
    its own."""

    name = "archive"

    def __init__(self) -> None:
        self.states: dict[str, tuple[Payload, list[bytearray]]] = {}
        self.asked = 0
        self.is_away = False
        self._is_closed = False

    def put(self, payload: Payload, *, base: object = None) -> Placed:
        self._check()
        payload.check()
        distinct = {(chunk.digest, chunk.length) for chunk in payload.manifest.content.chunks}
        for other, _ in list(self.states.values()):
            distinct -= {(chunk.digest, chunk.length) for chunk in other.manifest.content.chunks}
        here, _ = self.states.setdefault(
            payload.manifest.origin.uid, (payload, [bytearray(chunk) for chunk in payload.chunks])
        )
        return Placed(
            here.manifest, sum(length for _, length in distinct) if here is payload else 0
        )

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        self._check()
        if uid not in self.states:
            raise NotFound(f"state {uid} is not in the archive")
        payload, chunks = self.states[uid]
        return HeldReader(
            payload.manifest,
            [memoryview(chunk) for chunk in chunks],
            source="the archive",
            verify=verify,
        )

    def uids(self) -> Iterator[str]:
        return iter(list(self.states))

    def close(self) -> None:
        self._is_closed = True

    def _check(self) -> None:
        self.asked += 1
        if self.is_away:
            raise Unavailable("the archive does not answer")
        if self._is_closed:
            raise Closed("the archive is closed")


class TestArchive(TierSuite):
    """The suite holds for a tier that has no powers but those that each has."""

    @pytest.fixture
    def tier(self) -> Tier:
        return Archive()

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        assert isinstance(tier, Archive)
        tier.states[uid][1][chunk][byte] ^= 1


def state_of(payload: Payload, digest: str | None = None) -> State:
    origin = payload.manifest.origin
    return State(
        uid=origin.uid, digest=digest or payload.manifest.digest, parents=(), edges=(), run=None, step=0, micro_step=0, metrics={},
        attributes={}, message=None, created_at=datetime.now(UTC), status=Status.CAPTURED, generation=0, bytes_total=0, bytes_new=0,
    )  # fmt: skip


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    arena = Arena(4 * CHUNK_BYTES)
    made = Tiers(LocalTier(tmp_path), [Archive()])
    made.captured = MemoryTier(arena)
    yield made
    made.captured.close()
    made.close()
    arena.close()


def test_tiers_say_what_a_state_survives_there_and_what_they_can_do(tiers: Tiers) -> None:
    assert [(tier.name, tier.gives) for tier in tiers] == [
        ("memory", Status.CAPTURED),
        ("local", Status.DURABLE),
        ("archive", Status.EXTERNAL),
    ]
    assert {tier.name for tier in tiers if tier.gives is Status.CAPTURED} == VOLATILE
    powers = (SupportsRemoval, SupportsManifests, SupportsDirectWrite)
    assert [[isinstance(tier, power) for power in powers] for tier in tiers] == [
        [True, False, False],
        [True, True, True],
        [False, False, False],
    ]


def test_a_state_is_read_from_the_nearest_tier_that_has_it(tiers: Tiers) -> None:
    payload = small("a", 1, 2)
    (archive,) = tiers.further
    assert isinstance(archive, Archive)
    assert tiers.captured is not None
    for tier in reversed(tuple(tiers)):
        tier.put(payload)
    for nearest in (tiers.captured, tiers.durable, archive):
        before = archive.asked
        with tiers.open(state_of(payload)) as reader:
            assert stream(reader) == chunks_of(payload)
            assert (archive.asked > before) == (nearest is archive)
        assert tiers.has("a")
        if isinstance(nearest, SupportsRemoval):
            nearest.remove("a")
    with pytest.raises(NotFound):
        tiers.open(state_of(small("b", 1)))
    assert not tiers.has("b")


def test_a_reader_that_gives_way_is_opened_again_beyond_memory(tiers: Tiers) -> None:
    payload = small("a", 1)
    assert tiers.captured is not None
    tiers.captured.put(payload)
    with pytest.raises(NotFound):
        tiers.reopen(state_of(payload))
    tiers.further[0].put(payload)
    with tiers.reopen(state_of(payload)) as reader:
        assert stream(reader) == chunks_of(payload)


def test_a_tier_that_does_not_answer_hides_nothing_that_a_further_one_has(
    tiers: Tiers, tmp_path: Path
) -> None:
    payload = small("a", 1)
    tiers.further[0].put(payload)
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    with tiers.open(state_of(payload)) as reader:
        assert stream(reader) == chunks_of(payload)
    with pytest.raises(Unavailable, match="is gone"):
        tiers.open(state_of(small("b", 2)))
    tmp_path.mkdir()


def test_the_search_for_parts_ends_however_many_a_lineage_claims(tiers: Tiers) -> None:
    (archive,) = tiers.further
    assert isinstance(archive, Archive)
    with pytest.raises(
        Unavailable,
        match=r"1048576 parts, and those of rank 0, 1, .* and at least 4080 more are not here",
    ):
        tiers.open(replace(state_of(small("a", 1)), world_size=1 << 20))
    assert archive.asked == 4096


def test_bytes_of_another_state_are_not_read_for_it(tiers: Tiers) -> None:
    tiers.durable.put(small("a", 1))
    with pytest.raises(Corrupt, match="another"):
        tiers.open(state_of(small("a", 1), "0" * 64))


def test_what_is_put_further_is_checked_on_its_way(tiers: Tiers) -> None:
    payload = small("a", 1, 2)
    tiers.durable.put(payload)
    with tiers.durable.open("a") as reader:
        tiers.further[0].put(payload_of(reader))
    with tiers.further[0].open("a") as reader:
        assert stream(reader) == chunks_of(payload)
        assert (reader.manifest.packs, reader.manifest.refs) == ((), ())


class _Wrong(WrappedTier):
    gives = Status.CAPTURED


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["no tier"], "no tier is no URL of a tier"),
        ([7], "inherits datastates.storage.Tier"),
        ([Archive], "inherits datastates.storage.Tier"),
        ([Archive(), Archive()], "two tiers are called 'archive'"),
        ([type("Mine", (Archive,), {"name": "local"})()], "two tiers are called 'local'"),
        ([type("Mine", (Archive,), {"name": "a name that is too long"})()], "1 to 12"),
        ([type("Mine", (Archive,), {"name": None})()], "1 to 12"),
        ([_Wrong(Archive())], "gives"),
    ],
)
def test_a_further_tier_that_does_not_fit_is_refused(
    tmp_path: Path, given: list[object], why: str
) -> None:
    with pytest.raises(InvalidInput, match=why):
        Tiers(LocalTier(tmp_path), given)


def test_a_missing_chunk_is_damage(tiers: Tiers) -> None:
    payload = small("a", 1, 2)
    with pytest.raises(DatastatesError, match="2 chunks are listed, 1 are in the bucket"):
        HeldReader(payload.manifest, payload.chunks[:1], source="the bucket")
