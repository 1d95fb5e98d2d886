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
from tests.support.late import LateDevices, Lateness

CONFIG = Config(memory_bytes=16 * CHUNK_BYTES, durable_interval_s=None)
WORDS = 2 * CHUNK_BYTES // 4 + 1001
ALLOCATIONS = 2
"""Of a restore with enough memory: one on each device."""


def made() -> dict[str, torch.Tensor]:
    """A tensor of three chunks, and tensors that begin and end in the middle of a word."""
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(WORDS, generator=generator),
        "short": torch.randn(200_001, generator=generator).bfloat16(),
        "bytes": torch.randint(0, 255, (100_003,), dtype=torch.uint8, generator=generator),
        "elsewhere": torch.randn(300, 301, generator=generator),
    }


CASES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 1000)]
"""The first allocation that fails, and how many do. After one that fails, a chunk is tried."""


@pytest.mark.parametrize(
    ("number", "count", "status"),
    [*((*case, "captured") for case in CASES), (*CASES[0], "durable"), (*CASES[-1], "durable")],
)
def test_a_restore_without_memory_on_two_devices_is_right(
    number: int, count: int, status: str, tmp_path: Path
) -> None:
    late, expected = LateDevices(Lateness.BOTH), made()
    late.schedule.patience_s = 0.01
    live = {name: late.put(each, int(name == "elsewhere")) for name, each in made().items()}
    with (
        late.running(),
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(rng=False, state=live) as run,
    ):
        capture = run.capture()
        late.schedule.catch_up()
        capture.wait(status, timeout_s=20)
        for failing in (range(number, number + count), range(0)):
            late.schedule.be_late_again()
            late.allocations = 0
            for each in live.values():
                each.zero_()
            with late.failing(failing):
                run.restore("main")
            later = {name: each.clone() for name, each in live.items()}
            late.schedule.catch_up()
            for name, each in expected.items():
                assert torch.equal(live[name], each), name
                assert torch.equal(later[name], each), name
        assert late.allocations == ALLOCATIONS, "the next restore has memory"


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
