"""A state whose tensors are in several shards, cut unevenly along rows and along columns, is one
like any other."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import datastates
from datastates import Repository
from datastates.api.payload import StateFile
from datastates.compare.diff import Change
from datastates.files.checkpoints import export, plan_export
from datastates.state.adapters import Adapted
from datastates.state.digest import tensors_of
from datastates.state.tree import flatten
from datastates.storage.local import LocalTier
from tests.support.sharding import deposit, sharded, shares_of

MIB = 1 << 20
TOKEN = "t" * 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(700, 1501)
        self.turned = nn.Parameter(torch.randn(301, 90).t())
        self.kernel = nn.Parameter(torch.randn(7, 3, 5, 2).to(memory_format=torch.channels_last))
        self.tied = self.head
        self.register_buffer("flags", torch.tensor([True, False, True, True]))
        self.register_buffer("brief", torch.randn(33).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x).sum() + self.turned.sum() + self.kernel.sum()
        return found


def trained(seed: int, steps: int = 2) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 700)).backward()
        optimizer.step()
    return {"net": net, "optimizer": optimizer}


def tensors(tree: object) -> dict[str, torch.Tensor]:
    return {leaf.path: leaf.tensor.detach().clone() for leaf in flatten(tree).tensors}


def live(objects: dict[str, Any]) -> dict[str, torch.Tensor]:
    return tensors(Adapted(objects).tree())


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for path, tensor in wanted.items():
        assert found[path].dtype == tensor.dtype, path
        assert torch.equal(found[path], tensor), path


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    torch.set_num_threads(1)
    return trained(1)


@pytest.fixture
def folder(objects: dict[str, Any], tmp_path: Path) -> Path:
    tree = Adapted(objects).tree()
    (part,) = sharded(secrets.token_hex(12), tree, shares_of(tree), step=7)
    cuts = {len(spec.shards) for spec in tensors_of(part.manifest.content) if spec.alias is None}
    assert {2, 3} <= cuts
    deposit(tmp_path / "runs", [part], branch="main")
    return tmp_path / "runs"


@pytest.fixture
def repo(folder: Path) -> Iterator[Repository]:
    with datastates.open(folder, memory_bytes=64 * MIB) as opened:
        yield opened


def test_it_loads_and_verifies(repo: Repository, objects: dict[str, Any]) -> None:
    assert_equal(tensors(repo.load("main")), live(objects))
    assert repo.verify("main").step == 7
    only = repo.load("main", only="net/turned")
    assert torch.equal(only["net"]["turned"], objects["net"].turned)
    assert only["net"]["turned"].stride() == objects["net"].turned.stride()


def test_it_is_restored_and_trained_on(repo: Repository, objects: dict[str, Any]) -> None:
    mine = trained(2, steps=0)
    repo.restore("main", objects=mine)
    assert_equal(live(mine), live(objects))
    with repo.track(branch="main", rng=False, **mine) as run:
        run.capture().wait("durable")
    assert_equal(tensors(repo.load("main")), live(objects))


def test_it_is_compared_shard_by_shard(folder: Path, objects: dict[str, Any]) -> None:
    other = {"net": trained(1)["net"], "optimizer": objects["optimizer"]}
    with torch.no_grad():
        other["net"].turned[3, 250] += 1
    tree = Adapted(other).tree()
    (part,) = sharded(secrets.token_hex(12), tree, shares_of(tree))
    (plain,) = sharded(secrets.token_hex(12), tree, {})
    deposit(folder, [part], branch="other")
    deposit(folder, [plain], branch="plain")
    with datastates.open(folder) as repo:
        for branch in ("other", "plain"):  # cut in the same way, and not at all
            found = repo.diff("main", branch)
            assert {tensor.path for tensor in found.tensors if tensor.change is Change.CHANGED} == {
                "net/turned"
            }
            (changed,) = (tensor for tensor in found.tensors if tensor.path == "net/turned")
            assert changed.at == (3, 250)
        moments = [
            tensor
            for tensor in repo.diff("main", "other").tensors
            if tensor.path.endswith("head.weight/exp_avg_sq")
        ]
        assert [moment.norm for moment in moments] == [None], "the same chunks are not read"


def test_it_is_exported_and_downloaded_as_whole_tensors(
    repo: Repository, folder: Path, objects: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "out.safetensors"
    state = repo.state("main")
    export(plan_export(repo.load("main"), state, path))
    loaded = safetensors.torch.load_file(path)
    assert_equal(loaded, live(objects))
    with LocalTier(folder / "packs").open(state.uid) as reader:
        file = StateFile(reader, state, None)
        whole = b"".join(file.pieces(0, file.size))
        assert whole == path.read_bytes()
        for start, end in ((0, 5), (9999, 1_000_003), (len(whole) - 9, len(whole))):
            assert b"".join(file.pieces(start, end)) == whole[start:end]


def test_it_is_merged(folder: Path, objects: dict[str, Any]) -> None:
    other = trained(3)
    (plain,) = sharded(secrets.token_hex(12), Adapted(other).tree(), {})
    deposit(folder, [plain], branch="plain")
    with datastates.open(folder, memory_bytes=128 * MIB) as repo:
        repo.merge(["main", "plain"], method="mean", only="net", into="soup")
        repo.verify_merge("soup")
        ours, theirs, found = live(objects), live(other), tensors(repo.load("soup"))
        mean = (ours["net/turned"].double() + theirs["net/turned"].double()) / 2
        assert torch.allclose(found["net/turned"].double(), mean, rtol=1e-6)
        assert torch.equal(found["net/flags"], ours["net/flags"])
        lean = repo.merge(["main", "plain"], method="mean", only="net", rest="drop")
        assert torch.equal(tensors(repo.load(lean))["net/turned"], found["net/turned"])


@pytest.mark.parametrize("atomic", [True, False])
def test_it_is_cloned_into_live_objects(
    repo: Repository, objects: dict[str, Any], atomic: bool
) -> None:
    mine = trained(4, steps=0)
    with (
        repo.serve("tcp://127.0.0.1:0", token=TOKEN) as server,
        datastates.connect(server.url, token=TOKEN) as peer,
    ):
        peer.clone("main", objects=mine, atomic=atomic)
    assert_equal(live(mine), live(objects))


def test_it_is_cloned_into_another_repository(
    repo: Repository, objects: dict[str, Any], tmp_path: Path
) -> None:
    with (
        repo.serve("tcp://127.0.0.1:0", token=TOKEN) as server,
        datastates.connect(server.url, token=TOKEN) as peer,
        datastates.open(tmp_path / "theirs", memory_bytes=64 * MIB) as theirs,
    ):
        assert_equal(tensors(theirs.load(peer.clone("main", repo=theirs).state)), live(objects))
