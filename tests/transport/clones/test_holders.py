"""Who serves which part of a state, by how far away it is from whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings, strategies

from datastates.storage.parallel_read import NOT_HERE
from datastates.transport.state_parts import Holders, plan
from tests.support.effort import examples


@settings(max_examples=examples(100))
@given(
    strategies.integers(1, 5).flatmap(
        lambda parts: strategies.lists(
            strategies.binary(min_size=parts, max_size=parts), min_size=1
        )
    )
)
def test_nearest_serve_and_all_others_that_have_it_are_spare(places: list[bytes]) -> None:
    for part, holders in enumerate(plan(places, len(places[0]))):
        far = [each[part] for each in places]
        assert sorted((*holders.serving, *holders.spare)) == [
            number for number, distance in enumerate(far) if distance < NOT_HERE
        ]
        assert len(holders.serving) <= 4
        assert {far[number] for number in holders.serving} <= {min(far)}
        assert [far[number] for number in holders.spare] == sorted(
            far[number] for number in holders.spare
        )


def test_each_rank_serves_the_part_in_its_memory_though_all_reach_the_folder() -> None:
    places = [bytes(0 if part == rank else 1 for part in range(3)) for rank in range(3)]
    assert plan(places, 3) == [Holders((0,), (1, 2)), Holders((1,), (2, 0)), Holders((2,), (0, 1))]


def test_load_of_many_who_have_all_parts_is_even() -> None:
    served = Counter(number for holders in plan([bytes(8)] * 8, 8) for number in holders.serving)
    assert set(served.values()) == {4}
