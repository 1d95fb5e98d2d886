"""Restores into objects whose devices run out of memory, at each allocation in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates.config import Config
from datastates.errors import Dirty, OverBudget
from datastates.state.manifest import CHUNK_BYTES

CONFIG = Config(memory_bytes=16 * CHUNK_BYTES, durable_interval_s=None)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer without state."""
    torch.manual_seed(0)
    model = nn.Linear(30, 30)
    return model, torch.optim.AdamW(model.parameters())


MADE = 6
"""The tensors of the optimizer that a restore makes."""


@pytest.mark.parametrize("number", range(1, MADE + 2))
def test_a_restore_that_cannot_make_a_tensor_says_so_and_the_next_one_makes_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, left = torch.Tensor.to, number

    def short_of_memory(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal left
        left -= bool(options.get("copy"))
        if options.get("copy") and not left:
            raise torch.OutOfMemoryError("tried to allocate 3600 bytes")
        return to(tensor, *args, **options)

    model, optimizer = trained()
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    live, its = trained()
    with datastates.open(tmp_path, config=CONFIG) as repo:
        with repo.track(rng=False, model=model, optimizer=optimizer) as run:
            run.capture().wait("durable", timeout_s=20)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", short_of_memory)
            if number <= MADE:
                with pytest.raises(OverBudget, match=r"ran out of memory .* restore a state"):
                    repo.restore("main", model=live, optimizer=its)
                other = repo.track(branch="other", rng=False, model=live, optimizer=its)
                with other as run, pytest.raises(Dirty):
                    run.capture()
        assert (left == 0) is (number <= MADE), "each one has to fail once"
        repo.restore("main", model=live, optimizer=its)
        assert all(map(torch.equal, live.state_dict().values(), model.state_dict().values()))
        for mine, theirs in zip(live.parameters(), model.parameters(), strict=True):
            assert its.state[mine].keys() == optimizer.state[theirs].keys()
            for key, value in optimizer.state[theirs].items():
                assert torch.equal(its.state[mine][key], value)
