"""What goes into a state comes out of it; what cannot go in safely is refused by name."""

from __future__ import annotations

import copy
import enum
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.errors import Corrupt, DatastatesError, InvalidInput, Unsupported
from datastates.state.encoding import decode_values, encode_values, register_encoder
from datastates.state.skeleton import decode_skeleton
from datastates.state.tree import flatten, unflatten
from tests.support.effort import examples
from tests.support.strategies import assert_same, tree_dicts, trees


def there_and_back(tree: object) -> Any:
    """Flatten, through the encoded form, and unflatten with copies of the tensors."""
    flat = flatten(tree)
    skeleton, values = flat.skeleton.encoded, encode_values(flat.values)
    return unflatten(
        decode_skeleton(skeleton),
        decode_values(values),
        [leaf.tensor.detach() for leaf in flat.tensors],
    )


def paths_of(tree: object) -> list[str]:
    return [leaf.path for leaf in flatten(tree).tensors]


@given(trees)
@settings(max_examples=examples(400), deadline=None)
def test_any_tree_comes_back_in_type_order_and_bits(tree: object) -> None:
    assert_same(there_and_back(tree), tree)


@given(tree_dicts(trees))
@settings(max_examples=examples(200), deadline=None)
def test_paths_are_unique_and_the_skeleton_is_stable(tree: dict[Any, Any]) -> None:
    first = flatten(tree)
    paths = [leaf.path for leaf in first.tensors]
    assert len(set(paths)) == len(paths)
    again = flatten(tree)
    assert again.skeleton == first.skeleton
    assert decode_skeleton(first.skeleton.encoded) == first.skeleton
    assert decode_skeleton(first.skeleton.encoded).paths == first.skeleton.paths == tuple(paths)
    assert encode_values(again.values) == encode_values(first.values)
    later = flatten(tree, first)
    assert later.skeleton is first.skeleton
    assert [leaf.path for leaf in later.tensors] == paths


# A real training


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def real_state() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    model.head(model.norm(model.embed(torch.arange(7)))).sum().backward()
    optimizer.step()
    scheduler.step()
    numpy_rng = np.random.default_rng(3)
    return {
        "model": model.state_dict(keep_vars=True),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng": {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "numpy_generator": numpy_rng.bit_generator.state,
        },
        "loader": {
            "_index_sampler_state": None,
            "_num_yielded": 3,
            "snapshot": {"worker_0": {"worker_id": 0, "dataset_state": None}},
        },
    }


def test_a_real_training_comes_back() -> None:
    state = real_state()
    back = there_and_back(state)
    assert type(back["model"]) is OrderedDict
    assert vars(back["model"]) == vars(state["model"]) != {}
    assert list(back["model"]) == list(state["model"])
    assert_same(back["optimizer"], state["optimizer"])
    assert_same(back["scheduler"], state["scheduler"])
    assert type(back["scheduler"]["milestones"]) is Counter
    assert_same(back["scaler"], state["scaler"])
    assert_same(back["loader"], state["loader"])


def test_random_states_that_came_back_go_on_alike() -> None:
    back = there_and_back(real_state()["rng"])
    python, legacy, generator = random.Random(), np.random.RandomState(), np.random.default_rng()
    python.setstate(back["python"])
    assert python.random() == random.random()
    legacy.set_state(back["numpy"])
    assert legacy.random_sample() == np.random.random_sample()
    generator.bit_generator.state = back["numpy_generator"]
    assert generator.random() == np.random.default_rng(3).random()
    torch.set_rng_state(back["torch"])


def test_the_leaf_of_a_parameter_is_the_live_parameter() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    (leaf,) = flatten({"w": weight}).tensors
    assert leaf.tensor is weight


def test_tied_weights_are_two_leaves_of_one_memory() -> None:
    flat = flatten(real_state()["model"])
    by_path = {leaf.path: leaf.tensor for leaf in flat.tensors}
    assert by_path["embed.weight"].data_ptr() == by_path["head.weight"].data_ptr()
    back = unflatten(flat.skeleton, flat.values, [leaf.tensor for leaf in flat.tensors])
    assert back["embed.weight"] is back["head.weight"]


# Stable between captures


