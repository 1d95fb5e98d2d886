"""Six public training scripts are killed twice at random steps: each loss equals that of a
training that was never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ordinary.public_scripts import INEXACT, PUBLIC
from tests.support.effort import SEED
from tests.support.killed import drawn, run, warnings

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_script_that_is_killed_twice_repeats_every_loss(name: str, tmp_path: Path) -> None:
    whole, err = run(tmp_path / "whole", PUBLIC[name], "1")
    assert warnings(err) == []
    said: list[str] = []
    newest = 0
    for seed, kill in enumerate([*drawn(whole, f"{name} {SEED}"), None], 1):
        lines, err = run(tmp_path / "killed", PUBLIC[name], str(seed), kill_at=kill)
        steps = [int(line.split()[1]) for line in lines if line.startswith("train ")]
        assert all(step >= newest for step in steps), "the newest state was durable"
        assert all(
            name == "dcgan" and "random numbers come from state" in line for line in warnings(err)
        ), err
        said, newest = said + lines, max(newest, *steps, 0)
    assert set(said) == set(whole)


@pytest.mark.parametrize("name", INEXACT)
def test_a_public_script_that_tracks_what_it_binds_again_is_told_which(
    name: str, tmp_path: Path
) -> None:
    script, names = INEXACT[name]
    _, err = run(tmp_path / "inexact", script, "1")
    assert [line.partition(":")[0] for line in warnings(err)] == names
