"""A gradient scaler that is switched off has no state, and takes none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Repository
from datastates.state.restore import restore_into


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=64 << 20, durable_interval_s=None)
    ) as opened:
        yield opened


def scaler(*, is_enabled: bool, scale: float = 8.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, enabled=is_enabled)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_scaler_that_is_switched_off_is_captured_and_restored(
    repo: Repository, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    caplog.set_level(logging.INFO, "datastates")
    for _ in range(2):
        with repo.track(
            model=nn.Linear(1, 1), scaler=torch.amp.GradScaler(device, enabled=False)
        ) as run:
            run.capture().wait()
            assert repo.load("main", only="scaler")["scaler"] == {}
    assert not [record for record in caplog.records if "scaler" in record.message]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_training_that_switches_its_scaler_on_or_off_goes_on_and_says_what_was_not_restored(
    repo: Repository, caplog: pytest.LogCaptureFixture, *, was_enabled: bool
) -> None:
    caplog.set_level(logging.INFO, "datastates")
    with repo.track(model=nn.Linear(1, 1), scaler=scaler(is_enabled=was_enabled)) as run:
        run.capture()
    its = scaler(is_enabled=not was_enabled, scale=4.0)
    with repo.track(model=nn.Linear(1, 1), scaler=its) as run:
        assert run.report
        assert len(run.report.anew) == 1
        assert "scaler" not in run.report.restored
    assert its.get_scale() == (1.0 if was_enabled else 4.0)
    said = (
        "is switched off here, and what the state has of it is not restored"
        if was_enabled
        else "was switched off in the state"
    )
    assert caplog.text.count(f"branch main: scaler {said}") == 1


class Own(torch.amp.GradScaler):
    """Takes what others do not."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken = state_dict


def test_a_scaler_that_loads_in_a_way_of_its_own_is_asked() -> None:
    live = Own("cpu")
    assert not restore_into({"scaler": live}, {"scaler": {}}).anew
    assert live.taken == {}
