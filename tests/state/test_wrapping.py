"""Tensors that wrap others, as torchao's do, are stored by their inner tensors and come back in
place, or as new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import datastates
from datastates import Config, Repository
from datastates.errors import Corrupt, InvalidInput, Unsupported
from datastates.state.geometry import plain_tensors
from datastates.state.skeleton import Skeleton, decode_skeleton
from datastates.state.tree import flatten, unflatten

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


class Kind(Enum):
    """As torchao's kernel preference."""

    FAST = "fast"
    SLOW = "slow"


class Sizes(NamedTuple):
    """As torchao's options of matrix products."""

    block: int


@dataclass(frozen=True)
class Options:
    """As torchao's options of activations; ``__init__`` must not run when a state is read."""

    kind: Kind
    sizes: Sizes
    device: torch.device
    requires_grad: bool = False

    def __post_init__(self) -> None:
        Options.made += 1

    made = 0


class Scaled(torch.Tensor):
    """Codes and a scale; the metadata is whatever was given."""

    codes: torch.Tensor
    scale: torch.Tensor
    metadata: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, metadata: Any) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, device=codes.device, dtype=torch.float32
        )
        made.codes, made.scale, made.metadata = codes, scale, metadata
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.metadata

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], metadata: Any, shape: Any, strides: Any
    ) -> Scaled:
        return Scaled(inner["codes"], inner["scale"], metadata)

    @classmethod
    # as torch calls it
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].codes, args[0].scale, args[0].metadata)
        raise NotImplementedError(func)  # nothing but inner tensors may be touched


def options(
    kind: Kind = Kind.FAST, block: int = 4, *, requires_grad: bool = False
) -> dict[str, Any]:
    return {
        "options": Options(kind, Sizes(block), torch.device("cpu"), requires_grad),
        "dtype": torch.bfloat16,
        "list": [1, 2.5, None, "x", True],
        "shape": torch.Size([3]),
    }


def scaled(start: int = 0, size: int = 12, metadata: Any = None) -> Scaled:
    codes = torch.arange(start, start + size, dtype=torch.uint8 if size < 200 else torch.int32)
    return Scaled(
        codes.reshape(3, -1),
        torch.full((3,), float(start)),
        options() if metadata is None else metadata,
    )


def nested(start: int = 0) -> TwoTensor:
    one = torch.arange(6.0).reshape(2, 3) + start
    return TwoTensor(TwoTensor(one, one + 10), TwoTensor(one + 20, one + 30))


MADE: dict[str, Callable[[int], torch.Tensor]] = {
    "two": lambda start: TwoTensor(torch.ones(3) * start, torch.ones(3) + start),
    "nested": nested,
    "metadata": scaled,
    "large": lambda start: scaled(start, 3 << 20),
}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return type(one) is type(other) and all(
        map(torch.equal, plain_tensors(one), plain_tensors(other))
    )


@pytest.mark.parametrize("kind", MADE)
def test_a_parameter_that_wraps_tensors_comes_back_in_place(kind: str, repo: Repository) -> None:
    def model(start: int) -> Any:
        made = nn.Linear(2, 2)
        made.weight = nn.Parameter(MADE[kind](start), requires_grad=False)
        return made

    old, new = model(1), model(2)
    with repo.track(model=old) as run:
        run.capture()
    weight, inner = new.weight, plain_tensors(new.weight)
    assert repo.restore("main", model=new)
    assert new.weight is weight
    assert all(one is other for one, other in zip(plain_tensors(new.weight), inner, strict=True))
    assert equal(new.weight, old.weight)
    assert equal(repo.load("main")["model"]["weight"], old.weight)


@pytest.mark.parametrize("kind", MADE)
def test_a_value_that_wraps_tensors_is_overwritten_or_made_anew(
    kind: str, repo: Repository
) -> None:
    box: dict[str, Any] = {"same": MADE[kind](1), "other": MADE[kind](1)}
    with repo.track(box=box) as run:
        run.capture()
    fresh: dict[str, Any] = {"same": MADE[kind](2), "other": torch.zeros(2)}
    same = fresh["same"]
    assert repo.restore("main", box=fresh)
    assert fresh["same"] is same
    assert equal(fresh["same"], box["same"])
    assert equal(fresh["other"], box["other"])


def test_reading_a_state_runs_no_code_of_metadata(repo: Repository) -> None:
    with repo.track(box={"a": scaled()}) as run:
        run.capture()
    before = Options.made
    back = repo.load("main")["box"]["a"]
    assert Options.made == before
    assert back.metadata == options()