def test_changed_values_and_tensors_keep_the_skeleton_and_the_paths() -> None:
    weight, seed = torch.zeros(3), torch.zeros(2, dtype=torch.uint8)
    first = flatten(
        {"w": weight, "seed": seed, "lr": 0.1, "best": None, "history": [], "counts": Counter()}
    )
    later = flatten(
        {
            "w": weight,
            "seed": seed.clone(),
            "lr": 3,
            "best": "x",
            "history": [0.1, 2],
            "counts": Counter([1]),
        },
        first,
    )
    assert later.skeleton is first.skeleton
    assert later.tensors[0] is first.tensors[0]
    assert later.tensors[1].tensor is not seed
    assert [leaf.path for leaf in later.tensors] == ["w", "seed"]
    assert (
        flatten(
            {"w": weight, "seed": seed, "lr": 0.2, "best": 0, "history": [], "counts": Counter()},
            first,
        ).tensors
        is first.tensors
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(extra=1),
        lambda tree: tree.update(w=1),
        lambda tree: tree.pop("lr"),
        lambda tree: tree.update({True: tree.pop(1)}),
        lambda tree: tree.update({"lr": tree.pop("lr")}),
        lambda tree: tree.update(list=(torch.zeros(1),)),
        lambda tree: tree.update(list=[torch.zeros(1)] * 2),
    ],
    ids=[
        "added",
        "tensor to value",
        "removed",
        "key of another type",
        "order",
        "list to tuple",
        "longer",
    ],
)
def test_a_changed_tree_never_passes_for_the_previous_one(
    change: Callable[[dict[Any, Any]], Any],
) -> None:
    tree: dict[Any, Any] = {"w": torch.zeros(3), "lr": 0.1, "list": [torch.zeros(1)], 1: 2}
    first = flatten(tree)
    change(tree)
    later = flatten(tree, first)
    assert later.skeleton != first.skeleton
    assert [leaf.path for leaf in later.tensors] == paths_of(tree)
    assert_same(
        unflatten(later.skeleton, later.values, [leaf.tensor for leaf in later.tensors]), tree
    )


def test_many_tensors_seen_before_are_taken_at_once_and_a_stranger_among_them_is_not() -> None:
    tree: dict[str, Any] = {f"w{index}": torch.full((1,), float(index)) for index in range(20)}
    first = flatten(tree)
    assert flatten(tree, first).tensors is first.tensors
    tree["w7"] = torch.eye(3).to_sparse()
    later = flatten(tree, first)
    assert [leaf.path for leaf in later.tensors][6:10] == ["w6", "w7/indices", "w7/values", "w8"]
    tree["w7"] = torch.ones(2, device="meta")
    with pytest.raises(Unsupported, match="w7 is a meta tensor"):
        flatten(tree, first)


def test_values_share_nothing_with_the_live_tree() -> None:
    array, history, buffer = np.zeros(3), [1.0], bytearray(b"a")
    tree = {"array": array, "history": history, "buffer": buffer, "set": {1}, "deque": deque([1])}
    expected = copy.deepcopy(tree)
    flat = flatten(tree)
    array[0], buffer[0] = 9, 9
    history.append(2.0)
    tree["set"].add(2)  # type: ignore[attr-defined]  # a set
    tree["deque"].append(2)  # type: ignore[attr-defined]  # a deque
    assert_same(unflatten(flat.skeleton, flat.values, []), expected)


def test_a_tensor_that_turned_into_another_kind_since_is_seen() -> None:
    tree = {f"w{index}": torch.ones(1) for index in range(20)}
    first = flatten(tree)
    torch.utils.swap_tensors(tree["w3"], torch.ones(1).as_subclass(Sub))
    with pytest.raises(Unsupported, match=r"w3 is a tensor subclass, .*Sub"):
        flatten(tree, first)


# Paths


def test_paths_join_escaped_keys() -> None:
    leaf = torch.zeros(1)
    assert paths_of({"a/b": {"c%": [leaf, {"": leaf}]}}) == ["a%2Fb/c%25/0", "a%2Fb/c%25/1/%"]
    assert paths_of(leaf) == [""]
    assert paths_of({0: leaf, None: leaf, 1.5: leaf, ("a", 1): leaf}) == [
        "0",
        "None",
        "1.5",
        "('a', 1)",
    ]


