"""What only a tier of the user's has, while the repository was opened without it or while it
does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Unavailable
from tests.storage.test_tiers import Archive


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(8, 8)


@pytest.fixture
def archive(tmp_path: Path, model: torch.nn.Module) -> Archive:
    """It holds two states, and the folder of packs has lost the newest of them. (Closed with its
    repository: this one is another.)"""
    first, again = Archive(), Archive()
    with datastates.open(tmp_path, config=Config(tiers=[first])) as repo:
        with repo.track(model=model) as run:
            for _ in range(2):
                run.capture().wait("external", 60)
        repo.core.tiers.durable.remove(repo.state("main").uid)
    again.states = first.states
    return again


def test_a_branch_does_not_go_back_behind_what_a_tier_has_that_was_not_given(
    tmp_path: Path, model: torch.nn.Module, archive: Archive
) -> None:
    with datastates.open(tmp_path) as repo:
        head = repo.state("main")
        lacking = (
            r"is not in .*packs, but on the archive tier, with which it was not opened: give it by"
            r" Config\(tiers=\[…\]\)"
        )
        for use in (lambda: repo.track(model=model), lambda: repo.load(head)):
            with pytest.raises(Unavailable, match=lacking):
                use()
        assert repo.state("main") == head
    with (
        datastates.open(tmp_path, config=Config(tiers=[archive])) as repo,
        repo.track(model=model) as run,
    ):
        assert run.head == head


def test_a_branch_does_not_go_back_behind_what_a_tier_has_that_is_away(
    tmp_path: Path, model: torch.nn.Module, archive: Archive
) -> None:
    archive.is_away = True
    with datastates.open(tmp_path, config=Config(tiers=[archive])) as repo:
        head = repo.state("main")
        with pytest.raises(Unavailable, match="the archive does not answer"):
            repo.track(model=model)
        assert repo.state("main") == head


def test_a_branch_goes_back_where_the_tier_says_that_it_has_lost_the_state(
    tmp_path: Path, model: torch.nn.Module, archive: Archive
) -> None:
    with datastates.open(tmp_path, config=Config(tiers=[archive])) as repo:
        head = repo.state("main")
        del archive.states[head.uid]
        with repo.track(model=model) as run:
            assert run.head is not None
            assert run.head.uid == head.parents[0]
