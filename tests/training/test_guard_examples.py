"""The examples of a guarded training and of a population run as a user runs them: as scripts, in
processes of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import datastates
from tests.examples.test_examples import run


def test_rewind_goes_on_to_a_normal_loss_and_shows_what_it_abandoned(tmp_path: Path) -> None:
    said = run("rewind.py", "guarded", 90, cwd=tmp_path)

    assert "step 30: the loss is nan; back at step 28, see abandoned/main/30" in said
    assert "step 60: the loss is " in said
    mean = re.search(r"step 90: mean loss (\S+) of the last 10 steps", said)
    assert mean is not None
    assert float(mean[1]) < 1.5
    with datastates.open(tmp_path / "guarded") as repo:
        assert {ref.name for ref in repo.refs()} == {
            "main",
            "abandoned/main/30",
            "abandoned/main/60",
        }
        assert all(repo.verify(ref.name).status == "durable" for ref in repo.refs())


@pytest.mark.long
def test_pbt_shows_who_came_from_whom_and_is_not_trained_twice(tmp_path: Path) -> None:
    first, again = (run("pbt.py", "evolved", 400, 3, 2, 1, cwd=tmp_path) for _ in range(2))

    assert first.startswith("400 pictures of ")
    parents = re.findall(r"^│ r2/m(\d) +│ r1/m(\d) +│ done ", first, re.MULTILINE)
    assert [member for member, _ in parents] == ["1", "2", "3"]
    assert sum(member != parent for member, parent in parents) == 1, (
        "the worst continues from a fork of the best"
    )
    best = {
        found[1]: float(found[2])
        for found in re.finditer(
            r"^(pbt|alone): best \S+, validation loss (\S+);", first, re.MULTILINE
        )
    }
    assert best["pbt"] <= best["alone"]
    assert first == again, "the same states"
