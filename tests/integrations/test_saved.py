"""``datastates.save`` and ``load``: what is given comes back, each call is a state, and no
repository is left open."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Conflict, NotFound
from datastates.errors import Corrupt, InvalidInput, Unsupported
from datastates.integrations import saved
from tests.support import warm


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the repositories of a test are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATASTATES_MEMORY", "64M")
    yield tmp_path
    saved.close_unused()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert list(map(repr, found)) == list(map(repr, expected)), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple | deque):
        assert len(found) == len(expected), path
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{path}/{index}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.layout, found.shape) == (
            expected.dtype,
            expected.layout,
            expected.shape,
        ), path
        assert expected.is_sparse or found.stride() == expected.stride(), path
        assert torch.equal(found.to_dense(), expected.to_dense()), path
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes()), path
    else:
        assert found == expected, path


OBJECTS: dict[str, Any] = {
    "checkpoint": {
        "epoch": 3,
        "loss": 0.1,
        "best": None,
        "args": {"lr": 1e-3, "name": "é", "wide": True},
        "history": [1.0, 0.5],
        "t": (1, (2,)),
    },
    "numbered": {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "param_groups": [{"lr": 0.1, "params": [0, 1], "betas": (0.9, 0.999)}],
    },
    "containers": [
        OrderedDict(b=1, a=2),
        deque([1, 2], maxlen=3),
        {1, 2},
        frozenset({"x"}),
        Counter("aab"),
        defaultdict(list, {"a": [1]}),
    ],
    "numbers": (
        2**80,
        -1,
        1j,
        float("inf"),
        b"\0",
        bytearray(b"x"),
        range(3),
        slice(1, None),
        torch.Size([2]),
        torch.float16,
        ...,
    ),
    "arrays": {
        "small": np.arange(3),
        "large": np.asfortranarray(np.arange(40_000.0).reshape(200, -1)),
        "scalar": np.float32(1.5),
    },
    "types": [
        torch.ones(3).to(dtype)
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int8,
            torch.bool,
            torch.complex64,
        )
    ],
    "shapes": [
        torch.tensor(1),
        torch.empty(0, 3),
        torch.arange(6).view(2, 3).T,
        torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    "sparse": {"coo": torch.eye(3).to_sparse()},
    "a tensor": torch.arange(5),
    "a number": 5,
    "nothing": None,
    "an empty dict": {},
    "odd keys": {"a/b": 1, "": torch.ones(1), "x%": {3: 1, "3": 2, None: 4, (1, 2): 5}},
}


def test_every_object_comes_back_as_it_was(folder: Path) -> None:
    for name, obj in OBJECTS.items():
        datastates.save(obj, f"runs/{name.replace(' ', '-')}")

    for name, obj in OBJECTS.items():
        assert_same(datastates.load(f"runs/{name.replace(' ', '-')}"), obj, name)


def test_each_save_is_the_next_state_of_its_branch(folder: Path) -> None:
    model, optimizer = build()
    uids = []
    for epoch in range(3):
        obj = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        uids.append(
            datastates.save(
                obj,
                "runs/main",
                metrics={"loss": 1 - epoch / 10},
                message=f"epoch {epoch}",
                attributes={"seed": 0},
            )
        )
    assert datastates.load("runs/main~2")["epoch"] == 0
    assert datastates.load("runs/main@best:loss")["epoch"] == 2
    assert datastates.load(f"runs/{uids[1][:8]}")["epoch"] == 1

    saved.close_unused()
    with datastates.open("runs") as repo:
        log = repo.log("main")
        assert [state.uid for state in log] == uids[::-1]
        assert [state.step for state in log] == [3, 2, 1]
        assert {state.status for state in log} == {"durable"}
        assert (log[0].message, log[0].metrics, log[0].attributes) == (
            "epoch 2",
            {"loss": 0.8},
            {"seed": 0},
        )
        other = nn.Linear(4, 2)
        repo.restore("main", model=other)
        assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])


def test_optimizer_goes_on_with_what_was_loaded(folder: Path) -> None:
    model, optimizer = build()
    datastates.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "runs/main")
    found = datastates.load("runs/main")
    other = nn.Linear(4, 2)
    fresh = torch.optim.AdamW(other.parameters())
    other.load_state_dict(found["model"])
    fresh.load_state_dict(found["optimizer"])

    for each, its in ((model, optimizer), (other, fresh)):
        its.zero_grad()
        each(torch.ones(4)).square().sum().backward()
        its.step()
    assert torch.equal(model.state_dict()["weight"], other.state_dict()["weight"])


def test_step_is_the_one_given_or_the_objects_or_the_next(folder: Path) -> None:
    for obj, step in [
        ({"step": 7}, None),
        ({"global_step": torch.tensor(8)}, None),
        ({"step": 1.5}, None),
        ({"step": 3}, 20),
        ([1], None),
    ]:
        datastates.save(obj, "runs/main", step=step)

    with datastates.open("runs") as repo:
        assert [state.step for state in repo.log("main")] == [21, 20, 9, 8, 7]


@pytest.mark.parametrize(
    "step",
    [
        np.int64(500),
        np.uint8(50),
        np.array(500),
        np.float32(500),
        torch.tensor(500),
        torch.tensor(500.0),
        500.0,
    ],
    ids=repr,
)
def test_a_step_may_be_a_number_of_numpy_or_a_tensor(folder: Path, step: Any) -> None:
    datastates.save({"step": step}, "runs/main")
    with datastates.open("runs") as repo:
        assert repo.state("main").step == int(step)


@pytest.mark.parametrize(
    "step", [1.5, "7", None, True, -1, 2**70, torch.ones(3), float("nan")], ids=repr
)
def test_what_is_no_step_is_left_to_the_branch(folder: Path, step: Any) -> None:
    datastates.save({"step": step}, "runs/main")
    with datastates.open("runs") as repo:
        assert repo.state("main").step == 1


def test_tied_tensors_stay_tied_and_come_back_plain(folder: Path) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    base = torch.arange(10.0)
    datastates.save(
        {"a": weight, "b": weight, "view": base[2:4], "grad": torch.ones(2, requires_grad=True)},
        "runs/main",
    )
    found = datastates.load("runs/main")

    assert found["a"] is found["b"]
    assert type(found["a"]) is torch.Tensor
    assert not found["a"].requires_grad
    assert not found["grad"].requires_grad
    assert found["view"].untyped_storage().nbytes() < base.nbytes, (
        "a view is saved as its own bytes"
    )
    found["a"].add_(1)
    assert not torch.equal(datastates.load("runs/main")["a"], found["a"]), (
        "what was loaded is the caller's"
    )


def test_map_location_says_where_tensors_go(folder: Path) -> None:
    datastates.save({"w": torch.ones(2), "n": 1}, "runs/main")

    found = datastates.load("runs/main", map_location="meta")
    assert (found["w"].device.type, found["n"]) == ("meta", 1)
    with pytest.raises(InvalidInput, match="map_location"):
        # as torch.load takes it
        datastates.load("runs/main", map_location=lambda storage, place: storage)  # type: ignore[arg-type]


class Thing:
    """What nobody can store."""


@pytest.mark.parametrize(
    ("obj", "said"),
    [
        (nn.Linear(1, 1), r"the object is a Linear: save its state_dict\(\)"),
        ({"net": {"a": [1, nn.Linear(1, 1)]}}, "net/a/1 is a Linear"),
        ({"model": {"x": 1}, "opt": torch.optim.SGD([torch.ones(1)], lr=0.1)}, "opt is a SGD"),
        ({"a": {"b": [Thing()]}}, "a/b/0 is of type .*Thing"),
        ({"f": len}, "f is the function"),
        (Thing(), "Thing"),
        ({"m": torch.empty(2, device="meta")}, "m .*meta"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_path_and_nothing_is_saved(
    obj: object, said: str, folder: Path
) -> None:
    with pytest.raises(InvalidInput, match=said):
        datastates.save(obj, "runs/main")
    datastates.save({"ok": 1}, "runs/main")

    with datastates.open("runs") as repo:
        assert [state.step for state in repo.log("main")] == [1]


def test_object_that_holds_itself_is_refused(folder: Path) -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(InvalidInput, match="again"):
        datastates.save(loop, "runs/main")


def test_fork_begins_where_it_is_said(folder: Path) -> None:
    for value in range(2):
        datastates.save({"v": value}, "runs/main")
    datastates.save({"v": 9}, "runs/fork", start="main~1")

    assert datastates.load("runs/fork~1")["v"] == 0
    with pytest.raises(Conflict, match="does not descend"):
        datastates.save({"v": 9}, "runs/main", start="fork")


def test_open_repository_is_used_as_it_is(folder: Path) -> None:
    with datastates.open("runs", config=Config(memory_bytes=32 << 20)) as repo:
        uid = datastates.save({"v": 1}, "main", repo=repo)
        assert datastates.load("main", repo=repo) == {"v": 1}
        assert datastates.load(repo.state(uid), repo=repo) == {"v": 1}
        with repo.track(branch="tracked", model=nn.Linear(1, 1), rng=False) as run:
            run.capture().wait()
        assert list(datastates.load("tracked", repo=repo)["model"]) == ["weight", "bias"]
    with pytest.raises(InvalidInput, match="repo="):
        datastates.load(_state_of("runs"))


def _state_of(folder: str) -> datastates.State:
    with datastates.open(folder) as repo:
        return repo.state("main")


def test_what_is_not_there_is_said_and_nothing_is_made(folder: Path) -> None:
    with pytest.raises(NotFound, match="no repository in"):
        datastates.load("nosuch/main")
    assert not Path("nosuch").exists()
    datastates.save({"v": 1}, "runs/main")
    with pytest.raises(NotFound, match="mian"):
        datastates.load("runs/mian")
    with (
        datastates.open("runs") as repo,
        pytest.raises(InvalidInput, match="is of a repository that is not named: give repo= too"),
    ):
        datastates.load(repo.state("main"))
    for wrong in ("main", "", "https://host/main"):
        with pytest.raises(InvalidInput):
            datastates.save({"v": 1}, wrong)


def test_damaged_byte_is_found(folder: Path) -> None:
    datastates.save({"w": torch.ones(4096)}, "runs/main")
    uid = datastates.save({"w": torch.full((4096,), 2.0)}, "runs/main")
    saved.close_unused()
    (pack,) = Path("runs/packs").glob(f"{uid}*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-100] ^= 1
    pack.write_bytes(data)

    with pytest.raises(Corrupt, match="damaged"):
        datastates.load("runs/main")
    assert datastates.load("runs/main~1")["w"][0] == 1


def test_repository_stays_open_in_a_loop_and_is_closed_when_it_idles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datastates.save({"v": 0}, "runs/main")
    ((_, first),) = saved._kept.items()
    datastates.save({"v": 1}, "runs/main")
    ((_, second),) = saved._kept.items()
    assert first is second
    monkeypatch.setattr(saved, "IDLE_S", 0.0)
    datastates.load("runs/main")
    timer = first.timer
    if timer is not None:
        timer.join()

    assert not saved._kept
    assert first.repository.core.is_closed
    datastates.save({"v": 2}, "runs/main")
    assert datastates.load("runs/main~2")["v"] == 0


def test_repository_that_was_removed_and_made_anew_is_another_one(folder: Path) -> None:
    datastates.save({"v": 0}, "runs/main")
    Path("runs").rename("old")
    datastates.save({"v": 1}, "runs/main")

    assert datastates.load("runs/main")["v"] == 1
    with pytest.raises(NotFound):
        datastates.load("runs/main~1")
    assert datastates.load("old/main")["v"] == 0


def test_saves_of_several_processes_are_one_line(folder: Path) -> None:
    script = (
        "import datastates, sys\nfor n in range(5): print(datastates.save({'v': n, 'who':"
        " sys.argv[1]}, 'runs/main'))"
    )
    datastates.save({"v": -1, "who": "test"}, "runs/main")
    done = [
        warm.Popen([sys.executable, "-c", script, name], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    said = [process.communicate(timeout=120)[0].split() for process in done]
    datastates.save({"v": 9, "who": "test"}, "runs/main")

    assert [process.returncode for process in done] == [0, 0]
    with datastates.open("runs") as repo:
        log = repo.log("main")
    assert len(log) == 12
    assert {state.uid for state in log} >= {*said[0], *said[1]}
    assert [state.step for state in log] == [*range(12, 0, -1)]


def test_saves_of_several_threads_are_one_line(folder: Path) -> None:
    threads = [
        threading.Thread(target=datastates.save, args=({"v": number}, "runs/main"))
        for number in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(datastates.load(f"runs/main~{back}")["v"] for back in range(5)) == list(range(5))


def test_nothing_that_was_saved_is_kept_alive(folder: Path) -> None:
    weights = torch.ones(10)
    gone = weakref.ref(weights)
    datastates.save({"w": weights}, "runs/main")
    del weights
    gc.collect()

    assert gone() is None


def test_forked_child_opens_the_repository_for_itself(folder: Path) -> None:
    datastates.save({"v": 0}, "runs/main")
    child = os.fork()
    if child == 0:
        try:
            datastates.save({"v": 1}, "runs/child", start="main")
            os._exit(0 if datastates.load("runs/child~1")["v"] == 0 else 1)
        finally:
            os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert datastates.load("runs/child")["v"] == 1
    datastates.save({"v": 2}, "runs/main")


def test_object_of_a_registered_encoder_comes_back(folder: Path) -> None:
    with pytest.raises(Unsupported):
        datastates.save({"thing": Thing()}, "runs/main")
    datastates.register_encoder(
        Thing, "test-thing", encode=lambda thing: None, decode=lambda tree: Thing()
    )
    datastates.save({"thing": Thing()}, "runs/main")

    assert type(datastates.load("runs/main")["thing"]) is Thing
