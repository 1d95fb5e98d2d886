"""What a merged state takes along, which names it gets, what is refused; and made again from its
parents, it is the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Conflict, Repository, Status, Unavailable
from datastates.errors import Corrupt, InvalidInput, OverBudget, Unsupported
from datastates.state.manifest import ALIGNED_BYTES
from tests.compare.parents import Training, arrays, bits, fork, net, track

MIB = 1 << 20


# --- what comes along -----------------------------------------------------------------------------


def test_all_else_is_the_first_parents_and_a_training_goes_on_from_there(repo: Repository) -> None:
    heads = fork(repo)
    merged = repo.merge(heads, into="soup")

    first, found = repo.load(heads[0].uid), repo.load("soup")
    assert bits(found["optimizer"]) == bits(first["optimizer"])
    assert bits(found["rng"]) == bits(first["rng"])
    assert int(found["model"]["1.num_batches_tracked"]) == int(
        first["model"]["1.num_batches_tracked"]
    )
    assert (merged.step, merged.micro_step) == (heads[0].step, heads[0].micro_step)
    training = Training(5)
    with repo.track(model=training.model, optimizer=training.optimizer, branch="soup") as run:
        assert bits(training.model.state_dict()) == bits(found["model"])
        training.step()
        now = run.capture().wait()
    assert now.parents == (merged.uid,)


def test_a_dropped_rest_leaves_the_model_alone(repo: Repository) -> None:
    heads = fork(repo)
    whole, lone = repo.merge(heads), repo.merge(heads, rest="drop", tag="lone")

    assert list(repo.load("lone")) == ["model"]
    assert bits(repo.load("lone")["model"]) == bits(repo.load(whole.uid)["model"])
    assert lone.bytes_total < whole.bytes_total / 2
    model = net(9)
    repo.restore("lone", model=model)
    assert bits(model.state_dict()) == bits(repo.load("lone")["model"])


def test_what_is_left_of_a_large_state_is_laid_out_again(repo: Repository) -> None:
    def parts(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = {
            "a": torch.randn(700_001),
            "b": torch.randn(2 * MIB),
            "c": torch.randn(7),
            "d": torch.arange(5, dtype=torch.uint8),
        }
        return {
            "first": torch.randn(300_000),
            "model": model,
            "other": {"x": torch.randn(MIB), "y": torch.ones(3).double()},
        }

    heads = [track(repo, f"h{seed}", **parts(seed)) for seed in range(2)]

    merged = repo.merge(heads, rest="drop", tag="m")

    ours = [parts(seed)["model"] for seed in range(2)]
    for name, value in repo.load("m")["model"].items():
        expected = (ours[0][name].double() + ours[1][name].double()) / 2
        assert torch.equal(value, ours[0]["d"] if name == "d" else expected.float())
    gap = -ours[0]["a"].nbytes % ALIGNED_BYTES
    assert merged.bytes_total == sum(tensor.nbytes for tensor in ours[0].values()) + gap, (
        "b is aligned, as it was"
    )
    repo.verify_merge("m")


def test_optimizer_state_is_averaged_when_it_is_asked_for_but_its_step_is_counted(
    repo: Repository,
) -> None:
    heads = fork(repo)
    merged = repo.merge(heads, only=["model", "optimizer"])

    trees = [
        repo.load(uid, only="optimizer")["optimizer"]["state"]["0.weight"]
        for uid in (merged.uid, *(head.uid for head in heads))
    ]
    expected = sum(tree["exp_avg"].double() for tree in trees[1:]) / 3
    assert torch.allclose(trees[0]["exp_avg"].double(), expected, rtol=0, atol=1e-7)
    assert float(trees[0]["step"]) == float(trees[1]["step"]) != float(trees[2]["step"])


def test_odd_tensors_come_out_as_they_went_in(repo: Repository) -> None:
    torch.manual_seed(0)

    def model(scale: float) -> dict[str, Any]:
        tied = torch.full((4, 5), scale)
        return {
            "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) * scale,
            "half": torch.tensor([scale, 3.0], dtype=torch.bfloat16),
            "byte": torch.tensor([scale], dtype=torch.float8_e4m3fn),
            "complex": torch.tensor([scale + 1j, 2j * scale]),
            "tied": tied,
            "same": tied,
            "expanded": torch.tensor([scale]).expand(7),
            "empty": torch.empty(0, 3),
            "mask": torch.tensor([scale > 1, True]),
            "array": np.full(20_000, scale),
            "count": int(scale),
        }

    heads = [track(repo, name, model=model(scale)) for name, scale in (("a", 1.0), ("b", 3.0))]

    repo.merge(heads, tag="m")
    found, (one, other) = repo.load("m")["model"], (repo.load(name)["model"] for name in ("a", "b"))

    assert found["channels"].stride() == one["channels"].stride()
    assert torch.equal(
        found["channels"], ((one["channels"].double() + other["channels"].double()) / 2).float()
    )
    assert found["half"].tolist() == [2.0, 3.0]
    assert found["byte"].float().tolist() == [2.0]
    assert found["complex"].tolist() == [2 + 1j, 4j]
    assert found["tied"] is found["same"]
    assert found["expanded"].tolist() == [2.0] * 7
    assert found["expanded"].stride() == (0,)
    assert (found["empty"].shape, found["mask"].tolist(), found["array"][0], found["count"]) == (
        (0, 3),
        [False, True],
        1.0,
        1,
    )
    repo.verify_merge("m")


def test_parents_in_another_memory_order_and_unaligned_parts_fit(repo: Repository) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4)
    one = track(
        repo,
        "a",
        model={"w": weight, "odd": torch.arange(3, dtype=torch.uint8)},
        other=torch.arange(5, dtype=torch.uint8),
    )
    other = track(
        repo,
        "b",
        model={"w": (weight + 1).t().contiguous().t(), "odd": torch.zeros(3, dtype=torch.uint8)},
    )

    merged = repo.merge([one, other], rest="drop")

    assert np.allclose(arrays(repo, merged)["w"], (weight + 0.5).double().numpy(), atol=1e-6)
    assert list(repo.load(merged.uid)) == ["model"]
    repo.verify_merge(merged.uid)


def test_what_no_parent_changed_is_not_stored_again(repo: Repository) -> None:
    torch.manual_seed(0)
    last = nn.Linear(1024, 8)
    model = nn.Sequential(nn.Linear(2048, 1024), last)
    model[0].requires_grad_(False)
    for branch in ("a", "b"):
        with repo.track(model=model, branch=branch, rng=False) as run:
            run.capture().wait()
        with torch.no_grad():
            last.weight.add_(1.0)

    merged = repo.merge(["a", "b"], weights=[0.3, 0.7], tag="m")

    assert merged.bytes_total > 8 * MIB
    assert merged.bytes_new < 0.1 * merged.bytes_total
    repo.verify_merge("m")


def test_bytes_do_not_depend_on_threads(repo: Repository) -> None:
    torch.manual_seed(0)
    size = 3 * MIB + 5
    for name in ("a", "b"):
        track(repo, name, model={"w": torch.randn(size)})
    methods: list[dict[str, Any]] = [{}, {"weights": [0.3, 0.7]}, {"method": "ema", "decay": 0.9}]
    made = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        made += [bits(repo.load(repo.merge(["a", "b"], **options).uid)) for options in methods]
    assert made[:3] == made[3:]
    assert len(set(made)) == 3


# --- names and safety -----------------------------------------------------------------------------


def test_a_named_merge_is_durable_and_outlives_its_process(tmp_path: Path) -> None:
    with datastates.open(tmp_path / "runs", memory_bytes=128 * MIB) as repo:
        merged = repo.merge(fork(repo), into="soup", message="three of them")
        content = bits(repo.load("soup"))
    with datastates.open(tmp_path / "runs") as repo:
        again = repo.state("soup")
        assert again.status is Status.DURABLE
        assert (again.uid, again.parents, again.edges, again.attributes, again.message) == (
            merged.uid,
            merged.parents,
            merged.edges,
            merged.attributes,
            "three of them",
        )
        assert bits(repo.load("soup")) == content
        assert repo.verify_merge("soup").uid == merged.uid


def test_a_branch_goes_on_only_from_the_first_parent(repo: Repository) -> None:
    heads = fork(repo)
    with pytest.raises(Conflict, match="head first"):
        repo.merge(heads[1:], into="v0")
    with pytest.raises(Conflict, match="head last"):
        repo.merge(heads, method="ema", decay=0.5, into="v0")
    with pytest.raises(Conflict, match="taken"):
        repo.merge(heads, tag="warm")
    before = len(repo.find("step >= 0"))
    with pytest.raises(Conflict):
        repo.merge(heads, into="warm")
    assert len(repo.find("step >= 0")) == before

    merged = repo.merge(heads, into="v0")

    assert (repo.state("v0").uid, repo.state("v0~1").uid, repo.state("v0^2").uid) == (
        merged.uid,
        heads[0].uid,
        heads[1].uid,
    )


def test_a_branch_that_is_tracked_is_left_to_its_tracker(repo: Repository) -> None:
    heads = fork(repo)
    training = Training(0)
    with repo.track(model=training.model, optimizer=training.optimizer, branch="v0") as run:
        with pytest.raises(Conflict, match="tracked"):
            repo.merge(heads, into="v0")
        training.step()
        run.capture().wait()


def refuse(
    repo: Repository,
    match: str,
    revs: list[Any],
    error: type[Exception] = InvalidInput,
    **options: Any,
) -> None:
    with pytest.raises(error, match=match):
        repo.merge(revs, **options)


def test_senseless_arguments_are_refused_with_what_would_be_right(repo: Repository) -> None:
    heads = fork(repo)
    a, b = heads[:2]
    refuse(repo, "two states or more, not 1", [a])
    refuse(repo, "named before", [a, b, "v0"])
    refuse(repo, "mean, ema", heads, method="average")
    refuse(repo, r"sum to 3, not to 1: .*0\.333333", heads, weights=[1, 1, 1])
    refuse(repo, r"weights\[1\] is nan", heads, weights=[1, math.nan, 0])
    refuse(repo, r"weights\[0\] is -1", heads, weights=[-1, 1, 1])
    refuse(repo, "2 weights for 3", heads, weights=[0.5, 0.5])
    refuse(repo, "for method ema, not for mean", heads, decay=0.5)
    refuse(
        repo, "for method mean, not for ema", [a, b], method="ema", decay=0.5, weights=[0.5, 0.5]
    )
    refuse(repo, "needs decay", heads, method="ema")
    for decay in (1, -0.1, math.nan):
        refuse(repo, "from 0 to below 1", heads, method="ema", decay=decay)
    refuse(repo, "selects nothing: try model", heads, only="modle")
    refuse(repo, "nothing to merge", heads, only="model/1.num_batches_tracked")
    refuse(repo, "rest='all'", heads, rest="all")
    assert len(repo.find("step >= 0")) == 4, "nothing was made"


def test_states_that_do_not_fit_are_refused_with_a_list(repo: Repository) -> None:
    tied = torch.ones(3)
    a = track(repo, "a", model={"w": torch.ones(3), "x": torch.ones(2), "t": tied, "u": tied})
    b = track(
        repo,
        "b",
        model={"w": torch.ones(4), "y": torch.ones(2), "t": torch.ones(3), "u": torch.zeros(3)},
    )
    with pytest.raises(InvalidInput) as caught:
        repo.merge([a, b])
    for part in (
        "only in .*model/x",
        "only in .*model/y",
        r"model/w: float32 \(3,\) here, float32 \(4,\) there",
        "model/u: tied to model/t",
    ):
        assert caught.match(part)
    refuse(
        repo,
        "model/u: tied to model/t here, not there",
        [a, track(repo, "d", model={"u": torch.ones(3)})],
        only="model/u",
    )
    refuse(
        repo,
        "float32 .* here, float64",
        [a, track(repo, "c", model={"w": torch.ones(3).double()})],
        only="model/w",
    )
    sparse = [
        track(repo, f"s{number}", model={"s": torch.eye(3).to_sparse()}) for number in range(2)
    ]
    refuse(repo, "model/s/indices is part of a sparse", sparse, Unsupported)
    packed = [
        track(
            repo,
            f"p{number}",
            model={
                "p": torch.tensor([number], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
                "w": torch.ones(1),
            },
        )
        for number in range(2)
    ]
    refuse(repo, r"model/p is float4_e2m1fn_x2, .*: leave it out with only=", packed, Unsupported)
    assert repo.merge(packed, only="model/w").parents == tuple(each.uid for each in packed)


def test_an_evicted_parent_is_named_with_what_is_nearest(tmp_path: Path) -> None:
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=128 * MIB, durable_interval_s=None)
    ) as repo:
        fork(repo, 2)
        training = Training(0)
        with repo.track(model=training.model, optimizer=training.optimizer, branch="v0") as run:
            run.capture().wait()
            run.capture().wait()
        near = repo.state("v0~2").uid
    with datastates.open(tmp_path / "runs") as repo:
        with pytest.raises(Unavailable) as caught:
            repo.merge(["v0~1", "v1"])
        assert caught.value.nearest == near


def test_a_merge_that_has_no_room_beside_its_parents_says_so(tmp_path: Path) -> None:
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=24 * MIB, durable_interval_s=None)
    ) as repo:
        # two slots each, of six
        states = [track(repo, name, model={"w": torch.randn(2 * MIB)}) for name in ("a", "b")]
        arena = repo.core.arena
        assert arena is not None
        # all that is free: a parent may have left memory by now
        taken = list(iter(lambda: arena.acquire([4 * MIB]), None))
        refuse(repo, "more memory_bytes", states, OverBudget)
        for slots in taken:
            arena.release(slots)
        assert repo.merge(states, tag="m").uid == repo.state("m").uid


# --- made again -----------------------------------------------------------------------------------


METHODS: list[dict[str, Any]] = [
    {},
    {"weights": [0.2, 0.5, 0.3]},
    {"method": "ema", "decay": 0.9},
    {"only": None},
    {"only": ["model/0.*"], "rest": "drop"},
]


@pytest.mark.parametrize("options", METHODS, ids=["mean", "weighted", "ema", "all", "part"])
def test_a_merge_is_made_again_from_its_parents(repo: Repository, options: dict[str, Any]) -> None:
    merged = repo.merge(fork(repo), tag="m", **options)
    assert repo.verify_merge("m").uid == merged.uid
    assert repo.verify("m").digest == merged.digest


def test_a_state_that_is_no_merge_cannot_be_verified_as_one(repo: Repository) -> None:
    fork(repo)
    with pytest.raises(InvalidInput, match="is no merge"):
        repo.verify_merge("v0")


def test_a_merge_of_other_weights_than_it_says_is_found_out(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged in the making: the tensors are summed with other weights than are written down."""
    heads = fork(repo)
    with monkeypatch.context() as patch:
        patch.setattr(
            "datastates.compare.merge.combine",
            lambda recipe, parts: (parts[0].double() * 0.6 + parts[1].double() * 0.4).to(
                parts[0].dtype
            ),
        )
        repo.merge(heads[:2], tag="forged")
    with pytest.raises(Corrupt, match=r"model/0\.weight of state .* by method mean"):
        repo.verify_merge("forged")


def test_a_flipped_byte_names_the_tensor(tmp_path: Path) -> None:
    with datastates.open(tmp_path / "runs", memory_bytes=128 * MIB) as repo:
        merged = repo.merge(fork(repo), tag="m")
    (pack,) = (tmp_path / "runs" / "packs").glob(f"{merged.uid}*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-2000] ^= 1
    pack.write_bytes(data)
    with (
        datastates.open(tmp_path / "runs") as repo,
        pytest.raises(Corrupt, match=r"model/\S+ of the merged state cannot be read"),
    ):
        repo.verify_merge("m")


def test_merges_on_postgresql(postgresql_url: str, tmp_path: Path) -> None:
    with datastates.open(postgresql_url, packs=tmp_path / "packs", memory_bytes=128 * MIB) as repo:
        merged = repo.merge(fork(repo), method="ema", decay=0.5, into="soup")
        assert [state.uid for state in repo.find("attr.'merge.method' = 'ema'")] == [merged.uid]
        assert repo.verify_merge("soup").parents == merged.parents
