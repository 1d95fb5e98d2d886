"""The newest state of a branch whose every part verifies: ranks find it together, in a job of
another size too."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import datastates
from datastates.errors import InvalidInput, NotFound, Unavailable
from datastates.lineage.states import State
from datastates.ranks import SoloGroup, latest
from datastates.storage.tier import Reader
from tests.support.jobs import Say, run
from tests.support.thread_ranks import on_threads

HERE = "tests.ranks.test_newest"


def capture(folder: str, states: int, say: Say) -> None:
    """That many durable states of several parts."""
    tensor = torch.zeros(1000)
    with (
        datastates.open(folder, memory_bytes=64 << 20) as repo,
        repo.track(tracked={"x": tensor}, durable_every=1) as run,
    ):
        for number in range(states):
            tensor += number + 1
            say(run.capture().wait("durable").uid)


def look(folder: str, say: Say) -> None:
    """What this rank finds, and that a training goes on from there."""
    tensor = torch.zeros(1000)
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        found = latest(repo)
        say(found.step)
        with repo.track(branch="on", start=found, tracked={"x": tensor}) as run:
            say(float(tensor[0]), run.capture().wait().step)


def damage(folder: Path, uid: str, rank: int) -> None:
    """Change one byte of the payload of a part."""
    pack = folder / "packs" / f"{uid}.{rank}.safetensors"
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)


def test_ranks_pass_over_states_of_which_a_part_is_damaged_or_gone_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uids = run(2, f"{HERE}:capture", folder=str(tmp_path), states=4)[0]
    damage(tmp_path, uids[3], 1)
    (tmp_path / "packs" / f"{uids[2]}.0.safetensors").unlink()
    assert run(3, f"{HERE}:look", folder=str(tmp_path)) == [["2", "3.0 3"]] * 3
    with datastates.open(tmp_path) as repo:
        assert latest(repo, group=SoloGroup()).uid == uids[1]
        assert (
            f"state {uids[3][:10]} (step 4) is passed over: of its 2 parts 1 does not verify"
            in caplog.text
        )
        assert latest(repo, "on").step == 3
        for uid in uids[:2]:
            damage(tmp_path, uid, 0)
        with pytest.raises(Unavailable, match="no state of branch 'main' verifies"):
            latest(repo)
        with pytest.raises(NotFound):
            latest(repo, "nowhere")
        with pytest.raises(InvalidInput, match="group is 3: give a"):
            latest(repo, group=3)  # type: ignore[arg-type]


def test_a_part_that_one_rank_fails_to_read_for_any_reason_is_read_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with datastates.open(tmp_path, memory_bytes=64 << 20) as repo:
        with repo.track(tracked={"x": torch.zeros(1000)}, rng=False) as run:
            newest = run.capture().wait("durable")
        open_part, tried = repo.core.tiers.open_part, list[int]()

        def open_later(state: State, rank: int, **options: bool) -> tuple[Reader, int]:
            tried.append(rank)
            if len(tried) == 1:
                raise OSError("the mount went away")
            return open_part(state, rank, **options)

        monkeypatch.setattr(repo.core.tiers, "open_part", open_later)
        with caplog.at_level(logging.INFO, "datastates"):
            found, _ = on_threads(2, lambda group: latest(repo, group=group))
        assert found == [newest, newest]
        assert "part 0 does not verify here: OSError: the mount went away" in caplog.text
