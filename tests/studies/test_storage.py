"""What variants share is stored once, wherever and however they are forked."""

from __future__ import annotations

import os
from itertools import repeat
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Tracker
from datastates.errors import NotFound
from datastates.lineage.query.names import replicas_of
from datastates.maintenance.retention_pass import evict
from datastates.studies.results import storage
from tests.studies.exploring import pool
from tests.studies.frozen import begin, fork, fork_alone, make, open_at, step

WHOLE = 20 << 20


def used(folder: Path) -> int:
    """As ``du`` counts, without the backup of the lineage."""
    files = (path for path in (folder / "packs").glob("*.*") if path.suffix != ".backup")
    return sum(os.stat(path).st_blocks * 512 for path in files)


@pytest.mark.long
def test_sixteen_variants_of_a_model_frozen_to_four_fifths_take_a_quarter_of_full_copies(
    tmp_path: Path,
) -> None:
    begin(tmp_path)
    for number in range(10):
        fork_alone(tmp_path, number)
    with pool() as executor:
        list(executor.map(fork_alone, repeat(tmp_path), range(10, 16)))

    with open_at(tmp_path) as repo:
        found = storage(repo, "fine")
        for number in range(16):
            repo.verify(f"fine/{number}")
    assert found.states == 17, "the start too"
    assert found.bytes_full_copies == pytest.approx(17 * WHOLE, rel=0.01)
    assert used(tmp_path) <= 0.25 * 17 * WHOLE
    assert found.bytes_stored == pytest.approx(used(tmp_path), rel=0.01)
    assert found.ratio == pytest.approx(4.2 / 17, rel=0.01)
    assert str(found).startswith("17 states in 84.")


def test_variants_share_what_the_prefix_trained_and_they_freeze(tmp_path: Path) -> None:
    begin(tmp_path, is_frozen=False)
    for number in range(3):
        fork_alone(tmp_path, number)
    with open_at(tmp_path) as repo:
        assert storage(repo, "fine").ratio == pytest.approx((1 + 3 * 0.2) / 4, rel=0.02)


def test_variants_forked_from_memory_before_it_is_on_disk_share_it_too(tmp_path: Path) -> None:
    with open_at(tmp_path) as repo:
        model, optimizer = make(0)
        run = repo.track(model=model, optimizer=optimizer)
        step(model, optimizer)
        uid = run.capture().wait().uid
        for number in range(4):
            fork(repo, number, start=uid)
        repo.tag("start/fine", uid)
    with open_at(tmp_path) as repo:
        assert storage(repo, "fine").ratio == pytest.approx(1.8 / 5, rel=0.02)


def test_chain_of_variants_in_one_process_stores_what_they_share_once(tmp_path: Path) -> None:
    begin(tmp_path)
    with open_at(tmp_path) as repo:
        start = "start/fine"
        for number in range(5):
            with fork(repo, number, start=start):
                pass
            start = f"fine/{number}"
    with open_at(tmp_path) as repo:
        assert storage(repo, "fine").ratio == pytest.approx(2.0 / 6, rel=0.02)


def root(repo: datastates.Repository, number: int) -> Tracker:
    """A training that begins on a branch of its own with weights that others begin with too, but
    for the last layer."""
    model, optimizer = make(0)
    torch.manual_seed(100 + number)
    for parameter in model[4].parameters():
        torch.nn.init.normal_(parameter)
    run = repo.track(model=model, optimizer=optimizer, branch=f"root/{number}")
    for _ in range(2):
        step(model, optimizer)
        state = run.capture().wait("durable")
        assert repo.state(state.uid) == state
    return run


def test_trainings_that_have_no_ancestor_in_common_store_once_what_they_have_in_common(
    tmp_path: Path,
) -> None:
    with open_at(tmp_path) as repo, root(repo, 0), root(repo, 1):
        pass
    with open_at(tmp_path) as repo:
        with root(repo, 2):
            pass
        states = [state for number in range(3) for state in repo.log(f"root/{number}")]
        assert used(tmp_path) == pytest.approx((0.8 + 6 * 0.2) * WHOLE, rel=0.01)
        assert sum(state.bytes_new for state in states) == pytest.approx(
            used(tmp_path), rel=0.01
        ), "each says what it added"
        with repo.core.reading() as session:
            added = [
                replica.bytes
                for state in states
                for replica in replicas_of(session, state.uid)
                if replica.tier == "local"
            ]
        assert added == [state.bytes_new for state in states]
    with open_at(tmp_path) as repo:
        first = [state.uid for state in repo.log("root/0")]
        repo.delete_ref("root/0")
        freed = sum(evict(repo.core, uid) for uid in first)
        assert freed == pytest.approx(0.2 * WHOLE, rel=0.01), "the pack that the others need stays"
        assert repo.core.tiers.durable.sweep() == []
        for number in (1, 2):
            for state in repo.log(f"root/{number}"):
                repo.verify(state.uid)


def test_there_is_no_storage_of_a_study_that_is_not_there(tmp_path: Path) -> None:
    with open_at(tmp_path) as repo, pytest.raises(NotFound, match="start/none"):
        storage(repo, "none")
