"""Every way to load data that the documents and the messages give is exact: each is run as it
stands there, stopped and started again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config, PermutationSampler
from datastates.errors import InvalidInput

ROOT = Path(__file__).parents[2]
CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)
STEPS, STOPS = 18, (1, 6, 9, 12, 17)
"""An epoch has 6 batches: the stops are at the beginning of one, within one, at the end of two,
and one before the last."""


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


RECIPES = blocks("docs/data.md")
VARIANTS = [
    (code, workers)
    for code in RECIPES
    for workers in (0, 2)
    if workers == 0 or "num_workers" in code
]


class Items(Dataset[torch.Tensor]):
    """Inputs that depend on their index, and where ``is_noisy`` on random numbers that are drawn
    when they are read."""

    def __init__(self, *, is_noisy: bool) -> None:
        self.is_noisy = is_noisy

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        item = torch.sin(torch.arange(8) * (index + 1.0))
        return item + 0.1 * torch.randn(8) if self.is_noisy else item


class Stopped(Exception):
    """The training was stopped."""


class Training:
    """Fresh objects, as a process that starts has them, and the losses of the steps that it
    took."""

    def __init__(self, *, is_noisy: bool, stop: int | None) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)
        self.data = Items(is_noisy=is_noisy)
        self.left = stop
        self.losses: list[float] = []

    def step(self, batch: torch.Tensor) -> float:
        if self.left is not None and len(self.losses) == self.left:
            raise Stopped
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def names(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "data")}
        known = {
            each.__name__: each for each in (DataLoader, PermutationSampler, StatefulDataLoader)
        }
        return {**named, **known, "torch": torch, "train_step": self.step}


def run(code: str, training: Training, folder: Path) -> Training:
    """The code as it stands, until it ends or is stopped."""
    with datastates.open(folder, config=CONFIG) as repo, suppress(Stopped):
        exec(compile(code, "docs/data.md", "exec"), {**training.names(), "repo": repo})
    return training


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize(
    ("code", "workers"),
    VARIANTS,
    ids=[f"{RECIPES.index(code)}-{workers}" for code, workers in VARIANTS],
)
def test_a_training_that_is_stopped_again_and_again_is_the_one_that_never_was(
    code: str, workers: int, tmp_path: Path
) -> None:
    code = code.replace("num_workers=2", f"num_workers={workers}")
    is_noisy = "StatefulDataLoader" not in code or not workers
    never = run(code, Training(is_noisy=is_noisy, stop=None), tmp_path / "never")
    assert len(set(never.losses)) == STEPS
    losses: list[float] = []
    is_slow = "StatefulDataLoader" in code and workers  # to start
    for stop in (*(STOPS[1:3] if is_slow else STOPS), None):
        training = run(
            code,
            Training(is_noisy=is_noisy, stop=None if stop is None else stop - len(losses)),
            tmp_path / "stopped",
        )
        losses += training.losses
        assert losses == never.losses[: len(losses)], f"stopped after {stop}"
        assert stop is None or len(losses) == stop
    assert losses == never.losses
    assert_same(training.model, never.model)
    again = run(code, Training(is_noisy=is_noisy, stop=None), tmp_path / "stopped")
    assert again.losses == [], "it is finished"
    assert_same(again.model, never.model)


@pytest.mark.exact("loop", "fork")
def test_the_example_of_the_readme_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASTATES_MEMORY", "64M")
    (code,) = blocks("README.md")
    measure, losses = nn.functional.mse_loss, dict[str, list[float]]()
    for name, stops in (("never", (None,)), ("stopped", (1, 7, 16, 23, 30, None, None))):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        taken = losses[name] = []
        for stop in stops:

            def noted(
                got: torch.Tensor,
                wanted: torch.Tensor,
                taken: list[float] = taken,
                stop: int | None = stop,
            ) -> torch.Tensor:
                if len(taken) == stop:
                    raise Stopped
                loss = measure(got, wanted)
                taken.append(loss.item())
                return loss

            monkeypatch.setattr(nn.functional, "mse_loss", noted)
            with suppress(Stopped):
                exec(compile(code, "README.md", "exec"), {})
    assert losses["stopped"] == losses["never"]
    assert len(losses["never"]) == 3 * 8 + 2 * 8, "three epochs, and two of the fork"


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
def test_what_cannot_be_exact_is_refused_with_a_way_that_is(tmp_path: Path) -> None:
    data, sampler = Items(is_noisy=False), PermutationSampler(22)
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        with pytest.raises(
            InvalidInput,
            match=r"loop over run\.steps\(loader\).* track torchdata's StatefulDataLoader",
        ):
            repo.track(loader=DataLoader(data))
        loader = StatefulDataLoader(data, sampler=sampler, num_workers=2)
        with (
            repo.track(loader=loader, sampler=sampler) as tracked,
            pytest.raises(InvalidInput, match="track the loader alone"),
        ):
            next(tracked.steps(loader))
        kept = _Kept()
        with (
            repo.track(branch="other", kept=kept) as tracked,
            pytest.raises(InvalidInput, match="_Kept is tracked, and 2 workers"),
        ):
            next(tracked.steps(DataLoader(data, sampler=kept, num_workers=2)))


class _Kept(Sampler[int]):
    """A sampler of the user's own that says where it is."""

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        return iter(range(22))

    def state_dict(self) -> dict[str, int]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_messages_and_docstrings_give_only_what_the_document_has() -> None:
    document = (ROOT / "docs/data.md").read_text()
    for told in ("run.steps(loader)", "generator=torch.Generator()", "StatefulDataLoader"):
        assert told in document
    assert "generator=torch.Generator()" in str(PermutationSampler.__doc__)