def test_keys_that_look_alike_have_paths_apart() -> None:
    leaf = torch.zeros(1)
    tree: dict[Any, Any] = {
        1: leaf,
        "1": leaf,
        "1%int": leaf,
        "None": leaf,
        None: leaf,
        float("nan"): leaf,
        float("nan"): leaf,
    }
    assert paths_of(tree) == ["1%int", "1", "1%25int", "None", "None%NoneType", "nan", "nan%float"]
    assert [type(key) for key in there_and_back(tree)] == [
        int,
        str,
        str,
        str,
        type(None),
        float,
        float,
    ]


def test_bool_int_and_float_keys_are_told_apart() -> None:
    for key in (True, 1, 1.0, False, 0, 0.0, -0.0):
        (back,) = there_and_back({key: torch.zeros(1)})
        assert_same(back, key)


# Odd types


def test_a_defaultdict_keeps_a_factory_of_pythons_own() -> None:
    back = there_and_back({"a": defaultdict(list, x=[torch.ones(1)]), "b": defaultdict(None)})
    back["a"]["new"].append(1)
    with pytest.raises(KeyError):
        back["b"]["new"]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    "dtype", [np.float64, ">u2", "datetime64[ns]", "U3", [("a", "i4"), ("b", "f4")]]
)
def test_large_arrays_are_leaves(dtype: Any, order: Any) -> None:
    array = np.zeros((300, 200), dtype, order=order)
    array[5:9] = np.ones((), dtype) if np.dtype(dtype).kind != "U" else "abc"
    flat = flatten({"replay": array})
    assert [leaf.path for leaf in flat.tensors] == ["replay"]
    assert not flat.values
    back = there_and_back({"replay": array})["replay"]
    assert_same(back, array)
    assert back.flags.f_contiguous == array.flags.f_contiguous


@pytest.mark.parametrize(
    "array",
    [np.arange(40000.0)[::2], np.arange(20000.0)[::-1], np.broadcast_to(np.arange(4.0), (9000, 4))],
)
def test_large_arrays_that_are_strided_or_read_only_are_leaves_too(
    array: np.ndarray[Any, Any],
) -> None:
    assert len(flatten({"a": array}).tensors) == 1
    back = there_and_back({"a": array})["a"]
    assert np.array_equal(back, array)
    back[0] = 5


def sparse(layout: torch.layout) -> torch.Tensor:
    dense = torch.zeros(4, 6)
    dense[1, 2], dense[3, 5] = 1.5, -2
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        return dense.to_sparse(layout=layout, blocksize=(2, 3))
    return dense.to_sparse(layout=layout)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "layout",
    [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc],
    ids=str,
)
def test_sparse_tensors_come_back(layout: torch.layout) -> None:
    tensor = sparse(layout)
    flat = flatten({"s": tensor})
    assert all(
        leaf.path.startswith("s/") and leaf.tensor.layout is torch.strided for leaf in flat.tensors
    )
    assert_same(there_and_back({"s": tensor})["s"], tensor)


def test_a_sparse_tensor_keeps_whether_it_is_coalesced() -> None:
    places = torch.tensor([[0, 0, 1], [1, 1, 0]])
    twice = torch.sparse_coo_tensor(
        places, torch.tensor([1.0, 2.0, 3.0]), (2, 2), check_invariants=True
    )
    back = there_and_back([twice, twice.coalesce()])
    assert [tensor.is_coalesced() for tensor in back] == [False, True]
    assert torch.equal(back[0]._values(), twice._values())


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_indices_outside_the_tensor_are_corrupt() -> None:
    flat = flatten(torch.eye(3).to_sparse())
    indices, values = (leaf.tensor for leaf in flat.tensors)
    with pytest.raises(Corrupt, match="coo"):
        unflatten(flat.skeleton, flat.values, [indices + 7, values])


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantized_tensors_come_back(dtype: torch.dtype) -> None:
    plain = torch.randn(3, 4)
    per_tensor = torch.quantize_per_tensor(plain, 0.1, 3, dtype)
    per_channel = torch.quantize_per_channel(
        plain, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, dtype
    )
    back = there_and_back({"t": per_tensor, "c": per_channel})
    assert_same(back["t"], per_tensor)
    assert (back["t"].q_scale(), back["t"].q_zero_point()) == (0.1, 3)
    assert_same(back["c"], per_channel)


# What is refused


class Custom:
    pass


class Color(enum.IntEnum):
    RED = 1


class Sub(torch.Tensor):
    pass


Point = namedtuple("Point", "x y")  # the untyped form is what users have


def module_function() -> None:
    pass


