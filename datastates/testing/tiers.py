"""The suite that every tier must pass, whatever it stores into.

A test class inherits it and gives it a ``tier`` and a way to do damage."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import pytest
import torch

from datastates.errors import Closed, Corrupt, InvalidInput, NotFound
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.keyed import KeyedTier
from datastates.storage.tier import Payload, SupportsRemoval, Tier

from .states import chunks_of, lengths, numbers, part, payload, small, stream


class TierSuite(ABC):
    """The suite for tiers.

    Inherit it as ``class TestMyTier(TierSuite)`` with a fixture ``tier``, empty, and the method
    ``flip``."""

    keeps_whole_packs = False
    """Whether bytes that no state needs stay as long as other bytes that were put with them are
    needed."""

    @pytest.fixture
    @abstractmethod
    def tier(self) -> Tier:
        """An empty tier that can take 140 chunks."""

    @abstractmethod
    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        """Flip a bit of a stored chunk, behind the tier's back.

        :param tier: where the chunk is.
        :param uid: whose chunk it is.
        :param chunk: its index.
        :param byte: the byte in which a bit is flipped.
        """

    @pytest.mark.parametrize(
        "state",
        [
            payload("empty"),
            payload("tensorless", {"model/none": torch.empty(0)}),
            small("one", 1),
            small("many", *range(64)),
            payload("full", {"model/w": numbers(CHUNK_BYTES // 4)}),
            payload(
                "long",
                {
                    "model/w": numbers(CHUNK_BYTES // 4 * 2 + 3),
                    "model/b": torch.ones(7, dtype=torch.bool),
                },
                {"step": numbers(1)},
            ),
        ],
        ids=lambda state: state.manifest.origin.uid,
    )
    def test_a_state_comes_back_as_it_was_put(self, tier: Tier, state: Payload) -> None:
        uid = state.manifest.origin.uid
        placed = tier.put(state)
        assert placed.bytes_new == lengths(chunks_of(state))
        with tier.open(uid) as reader:
            assert stream(reader) == chunks_of(state)
            assert reader.manifest.content == state.manifest.content
            assert (reader.manifest.origin, reader.manifest.digest) == (
                state.manifest.origin,
                state.manifest.digest,
            )
            reader.verify()

    def test_an_unknown_state_is_not_found(self, tier: Tier) -> None:
        tier.put(small("known", 1))
        assert tier.has("known")
        assert not tier.has("nobody")
        with pytest.raises(NotFound, match="nobody"):
            tier.open("nobody")

    def test_an_unknown_state_is_removed_without_effect(self, tier: Tier) -> None:
        tier.put(small("known", 1))
        assert remove(tier, "nobody") == 0
        assert list(tier.uids()) == ["known"]

    @pytest.mark.parametrize(
        "uid", ["../known", "known/", "", "known.0", "..", "a" * 80, "known\n"]
    )
    def test_a_uid_reaches_nothing_but_its_state(self, tier: Tier, uid: str) -> None:
        tier.put(small("known", 1))
        assert not tier.has(uid)
        with pytest.raises(NotFound):
            tier.open(uid)
        assert not isinstance(tier, SupportsRemoval) or tier.remove(uid) == 0
        assert list(tier.uids()) == ["known"]

    def test_every_state_is_listed_until_it_is_removed(self, tier: Tier) -> None:
        assert list(tier.uids()) == []
        for number in range(5):
            tier.put(small(f"s{number}", number))
        assert sorted(tier.uids()) == ["s0", "s1", "s2", "s3", "s4"]
        remove(tier, "s3")
        assert sorted(tier.uids()) == ["s0", "s1", "s2", "s4"]

    def test_putting_a_state_twice_changes_nothing(self, tier: Tier) -> None:
        first = tier.put(small("twice", 1, 2))
        again = tier.put(small("twice", 1, 2))
        assert again.bytes_new == 0
        assert again.manifest == first.manifest
        assert list(tier.uids()) == ["twice"]

    def test_a_state_that_was_put_twice_is_removed_once(self, tier: Tier) -> None:
        for _ in range(2):
            tier.put(small("twice", 1, 2))
        assert remove(tier, "twice") == 200
        with pytest.raises(NotFound):
            tier.open("twice")

    def test_chunks_that_the_base_has_are_not_stored_again(self, tier: Tier) -> None:
        base = tier.put(small("base", 1, 2, 3))
        placed = tier.put(small("next", 1, 9, 3), base=base.manifest)
        assert placed.bytes_new == 100
        third = tier.put(small("third", 3, 9, 1), base=placed.manifest)
        assert third.bytes_new == 0
        for state in (small("base", 1, 2, 3), small("next", 1, 9, 3), small("third", 3, 9, 1)):
            with tier.open(state.manifest.origin.uid) as reader:
                assert stream(reader) == chunks_of(state)

    def test_chunks_that_repeat_inside_a_state_are_stored_once(self, tier: Tier) -> None:
        state = small("same", 7, 7, 8, 7)
        assert tier.put(state).bytes_new == 200
        with tier.open("same") as reader:
            assert stream(reader) == chunks_of(state)
        assert not isinstance(tier, SupportsRemoval) or tier.remove("same") == 200

    def test_removing_frees_what_no_other_state_needs(self, tier: Tier) -> None:
        base = tier.put(small("base", 1, 2))
        second = tier.put(small("second", 1, 3), base=base.manifest)
        tier.put(small("third", 3, 4), base=second.manifest)
        first, then = ("second", "base") if self.keeps_whole_packs else ("base", "second")
        assert remove(tier, first) == (0 if self.keeps_whole_packs else 100)
        rest = remove(tier, then)
        assert rest == (200 if self.keeps_whole_packs else 100)
        with tier.open("third") as reader:
            assert stream(reader) == chunks_of(small("third", 3, 4))
        assert remove(tier, "third") == 200
        assert list(tier.uids()) == []

    def test_a_state_survives_the_removal_of_its_base(self, tier: Tier) -> None:
        base = tier.put(small("base", 1, 2))
        tier.put(small("next", 1, 3), base=base.manifest)
        remove(tier, "base")
        with tier.open("next") as reader:
            assert stream(reader) == chunks_of(small("next", 1, 3))

    def test_a_base_that_was_removed_is_not_referred_to(self, tier: Tier) -> None:
        base = tier.put(small("base", 1, 2))
        remove(tier, "base")
        assert tier.put(small("next", 1, 3), base=base.manifest).bytes_new == 200
        with tier.open("next") as reader:
            assert stream(reader) == chunks_of(small("next", 1, 3))

    def test_a_state_that_was_removed_can_come_back_another_way(self, tier: Tier) -> None:
        first = tier.put(small("back", 1, 2))
        tier.put(small("other", 1, 3), base=first.manifest)
        remove(tier, "back")
        tier.put(small("back", 5, 6))
        for state in (small("back", 5, 6), small("other", 1, 3)):
            with tier.open(state.manifest.origin.uid) as reader:
                assert stream(reader) == chunks_of(state)

    def test_an_open_reader_outlives_the_removal(self, tier: Tier) -> None:
        tier.put(small("open", 1, 2))
        first, second = tier.open("open"), tier.open("open")
        remove(tier, "open")
        assert "open" not in list(tier.uids())
        with pytest.raises(NotFound):
            tier.open("open")
        first.close()
        for number in range(40):  # puts that might overwrite it
            tier.put(small(f"s{number}", 100 + number))
        assert stream(second) == chunks_of(small("open", 1, 2))
        second.close()

    @pytest.mark.parametrize("chunk", [0, 1, 2])
    def test_a_flipped_bit_is_found_and_named(self, tier: Tier, chunk: int) -> None:
        tier.put(
            payload(
                "flip", {"model/w": numbers(CHUNK_BYTES // 4 + 10)}, {"optimizer/step": numbers(5)}
            )
        )
        self.flip(tier, "flip", chunk, 17)
        with tier.open("flip") as reader:
            for index in {0, 1, 2} - {chunk}:
                reader.chunk(index)
            with pytest.raises(Corrupt, match=f"chunk {chunk} "):
                reader.chunk(chunk)
            with pytest.raises(Corrupt, match=f"chunk {chunk} "):
                reader.verify()
            with pytest.raises(Corrupt, match=f"chunk {chunk} "):
                reader.span(chunk * CHUNK_BYTES, 8)
        with tier.open("flip", verify=False) as reader:
            assert (
                reader.chunk(chunk)[17]
                == chunks_of(
                    payload("flip", {"model/w": numbers(CHUNK_BYTES // 4 + 10)}, {"o": numbers(5)})
                )[chunk][17]
                ^ 1
            )

    def test_spans_give_the_bytes_of_the_stream(self, tier: Tier) -> None:
        state = payload(
            "span", {"model/w": numbers(CHUNK_BYTES // 4 * 2 + 5)}, {"step": numbers(3)}
        )
        tier.put(state)
        whole = b"".join(chunks_of(state)[:3])
        with tier.open("span") as reader:
            for start, length in [
                (0, 8),
                (4, 0),
                (CHUNK_BYTES - 4, 8),
                (0, len(whole)),
                (CHUNK_BYTES, CHUNK_BYTES + 20),
            ]:
                view = reader.span(start, length)
                assert view is None or bytes(view) == whole[start : start + length]
            inside = reader.span(3 * CHUNK_BYTES + 4, 8)
            assert inside is not None
            assert bytes(inside) == chunks_of(state)[3][4:12]

    def test_spans_over_chunks_that_repeat_give_the_bytes_of_the_stream(self, tier: Tier) -> None:
        one, other = numbers(CHUNK_BYTES // 4, 1), numbers(CHUNK_BYTES // 4, 2)
        state = payload("again", {"model/w": torch.cat([one, one, other, one])})
        tier.put(state)
        whole = b"".join(chunks_of(state))
        with tier.open("again") as reader:
            for first in range(4):
                for end in range(first + 1, 5):
                    view = reader.span(first * CHUNK_BYTES, (end - first) * CHUNK_BYTES)
                    assert (
                        view is None
                        or bytes(view) == whole[first * CHUNK_BYTES : end * CHUNK_BYTES]
                    )

    @pytest.mark.parametrize(
        ("start", "length"),
        [(0, 4 * CHUNK_BYTES), (2 * CHUNK_BYTES, 24), (9 * CHUNK_BYTES, 1), (-4, 8)],
    )
    def test_a_span_that_the_stream_does_not_have_is_refused(
        self, tier: Tier, start: int, length: int
    ) -> None:
        tier.put(
            payload("span", {"model/w": numbers(CHUNK_BYTES // 4 * 2 + 5)}, {"step": numbers(3)})
        )
        with tier.open("span") as reader, pytest.raises(InvalidInput):
            reader.span(start, length)

    def test_chunks_are_read_only(self, tier: Tier) -> None:
        tier.put(small("fixed", 1))
        with tier.open("fixed") as reader:
            assert reader.chunk(0).readonly

    def test_writing_into_a_span_never_reaches_the_state(self, tier: Tier) -> None:
        state = small("private", 1)
        tier.put(state)
        with tier.open("private") as reader:
            view = reader.span(0, 100)
            assert view is not None
            if not view.readonly:
                view[:4] = b"xxxx"
        if not view.readonly:
            assert bytes(view[:4]) == b"xxxx"  # the view outlives its reader
        with tier.open("private") as reader:
            assert stream(reader) == chunks_of(state)

    def test_bytes_that_do_not_fit_the_manifest_are_refused(self, tier: Tier) -> None:
        state = small("short", 1, 2)
        with pytest.raises(InvalidInput, match="short"):
            tier.put(Payload(state.manifest, [state.chunks[0]]))
        with pytest.raises(InvalidInput, match="99"):
            tier.put(Payload(state.manifest, [state.chunks[0], state.chunks[1][:99]]))
        assert list(tier.uids()) == []

    def test_threads_put_read_and_remove_at_once(self, tier: Tier) -> None:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for number in range(10):
                    state = small(f"t{seed}-{number}", 1, seed, number)
                    tier.put(state)
                    with tier.open(state.manifest.origin.uid) as reader:
                        assert stream(reader) == chunks_of(state)
                    if number % 2 and isinstance(tier, SupportsRemoval):
                        tier.remove(state.manifest.origin.uid)
            except BaseException as exc:  # the test shows them
                errors.append(exc)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(100, 104)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(list(tier.uids())) == (20 if isinstance(tier, SupportsRemoval) else 40)

    def test_two_threads_that_put_the_same_state_store_it_once(self, tier: Tier) -> None:
        barrier, news = threading.Barrier(4), []

        def work() -> None:
            barrier.wait()
            news.append(tier.put(small("same", *range(20))).bytes_new)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(news) == [0, 0, 0, 2000]
        assert not isinstance(tier, SupportsRemoval) or tier.remove("same") == 2000

    def test_the_parts_of_ranks_stand_beside_each_other(self, tier: Tier) -> None:
        if not tier.holds_parts:
            pytest.skip("this tier holds states of one process")
        first, second = part("both", 0, 1, 2), part("both", 1, 3, 4)
        assert tier.put(second).bytes_new == 200
        assert not tier.has("both"), "that of rank 0 stands for the state"
        assert list(tier.uids()) == []
        assert tier.put(first).bytes_new == 200
        assert [tier.put(each).bytes_new for each in (first, second)] == [0, 0]
        tier.put(small("one", 5))
        assert sorted(tier.uids()) == ["both", "one"]
        for rank, state in enumerate((first, second)):
            with tier.open_part("both", rank) as reader:
                assert (reader.manifest.origin, reader.manifest.digest) == (
                    state.manifest.origin,
                    state.manifest.digest,
                )
                assert stream(reader) == chunks_of(state)
        with tier.open("both") as reader:
            assert stream(reader) == chunks_of(first)
        for uid, rank in (("both", 2), ("one", 1), ("nobody", 0)):
            with pytest.raises(NotFound):
                tier.open_part(uid, rank)
        assert remove(tier, "both") == 400, "all parts at once"
        for rank in range(2):
            with pytest.raises(NotFound):
                tier.open_part("both", rank)
        assert list(tier.uids()) == ["one"]

    def test_objects_are_found_under_their_keys(self, tier: Tier) -> None:
        if not isinstance(tier, KeyedTier):
            pytest.skip("this tier has no objects under keys")
        key, data = "probe/object", b"0123456789"
        assert not tier.holds(key)
        with pytest.raises(KeyError):
            tier.read(key)
        with pytest.raises(KeyError):
            tier.read_range(key, 2, 3)
        assert tier.write_new(key, data)
        assert not tier.write_new(key, b"other")
        assert tier.holds(key)
        assert bytes(tier.read(key)) == data
        assert bytes(tier.read_range(key, 3, 4)) == data[3:7]
        assert key in set(tier.keys("probe/"))
        tier.delete(key)
        assert tier.holds(key) == (type(tier).delete is KeyedTier.delete)
        assert list(tier.uids()) == []

    def test_a_check_leaves_no_state(self, tier: Tier) -> None:
        for _ in range(2):
            tier.check("0123456789ab" * 2)
        assert list(tier.uids()) == []

    def test_closing_twice_is_fine_and_use_after_it_is_refused(self, tier: Tier) -> None:
        tier.put(small("late", 1))
        reader = tier.open("late")
        reader.close()
        reader.close()
        with pytest.raises(Closed):
            reader.chunk(0)
        tier.close()
        tier.close()
        with pytest.raises(Closed):
            tier.open("late")
        with pytest.raises(Closed):
            tier.put(small("later", 1))


def remove(tier: Tier, uid: str) -> int:
    """Remove a state; returns the payload bytes set free.

    A tier that keeps everything skips the remaining checks."""
    if not isinstance(tier, SupportsRemoval):
        pytest.skip("this tier removes nothing")
    return tier.remove(uid)
