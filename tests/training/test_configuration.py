"""Configurations of scripts as plain values by flat names."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from datastates.errors import InvalidInput
from datastates.training.configuration import configuration

_names = st.text(
    st.characters(exclude_characters=".\x00", exclude_categories=["Cs"]), min_size=1, max_size=5
)
_plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text("abc ü", max_size=5),
)
_trees = st.recursive(
    _plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_names, inner, max_size=3)
    ),
    max_leaves=8,
)


def leaves(tree: object, *path: str) -> dict[str, object]:
    """The plain values of nested dicts and lists, by brute force."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            key: value
            for name, inner in items
            for key, value in leaves(inner, *path, str(name)).items()
        }
    return {".".join(path): tree}


@given(st.dictionaries(_names, _trees, max_size=4))
def test_every_plain_value_is_kept_under_the_names_that_lead_to_it(tree: dict[str, Any]) -> None:
    found = configuration(tree)
    expected = leaves(tree)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] in (value, "***")
        assert type(found[key]) in (type(value), str)


@given(st.dictionaries(_names, _trees, max_size=4))
def test_a_namespace_says_what_its_dictionary_says(tree: dict[str, Any]) -> None:
    assert configuration(argparse.Namespace(**tree)) == configuration(tree)


@given(st.dictionaries(_names, _trees, max_size=4))
def test_a_flat_configuration_stays_as_it_is(tree: dict[str, Any]) -> None:
    assert configuration(configuration(tree)) == configuration(tree)


class Conf(Mapping[str, Any]):
    """A mapping with attributes, as OmegaConf has them."""

    def __init__(self, **held: Any) -> None:
        self._held = held

    def __getitem__(self, key: str) -> Any:
        if self._held[key] == "???":
            raise LookupError(f"missing mandatory value: {key}")
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclasses.dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


class Struct(msgspec.Struct):
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


Named = collections.namedtuple("Named", ("lr", "betas"))


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 0.1, "betas": [0.9, 0.99]},
        Conf(lr=0.1, betas=(0.9, 0.99)),
        argparse.Namespace(lr=0.1, betas=[0.9, 0.99]),
        SimpleNamespace(lr=0.1, betas=collections.deque([0.9, 0.99])),
        Optimizer(),
        Struct(),
        Named(0.1, (0.9, 0.99)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_whatever_holds_the_configuration_is_read(given: object) -> None:
    flat = {"lr": 0.1, "betas.0": 0.9, "betas.1": 0.99}
    assert configuration(given) == flat
    assert configuration({"optimizer": given}) == {
        f"optimizer.{key}": value for key, value in flat.items()
    }


class Mode(enum.Enum):
    FAST = "fast"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (torch.tensor(2), 2),
        (torch.tensor(0.25), 0.25),
        (Path("data/x"), "data/x"),
        (Mode.FAST, "fast"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cpu"), "cpu"),
        (np.dtype("int16"), "int16"),
        (nn.GELU, "torch.nn.modules.activation.GELU"),
        (torch.relu, "torch.relu"),
        (math, "math"),
        (math.inf, math.inf),
        (1j, "1j"),
        ({3, 1}, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_people_put_into_configurations_is_kept_as_they_expect(
    value: object, kept: object
) -> None:
    found = configuration({"x": value})
    if kept is None:
        assert found == {"x.0": 1, "x.1": 3}
    else:
        assert found["x"] == kept or str(found["x"]).endswith("relu")
        assert type(found["x"]) is type(kept)


def test_secrets_are_masked() -> None:
    given = {"hub": {"api_key": "hush", "url": "https://me:hush@h/x"}, "max_tokens": 5}
    assert configuration(given) == {
        "hub.api_key": "***",
        "hub.url": "https://me:***@h/x",
        "max_tokens": 5,
    }


def test_nothing_is_nothing() -> None:
    assert configuration(None) == configuration({}) == configuration(argparse.Namespace()) == {}


def itself() -> dict[str, Any]:
    held: dict[str, Any] = {}
    held["again"] = {"and": held}
    return held


def deep(depth: int) -> dict[str, Any]:
    return {"x": deep(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"model": {"net": nn.Linear(1, 1)}},
            r"config\.model\.net is .*Linear.*give a text, a number",
        ),
        ({"data": torch.zeros(3)}, r"config\.data is "),
        ({"raw": b"x"}, r"config\.raw is b'x'"),
        ({"big": 2**70}, r"config\.big is .*64 bits"),
        ({"text": "a\x00"}, r"config\.text is .*NUL"),
        ({"": 1}, "give each value a name"),
        ({"a": {None: 1}}, r"config\.a has the name None"),
        ({"a.b": 1, "a": {"b": 2}}, r"config says a\.b twice"),
        ({"x" * 300: 1}, "1 to 255 characters"),
        ({"datastates": {"folder": 1}}, r"begin with 'datastates\.'"),
        (itself(), r"holds itself at again\.and"),
        (deep(60), "nested over 32 deep"),
        ({str(index): 0 for index in range(2_001)}, "over 2,000 values"),
        (Conf(lr="???"), "missing mandatory value: lr"),
        (nn.Linear(1, 1), r"objects=\{'config'"),
        ([1, 2], "give a mapping"),
        (3, "config is 3: give a mapping"),
        ("lr=3", "give a mapping"),
        (Optimizer, "give a mapping"),
    ],
)
def test_what_no_search_could_compare_is_refused_by_its_name(given: object, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        configuration(given)