def nested_tensor() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Custom(), r"Custom.*register_encoder\(Custom"),
    (lambda: module_function, "the function 'module_function'"),
    (lambda: lambda: 0, "the function '.*<lambda>'"),
    (lambda: Color.RED, r"Color.*register_encoder"),
    (lambda: Point(1, 2), r"Point.*register_encoder"),
    (lambda: Point, "type"),
    (lambda: torch.ones(2, device="meta"), "meta tensor.*to_empty"),
    (lambda: torch.ones(2).as_subclass(Sub), "tensor subclass.*Sub"),
    (lambda: torch.nn.parameter.UninitializedParameter(), "UninitializedParameter"),
    (nested_tensor, "nested|NestedTensor"),
    (lambda: np.array([object()]), "NumPy dtype object"),
    (lambda: np.zeros(2, [("a", object)]), "NumPy dtype"),
    (lambda: np.ma.masked_array([1]), "MaskedArray"),
    (lambda: {object(): 1}, "key"),
    (lambda: {torch.ones(1): 1}, "key"),
    (lambda: {"\ud800": 1}, "Unicode"),
    (lambda: {1, Color.RED, Custom}, "type"),
    (lambda: defaultdict(lambda: 0), "defaultdict whose factory"),
    (lambda: torch.Generator(), "Generator"),
    (lambda: Counter([Custom()]), "Custom"),
    (lambda: iter([1]), "list_iterator"),
]


@pytest.mark.parametrize(("make", "pattern"), REFUSED)
def test_what_has_no_safe_encoding_is_refused_with_its_path(
    make: Callable[[], object], pattern: str
) -> None:
    tree = {"model": {"w": torch.ones(1)}, "extra": [1, {"deep": make()}], "after": 2}
    with pytest.raises(Unsupported, match=pattern) as caught:
        flatten(tree)
    assert "extra/1/deep" in str(caught.value) or "Unicode" in str(caught.value)
    with pytest.raises(Unsupported, match=pattern):
        flatten(tree, flatten({"model": {}}))


@pytest.mark.parametrize("kind", [list, dict, OrderedDict, deque])
def test_a_cycle_is_refused(kind: type[Any]) -> None:
    container = kind()
    if isinstance(container, dict):
        container.update(a=1, b=container)
    else:
        container += [1, container]
    with pytest.raises(Unsupported, match=r"^state/.*contains itself"):
        flatten({"state": container})


def test_metadata_that_contains_itself_is_refused() -> None:
    ordered: OrderedDict[str, Any] = OrderedDict()
    ordered._metadata = {"self": ordered}  # type: ignore[attr-defined]  # as torch sets it
    ordered._metadata["self"] = ordered._metadata  # type: ignore[attr-defined]  # as torch sets it
    with pytest.raises(Unsupported, match="contains itself"):
        flatten({"state": ordered})


def test_depth_up_to_the_limit_works_and_beyond_it_is_refused() -> None:
    deep: Any = torch.ones(1)
    for _ in range(99):
        deep = [deep]
    assert len(paths_of(deep)[0].split("/")) == 99
    there_and_back(deep)
    with pytest.raises(Unsupported, match="more than 100 deep"):
        flatten([[[deep]]])


# Encoders


@dataclass
class Window:
    mean: torch.Tensor
    names: tuple[str, ...]


@pytest.fixture
def window_encoder() -> None:
    register_encoder(
        Window,
        "tests.window",
        lambda w: {"mean": w.mean, "names": w.names},
        lambda plain: Window(**plain),
    )


@pytest.mark.usefixtures("window_encoder")
def test_a_registered_type_comes_back() -> None:
    window = Window(torch.arange(3.0), ("a", "b"))
    assert paths_of({"x": [window]}) == ["x/0/mean"]
    back = there_and_back({"x": [window]})["x"][0]
    assert type(back) is Window
    assert_same((back.mean, back.names), (window.mean, window.names))


@pytest.mark.usefixtures("window_encoder")
def test_an_encoder_that_is_not_registered_where_the_state_is_read_is_named() -> None:
    flat = flatten({"x": Window(torch.ones(1), ())})
    renamed = flat.skeleton.encoded.replace(b"tests.window", b"tests.absent")
    with pytest.raises(
        InvalidInput, match=r"'tests\.absent', which is not registered.*register_encoder"
    ):
        unflatten(decode_skeleton(renamed), flat.values, [leaf.tensor for leaf in flat.tensors])


