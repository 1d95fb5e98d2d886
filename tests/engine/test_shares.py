"""What the ranks of a job copy is, together, the whole state, and each copies its share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from datastates.engine.plan import CopyPlan, compile_plan
from datastates.errors import Unsupported
from datastates.state.geometry import bytes_of, give, stand_in
from datastates.state.tree import flatten
from datastates.storage.reading import PartsReader, read_tree
from tests.engine.parts import part_of
from tests.support.effort import examples
from tests.support.meshes import Job, dtensor, jobs
from tests.support.strategies import bits


def loaded(tree_of: Callable[[int], object], size: int, **options: Any) -> Any:
    """What the parts of all ranks are together."""
    parts = []
    for rank in range(size):
        flat = flatten(tree_of(rank))
        parts.append(part_of(flat, compile_plan(flat, rank=rank, size=size, **options), rank, size))
    with PartsReader(parts) as reader:
        return read_tree(reader, wants=lambda _: True)


def bytes_stored(plan: CopyPlan) -> int:
    return sum(map(bytes_of, plan.specs))


@settings(max_examples=examples(1500), deadline=None)
@given(jobs())
def test_the_parts_of_any_job_are_the_state_bit_for_bit(job: Job) -> None:
    found = loaded(lambda rank: [spread.at(rank) for spread in job.tensors], job.size)
    for spread, back in zip(job.tensors, found, strict=True):
        assert (back.dtype, back.shape) == (spread.whole.dtype, spread.whole.shape)
        assert bits(back) == bits(spread.whole)


def test_tensors_of_any_form_that_every_rank_has_are_divided_and_come_back() -> None:
    base = torch.arange(24_000.0)
    tied = base.reshape(80, 300)
    tree = {
        "channels_last": base.reshape(10, 8, 20, 15).to(memory_format=torch.channels_last),
        "transposed": base.reshape(40, 600).t(),
        "expanded": torch.arange(50.0)[:, None].expand(50, 70),
        "holes": base.reshape(100, 240)[::2, ::3],
        "conjugated": torch.complex(base[:600], base[600:1200]).conj(),
        "tied": tied,
        "tied again": tied,
        "number": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "small": torch.arange(5, dtype=torch.int16),
        "sparse": torch.eye(30).to_sparse(),
    }
    back = loaded(lambda rank: tree, 3)
    for name, tensor in tree.items():
        assert torch.equal(
            back[name].to_dense() if tensor.is_sparse else back[name], tensor.to_dense()
        ), name
    assert back["channels_last"].stride() == tree["channels_last"].stride()
    assert back["tied"] is back["tied again"]


def test_a_rank_copies_its_share_and_views_where_it_can() -> None:
    tree = {"large": torch.randn(999, 1001), "other": torch.randn(300_000)}
    fenced = {id(tensor) for tensor in tree.values()}
    plans = [compile_plan(flatten(tree), fenced=fenced, rank=rank, size=4) for rank in range(4)]
    total = sum(tensor.nbytes for tensor in tree.values())
    assert sum(map(bytes_stored, plans)) == total
    assert all(abs(bytes_stored(plan) - total / 4) < total / 400 for plan in plans)
    assert all(source.is_deferred for plan in plans for source in plan.sources)
    pointers = {tensor.data_ptr(): tensor.nbytes for tensor in tree.values()}
    assert all(
        any(start <= source.flat.data_ptr() < start + length for start, length in pointers.items())
        for plan in plans
        for source in plan.sources
    )


def test_one_part_is_laid_out_as_ever() -> None:
    tree = {"a": torch.randn(300, 400), "b": torch.randn(7), "c": torch.randn(4, 3)[:, 1]}
    alone, first = compile_plan(flatten(tree)), compile_plan(flatten(tree), rank=0, size=1)
    assert alone.layout == first.layout
    assert alone.shares is first.shares is None


def halves(rank: int) -> DTensor:
    whole = torch.arange(400_000.0).reshape(2, 200_000)
    return dtensor(whole[rank : rank + 1], whole, (2,), [Shard(0)], rank)


def test_a_plan_holds_as_long_as_the_local_tensors_do() -> None:
    spread, plain = halves(1), torch.zeros(50_000)
    tree = {"spread": spread, "plain": plain}
    first = flatten(tree)
    plan = compile_plan(first, fenced={id(spread), id(plain)}, rank=1, size=2)
    again = flatten(tree, first)
    assert plan.refresh(again)
    assert plan.refresh(flatten(tree, again))
    spread._local_tensor = spread.to_local().clone()
    assert not plan.refresh(flatten(tree, again))


def test_a_tensor_of_which_this_rank_stores_nothing_changes_the_plan_all_the_same() -> None:
    tree = {"here": give(torch.zeros(1000), [0]), "there": give(torch.zeros(1000), [1])}
    first = flatten(tree)
    plan = compile_plan(first, rank=0, size=2)
    assert plan.refresh(flatten({**tree, "there": give(torch.zeros(1000), [1])}, first))
    assert not plan.refresh(flatten({**tree, "there": torch.zeros(1000)}, first))
    assert not plan.refresh(flatten({**tree, "there": give(torch.zeros(500, 2), [1])}, first))
    plan = compile_plan(first, rank=0, size=2)
    assert plan.refresh(first)
    tree["there"].data = torch.zeros(2, 500)
    assert not plan.refresh(flatten(tree, first))


def test_what_another_rank_was_given_stands_in_the_tree_and_is_not_stored_here() -> None:
    whole = [torch.randn(300), torch.randn(200)]

    def tree_of(rank: int) -> object:
        return (
            [give(whole[0], [0]), stand_in(whole[1], [1])]
            if rank == 0
            else [stand_in(whole[0], [0]), give(whole[1], [1])]
        )

    back = loaded(tree_of, 2)
    assert all(torch.equal(one, other) for one, other in zip(back, whole, strict=True))


def test_tied_dtensors_are_tied_on_a_rank_that_has_nothing_of_them_too() -> None:
    whole = torch.arange(3.0)

    def tree_of(rank: int) -> object:
        shared = dtensor(whole[rank : rank + 1], whole, (4,), [Shard(0)], rank)
        return {"embedding": shared, "head": shared}

    back = loaded(tree_of, 4)
    assert torch.equal(back["head"], whole)
    assert back["embedding"] is back["head"]


def test_what_changes_while_it_is_copied_is_noticed_in_the_local_tensor() -> None:
    spread = halves(0)
    plan = compile_plan(flatten({"spread": spread}), fenced={id(spread)}, rank=0, size=2)
    before = plan.tripwire.versions()
    spread.to_local().add_(1)
    assert plan.tripwire.versions() != before


def test_what_cannot_be_captured_is_refused_by_name() -> None:
    whole = torch.zeros(4)
    unreduced = dtensor(whole, whole, (2,), [Partial()], 0)
    with pytest.raises(Unsupported, match=r"model/bias: a DTensor is placed as Partial"):
        compile_plan(flatten({"model": {"bias": unreduced}}), rank=0, size=2)
    with pytest.raises(
        Unsupported,
        match=(
            r"^x is held by rank 1, and states of this training have 1 part: track it with the"
            r" group"
        ),
    ):
        compile_plan(flatten({"x": halves(0)}))
    alone = dtensor(whole, whole, (1,), [Replicate()], 0)
    assert bytes_stored(compile_plan(flatten({"x": alone}))) == whole.nbytes
