"""What shares memory in a script that starts, and was captured apart, is restored apart."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import datastates
from datastates import Config, Repository
from datastates.errors import InvalidInput
from datastates.state import in_place
from datastates.state.adapters import Adapted
from datastates.state.geometry import memory_key
from datastates.state.restore import restore_into
from tests.state.test_optimizer_state import stored

torch.set_num_threads(1)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=128 << 20, durable_interval_s=None)
    ) as opened:
        yield opened


def train(
    repo: Repository,
    until: int,
    *,
    width: int = 4,
    is_average_first: bool = False,
    branch: str = "main",
) -> list[torch.Tensor]:
    """Go on, or begin; the weights and their average at the end.

    The average begins as an alias of the weights."""
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tracked = {"model": model, "optimizer": optimizer, "average": average}
    with repo.track(
        branch=branch,
        objects={name: tracked[name] for name in sorted(tracked, reverse=not is_average_first)},
    ) as run:
        for step in range(run.step, until):
            if step == 4:
                model.bias.requires_grad_(True)
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, width)).square().sum().backward()
            optimizer.step()
            for name, parameter in model.named_parameters():
                average[name] = 0.5 * average[name] + 0.5 * parameter.detach()
            run.capture()
    return [*(each.detach().clone() for each in model.parameters()), *average.values()]


@pytest.mark.parametrize("is_average_first", [True, False])
@pytest.mark.parametrize("width", [4, 1600], ids=["copied", "read into its place"])
def test_an_average_that_begins_as_an_alias_of_the_weights_goes_on_apart_from_them(
    repo: Repository, width: int, *, is_average_first: bool
) -> None:
    """Its bias, frozen until step 4, is equal to the average of it where the training stops, and
    still another tensor."""
    expected = train(repo, 6, width=width, branch="whole")
    train(repo, 3, width=width, is_average_first=is_average_first)
    found = train(repo, 6, width=width, is_average_first=is_average_first)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], found[2])


BEST: dict[str, Callable[[torch.Tensor], Any]] = {
    "in a dict": lambda weight: {"best": weight.detach()},
    "in a list": lambda weight: [weight.detach()],
    "in a deque": lambda weight: deque([weight.detach()]),
    "in a tuple": lambda weight: {"best": (1, weight.detach())},
    "as an array": lambda weight: {"best": weight.detach().numpy()},
    "as a transposed array": lambda weight: {"best": weight.detach().numpy().T},
    "as a part": lambda weight: {"best": weight.detach()[:, 1:]},
    "as a reversed array": lambda weight: {"best": weight.detach().numpy()[::-1]},
}


def as_arrays(found: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(found, dict | list | tuple | deque):
        return [
            each
            for child in (found.values() if isinstance(found, dict) else found)
            for each in as_arrays(child)
        ]
    return [found.numpy() if isinstance(found, torch.Tensor) else np.asarray(found)]


@pytest.mark.parametrize("kind", BEST)
def test_what_lies_in_the_memory_of_a_model_and_was_stored_with_other_values_gets_its_own(
    kind: str,
) -> None:
    there, here = nn.Linear(3, 2), nn.Linear(3, 2)
    best = copy.deepcopy(BEST[kind](there.weight))
    with torch.no_grad():
        there.weight.add_(1)
    live = BEST[kind](here.weight)
    assert restore_into({"best": live, "model": here}, stored({"best": best, "model": there}))
    assert torch.equal(here.weight, there.weight)
    assert all(map(np.array_equal, as_arrays(live), as_arrays(best)))


def test_what_was_captured_as_one_tensor_stays_one(repo: Repository) -> None:
    def start() -> tuple[nn.Linear, dict[str, torch.Tensor]]:
        model = nn.Linear(3, 2)
        return model, model.state_dict()

    model, weights = start()
    with repo.track(model=model, weights=weights) as run:
        run.capture()
    other, its = start()
    with repo.track(weights=its, model=other):
        assert torch.equal(other.weight, model.weight)
        assert all(
            its[name].data_ptr() == parameter.data_ptr()
            for name, parameter in other.named_parameters()
        )


def test_views_that_the_state_has_alike_are_overwritten_in_place() -> None:
    base, array = torch.zeros(6), np.zeros(6)
    live = {"base": base, "half": base[3:], "even": base[::2], "array": array, "part": array[1:3]}
    tree = {"base": torch.arange(6.0), "array": np.arange(6.0), "part": np.arange(1.0, 3.0)}
    tree |= {"half": torch.arange(3.0, 6.0), "even": torch.arange(0.0, 6.0, 2)}
    held = dict(live)
    assert restore_into({"it": live}, {"it": tree})
    assert all(live[name] is held[name] for name in held)
    assert base.tolist() == array.tolist() == [*range(6)]


def test_the_first_of_two_entries_keeps_the_memory_that_they_share() -> None:
    shared = torch.zeros(2)
    one, other = {"it": shared}, [shared]
    assert restore_into(
        {"one": one, "other": other},
        {"one": {"it": torch.ones(2)}, "other": [torch.full((2,), 2.0)]},
    )
    assert one["it"] is shared
    assert (one["it"].tolist(), other[0].tolist()) == ([1, 1], [2, 2])


def modules_of_one_memory() -> dict[str, Any]:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight.data = first.weight.data
    return {"first": first, "second": second}


def test_modules_that_share_memory_refuse_a_state_that_has_them_apart_and_say_what_to_do() -> None:
    live = modules_of_one_memory()
    before = live["first"].weight.detach().clone()
    apart = stored({"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)})
    message = (
        r"second/weight: the state has another value than first/weight, the object one memory for"
        r" both\n"
        r"second/weight shares memory with first/weight: give it its own \(clone it\), or leave one"
        r" of the two out"
    )
    with pytest.raises(InvalidInput, match=message):
        restore_into(live, apart)
    assert torch.equal(live["first"].weight, before)
    assert not restore_into(live, apart, strict=False)


def test_modules_that_share_memory_take_a_state_with_equal_values() -> None:
    tree = stored(modules_of_one_memory())
    assert tree["first"]["weight"] is not tree["second"]["weight"]
    live = modules_of_one_memory()
    assert restore_into(live, tree)
    assert torch.equal(live["second"].weight, tree["second"]["weight"])


def test_a_tuple_that_nothing_can_replace_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    live = {"model": model, "pair": (model.weight.detach(), torch.zeros(1))}
    tree = {"model": {"weight": torch.ones(2, 2)}, "pair": (torch.zeros(2, 2), torch.ones(1))}
    with pytest.raises(InvalidInput, match="pair/0: the state has another value than model/weight"):
        restore_into(live, tree)


def test_the_state_of_an_optimizer_that_lies_in_the_memory_of_a_weight_gets_its_own() -> None:
    def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return model, optimizer

    (there, its), (here, mine) = make(), make()
    mine.state[here.weight]["momentum_buffer"] = here.weight.detach()
    assert restore_into(
        {"model": here, "optimizer": mine}, stored({"model": there, "optimizer": its})
    )
    assert torch.equal(here.weight, there.weight)
    assert torch.equal(
        mine.state[here.weight]["momentum_buffer"], its.state[there.weight]["momentum_buffer"]
    )


class Wrapping(torch.Tensor):
    """A tensor without memory of its own, as quantized weights often are."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor, *, requires_grad: bool = False) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(
            cls, wrapped.shape, dtype=wrapped.dtype, requires_grad=requires_grad
        )
        made.wrapped = wrapped
        return made

    @classmethod
    # torch declares the one that does nothing
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        out = func(
            *[each.wrapped if isinstance(each, Wrapping) else each for each in args],
            **(kwargs or {}),
        )
        return args[0] if func is torch.ops.aten.copy_.default else cls(out)