def test_an_encoder_that_fails_is_named_with_the_path() -> None:
    class Broken:
        pass

    register_encoder(Broken, "tests.broken", lambda _: 1 / 0, lambda plain: plain)
    with pytest.raises(
        Unsupported,
        match=r"a/0 of type .*Broken was refused by its encoder 'tests\.broken': division by zero",
    ):
        flatten({"a": [Broken()]})


@pytest.mark.usefixtures("window_encoder")
def test_tensors_that_are_left_out_leave_none_in_their_place() -> None:
    tree = {
        "a": torch.ones(1),
        "s": torch.eye(3).to_sparse(),
        "n": np.zeros(20_000),
        "w": [Window(torch.ones(1), ()), 5],
        "b": torch.ones(2),
    }
    flat = flatten(tree)
    tensors = [leaf.tensor if leaf.path == "b" else None for leaf in flat.tensors]
    back = unflatten(flat.skeleton, flat.values, tensors)
    assert_same(back, {"a": None, "s": None, "n": None, "w": [None, 5], "b": tree["b"]})


def test_a_decoder_that_fails_is_named() -> None:
    class Fussy:
        pass

    register_encoder(Fussy, "tests.fussy", lambda _: 1, lambda _: Fussy())
    flat = flatten(Fussy())
    register_encoder(Fussy, "tests.fussy", lambda _: 1, lambda _: 1 / 0)
    with pytest.raises(
        InvalidInput, match=r"'tests\.fussy' refused what it once encoded: division"
    ):
        unflatten(flat.skeleton, flat.values, [])


# Garbage


def parts() -> tuple[bytes, bytes, list[torch.Tensor]]:
    odd: dict[Any, Any] = {
        "sparse": torch.eye(2).to_sparse(),
        1: {2.5: deque([torch.ones(1)], 4)},
        "big": 1 << 90,
    }
    flat = flatten({**real_state(), **odd})
    return (
        flat.skeleton.encoded,
        encode_values(flat.values),
        [leaf.tensor for leaf in flat.tensors],
    )


SKELETON, VALUES, TENSORS = parts()


def read(skeleton: bytes, values: bytes) -> None:
    """Either it reads, or it says that it cannot; never anything else."""
    try:
        decoded = decode_skeleton(skeleton)
        assert len(decoded.paths) <= len(skeleton)
        unflatten(decoded, decode_values(values), TENSORS)
    except DatastatesError as exc:
        assert str(exc)  # noqa: PT017  # both outcomes are right


@given(st.data())
@settings(max_examples=examples(400), deadline=None)
def test_flipped_bytes_of_skeleton_and_values_crash_nothing(data: st.DataObject) -> None:
    skeleton, values = bytearray(SKELETON), bytearray(VALUES)
    for buffer in (skeleton, values):
        for _ in range(data.draw(st.integers(0, 3))):
            buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(skeleton), bytes(values))


_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=2), children, max_size=2)
    ),
    max_leaves=8,
)
_NODE_TAGS = ("d", "D", "o", "l", "t", "q", "x", "a", "coo", "csr", "bsc", "qt", "qc", "z")
_VALUE_TAGS = (
    *(
        "int",
        "str",
        "complex",
        "bytearray",
        "ellipsis",
        "slice",
        "range",
        "list",
        "tuple",
        "deque",
        "set",
        "dict",
        "odict",
        "counter",
    ),
    *("size", "device", "array", "nscalar", "ndtype", "nstr", "nbytes", "dtype", "z"),
)


def tagged(tags: tuple[str, ...]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.sampled_from(tags), st.lists(_plain, max_size=4)).map(
        lambda node: [node[0], *node[1]]
    )


_nodes, _packed = tagged(_NODE_TAGS), tagged(_VALUE_TAGS)


@given(
    st.lists(_nodes | st.integers(0, 2), max_size=6) | _plain,
    st.lists(_packed | _plain, max_size=4) | _plain,
)
@settings(max_examples=examples(600), deadline=None)
def test_made_up_skeletons_and_values_crash_nothing(nodes: object, values: object) -> None:
    read(msgspec.msgpack.encode(nodes), msgspec.msgpack.encode(values))
    for value in values if isinstance(values, list) else []:
        read(msgspec.msgpack.encode([1]), msgspec.msgpack.encode([value]))


