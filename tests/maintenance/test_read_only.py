"""Repositories that may only be read: whatever asks for no change works, and what does says why
it cannot be had."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import datastates
from datastates import Status, Unavailable
from datastates.cli.app import app
from datastates.lineage import Database
from tests.support import revisions
from tests.support.lodgers import CONFIG


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Path]:
    """A folder that shows what lies in ``open``, and in which nothing can be written."""
    (tmp_path / "open").mkdir()
    folder = tmp_path / "sealed"
    folder.mkdir()
    for command in (
        ["mount", "--bind", f"{tmp_path}/open", f"{folder}"],
        ["mount", "-o", "remount,ro,bind", f"{folder}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> str:
    """Make a repository with two states; the uid of the newest."""
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(folder, config=CONFIG) as repo,
        repo.track(tracked=tracked, rng=False) as run,
    ):
        run.capture(metrics={"loss": 2.0}).wait("durable")
        tracked["weight"].add_(1)
        return run.capture(metrics={"loss": 1.0}).wait("durable").uid


def check(folder: Path, uid: str) -> None:
    """Everything that reads works; what writes is refused, and says where."""
    before = sorted(path.name for path in folder.rglob("*"))
    with datastates.open(folder) as repo:
        assert repo.log("main")[0].uid == uid
        assert repo.find("metrics.loss < 1.5")[0].uid == uid
        assert repo.verify("main").status is Status.DURABLE
        assert torch.equal(repo.load("main")["tracked"]["weight"], torch.ones(1000))
        weight = torch.zeros(1000)
        assert repo.restore("main", tracked={"weight": weight}).restored
        assert torch.equal(weight, torch.ones(1000))
        with pytest.raises(
            Unavailable, match=r"this repository can only be read: .* may not be written"
        ):
            repo.track(tracked={"weight": weight})
        with pytest.raises(Unavailable, match="can only be read"):
            repo.tag("kept", "main")
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_a_read_only_file_system_can_be_read(tmp_path: Path, sealed: Path) -> None:
    check(sealed, fill(tmp_path / "open"))


def test_what_another_trains_in_can_be_read_where_it_may_not_be_written(
    tmp_path: Path, sealed: Path
) -> None:
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(tmp_path / "open", config=CONFIG) as repo,
        repo.track(tracked=tracked, rng=False) as run,
    ):
        first = run.capture().wait("durable")
        with datastates.open(sealed) as reader:
            assert reader.state("main").uid == first.uid
            second = run.capture().wait("durable")
            assert reader.state("main").uid == second.uid
            assert reader.verify("main").uid == second.uid


def test_what_is_written_after_a_file_without_a_log_was_opened_is_seen(
    tmp_path: Path, sealed: Path
) -> None:
    fill(tmp_path / "open")
    with datastates.open(sealed) as reader:
        reader.state("main")
        newest = fill(tmp_path / "open")
        assert reader.state("main").uid == newest


@pytest.mark.parametrize("left", [["-wal", "-shm"], ["-wal"]], ids=["log and index", "log alone"])
def test_a_snapshot_of_a_living_training_can_be_read(
    tmp_path: Path, sealed: Path, left: list[str]
) -> None:
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(tmp_path / "runs", config=CONFIG) as repo,
        repo.track(tracked=tracked, rng=False) as run,
    ):
        run.capture(metrics={"loss": 2.0}).wait("durable")
        tracked["weight"].add_(1)
        newest = run.capture(metrics={"loss": 1.0}).wait("durable")
        shutil.copytree(tmp_path / "runs" / "packs", tmp_path / "open" / "packs")
        for suffix in ["", *left]:
            shutil.copyfile(
                tmp_path / "runs" / f"lineage.db{suffix}", tmp_path / "open" / f"lineage.db{suffix}"
            )
    check(sealed, newest.uid)


def test_an_older_schema_is_read_without_being_changed(
    tmp_path: Path, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = fill(tmp_path / "open")
    revisions.add(tmp_path / "next", monkeypatch)
    data = (tmp_path / "open" / "lineage.db").read_bytes()
    check(sealed, newest)
    assert (tmp_path / "open" / "lineage.db").read_bytes() == data


def test_a_lineage_alone_can_be_read(tmp_path: Path, sealed: Path) -> None:
    newest = fill(tmp_path / "runs")
    shutil.copyfile(tmp_path / "runs" / "lineage.db", tmp_path / "open" / "lineage.db")
    with datastates.open(sealed) as repo:
        assert repo.log("main")[0].uid == newest
        with pytest.raises(
            Unavailable, match=f"is gone|in another folder of packs: {tmp_path}/runs/packs on "
        ):
            repo.load("main")


def test_no_room_for_a_copy_is_said(
    tmp_path: Path, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "open")
    revisions.add(tmp_path / "next", monkeypatch)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(
        Unavailable,
        match=r"can only be read from a copy, .* \(.*No space left on device\): set TMPDIR",
    ):
        datastates.open(sealed)


def test_the_terminal_reads_where_nothing_can_be_written(tmp_path: Path, sealed: Path) -> None:
    newest = fill(tmp_path / "open")
    for words in (
        ["log"],
        ["show", "main"],
        ["refs"],
        ["find", "step > 1"],
        ["verify", "main"],
        ["export", "main", "--bundle", str(tmp_path / "bundle")],
    ):
        done = CliRunner().invoke(app, ["--repo", str(sealed), *words])
        assert done.exit_code == 0, done.output
        assert newest[:7] in done.output or words[0] in ("refs", "export")
    done = CliRunner().invoke(app, ["--repo", str(sealed), "tag", "kept", "main"])
    assert done.exit_code == 7
    assert "can only be read" in done.output


def test_a_lineage_that_is_not_there_cannot_be_made_where_nothing_can_be_written(
    sealed: Path,
) -> None:
    with pytest.raises(Unavailable, match=r"lineage\.db cannot be made"):
        Database(f"sqlite:///{sealed}/lineage.db")
