"""``blame``: which state last changed each tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import datastates
from datastates.maintenance.retention_pass import evict
from tests.cli.conftest import Invoke


@pytest.fixture
def uids(tmp_path: Path) -> list[str]:
    """Five states: ``w`` changes at steps 2 and 4, ``still`` never; that of step 3 has lost its
    bytes."""
    tree = {"w": torch.ones(4), "still": torch.ones(2)}
    with (
        datastates.open(tmp_path / "runs", memory_bytes=32 << 20) as repo,
        repo.track(rng=False, tree=tree) as run,
    ):
        made = []
        for step in range(1, 6):
            tree["w"] += step in (2, 4)
            made.append(run.capture().wait("durable").uid)
        evict(repo.core, made[2], is_forced=True)
    return made


def test_each_tensor_has_the_state_that_last_changed_it(uids: list[str], invoke: Invoke) -> None:
    done = invoke("blame", "--size")
    assert done.code == 0, done.err
    rows = {line.split()[0]: line for line in done.out.splitlines()[1:]}
    assert (
        f"at or after step 3, {uids[2][:10]}; at or before step 4, {uids[3][:10]}" in rows["tree/w"]
    )
    assert "0.5" in rows["tree/w"]
    assert f"step 1, {uids[0][:10]}" in rows["tree/still"]
    assert "are gone" in done.err


def test_json_is_a_tensor_a_line(uids: list[str], invoke: Invoke) -> None:
    (told,) = invoke("blame", "main~3", "--only", "tree/w", "--size", "--json").lines
    assert (told["path"], told["state"], told["step"], told["change"], told["earliest"]) == (
        "tree/w",
        uids[1],
        2,
        "changed",
        None,
    )
    assert (told["before"], told["relative"], told["merged"]) == (uids[0], 1.0, False)
