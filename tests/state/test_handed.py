"""What is tracked by itself comes back: in place where that can be, else by ``run.values``; or
it is refused by ``track``."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Repository, register_encoder
from datastates.errors import InvalidInput
from datastates.state.restore import restore_into

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "deque": (lambda: deque([1, 2, 3], maxlen=4), lambda: deque([9], maxlen=4)),
    "deque of lists": (lambda: deque([[1], [2]]), lambda: deque([[7]])),
    "set": (lambda: {1, "a"}, lambda: {2}),
    "list": (lambda: [1, [2]], list),
    "dict": (lambda: {"a": 1, "b": {2}}, lambda: {"b": {3}, "c": 4}),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda: OrderedDict(b=2, a=1)),
    "defaultdict": (lambda: defaultdict(list, a=[1]), lambda: defaultdict(list)),
    "counter": (lambda: Counter("aab"), lambda: Counter("b")),
    "bytearray": (lambda: bytearray(b"abc"), bytearray),
    "array": (lambda: np.arange(3.0), lambda: np.zeros(3)),
    "tensor": (lambda: torch.arange(3), lambda: torch.zeros(3, dtype=torch.int64)),
    "tuple of tensors": (
        lambda: (torch.ones(2), [torch.ones(1)]),
        lambda: (torch.zeros(2), [torch.zeros(1)]),
    ),
}

VALUES: dict[str, tuple[object, object]] = {
    "tuple": ((1, "a", None), (2,)),
    "empty tuple": ((), (2,)),
    "tuple of tuples": ((1, (2, 3)), (0, (0, 0))),
    "frozenset": (frozenset({1, 2}), frozenset()),
    "range": (range(3), range(9)),
    "slice": (slice(1, 2), slice(None)),
    "dtype": (torch.float16, torch.float32),
    "size": (torch.Size([1, 2]), torch.Size([])),
    "number of numpy": (np.int32(3), np.int32(0)),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_whatever_can_be_changed_is_put_back_in_place(kind: str, repo: Repository) -> None:
    make, make_other = IN_PLACE[kind]
    with repo.track(it=make(), nested=[make()]) as run:
        run.capture()
    live, nested = make_other(), [make_other()]
    inner = nested[0]
    run = repo.track(it=live, nested=nested)
    for found in (live, inner):
        assert repr(found) == repr(make())
        assert type(found) is type(make())
    assert nested[0] is inner
    assert not run.values


@pytest.mark.parametrize("kind", VALUES)
def test_whatever_cannot_be_changed_comes_back_by_the_values_of_the_run(
    kind: str, repo: Repository
) -> None:
    stored, live = VALUES[kind]
    with repo.track(it=stored) as run:
        run.capture()
    again = repo.track(it=live)
    assert again.values == {"it": stored}
    assert type(again.values["it"]) is type(stored)
    again.values["it"] = live
    assert repo.load(again.capture().wait().uid)["it"] == live


def test_a_value_beside_a_tensor_comes_back_by_the_values_of_the_run(repo: Repository) -> None:
    with repo.track(it=(torch.ones(2), 3)) as run:
        run.capture()
    tensor = torch.zeros(2)
    again: Any = repo.track(it=(tensor, 0)).values["it"]
    assert again[0] is tensor
    assert tensor.tolist() == [1, 1]
    assert again[1] == 3


def test_an_array_that_has_another_shape_now_is_refused(repo: Repository) -> None:
    with repo.track(it=np.ones(3)) as run:
        run.capture()
    live = np.zeros(2)
    with pytest.raises(InvalidInput, match=r"it: the state has .*, the object"):
        repo.track(it=live)
    report = repo.track(it=live, branch="b", start="main", strict=False).report
    assert report is not None
    assert not report
    assert live.tolist() == [0, 0]


def test_a_deque_that_takes_less_than_it_had_is_refused(repo: Repository) -> None:
    with repo.track(it=deque(range(9), maxlen=9)) as run:
        run.capture()
    with pytest.raises(
        InvalidInput, match=r"the state has a deque of 9, the object a deque that takes 3"
    ):
        repo.track(it=deque(maxlen=3))
    live: deque[int] = deque(maxlen=20)
    repo.track(it=live)
    assert live == deque(range(9))


def test_another_container_than_it_was_is_refused(repo: Repository) -> None:
    with repo.track(it=deque([1])) as run:
        run.capture()
    with pytest.raises(InvalidInput, match=r"it: the state has .*, the object list"):
        repo.track(it=[])


class Plain:
    pass


class Shade(Enum):
    RED = 1


@dataclass
class Window:
    mean: float


@dataclass(frozen=True)
class Setting:
    rate: float


class Odd:
    """Its state holds what no state can hold."""

    def state_dict(self) -> dict[str, object]:
        return {"deep": [Plain()]}

    def load_state_dict(self, state: object) -> None: ...


class Late:
    """It has no state before the first step."""

    is_ready = False

    def state_dict(self) -> dict[str, int]:
        if not self.is_ready:
            raise RuntimeError("not yet")
        return {"a": 1}

    def load_state_dict(self, state: object) -> None: ...


def odd_optimizer() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.param_groups[0]["schedule"] = lambda step: step
    return optimizer


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Plain(), r"it is of type .*Plain"),
        ({"a": [1, Plain()]}, r"it/a/1 is of type .*Plain"),
        (Shade.RED, r"it is of type .*Shade"),
        ((1, Plain()), r"it.* is of type .*Plain"),
        ({nn.Linear(1, 1)}, r"it .*Linear"),
        (Odd(), r"it/deep/0 is of type .*Plain"),
        (odd_optimizer(), r"it/param_groups/0/schedule is the function"),
        (
            (nn.Linear(1, 1), 3),
            r"it is a tuple of plain values and of objects with a state.*list or a dict",
        ),
    ],
)
def test_what_no_state_can_hold_is_refused_by_track(
    found: object, message: str, repo: Repository
) -> None:
    with pytest.raises(InvalidInput, match=message):
        repo.track(it=found)
    assert repo.refs() == []


def test_what_is_not_ready_yet_may_be_tracked(repo: Repository) -> None:
    late, model = Late(), nn.Sequential(nn.Linear(2, 2, device="meta"))
    run = repo.track(late=late, model=model)
    late.is_ready = True
    model.to_empty(device="cpu")
    run.capture().wait()


def test_a_loader_is_not_asked_for_its_place_before_the_loop(repo: Repository) -> None:
    class Loader:
        asked = 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            return {}

        def load_state_dict(self, state: object) -> None: ...

    loader = Loader()
    run = repo.track(loader=loader)
    assert loader.asked == 0
    run.capture()
    assert loader.asked == 1


def test_an_object_of_an_encoder_comes_back_only_where_that_means_something(
    repo: Repository,
) -> None:
    register_encoder(Window, "tests.handed.window", lambda window: window.mean, Window)
    register_encoder(Setting, "tests.handed.setting", lambda setting: setting.rate, Setting)
    with pytest.raises(
        InvalidInput,
        match=(
            r"it is a Window, of which its encoder makes a new one.*load_state_dict, or track it in"
            r" a list"
        ),
    ):
        repo.track(it=Window(1.0))
    with repo.track(setting=Setting(0.5), holder={"window": Window(2.0)}) as run:
        run.capture()
    holder = {"window": Window(0.0)}
    again = repo.track(setting=Setting(0.0), holder=holder)
    assert again.values == {"setting": Setting(0.5)}
    assert holder == {"window": Window(2.0)}
    assert restore_into({"window": Window(0.0)}, {"window": Window(3.0)}).values == {
        "window": Window(3.0)
    }


def cyclic_list() -> list[Any]:
    items: list[Any] = [1]
    items.append({"deep": items})
    return items


def cyclic_dict() -> dict[str, Any]:
    items: dict[str, Any] = {}
    items["self"] = (items,)
    return items


def deep() -> list[Any]:
    items: list[Any] = []
    for _ in range(5000):
        items = [items]
    return items


@pytest.mark.parametrize("make", [cyclic_list, cyclic_dict, deep])
def test_a_container_that_holds_itself_is_refused(
    make: Callable[[], Any], repo: Repository
) -> None:
    with pytest.raises(
        InvalidInput, match=r"it/.* holds itself, or is nested too deep: break the cycle"
    ):
        repo.track(it=make())
    with repo.track(it=[1]) as run:
        run.capture()
    with pytest.raises(InvalidInput, match="holds itself"):
        repo.restore("main", it=make())


def test_what_is_held_twice_is_no_cycle(repo: Repository) -> None:
    shared = [1]
    repo.track(it=[shared, shared, {"a": shared}]).capture().wait()
