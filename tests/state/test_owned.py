"""What each rank has for itself is one value of a state, and comes back as it was."""

from __future__ import annotations

import random
from collections import OrderedDict

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from datastates.errors import Corrupt, Unsupported
from datastates.state.adapters import Adapted
from datastates.state.encoding import decode_values, encode_values
from datastates.state.generators import RngState
from datastates.state.geometry import stand_in
from datastates.state.per_rank import is_own, mark_per_rank
from datastates.state.sampler import PermutationSampler
from datastates.state.skeleton import decode_skeleton
from datastates.state.tree import PerRank, flatten, pack_tree, unflatten, unpack_tree
from tests.engine.build import leaves_of


def test_trees_of_other_form_on_each_rank_are_one_skeleton_and_come_back() -> None:
    trees = [
        {"seen": [1, 2], "at": torch.arange(4)},
        {"seen": [], "more": {"bytes": b"x", "order": OrderedDict(a=1)}},
    ]
    flats = [flatten({"data": PerRank(tree), "shared": 1.5}) for tree in trees]
    assert flats[0].skeleton == flats[1].skeleton
    assert flats[0].tensors == []
    for flat, tree in zip(flats, trees, strict=True):
        values = decode_values(encode_values(flat.values))
        for is_sketch in (False, True):
            back = unflatten(
                decode_skeleton(flat.skeleton.encoded), values, [], is_sketch=is_sketch
            )
            assert back["shared"] == 1.5
            assert list(map(str, leaves_of(back["data"]))) == list(map(str, leaves_of(tree)))


def test_tensors_of_any_form_come_back_from_what_is_packed() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    tree = {
        "turned": base.permute(2, 0, 1),
        "expanded": torch.arange(3.0)[:, None].expand(3, 5),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3, dtype=torch.int8),
        "conjugated": torch.complex(base, base).conj(),
    }
    array = np.arange(20_000)
    back = unpack_tree(pack_tree({**tree, "array": array}))
    assert np.array_equal(back["array"], array)
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor), name
    base.zero_()
    assert back["turned"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own[:-1], "does not decode"),
        (lambda own: [2, *own[1:]], "version 2"),
        (lambda own: [*own[:3], [["float32", [3], [1], b"1234"]]], "a tensor: 4 bytes for float32"),
        (lambda own: [*own[:3], [["float32", [1, 2], [1], b"12345678"]]], "does not decode"),
        (lambda own: [*own[:3], [["float32", [-2, -2], [-2, 1], bytes(16)]]], "does not decode"),
        (lambda own: [*own[:3], [["nothing", [1], [1], b"1234"]]], "no dtype 'nothing'"),
        (lambda own: [*own[:3], []], "ends early"),
        (lambda own: [own[0], own[1], [1, 2, 3], own[3]], "more values than"),
    ],
)
def test_bytes_that_do_not_agree_with_each_other_are_refused(change: object, message: str) -> None:
    data = msgspec.msgpack.decode(pack_tree({"at": torch.ones(1)}))
    assert torch.equal(unpack_tree(msgspec.msgpack.encode(data))["at"], torch.ones(1))
    with pytest.raises(Corrupt, match=message):
        # one of the above
        unpack_tree(msgspec.msgpack.encode(change(data)))  # type: ignore[operator]


def test_nothing_of_its_own_lies_within_what_is_its_own_or_with_other_ranks() -> None:
    with pytest.raises(Corrupt, match="holds another such thing"):
        unpack_tree(pack_tree([PerRank(1)]))
    with pytest.raises(Unsupported, match="a lies with several ranks"):
        pack_tree({"a": stand_in(torch.ones(1), [1])})


def test_generators_loaders_samplers_and_what_is_named_are_each_ranks_own() -> None:
    data = TensorDataset(torch.arange(4))
    own = [
        RngState(),
        random.Random(0),
        torch.Generator(),
        np.random.default_rng(0),
        DataLoader(data),
        RandomSampler(data),
    ]
    own += [PermutationSampler(4)]
    assert all(map(is_own, own))
    shared = [
        nn.Linear(1, 1),
        nn.ModuleList(),
        nn.ParameterDict(),
        torch.ones(2),
        [1],
        {"a": 1},
        3,
        "text",
    ]
    assert not any(map(is_own, shared))
    assert type(mark_per_rank({"ema": 1, "model": 2}, ["ema"])["ema"]) is PerRank


def test_a_tree_of_several_ranks_has_the_model_shared_and_the_numbers_of_each_rank_its_own() -> (
    None
):
    sampler = PermutationSampler(10)
    adapted = Adapted(
        {
            "model": nn.Linear(2, 2),
            "rng": RngState(),
            "data": {"sampler": sampler, "numbers": torch.Generator()},
        }
    )
    plain, shared = flatten(adapted.tree()), flatten(adapted.tree(is_shared=True))
    assert [leaf.path for leaf in shared.tensors] == ["model/weight", "model/bias"]
    back = unflatten(shared.skeleton, shared.values, [leaf.tensor for leaf in shared.tensors])
    before = unflatten(plain.skeleton, plain.values, [leaf.tensor for leaf in plain.tensors])
    assert list(map(str, leaves_of(back))) == list(map(str, leaves_of(before)))
