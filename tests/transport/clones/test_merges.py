"""Merged states in other repositories: edges, weights and parents go along, and the merge is
made again there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Config, Peer, Repository, State, Status, Unavailable
from datastates.lineage.states import Edge, EdgeKind

SLOT = 4 << 20


class Two:
    """A repository, another one, and a peer that sees the first."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.repo, self.other = (
            stack.enter_context(_open(folder / name)) for name in ("ours", "theirs")
        )
        self._stack = stack

    def peer(self, **options: Any) -> Peer:
        server = self.repo.serve("memory://", **options)
        return self._stack.enter_context(datastates.connect(server.url))


def _open(folder: Path) -> Repository:
    return datastates.open(folder, config=Config(memory_bytes=64 * SLOT, durable_interval_s=None))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield Two(tmp_path, stack)


def member(repo: Repository, branch: str, value: float, **options: Any) -> State:
    with repo.track(
        branch=branch,
        rng=False,
        model={"w": torch.linspace(0, value, 300), "n": torch.tensor(3)},
        **options,
    ) as run:
        return run.capture().wait()


def soup(repo: Repository) -> State:
    members = [member(repo, name, value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    return repo.merge(members, weights=[0.5, 0.3, 0.2], into="soup", message="three")


def facts(state: State) -> tuple[Any, ...]:
    return (
        state.uid,
        state.digest,
        state.parents,
        state.edges,
        state.attributes,
        state.message,
        state.created_at,
        state.step,
    )


def test_a_clone_of_a_merge_has_its_edges_and_can_be_made_again_there(two: Two) -> None:
    merged = soup(two.repo)
    peer = two.peer()

    cloned = peer.clone("soup", repo=two.other).state

    assert facts(two.other.state(merged.uid)) == facts(merged) == facts(cloned)
    assert [edge.weight for edge in cloned.edges] == [0.3, 0.2]
    assert [two.other.state(uid).status for uid in merged.parents] == [Status.EVICTED] * 3
    with pytest.raises(Unavailable):
        two.other.verify_merge(merged.uid)
    for uid in merged.parents:
        peer.clone(uid, repo=two.other)
    assert two.other.verify_merge(merged.uid).digest == merged.digest
    assert two.other.state(f"{merged.uid}^3").uid == merged.parents[2]


def test_parents_may_come_first_and_what_is_here_is_not_moved(two: Two) -> None:
    merged = soup(two.repo)
    peer = two.peer()
    for uid in merged.parents:
        peer.clone(uid, repo=two.other)
    peer.clone(merged.uid, repo=two.other)
    two.other.verify_merge(merged.uid)
    assert facts(two.other.state(merged.uid)) == facts(merged)


def test_a_merge_is_pushed_with_its_parents(two: Two) -> None:
    merged = soup(two.repo)
    server = two.other.serve("memory://", is_writable=True)
    with datastates.connect(server.url) as peer:
        for rev in ("soup", "a", "b", "c"):
            peer.push(rev, repo=two.repo, tags=True)
    assert facts(two.other.state(merged.uid)) == facts(merged)
    two.other.verify_merge(merged.uid)


def test_a_merge_of_merges_goes_along(two: Two) -> None:
    start = member(two.repo, "main", 1.0)
    two.repo.tag("start", start)
    heads = [
        member(two.repo, name, value, start="start") for name, value in (("a", 2.0), ("b", 3.0))
    ]
    inner = two.repo.merge(heads)
    outer = two.repo.merge([inner, heads[1]], weights=[0.75, 0.25], tag="outer")
    peer = two.peer()
    for uid in (outer.uid, inner.uid, *(head.uid for head in heads), start.uid):
        peer.clone(uid, repo=two.other)
    assert two.other.verify_merge(outer.uid).parents == (inner.uid, heads[1].uid)
    assert two.other.verify_merge(inner.uid).parents == tuple(head.uid for head in heads)
    assert [state.uid for state in two.other.log(outer.uid)] == [
        state.uid for state in two.repo.log(outer.uid)
    ]


@pytest.mark.parametrize("is_pushed", [False, True])
def test_a_parent_older_than_a_page_of_known_states_comes_too(
    two: Two, is_pushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other repository has the long branch: pages of the ancestry are known to it before the
    short branch comes."""
    for module in ("transfer", "peer"):
        monkeypatch.setattr(f"datastates.transport.{module}.PAGE", 4)
    short = member(two.repo, "short", 1.0)
    weights = {"w": torch.zeros(300), "n": torch.tensor(3)}
    with two.repo.track(branch="long", rng=False, model=weights) as run:
        for _ in range(20):
            weights["w"] += 1.0
            run.capture().wait()
    bring(two, "long", is_pushed=is_pushed)
    merged = two.repo.merge(["long", "short"], weights=[0.75, 0.25], tag="m")

    bring(two, "m", is_pushed=is_pushed)

    assert facts(two.other.state(merged.uid)) == facts(merged)
    assert two.other.state(merged.uid).edges == (Edge(short.uid, EdgeKind.SOUP, 0.25),)
    assert {state.uid for state in two.other.log(merged.uid)} == {
        state.uid for state in two.repo.log("m")
    }


def bring(two: Two, rev: str, *, is_pushed: bool) -> None:
    if is_pushed:
        server = two.other.serve("memory://", is_writable=True)
        with datastates.connect(server.url) as peer:
            peer.push(rev, repo=two.repo)
    else:
        two.peer().clone(rev, repo=two.other)
