"""Single states out of packs that they share with others: exported, cloned, reindexed, dropped,
collected and verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Repository, Status
from datastates.files.bundle import export_bundle, import_bundle
from datastates.maintenance.retention_pass import evict

CONFIG = Config(durable_every=1, memory_bytes=64 << 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository of 60 states in few packs; ``weight`` is the number of the state everywhere."""
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        weight = torch.zeros(3000)
        run = repo.track(weight=weight, rng=False)
        for _ in range(60):
            weight += 1
            run.capture()
    assert len(list((tmp_path / "runs" / "packs").glob("*.safetensors"))) < 30
    return tmp_path / "runs"


def check(repo: Repository, *steps: int) -> None:
    for state in repo.log("main", limit=None):
        if state.step in steps or not steps:
            assert repo.load(state.uid)["weight"].tolist() == [float(state.step)] * 3000


def test_one_state_is_exported_and_taken_in_elsewhere(folder: Path, tmp_path: Path) -> None:
    with datastates.open(folder) as repo:
        uid = repo.state("main~30").uid
        export_bundle(repo, [uid], tmp_path / "bundle")
    with datastates.open(tmp_path / "other") as other:
        import_bundle(other, tmp_path / "bundle")
        assert other.load(uid)["weight"].tolist() == [30.0] * 3000
        assert other.verify().damage == ()


def test_one_state_is_cloned_from_the_disk_of_another_process(folder: Path, tmp_path: Path) -> None:
    with datastates.open(folder) as repo, repo.serve("tcp://127.0.0.1:0", token="t" * 32) as server:
        with datastates.connect(server.url, token="t" * 32) as peer:
            weight = torch.zeros(3000)
            peer.clone("main~10", weight=weight)
            assert weight.tolist() == [50.0] * 3000
        with (
            datastates.open(tmp_path / "other") as other,
            datastates.connect(server.url, token="t" * 32) as peer,
        ):
            peer.clone("main~20", repo=other)
            assert other.load(repo.state("main~20").uid)["weight"].tolist() == [40.0] * 3000


def test_every_state_is_there_after_a_reindex(folder: Path) -> None:
    (folder / "lineage.db").unlink()
    report = datastates.reindex(folder)
    assert (report.states, report.restorable) == (60, 60)
    with datastates.open(folder) as repo:
        check(repo)
        assert repo.verify().damage == ()


def test_states_are_dropped_one_by_one_and_collected(folder: Path) -> None:
    with datastates.open(folder) as repo:
        uids = [state.uid for state in repo.log("main", limit=None)]
        for uid in uids[1::2]:
            evict(repo.core, uid)
        repo.gc()
        check(repo, *range(2, 61, 2))
        assert repo.verify().damage == ()
        assert [repo.state(uid).status for uid in uids[:4]] == [Status.DURABLE, Status.EVICTED] * 2