def test_tensors_that_wrap_others_share_no_memory() -> None:
    live = {
        name: Wrapping(torch.zeros(count))
        for name, count in {"one": 3, "like it": 3, "longer": 4}.items()
    }
    tree = {
        name: torch.full(each.shape, float(number))
        for number, (name, each) in enumerate(live.items())
    }
    assert restore_into(live, tree)
    assert all(torch.equal(live[name].wrapped, tree[name]) for name in live)


def test_only_what_touches_in_memory_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def look(tensor: torch.Tensor) -> object:
        looks.append(tensor)
        return memory_key(tensor)

    monkeypatch.setattr(in_place, "memory_key", look)

    def compared(count: int) -> int:
        """In a restore of so many views of one buffer, and of the buffer."""
        looks.clear()
        buffer, values = torch.zeros(count, 2), torch.rand(count, 2)
        views = [*buffer]
        assert restore_into(
            {"buffer": buffer, "views": views},
            {"buffer": values, "views": [each.clone() for each in values]},
        )
        assert torch.equal(buffer, values)
        assert [view.data_ptr() for view in views] == [row.data_ptr() for row in buffer]
        return len(looks)

    assert 0 < compared(40) <= 2 * compared(20)


def test_weights_that_begin_as_those_of_the_model_and_were_trained_apart_can_be_trained_on() -> (
    None
):
    there, here = nn.Linear(3, 2), nn.Linear(3, 2)
    fast = {name: parameter.detach() + 1 for name, parameter in there.named_parameters()}
    live: dict[str, torch.Tensor] = {"weight": here.weight, "bias": here.bias.view(2)}
    assert restore_into({"model": here, "fast": live}, stored({"model": there, "fast": fast}))
    assert all(
        torch.equal(live[name], fast[name]) and live[name] is not parameter
        for name, parameter in here.named_parameters()
    )
    assert type(live["weight"]) is nn.Parameter
    assert type(live["bias"]) is torch.Tensor
    nn.functional.linear(torch.ones(3), live["weight"], live["bias"]).sum().backward()
    assert all(each.grad is not None for each in live.values())
    assert here.weight.grad is here.bias.grad is None


@pytest.fixture
def mesh() -> Iterator[Any]:
    """That of rank 5 of 8, where nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_shard_that_lies_in_the_memory_of_a_sharded_weight_gets_its_own_unless_both_are_equal(
    mesh: Any, *, is_alike: bool
) -> None:
    model = nn.Linear(2, 16, bias=False)
    model.weight = nn.Parameter(
        DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], run_check=False)
    )
    average: dict[str, Any] = {"weight": model.weight.detach()}
    weight = torch.arange(32.0).view(16, 2)
    tree = {
        "model": {"weight": weight},
        "average": {"weight": weight.clone() if is_alike else weight + 1},
    }
    assert restore_into({"average": average, "model": model}, tree)
    # a DTensor
    assert model.weight.to_local().tolist() == weight[10:12].tolist()  # type: ignore[attr-defined]
    assert average["weight"].to_local().tolist() == (weight[10:12] + (not is_alike)).tolist()
    # a DTensor
    assert (
        average["weight"].to_local().data_ptr() == model.weight.to_local().data_ptr()  # type: ignore[attr-defined]
    ) is is_alike


def test_what_torch_has_read_into_the_live_tensors_is_one_with_them() -> None:
    """As torch's own readers do before a ``load_state_dict``."""
    model = nn.Linear(2, 2)
    weights = model.state_dict()
    tree = Adapted({"model": model, "weights": weights}).tree()
    held = dict(weights)
    assert restore_into({"model": model, "weights": weights}, tree)
    assert all(weights[name] is held[name] for name in held)
