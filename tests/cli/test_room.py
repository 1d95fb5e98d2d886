"""``du`` and ``prune``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates.cli.app import Shell
from tests.cli.conftest import Invoke


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """Ten states of ``main``, the best of them the fourth, and three of ``fork``, which shares a
    layer of 1.2 MiB with it."""
    head = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(600, 512), head)
    config = datastates.Config(memory_bytes=64 << 20, durable_every=1, durable_interval_s=None)
    with datastates.open(tmp_path / "trained", config=config) as repo:
        for branch, start, count in (("main", None, 10), ("fork", "main~2", 3)):
            with repo.track(branch=branch, start=start, model=model) as run:
                for _ in range(count):
                    with torch.no_grad():
                        head.weight.add_(1)
                    run.capture(metrics={"loss": abs(run.step - 3)}).wait("durable", timeout_s=60)
    return str(tmp_path / "trained")


def test_du_says_what_dropping_each_branch_or_state_would_free(runs: str, invoke: Invoke) -> None:
    branches = {line["branch"]: line for line in invoke("-r", runs, "du", "--json").lines}
    assert {name: use["states"] for name, use in branches.items()} == {"main": 10, "fork": 3}
    assert all(use["own_bytes"] < 1 << 20 < use["shared_bytes"] for use in branches.values()), (
        "both need what the first state wrote"
    )
    states = invoke("-r", runs, "du", "main", "--json").lines
    assert [use["step"] for use in states] == list(range(10, 0, -1))
    assert [use["stays"] for use in states if use["stays"]] == [
        "the head of branch 'main'",
        "branch 'fork' forks here",
    ]
    said = invoke("-r", runs, "du").out
    assert "13 states, 1." in said
    assert "dropping it frees" in invoke("-r", runs, "du", "main", "-n", "2").out
    assert "these are the newest 2 of 10" in invoke("-r", runs, "du", "main", "-n", "2").err
    assert invoke("-r", runs, "du", "nobody").code != 0


def test_prune_drops_what_its_policy_does_not_keep_and_a_dry_run_nothing(
    runs: str, invoke: Invoke
) -> None:
    planned = invoke("-r", runs, "prune", "--keep", "latest:2 best:1:loss", "--dry-run")
    assert "no rule of 'latest:2 best:1:loss' keeps it" in planned.out
    assert "1 stay: the best loss on the way to branch fork" in planned.out
    assert len(invoke("-r", runs, "du", "main", "--json").lines) == 10
    done = invoke("-r", runs, "prune", "--keep", "latest:2 best:1:loss", "--json").json
    assert (len(done["dropped"]), done["is_dry_run"]) == (6, False)
    assert done["bytes_before"] - done["bytes_after"] == done["bytes_freed"]
    assert [use["step"] for use in invoke("-r", runs, "du", "main", "--json").lines] == [
        10,
        9,
        8,
        4,
    ]
    assert "0 states dropped" in invoke("-r", runs, "prune").out, "by default everything stays"
    refused = invoke("-r", runs, "prune", "--keep", "newest:3")
    assert (refused.code != 0, "'newest:3' is none of all, latest:N" in refused.err) == (True, True)


@pytest.mark.parametrize("command", [("du",), ("prune", "--keep", "latest:2")])
def test_progress_of_long_work_is_shown_to_people(
    command: tuple[str, ...], runs: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[tuple[int, int]]()

    @contextmanager
    def progress(
        shell: Shell, what: str, *, is_of_bytes: bool
    ) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: shown.append((done, total))

    monkeypatch.setattr("datastates.cli.upkeep.progress", progress)
    assert invoke("-r", runs, *command).code == 0
    assert shown[0] == (13, 13)
