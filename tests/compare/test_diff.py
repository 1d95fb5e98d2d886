"""What changed between two states, against plain torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import datastates
from datastates import Repository
from datastates.cli.app import app
from datastates.compare.diff import Change, Diff, TensorChange, pieces, untied
from datastates.errors import InvalidInput, Unsupported
from datastates.maintenance.retention_pass import evict


@pytest.fixture
def repo(tmp_path: Path) -> Any:
    with datastates.open(tmp_path, memory_bytes=128 << 20) as opened:
        yield opened


def two(repo: Repository, old: dict[str, Any], new: dict[str, Any], **more: Any) -> Diff:
    """A state of each tree, one after the other, compared."""
    for branch, tree in (("old", old), ("new", new)):
        with repo.track(branch=branch, rng=False, tree=tree) as run:
            run.capture()
    return repo.diff("old", "new", **more)


def of(found: Diff, path: str) -> TensorChange:
    (tensor,) = (tensor for tensor in found.tensors if tensor.path == f"tree/{path}")
    return tensor


def test_numbers_are_those_of_plain_torch(repo: Repository) -> None:
    torch.manual_seed(3)
    old = torch.randn(1500, 900)  # more than one piece
    new = old.clone()
    new[7:700:3] += torch.randn(231, 900)
    new[1000, 5] = old[1000, 5] + 50
    found = of(two(repo, {"w": old}, {"w": new}), "w")

    left, right = old.double(), new.double()
    assert found.change is Change.CHANGED
    assert found.old_norm == pytest.approx(float(left.norm()), rel=1e-12)
    assert found.norm == pytest.approx(float(right.norm()), rel=1e-12)
    assert found.distance == pytest.approx(float((right - left).norm()), rel=1e-12)
    assert found.relative == pytest.approx(float((right - left).norm() / left.norm()), rel=1e-12)
    cosine = torch.nn.functional.cosine_similarity(left.flatten(), right.flatten(), dim=0)
    assert found.cosine == pytest.approx(float(cosine), rel=1e-12)
    assert found.at == (1000, 5)
    assert found.largest == pytest.approx(float((right - left).abs().max()), rel=1e-12)
    assert found.fraction == int((old != new).sum()) / old.numel()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn],
)
def test_every_dtype_can_be_compared(repo: Repository, dtype: torch.dtype) -> None:
    old = torch.tensor([[0, 1, 1], [1, 1, 0]]).to(dtype)
    new = torch.tensor([[0, 1, 1], [0, 1, 0]]).to(dtype)
    found = of(two(repo, {"w": old}, {"w": new}), "w")
    assert (found.distance, found.largest, found.at) == (1.0, 1.0, (1, 0))
    assert found.fraction == pytest.approx(1 / (12 if dtype.is_complex else 6))
    assert found.old_norm == 2.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_that_float64_cannot_tell_apart_are_told_apart(
    repo: Repository, dtype: torch.dtype
) -> None:
    old = torch.tensor([5, 2**60, 2**62], dtype=torch.int64).view(dtype)
    new = torch.tensor([5, 2**60, 2**62 + 3], dtype=torch.int64).view(dtype)
    found = of(two(repo, {"w": old}, {"w": new}), "w")
    assert (found.change, found.distance, found.largest, found.at) == (
        Change.CHANGED,
        3.0,
        3.0,
        (2,),
    )
    assert found.fraction == pytest.approx(1 / 3)


def test_a_difference_of_large_integers_is_exact(repo: Repository) -> None:
    old = {"near": torch.tensor([2**60 + 1, 7]), "far": torch.tensor([-(2**63), 7])}
    new = {"near": torch.tensor([2**60 + 131, 7]), "far": torch.tensor([2**63 - 1, 7])}
    found = two(repo, old, new)
    assert of(found, "near").largest == 130.0, "float64 holds every 256th integer there"
    assert of(found, "far").largest == 2.0**64, "more than 64 bits with a sign hold"


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.complex64])
def test_pieces_are_float64(repo: Repository, dtype: torch.dtype) -> None:
    values = torch.tensor([2**40, 3]).to(dtype)
    two(repo, {"w": values}, {"w": values})
    with repo.core.open_payload(repo.state("old")) as reader:
        (spec,) = untied(reader)
        (piece,) = pieces(reader, spec)
    assert float(piece.dot(piece)) == 2.0**80 + 9


def test_a_dtype_with_which_torch_does_not_compute_is_compared_without_figures(
    repo: Repository,
) -> None:
    old = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    new = torch.tensor([[1, 2], [3, 5]], dtype=torch.uint8)
    kind = torch.float4_e2m1fn_x2
    found = two(
        repo,
        {"w": old.view(kind), "turned": old.view(kind), "cast": old.view(kind)},
        {"w": new.view(kind), "turned": old.t().contiguous().view(kind).t(), "cast": old.float()},
    )
    assert of(found, "w") == TensorChange("tree/w", Change.CHANGED, (2, 2), "float4_e2m1fn_x2")
    assert (of(found, "turned").change, of(found, "cast").change) == (Change.SAME, Change.RECAST)
    with (
        repo.core.open_payload(repo.state("old")) as reader,
        pytest.raises(Unsupported, match="which torch stores but does not compute"),
    ):
        next(pieces(reader, untied(reader)[0]))


@pytest.mark.parametrize("place", [(0, 1), (1, 0), (2, 1)])
@pytest.mark.parametrize("part", [1.0, 1j])
def test_a_complex_number_that_changed_is_found(
    repo: Repository, place: tuple[int, int], part: complex
) -> None:
    old = torch.zeros(3, 2, dtype=torch.complex64)
    new = old.clone()
    new[place] = torch.tensor(part)
    assert of(two(repo, {"w": old}, {"w": new}), "w").at == place


def test_what_came_went_or_has_another_shape_or_dtype_is_named(repo: Repository) -> None:
    old = {
        "went": torch.ones(2),
        "shape": torch.ones(2),
        "dtype": torch.ones(2),
        "stays": torch.ones(3),
    }
    new = {
        "came": torch.ones(2),
        "shape": torch.ones(3),
        "dtype": torch.ones(2).double() * 2,
        "stays": torch.ones(3),
    }
    found = two(repo, old, new)
    changes = {tensor.path.removeprefix("tree/"): tensor.change for tensor in found.tensors}
    assert changes == {
        "went": "removed",
        "came": "added",
        "shape": "recast",
        "dtype": "recast",
        "stays": "same",
    }
    assert (of(found, "shape").old_shape, of(found, "shape").distance) == ((2,), None)
    assert of(found, "dtype").distance == pytest.approx(math.sqrt(2))
    assert found.count(Change.RECAST) == 2


def test_nan_on_both_sides_is_no_change_and_a_new_one_is_the_largest(repo: Repository) -> None:
    old = torch.tensor([math.nan, 1.0, math.inf, 5.0])
    new = torch.tensor([math.nan, 1.0, math.inf, math.nan])
    found = of(two(repo, {"w": old}, {"w": new}), "w")
    assert (found.fraction, found.at, found.largest) == (0.25, (3,), math.inf)


def test_another_order_of_storing_is_no_change(repo: Repository) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    found = of(two(repo, {"w": values}, {"w": values.t().contiguous().t()}), "w")
    assert (found.change, found.distance, found.fraction) == (Change.SAME, 0.0, 0.0)


def test_what_both_hold_in_the_same_chunks_is_not_read(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = torch.randn(3 << 20)
    read: list[str] = []

    def spy(reader: Any, spec: Any) -> torch.Tensor:
        read.append(spec.path)
        return read_flat(reader, spec)

    from datastates.compare import diff
    from datastates.storage.reading import read_flat

    monkeypatch.setattr(diff, "read_flat", spy)
    model = {"frozen": frozen, "head": torch.zeros(4)}
    with repo.track(rng=False, tree=model) as run:
        run.capture()
        model["head"] += 1
        run.capture()
    found = repo.diff("main~1", "main")
    assert set(read) == {"tree/head"}
    assert of(found, "frozen").change is Change.SAME
    assert found.base is not None
    assert found.base.uid == found.old.uid


def test_values_metrics_and_attributes_that_differ_are_told_and_only_asks_for_a_part(
    repo: Repository,
) -> None:
    module = torch.nn.Linear(2, 2)
    for branch, rate, loss in (("old", 0.1, 1.0), ("new", 0.2, math.nan)):
        with repo.track(
            branch=branch,
            rng=False,
            model=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=rate),
            epoch=3,
        ) as run:
            run.capture(metrics={"loss": loss, "same": 1.0}, attributes={branch: True})
    found = repo.diff("old", "new")
    assert {path: pair for path, pair in found.values.items() if path.endswith("lr")} == {
        "optimizer/param_groups/0/lr": (0.1, 0.2)
    }
    assert list(found.metrics) == ["loss"]
    assert found.attributes == {"new": (None, True), "old": (True, None)}
    assert (found.config, found.versions, found.code, found.base) == (
        {"optimizer.lr": (0.1, 0.2)},
        {},
        None,
        None,
    )
    assert {tensor.path for tensor in repo.diff("old", "new", only="model/*weight").tensors} == {
        "model/weight"
    }
    assert not repo.diff("old", "new", only="epoch").tensors, (
        "a value is there, whatever is asked for"
    )
    with pytest.raises(InvalidInput, match=r"only='modle' selects nothing: try .*model"):
        repo.diff("old", "new", only=["model/weight", "modle"])


def test_progress_ends_with_all_bytes(repo: Repository) -> None:
    seen: list[tuple[int, int]] = []
    two(
        repo,
        {"a": torch.ones(5), "b": torch.ones(7)},
        {"a": torch.ones(5), "b": torch.zeros(7)},
        on_progress=lambda *at: seen.append(at),
    )
    assert seen[-1] == (48, 48)


def test_the_terminal_shows_what_changed(tmp_path: Path) -> None:
    model = {"frozen": torch.ones(3), "head": torch.zeros(2, 2)}
    with datastates.open(tmp_path) as repo, repo.track(rng=False, tree=model) as run:
        run.capture(metrics={"loss": 2.0})
        model["head"][1, 0] = 3
        run.capture(metrics={"loss": 1.0})

    def call(*words: str) -> str:
        done = CliRunner().invoke(app, ["--repo", str(tmp_path), "diff", "main~1", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    shown = call("--tensors")
    assert "tree/head" in shown
    assert "3 at [1, 0]" in shown
    assert "25 %" in shown
    assert "loss: 2 -> 1" in shown
    assert "1 step on" in shown
    assert "tree/frozen" not in shown
    assert "tree/frozen" in call("--tensors", "--all")
    assert call().splitlines()[-1].split() == ["tree", "2", "1", "3", "3"]
    assert "tree/head" not in call("--stat")
    plain = json.loads(call("--json"))
    assert [tensor["change"] for tensor in plain["tensors"]] == ["same", "changed"]
    assert plain["metrics"] == {"loss": [2.0, 1.0]}


def test_the_terminal_collapses_tensors_by_module_and_leaves_out_generators(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with (
        datastates.open(tmp_path) as repo,
        repo.track(model=model, optimizer=optimizer) as run,
    ):
        for _ in range(2):
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
            run.capture()

    done = CliRunner().invoke(app, ["--repo", str(tmp_path), "diff", "main~1"])
    modules = [line.split() for line in done.stdout.split("\n\n")[1].splitlines()[1:]]
    assert [row[:3] for row in modules] == [
        ["model/0", "2", "2"],
        ["model/1", "2", "2"],
        ["optimizer/0", "6", "6"],
        ["optimizer/1", "6", "6"],
    ]
    with datastates.open(tmp_path) as repo:
        found = {each.path: each for each in repo.diff("main~1", "main").tensors}
    weight, bias = found["model/0.weight"], found["model/0.bias"]
    assert modules[0][3] == f"{math.hypot(weight.norm or 0, bias.norm or 0):.4g}"
    assert modules[0][5] == f"{max(weight.largest or 0, bias.largest or 0):.4g}"
    shown = [
        CliRunner().invoke(app, ["--repo", str(tmp_path), "diff", "main~1", *words]).stdout
        for words in ([], ["--rng"])
    ]
    assert ["rng/" in text for text in shown] == [False, True]


def test_the_terminal_says_first_how_configurations_differ(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        for branch, config in (
            ("main", {"lr": 0.1, "net": {"act": "relu", "width": 8}}),
            ("fork", {"lr": 0.2, "net": {"act": "relu"}}),
        ):
            with repo.track(branch=branch, weight=torch.ones(3), rng=False, config=config) as run:
                run.capture(metrics={"loss": 1.0})
    done = CliRunner().invoke(app, ["--repo", str(tmp_path), "diff", "main", "fork"])
    lines = done.stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("config")] == [
        "lr: 0.1 -> 0.2",
        "net.width: 8 -> nothing",
    ]
    assert [line.split()[0] for line in lines[3:]] == ["tensors", "config", "config"]
    plain = json.loads(
        CliRunner().invoke(app, ["--repo", str(tmp_path), "diff", "main", "fork", "--json"]).stdout
    )
    assert plain["config"] == {"lr": [0.1, 0.2], "net.width": [8, None]}
    assert plain["new"]["config"] == {"lr": 0.2, "net.act": "relu"}


@pytest.fixture
def dropped(tmp_path: Path) -> Iterator[Repository]:
    """A branch of eight states; the bytes of the first, the fifth and the sixth are dropped."""
    tree = {"w": torch.ones(4)}
    with datastates.open(tmp_path) as repo:
        with repo.track(rng=False, tree=tree, durable_every=1, config={"lr": 0.1}) as run:
            for step in range(8):
                tree["w"] += 1
                run.capture(metrics={"loss": 1 / (step + 1)}).wait("durable")
        for step in (1, 5, 6):
            evict(repo.core, repo.state(f"main@step:{step}").uid)
        yield repo


def test_a_state_whose_bytes_are_gone_is_compared_by_what_is_known_and_the_nearest_is_named(
    dropped: Repository,
) -> None:
    gone, nearest = dropped.state("main@step:6"), dropped.state("main@step:4")
    found = dropped.diff(gone.uid, "main")
    assert found.metrics == {"loss": (gone.metrics["loss"], 1 / 8)}
    assert (found.tensors, found.values) == ((), {})
    (lacking,) = found.lacking
    assert lacking.state == gone.uid
    assert lacking.nearest == nearest
    assert f"step {nearest.step}" in lacking.why
    assert dropped.diff(lacking.nearest, "main").count(Change.CHANGED) == 1

    with pytest.raises(datastates.Unavailable):
        dropped.load(gone.uid)


def test_both_sides_may_be_gone_and_a_root_has_nothing_before_it(dropped: Repository) -> None:
    newest, root = dropped.state("main@step:6"), dropped.state("main@step:1")
    found = dropped.diff(root, newest)
    assert [(each.state, each.nearest is None) for each in found.lacking] == [
        (root.uid, True),
        (newest.uid, False),
    ]


def test_the_terminal_offers_what_can_be_compared_instead(dropped: Repository) -> None:
    folder = str(dropped.location.root)
    dropped.close()
    done = CliRunner().invoke(app, ["--repo", folder, "diff", "main@step:6", "main"])
    assert done.exit_code == 0, done.output
    assert "loss: " in done.stdout
    assert "could not be compared" in done.output
    nearest = re.search(r"`datastates --repo \S+ diff ([0-9a-f]+) ", done.output)
    assert nearest is not None
    again = CliRunner().invoke(app, ["--repo", folder, "diff", nearest[1], "main"])
    assert "1 changed" in again.stdout


def test_stat_reads_no_payload_and_says_what_it_cannot_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {
        "frozen": torch.ones(3 << 20),
        "head": torch.zeros(4),
        "cast": torch.zeros(2),
        "went": torch.zeros(3),
    }
    with datastates.open(tmp_path) as repo, repo.track(rng=False, tree=model) as run:
        run.capture().wait("durable")
        model["head"] += 1
        model["cast"] = model["cast"].double()
        del model["went"]
        run.capture().wait("durable")
    from datastates.storage.pack_reader import MappedReader

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("payload was read")

    with monkeypatch.context() as patch:
        for name in ("chunk", "span", "loan", "gather"):
            patch.setattr(MappedReader, name, refuse)
        with datastates.open(tmp_path) as repo:
            found = repo.diff("main~1", "main", stat=True)
            with pytest.raises(AssertionError, match="payload was read"):
                repo.diff("main~1", "main")
        done = CliRunner().invoke(
            app, ["--repo", str(tmp_path), "diff", "main~1", "main", "--stat"]
        )
    changes = {tensor.path.removeprefix("tree/"): tensor.change for tensor in found.tensors}
    assert changes == {"frozen": "same", "head": "unread", "cast": "recast", "went": "removed"}
    assert done.exit_code == 0, done.output
    assert "1 unread" in done.stdout
    assert "no payload was read" in done.output


def test_secrets_that_are_tracked_are_not_shown(repo: Repository) -> None:
    found = two(
        repo,
        {"api_key": "hunter22", "lr": 1},
        {"api_key": "hunter23", "lr": 2, "url": "http://me:hunter22@x/"},
    )
    assert found.values == {
        "tree/api_key": ("***", "***"),
        "tree/lr": (1, 2),
        "tree/url": (None, "http://me:***@x/"),
    }
    assert repo.load("old")["tree"]["api_key"] == "hunter22", (
        "what is tracked is restored as it was"
    )