@pytest.mark.parametrize("metadata", [options(Kind.SLOW), options(block=8)])
def test_another_format_does_not_fit(metadata: Any, repo: Repository) -> None:
    model: Any = nn.Linear(2, 2)
    model.weight = nn.Parameter(scaled(), requires_grad=False)
    with repo.track(model=model) as run:
        run.capture()
    model.weight = nn.Parameter(scaled(5, metadata=metadata), requires_grad=False)
    with pytest.raises(InvalidInput, match="model/weight: the state has Scaled of float32"):
        repo.restore("main", model=model)
    assert model.weight.scale[0] == 5


def test_whether_a_gradient_is_required_is_no_part_of_the_format(repo: Repository) -> None:
    box = {"a": scaled(metadata=options(requires_grad=True))}
    with repo.track(box=box) as run:
        run.capture()
    live = box["a"] = scaled(5)
    assert repo.restore("main", box=box)
    assert box["a"] is live
    assert equal(live, scaled())


def test_neither_a_plain_tensor_nor_its_own_goes_into_the_other(repo: Repository) -> None:
    plain, wrapping = nn.Linear(4, 3), nn.Linear(4, 3)
    wrapping.weight = nn.Parameter(scaled(), requires_grad=False)
    for name, model, other in (("plain", plain, wrapping), ("scaled", wrapping, plain)):
        with repo.track(branch=name, model=model) as run:
            run.capture()
        with pytest.raises(InvalidInput, match=r"model/weight: the state has .*Scaled of"):
            repo.restore(name, model=other)
        assert repo.restore(name, model=other, strict=False).mismatched


def test_a_class_that_is_not_imported_gives_its_inner_tensors(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with repo.track(box={"a": scaled(1)}) as run:
        run.capture()
    monkeypatch.delattr(f"{__name__}.Scaled")
    back = repo.load("main")["box"]["a"]
    assert {name: part.tolist() for name, part in back.items()} == {
        "codes": scaled_codes(),
        "scale": [1.0] * 3,
    }


def scaled_codes() -> list[list[int]]:
    return torch.arange(1, 13).reshape(3, 4).tolist()


def renamed(packed: Any, old: str, new: str) -> Any:
    return (
        [renamed(each, old, new) for each in packed]
        if isinstance(packed, list)
        else new
        if packed == old
        else packed
    )


@pytest.mark.parametrize(
    "name", ["os:system", "datastates.state.tree:Owned", f"{__name__}:Outsider", "builtins:list"]
)
def test_metadata_makes_no_object_of_a_class_that_is_no_metadata(name: str) -> None:
    flat = flatten({"a": scaled()})
    root, (*node, metadata), *rest = flat.skeleton.nodes
    forged = msgspec.msgpack.encode(
        renamed(msgspec.msgpack.decode(metadata), f"{__name__}:Options", name)
    )
    assert forged != metadata
    with pytest.raises(Corrupt, match="does not come back"):
        unflatten(
            Skeleton([root, (*node, forged), *rest]),
            flat.values,
            [leaf.tensor for leaf in flat.tensors],
        )


@pytest.mark.parametrize(
    "name", ["torch:Tensor", "torch.nested._internal.nested_tensor:NestedTensor", "torch:nn", "a:b"]
)
def test_a_state_names_no_tensor_class_but_those_that_are_stored(name: str) -> None:
    flat = flatten({"a": scaled()})
    root, (tag, _, *fields), *rest = flat.skeleton.nodes
    skeleton = decode_skeleton(Skeleton([root, (tag, name, *fields), *rest]).encoded)
    try:
        back = unflatten(skeleton, flat.values, [leaf.tensor for leaf in flat.tensors])
    except Corrupt:
        return
    assert list(back["a"]) == ["codes", "scale"], "plain parts"


class WithTensor(TwoTensor):
    """Its metadata cannot be stored."""

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], {"more": object()}


def refused() -> dict[str, Callable[[], torch.Tensor]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake() -> torch.Tensor:
        with FakeTensorMode():
            return torch.ones(2)

    class Plain(torch.Tensor):
        pass

    return {
        # it has no types
        "metadata": lambda: WithTensor(torch.ones(2), torch.ones(2)),  # type: ignore[no-untyped-call]
        "nested": lambda: torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(3)], layout=torch.jagged
        ),
        "fake": fake,
        "no parts": lambda: torch.ones(2).as_subclass(Plain),
    }


@pytest.mark.parametrize("kind", ["metadata", "nested", "fake", "no parts"])
def test_what_cannot_be_taken_apart_is_refused_when_it_is_tracked(
    kind: str, repo: Repository
) -> None:
    with pytest.raises(Unsupported, match=r"^box/a is a"), repo.track(box={"a": refused()[kind]()}):
        pass