@given(st.binary(max_size=60))
@settings(max_examples=examples(300), deadline=None)
def test_random_bytes_crash_nothing(data: bytes) -> None:
    read(data, data)


@pytest.mark.parametrize(
    "bomb",
    [b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"],
)
def test_bombs_are_corrupt(bomb: bytes) -> None:
    with pytest.raises(Corrupt, match="the file"):
        decode_skeleton(bomb, source="the file")
    with pytest.raises(Corrupt, match="the file"):
        decode_values(bomb, source="the file")


def test_a_count_that_no_nodes_follow_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="ends before"):
        decode_skeleton(msgspec.msgpack.encode([["l", (1 << 63)], 0]))
    with pytest.raises(Corrupt, match="continues"):
        decode_skeleton(msgspec.msgpack.encode([0, 0]))


def test_a_skeleton_deeper_than_the_limit_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="more than 100 deep"):
        unflatten(decode_skeleton(msgspec.msgpack.encode([["l", 1]] * 5000 + [1])), [0], [])


def test_leaves_that_are_missing_or_left_over_are_corrupt() -> None:
    flat = flatten({"w": torch.ones(1), "lr": 0.1})
    tensor = torch.ones(1)
    for values, tensors in (
        ([], [tensor]),
        ([0.1], []),
        ([0.1, 0.1], [tensor]),
        ([0.1], [tensor, tensor]),
    ):
        with pytest.raises(Corrupt, match="skeleton needs"):
            unflatten(flat.skeleton, values, tensors)


@dataclass(frozen=True)
class Reading:
    """A number with a unit."""

    number: float
    unit: str = "m"


COUNT = itertools.count()
WRONG: dict[str, tuple[Callable[[Any], object], Callable[[Any], Any], str]] = {
    "forgets": (
        lambda r: {"number": r.number, "unit": r.unit},
        lambda plain: Reading(plain["number"]),
        "'unit': 's'.*'unit': 'm'",
    ),
    "another type": (
        lambda r: [r.number, r.unit],
        lambda plain: plain,
        "failed on what was encoded",
    ),
    "raises": (
        lambda r: [r.number, r.unit],
        lambda plain: Reading(**plain),
        "failed on what was encoded: TypeError",
    ),
    "counts": (lambda r: [r.number, next(COUNT)], lambda plain: Reading(plain[0]), "made"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("is_checking", [True, False])
def test_an_encoder_that_does_not_bring_back_what_it_took_is_refused(
    kind: str, is_checking: bool
) -> None:
    encode, decode, said = WRONG[kind]
    register_encoder(Reading, "tests.reading", encode, decode)
    with pytest.raises(
        Unsupported, match=rf"^a/0 of type Reading does not come back: .*'tests\.reading'.*{said}"
    ):
        flatten({"a": [Reading(2.5, "s")]}, is_checking=is_checking)


def test_each_object_is_checked_when_it_is_tracked_and_later_only_the_first() -> None:
    decoded: list[object] = []

    def decode(plain: Any) -> Reading:
        decoded.append(plain)
        torch.rand(1)  # the training goes on as if nobody had looked
        return Reading(*plain)

    register_encoder(Reading, "tests.reading", lambda r: [r.number, r.unit], decode)
    before = torch.get_rng_state()
    flatten({"a": Reading(1.0), "b": Reading(2.0)})
    assert len(decoded) == 1
    flatten({"a": Reading(1.0), "b": Reading(2.0)}, is_checking=True)
    assert len(decoded) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_an_encoder_that_fits_some_objects_is_refused_for_the_others() -> None:
    register_encoder(
        Reading, "tests.reading", lambda r: [r.number, r.unit], lambda plain: Reading(plain[0])
    )
    flatten({"a": Reading(1.0)}, is_checking=True)
    with pytest.raises(Unsupported, match=r"^b of type Reading"):
        flatten({"a": Reading(1.0), "b": Reading(1.0, "s")}, is_checking=True)


def test_a_tensor_on_no_device_of_an_encoder_is_refused_by_its_own_path() -> None:
    register_encoder(
        Reading,
        "tests.reading",
        lambda r: {"w": torch.empty(2, device="meta")},
        lambda plain: Reading(1.0),
    )
    with pytest.raises(Unsupported, match=r"^a/w is a meta tensor"):
        flatten({"a": Reading(1.0)})
