"""``show`` and ``diff --config``: what a state was configured with, and what was another before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import datastates
from tests.cli.conftest import Invoke


@pytest.fixture
def uids(tmp_path: Path) -> dict[str, str]:
    """``main`` with three states; ``fork``, from the second, at another rate, was trained by two
    processes in turn."""
    weight = torch.ones(1)
    found = {}
    with datastates.open(tmp_path / "runs", memory_bytes=32 << 20) as repo:
        with repo.track(
            rng=False, weight=weight, config={"lr": 0.1, "opt": {"name": "sgd"}}
        ) as run:
            for step in range(1, 4):
                found[f"main{step}"] = run.capture().wait("durable").uid
        for number in (1, 2):
            start = "main~1" if number == 1 else None
            with repo.track(
                rng=False, weight=weight, branch="fork", start=start, config={"lr": 0.2, "seed": 7}
            ) as run:
                found[f"fork{number}"] = run.capture().wait("durable").uid
        with repo.track(rng=False, weight=weight, branch="bare") as run:
            found["bare"] = run.capture().wait("durable").uid
    return found


def test_it_says_since_when_and_what_was_another_before(
    uids: dict[str, str], invoke: Invoke
) -> None:
    shown = invoke("show", "fork", "--json").json
    assert shown["config"] == {"lr": 0.2, "seed": 7}
    assert shown["configured"] == {
        "since": uids["fork1"],
        "before": uids["main2"],
        "changes": {"lr": [0.1, 0.2], "opt.name": ["sgd", None], "seed": [None, 7]},
    }
    lines = invoke("show", "fork").out.splitlines()
    assert {"lr: 0.1 -> 0.2", "opt.name: 'sgd' -> nothing", "seed: nothing -> 7"} <= set(lines)
    assert any(f"configured like this since step 3, {uids['fork1'][:10]}" in line for line in lines)


def test_a_path_that_began_so_has_nothing_before(uids: dict[str, str], invoke: Invoke) -> None:
    told = invoke("show", "main", "--json").json["configured"]
    assert (told["since"], told["before"], told["changes"]) == (uids["main1"], None, {})


def test_two_states_are_compared(uids: dict[str, str], invoke: Invoke) -> None:
    told = invoke("diff", "--config", "main", "fork", "--json").json
    assert [each["state"]["uid"] for each in told["states"]] == [uids["main3"], uids["fork2"]]
    rows = {row["key"]: row["values"] for row in told["config"] if row["differs"]}
    assert rows == {"lr": [0.1, 0.2], "opt.name": ["sgd", None], "seed": [None, 7]}
    assert (told["metrics"], told["code"]) == ([], [])
    assert "config.lr" in invoke("diff", "--config", "main", "fork").out
    assert "config." not in invoke("diff", "--config", "fork~1", "fork").out
