"""A damaged state, and a fork that fails: what the error says is what goes on, and nothing is
left half done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Conflict, NotFound, Repository, Unavailable
from datastates.errors import Corrupt, InvalidInput

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A branch of four durable states of one tensor each, which no memory holds any more."""
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as first,
        first.track(weight=(weight := torch.zeros(3))) as run,
    ):
        for _ in range(4):
            weight += 1
            run.capture().wait("durable")
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


def damage(repo: Repository, rev: str, kind: str) -> str:
    """Flip the last byte of a state's pack or manifest; its uid."""
    uid = repo.state(rev).uid
    (path,) = repo.location.packs.glob(f"{uid}.*.{kind}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return uid


@pytest.mark.parametrize("kind", ["safetensors", "manifest"])
def test_a_branch_with_a_damaged_head_goes_on_as_the_error_says(
    repo: Repository, kind: str
) -> None:
    damage(repo, "main", kind)
    damage(repo, "main~1", kind)
    weight = torch.zeros(3)
    with pytest.raises(
        Corrupt, match=r"the nearest state that verifies is \w{10} \(step 2\)"
    ) as caught:
        repo.track(weight=weight)
    assert caught.value.nearest == repo.state("main~2").uid
    (advice,) = re.findall(
        r"on branch 'main': (repo\.move\(.*\)), then track it again", str(caught.value)
    )
    eval(advice, {"repo": repo})
    with repo.track(weight=weight) as run:
        assert weight.tolist() == [2, 2, 2]
        assert run.capture().wait("durable").step == 3


def test_a_damaged_state_that_is_asked_for_names_the_one_to_restore(repo: Repository) -> None:
    uid = damage(repo, "main~1", "safetensors")
    for ask in (lambda: repo.load(uid), lambda: repo.restore(uid, weight=torch.zeros(3))):
        with pytest.raises(Corrupt, match="is damaged") as caught:
            ask()
        assert caught.value.nearest == repo.state("main~2").uid
        assert "repo.move" not in str(caught.value)  # no branch stands there


def test_a_damaged_state_without_sound_ancestors_names_a_later_one(repo: Repository) -> None:
    for back in (3, 2):
        damage(repo, f"main~{back}", "safetensors")
    with pytest.raises(Corrupt, match="the nearest state that verifies is") as caught:
        repo.load("main~3")
    assert caught.value.nearest == repo.state("main~1").uid


def test_a_state_that_cannot_be_restored_is_not_the_one_to_restore_instead(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid, before = repo.state("main").uid, repo.state("main~1").uid

    def is_missing(*args: object, **options: object) -> None:
        raise NotFound("a part of it is missing")

    monkeypatch.setattr(repo.core.tiers, "open", is_missing)
    assert repo.core.tiers.has(uid)
    with pytest.raises(
        Unavailable, match=f"the nearest ancestor that can is {before[:10]}"
    ) as caught:
        repo.load(uid)
    assert caught.value.nearest == before


def test_when_no_ancestor_verifies_the_error_says_so(repo: Repository) -> None:
    for back in range(4):
        damage(repo, f"main~{back}", "safetensors")
    with pytest.raises(
        Corrupt, match="no ancestor or descendant of it verifies here: bring its files back"
    ) as caught:
        repo.track(weight=torch.zeros(3))
    assert caught.value.nearest is None
    with repo.track(weight=torch.zeros(3), branch="another") as run:
        run.capture().wait("durable")


def test_a_fork_that_fails_leaves_no_branch(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="does not fit"):
        repo.track(weight=torch.zeros(4), branch="fork", start="main~1")
    with pytest.raises(InvalidInput, match="has no state"):
        repo.track(weight=torch.zeros(3), code=print, branch="fork", start="main~1")
    damage(repo, "main~2", "safetensors")
    with pytest.raises(Corrupt):
        repo.track(weight=torch.zeros(3), branch="fork", start="main~2")
    assert [ref.name for ref in repo.refs()] == ["main"]
    with repo.track(weight=(weight := torch.zeros(3)), branch="fork", start="main~1") as run:
        assert weight.tolist() == [3, 3, 3]
        assert [event.reason for event in repo.reflog("fork")] == ["branch"]
        run.capture().wait("durable")


def test_a_fork_starts_where_the_branch_is_now(repo: Repository) -> None:
    with repo.track(weight=(weight := torch.zeros(3))) as run:
        weight += 1
        run.capture()
        with repo.track(weight=(fork := torch.zeros(3)), branch="fork", start="main"):
            assert fork.tolist() == [5, 5, 5]
        with pytest.raises(Conflict, match="exists"):
            repo.track(weight=fork, branch="fork", start="main", resume=False)
