"""States of several parts, from the packs of their ranks to a restored tree: visible exactly
when whole, and then equal."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import datastates
from datastates.errors import Unavailable, Unsupported
from datastates.files.bundle import export_bundle
from datastates.lineage import Database, NewState, State, StateFacts, Status
from datastates.lineage.query.incomplete import waiting
from datastates.lineage.query.names import refs
from datastates.lineage.query.pages import find
from datastates.lineage.write.replicas import mark
from datastates.storage.local import LocalTier
from datastates.storage.tier import Payload
from tests.support.records import record_part
from tests.support.sharding import Box, boxes, deposit, sharded, shares_of
from tests.support.strategies import random_tensor

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
TOKEN = "t" * 32


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Crash(Exception):
    """The process ends here."""


def told(part: Payload) -> NewState:
    """What the rank of a part tells the lineage."""
    origin = part.manifest.origin
    facts = StateFacts(
        uid=origin.uid,
        parent=None,
        branch="main",
        run=None,
        step=origin.step,
        world_size=origin.world_size,
    )
    total = sum(view.nbytes for view in part.chunks)
    return NewState(facts, part.manifest.digest, Status.DURABLE, total, total, "local", "packs")


def tell(folder: Path, part: Payload, crash: str | None = None) -> State | None:
    """One rank's process: its bytes reach the disk, it tells of them, and it ends, perhaps
    before it has done so."""
    rank = part.manifest.origin.rank
    with closing(LocalTier(folder / "packs", direct=False, rank=rank)) as tier:
        tier.put(part)
    if crash == "before":
        raise Crash
    with (
        closing(Database(f"sqlite:///{folder / 'lineage.db'}")) as database,
        database.write() as session,
    ):
        state = record_part(session, told(part), rank=rank)
        if crash == "within":
            raise Crash
    return state


def is_visible(folder: Path, uid: str) -> bool:
    with (
        closing(Database(f"sqlite:///{folder / 'lineage.db'}")) as database,
        database.read() as session,
    ):
        found = [state.uid for state in find(session, "step >= 0").states]
        assert [(ref.name, ref.state) for ref in refs(session)] == [
            ("main", each) for each in found
        ]
    assert found in ([], [uid])
    return bool(found)


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, list[list[Box]]], int]:
    """A tree of tensors, and which boxes of each the parts hold."""
    count = draw(st.integers(1, 4))
    tree, shares = {}, {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
        tensor = random_tensor(
            draw(st.sampled_from(DTYPES)), list(shape), seed=draw(st.integers(0, 99))
        )
        tree[name] = tensor.permute(*draw(st.permutations(range(len(shape))))) if shape else tensor
        share = shares[name] = [list[Box]() for _ in range(count)]
        for box in draw(boxes(tuple(tree[name].shape))):
            share[draw(st.integers(0, count - 1))].append(box)
    return tree, shares, count


@settings(max_examples=10, deadline=None)
@given(state=states(), data=st.data())
def test_a_state_is_visible_exactly_when_whole_and_restored_equal(
    state: tuple[dict[str, torch.Tensor], dict[str, list[list[Box]]], int], data: st.DataObject
) -> None:
    tree, shares, count = state
    parts = sharded(secrets.token_hex(12), tree, shares, count, step=3)
    uid, reported = parts[0].manifest.origin.uid, set[int]()
    with TemporaryDirectory() as name:
        folder = Path(name)
        left = list(data.draw(st.permutations(range(count))))
        left += data.draw(st.lists(st.integers(0, count - 1), max_size=2))  # told again
        while left:
            rank, crash = left.pop(0), data.draw(st.sampled_from([None, None, "before", "within"]))
            try:
                made = tell(folder, parts[rank], crash)
                reported.add(rank)
                assert (made is not None) == (len(reported) == count)
            except Crash:
                left.append(rank)  # it is started again
            assert is_visible(folder, uid) == (len(reported) == count)
        with datastates.open(folder, memory_bytes=16 << 20) as repo:
            found = repo.load("main")
            mine = {key: torch.zeros_like(tensor) for key, tensor in tree.items()}
            repo.restore("main", objects=mine)
            repo.verify("main")
        for key, tensor in tree.items():
            assert (found[key].dtype, found[key].stride()) == (tensor.dtype, tensor.stride())
            assert bits(found[key]) == bits(mine[key]) == bits(tensor)


@pytest.fixture
def tree() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"w": torch.randn(70, 31), "b": torch.randn(40), "step": 7}


def test_what_waits_for_parts_can_be_listed(tmp_path: Path, tree: dict[str, Any]) -> None:
    parts = sharded(secrets.token_hex(12), tree, shares_of(tree, 3), 3, step=7)
    for rank in (2, 0):
        tell(tmp_path, parts[rank])
    with (
        closing(Database(f"sqlite:///{tmp_path / 'lineage.db'}")) as database,
        database.read() as session,
    ):
        assert [(each.uid, each.ranks, each.world_size) for each in waiting(session)] == [
            (parts[0].manifest.origin.uid, (0, 2), 3)
        ]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_waits_when_a_repository_closes_goes_with_its_memory_and_is_said(
    tmp_path: Path, tree: dict[str, Any], is_on_disk: bool, caplog: pytest.LogCaptureFixture
) -> None:
    parts = sharded(secrets.token_hex(12), tree, shares_of(tree, 2), 2, step=7)
    uid = parts[0].manifest.origin.uid
    with datastates.open(tmp_path, memory_bytes=16 << 20) as repo:
        captured, run = repo.core.engage().memory, repo.core.run_uid
        new = told(parts[0])
        new = replace(
            new,
            facts=replace(new.facts, run=run),
            status=captured.gives,
            tier=captured.name,
            node=captured.node,
        )
        with repo.core.writing() as session:
            assert record_part(session, new, rank=0) is None
            if is_on_disk:
                tier = repo.core.tiers.durable
                mark(session, uid, tier.gives, tier=tier.name, node=tier.node, rank=0)
    with datastates.open(tmp_path) as repo, repo.core.reading() as session:
        assert [(each.uid, each.missing, each.has_ended) for each in waiting(session)] == (
            [(uid, (1,), True)] if is_on_disk else []
        )
    said = (
        f"state {uid} (branch main, step 7) waits for the parts of rank 1 of 2; the part of this"
        " process ended with its memory"
    )
    assert (said in caplog.text) == (not is_on_disk)


def test_a_state_of_several_parts_is_compared_and_merged_with_one_of_one(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    deposit(
        tmp_path, sharded(secrets.token_hex(12), tree, shares_of(tree, 3), 3, step=7), branch="main"
    )
    deposit(tmp_path, sharded(secrets.token_hex(12), tree, {}, 1), branch="plain")
    with datastates.open(tmp_path, memory_bytes=64 << 20) as repo:
        assert {tensor.change for tensor in repo.diff("main", "plain").tensors} == {"same"}
        made = repo.merge(["main", "plain"], method="mean", only="[wb]")
        assert made.world_size == 1
        assert torch.equal(repo.load(made)["w"], tree["w"])
        repo.verify_merge(made)


def test_a_state_of_which_a_part_is_missing_names_its_rank(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    parts = sharded(secrets.token_hex(12), tree, shares_of(tree, 3), 3, step=7)
    deposit(tmp_path, parts, branch="main")
    (tmp_path / "packs" / f"{parts[0].manifest.origin.uid}.1.manifest").unlink()
    with (
        datastates.open(tmp_path) as repo,
        pytest.raises(Unavailable, match="3 parts, and those of rank 1 are not here"),
    ):
        repo.load("main")


def test_the_parts_of_a_state_are_verified_and_counted_as_one(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    for branch in ("main", "other"):
        deposit(
            tmp_path, sharded(secrets.token_hex(12), tree, shares_of(tree, 3), 3), branch=branch
        )
    with datastates.open(tmp_path, memory_bytes=32 << 20) as repo:
        found = repo.verify()
        packs = sorted((tmp_path / "packs").glob("*.2.safetensors"))
        with packs[0].open("r+b") as pack:
            pack.seek(-1, 2)
            pack.write(b"\xa5")
        again = repo.verify()
    assert (found.states, found.damage) == (2, ())
    assert again.states == 2
    assert [each.rank for each in again.damage] == [2]


def test_a_state_of_several_parts_is_cloned_whole_and_is_not_bundled(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    deposit(
        tmp_path / "ours",
        sharded(secrets.token_hex(12), tree, shares_of(tree, 3), 3),
        branch="main",
    )
    into = {key: torch.zeros_like(value) for key, value in tree.items() if key != "step"}
    with datastates.open(tmp_path / "ours", memory_bytes=32 << 20) as repo:
        with repo.serve(token=TOKEN) as server, datastates.connect(server.url, token=TOKEN) as peer:
            peer.clone("main", objects=into)
        assert {key: bits(value) for key, value in into.items()} == {
            key: bits(tree[key]) for key in into
        }
        with pytest.raises(Unsupported, match="3 parts"):
            export_bundle(repo, ["main"], tmp_path / "bundle")
