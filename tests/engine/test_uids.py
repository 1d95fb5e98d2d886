"""Ranks give one state one uid without a message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

import datastates
from datastates.engine.handle import DerivedUids, RandomUids

if TYPE_CHECKING:
    import pytest

places = st.tuples(
    st.sampled_from(["main", "fork", "main\0", "größe"]), st.integers(0, 5), st.integers(0, 2)
)


@given(captures=st.lists(places, max_size=40), ranks=st.integers(2, 5))
def test_ranks_that_capture_alike_agree_and_no_uid_comes_twice(
    captures: list[tuple[str, int, int]], ranks: int
) -> None:
    groups = [DerivedUids("job") for _ in range(ranks)]
    told = [[group.next(*place) for place in captures] for group in groups]
    assert all(uids == told[0] for uids in told)
    assert len(set(told[0])) == len(captures), "also where a step comes again"
    assert all(re.fullmatch("[0-9a-f]{24}", uid) for uid in told[0])
    other = DerivedUids("another job")
    assert not set(told[0]) & {other.next(*place) for place in captures}


def test_branches_are_counted_apart() -> None:
    """A rank that is faster on one branch gives the same uids on the other."""
    one, other = DerivedUids("job"), DerivedUids("job")
    first = [one.next("a", 1, 0), one.next("a", 1, 0), one.next("b", 1, 0)]
    assert other.next("b", 1, 0) == first[2]
    assert [other.next("a", 1, 0), other.next("a", 1, 0)] == first[:2]


def test_a_capture_has_the_uid_that_its_line_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomUids, "next", DerivedUids("job").next)
    expected, places = DerivedUids("job"), [(1, 0), (4, 0), (4, 0)]
    with (
        datastates.open(tmp_path, memory_bytes=32 << 20) as repo,
        repo.track(rng=False, weights=torch.ones(3)) as run,
    ):
        made = [run.capture(step=step).wait().uid for step, _ in places]
    assert made == [expected.next("main", *place) for place in places]
