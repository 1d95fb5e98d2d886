"""Which state last changed each tensor, against all states read from the newest to the oldest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Repository, State, Unavailable
from datastates.compare.blame import Blame
from datastates.errors import InvalidInput
from datastates.maintenance.retention_pass import evict
from datastates.storage import pack_reader
from tests.support.effort import examples, seeds

CHUNK = 1 << 20  # float32 elements of a chunk


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", memory_bytes=512 << 20) as opened:
        yield opened


def tensors_of(repo: Repository, state: State) -> dict[str, torch.Tensor]:
    return {f"tree/{name}": tensor for name, tensor in repo.load(state)["tree"].items()}


def is_equal(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return (
        one is not None
        and one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one, other)
    )


def by_force(repo: Repository, head: State, gone: set[str]) -> dict[str, tuple[str, str | None]]:
    """By loading every state: the newest that may have changed each tensor, and the oldest where
    that is another."""
    line = [head, *repo.ancestors(head)]
    found: dict[str, tuple[str, str | None]] = {}
    for path, value in tensors_of(repo, head).items():
        newest, gap = head, None
        for state in line[1:]:
            if state.uid in gone:
                gap = state.uid
                continue
            if not is_equal(tensors_of(repo, state).get(path), value):
                break
            newest, gap = state, None
        found[path] = (newest.uid, gap)
    return found


def trained(repo: Repository, seed: int, count: int, *, sizes: dict[str, int]) -> list[State]:
    """States in each of which some tensors change, and some go back to what they were."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    tree: dict[str, Any] = {name: torch.randn(size) for name, size in sizes.items()}
    still = {name: tensor.clone() for name, tensor in tree.items()}
    made = []
    with repo.track(rng=False, tree=tree) as run:
        for step in range(count):
            for name in [name for name in tree if chance.random() < 0.15]:
                change = chance.choice(("add", "one", "back", "recast"))
                if change == "back":
                    tree[name] = still.get(name, tree[name]).clone()
                elif change == "recast":
                    tree[name] = (
                        tree[name].double()
                        if tree[name].dtype == torch.float32
                        else tree[name].float()
                    )
                else:
                    tree[name] = tree[name].clone()
                    tree[name].view(-1)[
                        chance.randrange(tree[name].numel()) if change == "one" else slice(None)
                    ] += 1
            if step == count // 2:
                tree["late"] = torch.randn(7)
            made.append(run.capture().wait("durable"))
    return made


@pytest.mark.parametrize("seed", seeds(10))
def test_it_says_what_reading_every_state_says(repo: Repository, seed: int) -> None:
    made = trained(
        repo,
        seed,
        examples(24),
        sizes={"a": 3, "b": 40, "c": 1000, "d": CHUNK + 5, "e": 1, "f": CHUNK // 2},
    )
    chance = random.Random(seed)
    gone = {state.uid for state in made[:-1] if chance.random() < 0.25}
    whole = by_force(repo, made[-1], set())
    assert {each.path: (each.state.uid, None) for each in repo.blame("main")} == whole
    for uid in gone:
        evict(repo.core, uid, is_forced=True)

    found = {
        each.path: (each.state.uid, None if each.earliest is None else each.earliest.uid)
        for each in repo.blame("main")
    }

    assert found == by_force(repo, repo.state("main"), gone)


def only(found: list[Blame]) -> Blame:
    (one,) = found
    return one


def test_it_says_by_how_much_as_diff_does(repo: Repository) -> None:
    tree = {"w": torch.arange(1.0, 5.0), "still": torch.ones(2)}
    with repo.track(rng=False, tree=tree) as run:
        run.capture()
        tree["w"] += 1
        changed = run.capture().wait()
        run.capture().wait()

    found = only(repo.blame("main", only="tree/w", size=True))
    (told,) = repo.diff("main~2", "main~1", only="tree/w").tensors
    assert (found.state.uid, found.change, found.before) == (
        changed.uid,
        "changed",
        repo.state("main~2").uid,
    )
    assert (found.distance, found.old_norm, found.relative) == (
        told.distance,
        told.old_norm,
        told.relative,
    )
    still = only(repo.blame("main", only="tree/still", size=True))
    assert (still.change, still.state.step, still.relative, still.before) == (
        "added",
        1,
        None,
        None,
    )


def test_only_what_shares_a_chunk_with_a_change_is_read(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"large": torch.randn(4 * CHUNK), "small": torch.ones(8)}
    with repo.track(rng=False, tree=tree, durable_every=1) as run:
        run.capture().wait("durable")
        tree["large"] += 1
        run.capture().wait("durable")
    location = repo.location
    repo.close()
    read: list[int] = []
    monkeypatch.setattr(
        pack_reader.MappedReader, "gather", lambda self, start, into: read.append(into.nbytes)
    )
    with datastates.open(location.root or "") as again:
        assert {each.path: each.state.step for each in again.blame("main")} == {
            "tree/large": 2,
            "tree/small": 1,
        }
    assert sum(read) == 0


def test_a_merge_is_said_to_be_one(repo: Repository) -> None:
    model = torch.nn.Linear(2, 2)
    with repo.track(rng=False, model=model) as run:
        run.capture()
    with repo.track(rng=False, model=model, branch="other", start="main") as other, torch.no_grad():
        model.weight.add_(1)
        other.capture().wait()
    merged = repo.merge(["main", "other"], into="soup")
    found = {each.path: (each.state.uid, each.is_merged) for each in repo.blame("soup")}
    assert found["model/weight"] == (merged.uid, True)
    assert found["model/bias"] == (repo.state("main").uid, False)


def test_a_state_without_bytes_names_the_nearest_that_has_them(repo: Repository) -> None:
    tree = {"w": torch.ones(2)}
    with repo.track(rng=False, tree=tree) as run:
        states = [run.capture().wait("durable") for _ in range(3)]
    evict(repo.core, states[1].uid, is_forced=True)
    with pytest.raises(Unavailable, match=states[0].uid[:10]):
        repo.blame(states[1])


def test_a_pattern_that_selects_nothing_is_refused(repo: Repository) -> None:
    with repo.track(rng=False, tree={"w": torch.ones(2)}) as run:
        run.capture()
    with pytest.raises(InvalidInput, match="selects nothing"):
        repo.blame("main", only="nothing")
