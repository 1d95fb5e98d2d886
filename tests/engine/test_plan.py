"""A plan copies what is live and what its specs say it is, and notices when it no longer fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.engine.copy import Stager
from datastates.engine.plan import DEFER_BYTES, CopyPlan, compile_plan
from datastates.state.geometry import is_dense
from datastates.state.manifest import CHUNK_BYTES
from datastates.state.tree import flatten
from datastates.storage.arena import Arena
from tests.support.effort import examples
from tests.support.strategies import bits, random_tensor, tensors

from .build import copied


def plan_of(*sources: torch.Tensor, deferred: bool = False) -> CopyPlan:
    return compile_plan(
        flatten(list(sources)), fenced={id(source) for source in sources} if deferred else ()
    )


def assert_comes_back(
    plan: CopyPlan, sources: list[torch.Tensor], arena: Arena, stager: Stager
) -> None:
    for source, back in zip(sources, copied(plan, arena, stager), strict=True):
        assert (back.dtype, back.shape) == (source.dtype, source.shape)
        assert bits(back) == bits(source)
        if is_dense(source.shape, source.stride()):
            assert back.stride() == source.stride()


@given(st.lists(tensors(), max_size=6), st.sets(st.integers(0, 5)), st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_any_tensors_come_back_from_a_copy_by_plan(
    arena: Arena, stager: Stager, sources: list[torch.Tensor], still: set[int], tie: bool
) -> None:
    if tie and sources:
        sources = [*sources, sources[0]]
    plan = compile_plan(
        flatten(sources),
        frozen={id(source) for index, source in enumerate(sources) if index in still},
    )
    assert_comes_back(plan, sources, arena, stager)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3 << 20),
            st.sampled_from([torch.float32, torch.int16, torch.uint8, torch.float64]),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=examples(25), deadline=None)
def test_large_tensors_of_mixed_types_come_back_deferred(
    arena: Arena, stager: Stager, sizes: list[tuple[int, torch.dtype]]
) -> None:
    sources = [
        random_tensor(dtype, [count // dtype.itemsize], seed=count) for count, dtype in sizes
    ]
    plan = plan_of(*sources, deferred=True)
    for placed in plan.sources:
        assert placed.is_deferred == (placed.flat.numel() >= DEFER_BYTES)
        assert placed.start % placed.tensor.element_size() == 0
    assert_comes_back(plan, sources, arena, stager)
    for source in sources:
        source.copy_(random_tensor(source.dtype, list(source.shape), seed=1))
    assert plan.refresh(flatten(sources, plan.flat))
    assert_comes_back(plan, sources, arena, stager)


def test_a_tensor_that_straddles_chunks_comes_back(arena: Arena, stager: Stager) -> None:
    sources = [torch.randn(300_000), torch.randn(3 * CHUNK_BYTES // 8), torch.randn(77)]
    plan = plan_of(*sources, deferred=True)
    assert len(plan.sizes) == 3  # two for the large ones, one for the small
    assert [len(source.pieces) for source in plan.sources if source.is_deferred] == [1, 2]
    assert plan.layout.bytes_total == sum(source.nbytes for source in sources) + 128, (
        "the second one begins at a whole KiB"
    )
    assert_comes_back(plan, sources, arena, stager)


def test_tied_tensors_are_stored_once_and_views_as_their_own_bytes() -> None:
    base = torch.randn(1000, 1000)
    tied, view = base.view(1000, 1000), base[:10]
    plan = plan_of(base, tied, view)
    assert [spec.alias for spec in plan.specs] == [None, 0, None]
    assert plan.layout.bytes_total == base.nbytes + view.nbytes


def test_memory_formats_expansions_and_odd_shapes_come_back(arena: Arena, stager: Stager) -> None:
    sources = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7, 5).t(),
        torch.randn(1, 3).expand(1000, 3),
        torch.randn(20, 20)[::2, ::3],
        torch.empty(0, 3),
        torch.tensor(3.5),
        torch.randn(6, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
    ]
    plan = plan_of(*sources)
    assert plan.layout.bytes_total == 480 + 140 + 12 + 280 + 0 + 4 + 48 + 2
    assert_comes_back(plan, sources, arena, stager)


def test_a_state_without_a_tensor_takes_no_slot() -> None:
    assert len(plan_of().sizes) == 0
    assert len(plan_of(torch.empty(0)).sizes) == 0


def test_what_stays_the_same_lies_in_chunks_of_its_own() -> None:
    still, moving = torch.randn(1000), torch.randn(1000)
    plan = compile_plan(flatten([moving, still]), frozen={id(still)})
    assert [sum(chunk) for chunk in plan.sizes] == [4000, 4000]
    assert [plan.specs[index].shards[0].start for index in (0, 1)] == [CHUNK_BYTES, 0]


def test_only_large_fenced_tensors_that_never_tore_are_deferred() -> None:
    large, small, outside, torn = (
        torch.randn(256, 256),
        torch.randn(8),
        torch.randn(256, 256),
        torch.randn(256, 256),
    )
    fenced = {id(large), id(small), id(torn)}
    plan = compile_plan(
        flatten({"a": large, "b": small, "c": outside, "d": torn}), fenced=fenced, eager_paths={"d"}
    )
    assert [source.path for source in plan.sources if source.is_deferred] == ["a"]


def _data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    def swap(sources: list[torch.Tensor]) -> None:
        sources[0].data = change(sources[0].data)

    return swap


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_data(lambda data: data.clone()), id="data swapped"),
        pytest.param(_data(lambda data: data.t()), id="transposed in place"),
        pytest.param(_data(lambda data: data.view(128, 512)), id="reshaped in place"),
        pytest.param(_data(lambda data: data[:100]), id="cut in place"),
        pytest.param(_data(lambda data: data.double()), id="another dtype"),
        pytest.param(
            _data(lambda data: data.view(torch.int32)), id="another dtype of the same bytes"
        ),
        pytest.param(lambda sources: sources[0].resize_(10, 10), id="shrunk"),
        pytest.param(lambda sources: sources[0].resize_(1000, 1000), id="grown"),
        pytest.param(lambda sources: sources[0].t_(), id="t_"),
        pytest.param(lambda sources: sources[0].requires_grad_(), id="unfrozen"),
        pytest.param(lambda sources: sources.append(torch.ones(3)), id="one more"),
        pytest.param(lambda sources: sources.pop(), id="one less"),
        pytest.param(
            lambda sources: sources.__setitem__(0, torch.randn(256, 256)),
            id="another deferred object",
        ),
        pytest.param(lambda sources: sources.__setitem__(1, torch.randn(4)), id="another shape"),
        pytest.param(
            lambda sources: sources.__setitem__(1, torch.zeros(3, dtype=torch.int32)),
            id="another object and dtype",
        ),
        pytest.param(lambda sources: sources.__setitem__(2, sources[2].clone()), id="a tie broken"),
        pytest.param(lambda sources: sources[2].t_(), id="a tie transposed"),
    ],
)
def test_a_change_of_layout_is_noticed_and_a_new_plan_is_right(
    change: Callable[[list[torch.Tensor]], None], arena: Arena, stager: Stager
) -> None:
    large = torch.randn(256, 256)
    sources = [large, torch.randn(3), large.detach()]
    plan = plan_of(*sources, deferred=True)
    assert plan.refresh(flatten(sources, plan.flat))
    change(sources)
    flat = flatten(sources, plan.flat)
    assert not plan.refresh(flat)
    assert_comes_back(compile_plan(flat), sources, arena, stager)


@pytest.mark.parametrize("is_by_data", [False, True])
def test_two_tensors_that_were_one_are_stored_apart_once_the_first_is_another(
    is_by_data: bool, arena: Arena, stager: Stager
) -> None:
    first = torch.randn(300)
    sources = [first, first.detach()]
    plan = plan_of(*sources)
    assert plan.refresh(flatten(sources, plan.flat))
    if is_by_data:
        first.data = first + 1
    else:
        sources[0] = first + 1
    flat = flatten(sources, plan.flat)
    assert not plan.refresh(flat)
    assert_comes_back(compile_plan(flat), sources, arena, stager)


def test_a_complex_tensor_conjugated_in_place_is_noticed(arena: Arena, stager: Stager) -> None:
    source = torch.randn(300, 300, dtype=torch.complex64)
    plan = plan_of(source, deferred=True)
    source.data = source.data.conj()
    flat = flatten([source], plan.flat)
    if plan.refresh(flat):
        assert_comes_back(plan, [source], arena, stager)
    else:
        assert_comes_back(compile_plan(flat), [source], arena, stager)


def test_a_storage_that_was_emptied_and_filled_again_is_captured_where_it_lies_now(
    arena: Arena, stager: Stager
) -> None:
    source = torch.randn(256, 256)
    plan = plan_of(source, deferred=True)
    pointer, storage = source.data_ptr(), source.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)  # a plan does not forbid it, as ``Tensor.numpy`` would
    in_its_place = [torch.zeros(256, 256) for _ in range(8)]
    storage.resize_(size)
    source.normal_()
    assert source.data_ptr() != pointer, in_its_place
    plan.refresh(flatten([source], plan.flat))
    for _ in range(2):
        (back,) = copied(plan, arena, stager, is_deferring=True)
        assert torch.equal(back, source)


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(100, 100),
        torch.randn(100, 100).t(),
        torch.randn(100, 200)[:, ::2],
        torch.randn(1, 100).expand(100, 100),
    ],
    ids=["dense", "transposed", "with holes", "expanded"],
)
def test_a_new_object_is_taken_over_or_refused_and_never_mistaken(
    other: torch.Tensor, arena: Arena, stager: Stager
) -> None:
    sources = [torch.randn(1_100_000), torch.randn(100, 100)]
    plan = plan_of(*sources)
    sources[1] = other
    for _ in range(2):
        flat = flatten(sources, plan.flat)
        if not plan.refresh(flat):
            plan = compile_plan(flat)
        assert_comes_back(plan, sources, arena, stager)
        if other.stride(0):
            other.normal_()


def test_an_equal_new_object_costs_no_new_plan(arena: Arena, stager: Stager) -> None:
    sources = [torch.randn(1_048_000), torch.randn(20_000)]  # the second straddles
    plan = plan_of(*sources)
    sources = [sources[0], torch.randn(20_000)]
    assert plan.refresh(flatten(sources, plan.flat))
    assert_comes_back(plan, sources, arena, stager)
