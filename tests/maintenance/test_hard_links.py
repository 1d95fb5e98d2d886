"""A snapshot of a repository by hard links (``cp -al``): the database is refused under both
names, and a training goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import datastates
from datastates.errors import InvalidInput
from datastates.lineage import sqlite_files
from datastates.storage.dedup import SHARED_BYTES
from datastates.storage.durable_files import locked, temporary
from datastates.storage.local import LocalTier
from datastates.system.files import hold
from datastates.testing.states import numbers, payload


def snapshot(root: Path) -> Path:
    made = root.with_name(f"{root.name}.snap")
    subprocess.run(["cp", "-al", str(root), str(made)], check=True)
    return made


def test_a_database_with_a_second_link_is_refused_by_name_until_the_link_is_gone(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    with datastates.open(runs) as repo:
        repo.track(model=torch.nn.Linear(2, 2)).capture().wait("durable")
    made = snapshot(runs)
    for root in (made, runs):
        with pytest.raises(InvalidInput, match=f"{root}/lineage.db has another hard link"):
            datastates.open(root)
    shutil.rmtree(made)
    with datastates.open(runs) as repo:
        assert len(repo.log()) == 1


def test_a_log_with_a_second_link_is_refused_even_if_the_database_is_a_copy(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with datastates.open(runs) as repo:
        repo.track(model=torch.nn.Linear(2, 2)).capture().wait("durable")
        made = snapshot(runs)
        shutil.copyfile(runs / "lineage.db", made / "copy")
        os.replace(made / "copy", made / "lineage.db")
        with pytest.raises(InvalidInput, match=r"lineage.db-wal has another hard link"):
            datastates.open(made)


def test_a_training_goes_on_while_a_snapshot_has_its_files(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    model = torch.nn.Linear(2, 2)
    with datastates.open(runs) as repo:
        run = repo.track(model=model)
        run.capture().wait("durable")
        made = snapshot(runs)
        before = {path: path.read_bytes() for path in (made / "packs").iterdir() if path.is_file()}
        for _ in range(3):
            torch.nn.init.normal_(model.weight)
            run.capture().wait("durable")
        repo.gc()
    shutil.rmtree(made / "packs/leases", ignore_errors=True)
    assert {
        path: path.read_bytes() for path in (made / "packs").iterdir() if path.is_file()
    } == before
    shutil.rmtree(made)
    with datastates.open(runs) as repo:
        assert [state.status for state in repo.log()] == ["durable"] * 4
        assert not repo.verify().damage


def test_lock_files_may_have_other_links_and_are_not_written_through_them(tmp_path: Path) -> None:
    for name in (".lock", ".tmp-file", "lease"):
        (tmp_path / name).write_text("" if name == ".lock" else "as it was")
        os.link(tmp_path / name, tmp_path / f"{name}.snap")
    with locked(tmp_path, is_shared=False):
        pass
    with temporary(tmp_path / "file") as file:
        os.write(file.fd, b"new")
        file.commit()
    held = hold(tmp_path / "lease")
    assert held is not None
    held.write("new")
    assert (tmp_path / "lease").read_text() == (tmp_path / "file").read_text() == "new"
    held.close()
    assert (
        (tmp_path / "lease.snap").read_text()
        == (tmp_path / ".tmp-file.snap").read_text()
        == "as it was"
    )


def test_a_database_that_another_process_may_have_under_another_link_is_locked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lineage.db"
    path.touch()
    os.link(path, tmp_path / "snap.db")
    with (
        sqlite_files.exclusive(path) as is_alone,
        sqlite_files.exclusive(tmp_path / "snap.db") as is_alone_too,
    ):
        assert is_alone
        assert not is_alone_too


def test_chunks_are_shared_again_after_a_snapshot_took_the_index(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "packs")
    tier.put(payload("a", {"model/0": numbers(SHARED_BYTES, 1)}))
    made = snapshot(tmp_path / "packs")
    kept = (made / ".chunks").read_bytes()
    tier.put(payload("b", {"model/0": numbers(SHARED_BYTES, 2)}))
    assert (made / ".chunks").read_bytes() == kept
    assert (
        LocalTier(tmp_path / "packs")
        .put(payload("c", {"model/0": numbers(SHARED_BYTES, 2)}))
        .bytes_new
        == 0
    )
    assert (
        LocalTier(tmp_path / "packs")
        .put(payload("d", {"model/0": numbers(SHARED_BYTES, 1)}))
        .bytes_new
        == 0
    )
