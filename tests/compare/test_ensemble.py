"""Predictions from several states with one module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Ensemble, NotFound, Repository, State
from datastates.errors import InvalidInput
from datastates.maintenance.core import Core
from datastates.maintenance.loading import load

MIB = 1 << 20


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", memory_bytes=64 * MIB) as opened:
        yield opened


class Net(nn.Module):
    """A frozen backbone, a BatchNorm, dropout, tied weights, and a buffer that counts calls."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(6, 8)
        torch.manual_seed(seed)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.head, self.tied = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight
        self.calls: torch.Tensor
        self.shift: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.full((8,), 0.5), persistent=False)
        self.norm(torch.randn(32, 8) * (seed + 1))  # running statistics of its own

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        hidden: torch.Tensor = self.tied(self.head(self.drop(self.norm(self.backbone(x)))))
        return hidden * scale + self.shift * self.calls


def capture(repo: Repository, count: int = 3) -> list[Net]:
    nets = [Net(seed) for seed in range(1, count + 1)]
    for number, net in enumerate(nets):
        with repo.track(model=net, branch=f"b{number}") as run:
            run.capture().wait()
    return nets


REVS = ["b0", "b1", "b2"]


def test_each_member_predicts_as_its_own_module_does(repo: Repository) -> None:
    nets = capture(repo)
    x = torch.randn(5, 6)
    ensemble = repo.ensemble(REVS, Net(9))

    found = ensemble(x, scale=2.0)

    expected = torch.stack([net.eval()(x, scale=2.0) for net in nets]).detach()
    assert isinstance(ensemble, Ensemble)
    assert torch.equal(found.outputs, expected)
    assert torch.equal(found.mean, expected.mean(0))
    assert torch.allclose(
        found.spread, ((expected - expected.mean(0)) ** 2).mean(0).sqrt(), atol=1e-6
    )
    assert [state.uid for state in ensemble.members] == [repo.state(rev).uid for rev in REVS]
    assert torch.equal(torch.stack(list(ensemble.each(x, scale=2.0))), expected), (
        "a second time too: nothing was counted"
    )
    assert not found.outputs.requires_grad


def test_the_module_is_as_it_was(repo: Repository) -> None:
    capture(repo)
    skeleton = Net(9).train()
    skeleton.norm.eval()
    before = {name: tensor.clone() for name, tensor in skeleton.state_dict().items()}

    repo.ensemble(REVS, skeleton)(torch.randn(5, 6))

    assert all(torch.equal(tensor, before[name]) for name, tensor in skeleton.state_dict().items())
    assert (skeleton.training, skeleton.norm.training, skeleton.drop.training) == (
        True,
        False,
        True,
    )
    with pytest.raises(RuntimeError):
        repo.ensemble(REVS, skeleton)(torch.randn(5, 7))
    assert (skeleton.training, skeleton.norm.training) == (True, False)


def test_each_member_is_loaded_once_and_what_they_share_is_held_once(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(repo)
    loads: list[str] = []

    def counting(core: Core, state: State, **options: Any) -> Any:
        loads.append(state.uid)
        return load(core, state, **options)

    monkeypatch.setattr("datastates.compare.ensemble.load", counting)
    ensemble = repo.ensemble(REVS, Net(9))
    for _ in range(3):
        ensemble(torch.randn(2, 6))

    assert len(loads) == 3
    # backbone, counters; head and norm
    shared, own = (
        (6 * 8 + 8) * 4 + 3 * 8 + 4,
        (8 * 8 + 4 * 8) * 4,
    )
    assert ensemble.bytes_held <= shared + 3 * own
    assert len(ensemble) == 3


def test_what_does_not_fit_is_listed(repo: Repository) -> None:
    capture(repo, 1)
    with pytest.raises(InvalidInput) as caught:
        repo.ensemble(["b0"], nn.Sequential(nn.Linear(6, 8)))
    assert caught.match(r"not in the state: model/0\.weight")
    assert caught.match(r"not in the module: model/backbone\.weight")
    wide = Net(1)
    wide.backbone = nn.Linear(7, 8)
    with pytest.raises(
        InvalidInput,
        match=(
            r"model/backbone\.weight: the state has float32 \(8, 6\), the module float32 \(8, 7\)"
        ),
    ):
        repo.ensemble(["b0"], wide)
    loose = Net(1)
    loose.tied.weight = nn.Parameter(torch.zeros(8, 8))
    with repo.track(model=loose, branch="loose") as run:
        run.capture().wait()
    with pytest.raises(InvalidInput, match="tied to"):
        repo.ensemble(["loose"], Net(1))
    with pytest.raises(InvalidInput, match=r"has no module 'net'"):
        repo.ensemble(["b0"], Net(1), only="net")
    with pytest.raises(InvalidInput, match="give a list"):
        repo.ensemble("b0", Net(1))
    with pytest.raises(NotFound):
        repo.ensemble(["nobody"], Net(1))


def test_an_output_that_is_no_tensor_needs_a_choice(repo: Repository) -> None:
    class Pair(nn.Linear):
        # as models of libraries do
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"logits": super().forward(x)}

    torch.manual_seed(0)
    with repo.track(model=Pair(3, 2), branch="p") as run:
        run.capture().wait()
    with pytest.raises(InvalidInput, match="pick="):
        repo.ensemble(["p"], Pair(3, 2))(torch.ones(1, 3))
    assert repo.ensemble(["p"], Pair(3, 2), pick=lambda output: output["logits"])(
        torch.ones(1, 3)
    ).outputs.shape == (1, 1, 2)


def test_a_soup_and_its_members_predict_side_by_side(repo: Repository) -> None:
    capture(repo)
    repo.merge(REVS, into="soup")
    found = repo.ensemble(["soup", *REVS], Net(9))(torch.randn(4, 6))
    assert found.outputs.shape == (4, 4, 8)
    assert not torch.equal(found.outputs[0], found.outputs[1])
