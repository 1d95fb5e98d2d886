"""Ranks that restore together: what several want is read once and passed on, whoever has it; and
one that fails ends it for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.collective import CollectiveCall
from datastates.errors import Corrupt, InvalidInput, NotFound
from datastates.maintenance.loading import restore_from
from datastates.state.data_position import Redivision
from datastates.storage.parallel_read import open_shared, plan_transfers
from datastates.storage.tier import Payload, Reader
from tests.support.effort import examples
from tests.support.sharding import Opened, rows, sharded
from tests.support.thread_ranks import ThreadGroup, on_threads

torch.set_num_threads(1)

UID = "0" * 24
ROWS, WIDTH = 6, 1 << 20  # 24 MiB: 6 chunks, of which each of 3 parts has 2
HERE, FOLDER = 0, 1


class Part(Opened):
    """A part as one rank opened it; it may be damaged there."""

    def __init__(self, payload: Payload, *, is_bad: bool) -> None:
        super().__init__([payload])
        self.is_bad = is_bad

    def chunk(self, index: int) -> memoryview:
        if self.is_bad:
            raise Corrupt(f"the pack of rank {self.manifest.origin.rank} is damaged")
        return super().chunk(index)


@pytest.fixture(scope="module")
def tree() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"wide": torch.randn(ROWS, WIDTH), "small": torch.arange(5.0)}


@pytest.fixture(scope="module")
def payloads(tree: dict[str, torch.Tensor]) -> list[Payload]:
    return sharded(UID, tree, {"wide": [[box] for box in rows((ROWS, WIDTH), 2, 2, 2)]}, 3, step=1)


class Job:
    """Ranks that reach some parts each: by rank and part how far away it is."""

    def __init__(
        self,
        payloads: Sequence[Payload],
        places: Sequence[Mapping[int, int]],
        bad: Mapping[int, int] | None = None,
    ):
        self.payloads, self.places, self.bad = payloads, places, bad or {}
        self.reads = [Counter[int]() for _ in places]
        self.into: list[dict[str, torch.Tensor]] = []

    def opened(self, rank: int, number: int) -> tuple[Reader, int]:
        if number not in self.places[rank]:
            raise NotFound("not here")
        part = Part(self.payloads[number], is_bad=self.bad.get(rank) == number)
        self.parts.setdefault(rank, []).append((number, part))
        return part, self.places[rank][number]

    def restore(
        self, into: Sequence[dict[str, Any]], only: Sequence[Any] | None = None, **options: Any
    ) -> tuple[list[Any], list[tuple[int, int, int]]]:
        self.parts: dict[int, list[tuple[int, Part]]] = {}

        def work(group: ThreadGroup) -> object:
            meeting, own = (
                CollectiveCall(group, f"restore state {UID}"),
                Redivision(3, group.rank, group.size),
            )
            with meeting.synchronized():
                opened = open_shared(
                    meeting, UID, 3, lambda number: self.opened(group.rank, number), rank=own.source
                )
                with opened as reader:
                    wanted = None if only is None else only[group.rank]
                    return restore_from(
                        reader, into[group.rank], only=wanted, own=own, meeting=meeting
                    )

        return on_threads(len(self.places), work, **options)

    def read_by(self, rank: int) -> set[tuple[int, int]]:
        """The chunks that a rank read itself, by part and number in it."""
        return {(number, index) for number, part in self.parts.get(rank, []) for index in part.read}


def assert_restored(reports: Sequence[object]) -> None:
    for report in reports:
        if isinstance(report, Exception):
            raise report
        assert report


def blank(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"wide": torch.zeros(ROWS, WIDTH), "small": torch.zeros(5)} for _ in range(count)]


def test_what_all_want_is_read_once_and_passed_on(
    payloads: list[Payload], tree: dict[str, torch.Tensor]
) -> None:
    job, into = Job(payloads, [dict.fromkeys(range(3), FOLDER)] * 3), blank(3)
    reports, passed = job.restore(into)
    assert_restored(reports)
    for rank in range(3):
        assert torch.equal(into[rank]["wide"], tree["wide"])
        assert torch.equal(into[rank]["small"], tree["small"])
    read = [job.read_by(rank) for rank in range(3)]
    assert sum(map(len, read)) == len(set().union(*read)) == 7
    assert {len(each) for each in read} <= {2, 3}, "each reads its share"
    assert all(
        set(part.read.values()) <= {1} for parts in job.parts.values() for _, part in parts
    ), "no chunk is read again"
    assert len(passed) == 14


def test_each_ranks_own_part_comes_from_its_memory_where_nobody_has_all(
    payloads: list[Payload], tree: dict[str, torch.Tensor]
) -> None:
    # the last rank is new, and has nothing
    job, into = (
        Job(payloads, [{0: HERE}, {1: HERE}, {2: HERE}, {}]),
        blank(4),
    )
    reports, _ = job.restore(into)
    assert_restored(reports)
    for rank in range(4):
        assert torch.equal(into[rank]["wide"], tree["wide"])
        assert {number for number, _ in job.read_by(rank)} == ({rank} if rank < 3 else set())


def test_what_one_rank_wants_alone_it_reads_itself(
    payloads: list[Payload], tree: dict[str, torch.Tensor]
) -> None:
    everywhere = dict.fromkeys(range(3), FOLDER)
    job, into = Job(payloads, [everywhere | {0: HERE}, everywhere]), blank(2)
    reports, passed = job.restore(into, only=["small", "wide"])
    assert_restored(reports)
    assert torch.equal(into[1]["wide"], tree["wide"])
    assert not into[0]["wide"].any()
    assert len(job.read_by(0)) == 1
    assert len(job.read_by(1)) == 6
    assert not passed


@pytest.mark.parametrize(
    ("places", "bad", "said"),
    [
        ([dict.fromkeys(range(3), FOLDER)] * 3, {1: 1}, "the pack of rank 1 is damaged"),
        ([{0: HERE, 1: HERE}] * 3, {}, "no rank reaches the parts of rank 2"),
    ],
)
def test_what_cannot_be_read_is_raised_on_all_and_nothing_is_changed(
    payloads: list[Payload], places: list[dict[int, int]], bad: dict[int, int], said: str
) -> None:
    into = blank(3)
    errors, _ = Job(payloads, places, bad).restore(into)
    assert [said in str(error) for error in errors] == [True] * 3, errors
    if bad:
        assert [type(error) for error in errors] == [Corrupt] * 3
        assert str(errors[0]).startswith(f"rank 1 of 3 could not restore state {UID}: ")
        assert str(errors[1]).startswith("the pack of rank 1")
    assert not any(tensor.any() for each in into for tensor in each.values())


def test_a_rank_whose_objects_do_not_fit_ends_it_for_all_before_anything_is_written(
    payloads: list[Payload],
) -> None:
    into = blank(3)
    into[2]["small"] = torch.zeros(6)
    errors, passed = Job(payloads, [dict.fromkeys(range(3), FOLDER)] * 3).restore(into)
    assert [type(error) for error in errors] == [InvalidInput] * 3
    assert str(errors[0]).startswith("rank 2 of 3 could not restore")
    assert not passed
    assert not any(tensor.any() for each in into for tensor in each.values())


def test_what_changes_on_the_way_is_found_by_whoever_gets_it(payloads: list[Payload]) -> None:
    def damage(root: int, to: int, data: bytes) -> bytes:
        return b"\xff" + data[1:] if to == 2 and root == 0 else data

    into = blank(3)
    errors, _ = Job(payloads, [dict.fromkeys(range(3), FOLDER)] * 3).restore(into, damage=damage)
    assert [type(error) for error in errors] == [Corrupt] * 3
    assert "which rank 0 read and passed on, came to rank 2 as something else" in str(errors[2])
    assert str(errors[1]).startswith("rank 2 of 3 could not restore")
    assert not any(tensor.any() for each in into for tensor in each.values())


def test_an_object_that_fails_while_it_is_written_raises_on_all(payloads: list[Payload]) -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: object) -> None:
            raise RuntimeError("no")

    tree = {"thing": {"a": 1}, "wide": torch.ones(3)}
    made = sharded(UID, tree, {}, 3)
    into = [
        {"thing": Stubborn() if rank == 1 else {"a": 0}, "wide": torch.zeros(3)}
        for rank in range(2)
    ]
    errors, _ = Job(made, [dict.fromkeys(range(3), FOLDER)] * 2).restore(into)
    assert [type(error) for error in errors] == [InvalidInput] * 2
    assert str(errors[0]).startswith("rank 1 of 2 could not restore")


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_everybody_gets_what_it_wants_once_from_one_that_has_it(data: st.DataObject) -> None:
    size, lengths = (
        data.draw(st.integers(1, 5)),
        data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)),
    )
    starts = [*accumulate(lengths, initial=0)]
    places = [[data.draw(st.sampled_from([0, 1, 255])) for _ in lengths] for _ in range(size)]
    for part in range(len(lengths)):
        places[data.draw(st.integers(0, size - 1))][part] = 1
    wants = [
        sorted(data.draw(st.sets(st.integers(0, max(0, starts[-1] - 1))))) if starts[-1] else []
        for _ in range(size)
    ]
    found = plan_transfers(wants, places, starts)
    got = [Counter[int]() for _ in range(size)]
    for each in found:
        part = next(
            number
            for number in range(len(lengths))
            if starts[number] <= each.chunk < starts[number + 1]
        )
        assert places[each.root][part] < 255
        wanting = [rank for rank in range(size) if each.chunk in wants[rank]]
        assert each.root in wanting or all(places[rank][part] == 255 for rank in wanting)
        if each.root in wanting:
            assert places[each.root][part] == min(places[rank][part] for rank in wanting)
        assert {*each.to} == {*wanting} - {each.root}
        if each.root in wanting:
            got[each.root][each.chunk] += 1
        for rank in each.to:
            got[rank][each.chunk] += 1
    for rank in range(size):
        assert max(got[rank].values(), default=1) == 1
        alone = {*wants[rank]} - {*got[rank]}
        for chunk in alone:
            assert sum(chunk in each for each in wants) == 1
            part = next(
                number
                for number in range(len(lengths))
                if starts[number] <= chunk < starts[number + 1]
            )
            assert places[rank][part] < 255
