"""Quantized optimizers of torchao and bitsandbytes, and models of bitsandbytes, go on with equal
losses; what cannot is refused at once."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Repository
from datastates.errors import Unsupported
from datastates.integrations.transformers import DatastatesCallback
from datastates.state.geometry import is_wrapping, plain_tensors
from datastates.state.tree import canonical_name
from tests.support.effort import IS_THOROUGH

from .trainers import StopAt, Words, losses, qlora, trainer

pytestmark = pytest.mark.long  # torch.compile, PEFT and bitsandbytes take seconds

ITEMS = 5000


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(
        tmp_path / "runs", config=datastates.Config(memory_bytes=64 << 20)
    ) as opened:
        yield opened


def of_torchao(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        from torchao import optim

        made: torch.optim.Optimizer = getattr(optim, name)(parameters, lr=1e-2)
        return made

    return make


def of_bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-2)
    return made


OPTIMIZERS = {
    "AdamW8bit": of_torchao("AdamW8bit"),
    "AdamW4bit": of_torchao("AdamW4bit"),
    "AdamWFp8": of_torchao("AdamWFp8"),
    "bitsandbytes": of_bitsandbytes,
}


class Loop:
    """A training on a branch of ``repo``."""

    def __init__(self, repo: Repository, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.repo, self.make = repo, make

    def train(
        self, branch: str, until: int, *, seed: int = 0, start: str | None = None
    ) -> list[float]:
        """The losses from where it goes on; with another seed, the weights that a restore must
        replace are others."""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 8))
        self.optimizer = self.make(model.parameters())
        found = []
        with self.repo.track(
            branch=branch, start=start, model=model, optimizer=self.optimizer
        ) as self.run:
            for step in range(self.run.step, until):
                draw = torch.Generator().manual_seed(step)
                loss = (
                    (
                        model(torch.randn(16, 64, generator=draw))
                        - torch.randn(16, 8, generator=draw)
                    )
                    .square()
                    .mean()
                )
                self.optimizer.zero_grad()
                loss.backward()
                with warnings.catch_warnings():
                    # torchao's classes say nothing of torch.compile's cache
                    warnings.simplefilter("ignore")
                    self.optimizer.step()
                self.run.capture(step=step + 1)
                found.append(loss.item())
        return found


@pytest.mark.parametrize(
    "name", OPTIMIZERS if IS_THOROUGH else ("AdamW8bit", "bitsandbytes")
)  # torchao compiles for half a minute
def test_an_optimizer_with_quantized_state_goes_on_with_equal_losses(
    name: str, repo: Repository
) -> None:
    loop = Loop(repo, OPTIMIZERS[name])
    whole = loop.train("whole", 8)
    assert loop.train("main", 3) + loop.train("main", 8, seed=5) == whole
    assert loop.train("fork", 8, seed=6, start="main~5") == whole[3:]
    assert any(
        is_wrapping(value) for entry in loop.optimizer.state.values() for value in entry.values()
    ) is (name != "bitsandbytes")


def test_quantized_state_is_overwritten_in_place_and_takes_as_much_room_as_it_has(
    repo: Repository,
) -> None:
    loop = Loop(repo, OPTIMIZERS["AdamW8bit"])
    loop.train("main", 3)
    parameter = next(each for each in loop.optimizer.state if each.numel() > ITEMS)
    live = loop.optimizer.state[parameter]["exp_avg"]
    before = [part.clone() for part in plain_tensors(live)]
    live.codes.fill_(7)
    assert repo.restore("main", optimizer=loop.optimizer, only="optimizer/state")
    assert loop.optimizer.state[parameter]["exp_avg"] is live
    assert all(map(torch.equal, plain_tensors(live), before))
    weights = sum(each.nbytes for each in loop.optimizer.state)
    assert repo.state("main").bytes_total < 2 * weights + 20_000


def with_projector(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A stand-in for galore_torch, which is installed by few: its names are what is looked at."""
    module: Any = types.ModuleType("galore_torch.galore_projector")

    class GaLoreProjector:
        rank = 2

    class AdamW(torch.optim.AdamW):
        pass

    module.GaLoreProjector, module.AdamW = GaLoreProjector, AdamW
    AdamW.__module__ = "galore_torch.adamw"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return AdamW


def test_galore_is_refused_before_its_first_step(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = with_projector(monkeypatch)
    model = nn.Linear(2, 2)
    plain = kind(model.parameters())
    with repo.track(branch="plain", model=model, optimizer=plain):
        pass
    optimizer = kind(
        [{"params": [model.weight], "rank": 2, "update_proj_gap": 10}, {"params": [model.bias]}]
    )
    with pytest.raises(
        Unsupported, match=r"optimizer is a AdamW.*register_encoder\(GaLoreProjector"
    ):
        repo.track(model=model, optimizer=optimizer)
    projector = sys.modules["galore_torch.galore_projector"].GaLoreProjector
    datastates.register_encoder(
        projector,
        f"tests.projector.{id(projector)}",
        encode=lambda p: p.rank,
        decode=lambda _: projector(),
    )
    with repo.track(model=model, optimizer=optimizer):
        pass


def test_torchao_over_dtensors_is_refused_before_its_first_step(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = OPTIMIZERS["AdamW8bit"](model.parameters())
    monkeypatch.setattr("datastates.state.optimizer.is_spread", lambda found: found is model.weight)
    with pytest.raises(Unsupported, match="optimizer is a AdamW8bit of DTensors"):
        repo.track(model=model, optimizer=optimizer)


@pytest.mark.exact("transformers", "peft")
@pytest.mark.parametrize("is_4bit", [True, False])
def test_qlora_with_the_trainer_goes_on_and_leaves_its_base_out(
    is_4bit: bool, tmp_path: Path, repo: Repository
) -> None:
    from transformers import default_data_collator

    def make(*callbacks: Any, seed: int = 0) -> Any:
        model = qlora(tmp_path / "base", is_4bit=is_4bit)
        torch.manual_seed(seed)
        options = {
            "train_dataset": Words(),
            "data_collator": default_data_collator,
            "label_names": ["labels"],
        }
        return trainer(tmp_path / "out", callbacks=callbacks, model=model, max_steps=8, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bitsandbytes and transformers
        whole = losses(make())
        assert (
            losses(make(DatastatesCallback(repo), StopAt(3)))
            + losses(make(DatastatesCallback(repo)))
            == whole
        )
        tree = repo.load("main")
        assert all("lora_" in name for name in tree["model"])
        left = tree["frozen_parameters"]["model"].split("\n")
        assert len(left) >= 21
        assert not any("lora_" in name for name in left)
        model = qlora(tmp_path / "base", is_4bit=is_4bit)
        assert repo.restore("main", model=model)
        other = make(DatastatesCallback(repo, "all", frozen=True))
        with pytest.raises(
            Unsupported, match=r"is a tensor subclass, bitsandbytes\..*frozen=False"
        ):
            other.train()
    assert len(whole) == 8
    assert all(
        torch.equal(value, tree["model"][canonical_name(model, name)])
        for name, value in model.state_dict().items()
        if "lora_" in name
    )
