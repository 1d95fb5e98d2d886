"""Whose states, whose processes, whose files: a repository is known by what lies in it, a
process by its lock."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import text
from typer.testing import CliRunner

import datastates
from datastates import Conflict, NotFound, Status, Unavailable
from datastates.cli.app import app
from datastates.config import OnFailure
from datastates.lineage import Database
from datastates.lineage.query.names import replicas_of
from datastates.lineage.views import detail
from datastates.lineage.write.clones import repository_uid
from datastates.maintenance import environment
from datastates.maintenance.lease import LEASES, LeaseState, PackFolder, look, register_folder
from datastates.maintenance.location import locate
from datastates.maintenance.retention_pass import evict
from datastates.storage.durable_files import locked
from datastates.studies.records import Claim, holder
from tests.conftest import Postgresql
from tests.support import warm
from tests.support.forge import Forge, Job, forge
from tests.support.lodgers import CONFIG

GROUP = 54321
ANN, BEN = [12345, GROUP], [12346, GROUP]


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts trainings."""
    with forge(tmp_path_factory.mktemp("forge"), ["tests.support.lodgers"]) as opened:
        yield opened


@contextmanager
def lodging(smith: Forge, folder: Path, **arguments: object) -> Iterator[tuple[Job, str, str]]:
    """A training that lives as long as the block, and its states: one on disk, one in memory."""
    job = smith.start("tests.support.lodgers:lodge", folder=str(folder), **arguments)
    try:
        words = job.lines.readline().split()
        assert words[:1] == ["lodges"], smith.errors()
        yield job, words[1], words[2]
    finally:
        job.kill(signal.SIGKILL)
        job.wait()


def dead(smith: Forge, folder: Path, **arguments: object) -> tuple[str, str]:
    """What a training left behind that was killed: its state on disk, its state in memory."""
    with lodging(smith, folder, **arguments) as (_, kept, newest):
        return kept, newest


def call_us(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Be on another host from here on, as far as names and boots tell."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(environment, "_boot", lambda: f"boot of {host}")


def status(folder: Path, uid: str) -> Status:
    with datastates.open(folder, config=CONFIG) as repo:
        return repo.state(uid).status


# A living training


def test_a_training_that_lives_is_seen_under_another_path(smith: Forge, tmp_path: Path) -> None:
    with lodging(smith, tmp_path / "runs") as (_, _, newest):
        # its path is another one to whoever opens it now
        (tmp_path / "runs").rename(tmp_path / "seen")
        with datastates.open(tmp_path / "seen") as repo:
            assert not repo.recovered
            assert repo.state("main").uid == newest
            assert repo.state("main").status is Status.CAPTURED


@pytest.mark.parametrize("host", ["this host", "another host"])
def test_a_training_that_copied_its_own_folder_still_holds_its_lease(
    smith: Forge, tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lodging(smith, tmp_path / "runs", how="copy") as (_, _, newest):
        if host == "another host":
            call_us(monkeypatch, host)
        with datastates.open(tmp_path / "runs") as repo:
            assert not repo.recovered
            assert repo.state("main").uid == newest


def test_a_lease_is_held_whoever_opens_and_closes_its_file(tmp_path: Path) -> None:
    lease = PackFolder(tmp_path, "f", is_beside=False, read_only=None).lease("r")
    (tmp_path / LEASES / "r").read_bytes()
    assert look(tmp_path, "r") is LeaseState.HELD
    lease.close()
    assert look(tmp_path, "r") is LeaseState.NOTHING
    lease.close()


def test_a_claim_that_cannot_be_noted_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(held: object, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("datastates.system.files.FileLock.write", refuse)
        with pytest.raises(OSError, match="No space left"):
            Claim.take(tmp_path, "study", "mine")
    claim = Claim.take(tmp_path, "study", "mine")
    assert claim is not None
    claim.close()


def test_a_claim_is_held_whoever_opens_and_closes_its_file(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    claim = Claim.take(tmp_path / "packs" / LEASES, "study", "mine")
    assert claim is not None
    shutil.copytree(tmp_path / "packs", tmp_path / "copy")
    assert Claim.take(tmp_path / "packs" / LEASES, "study", "again") is None
    held = warm.run(
        [sys.executable, "-c", HOLDER, str(tmp_path / "packs" / LEASES)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert held.stdout == "mine\n"
    claim.close()
    assert holder(tmp_path / "packs" / LEASES, "study") is None


HOLDER = """
import sys
from pathlib import Path
from datastates.studies.records import holder
print(holder(Path(sys.argv[1]), "study"))
"""


def test_a_child_does_not_hold_the_lease_of_a_parent_that_died(
    smith: Forge, tmp_path: Path
) -> None:
    job = smith.start("tests.support.lodgers:lodge", folder=str(tmp_path), how="fork")
    said = {words[0]: words[1:] for words in (job.lines.readline().split() for _ in range(2))}
    child = int(said["child"][0])
    job.lines.close()
    try:
        assert job.wait() == 0
        os.kill(child, 0)  # it lives
        assert status(tmp_path, said["lodges"][1]) is Status.LOST
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lease_whose_file_was_deleted_does_not_make_a_training_dead(
    smith: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with lodging(smith, tmp_path) as (_, kept, newest):
        shutil.rmtree(tmp_path / "packs" / LEASES)
        with datastates.open(tmp_path) as repo:  # the process is there
            assert repo.state("main").uid == newest
            with pytest.raises(
                Unavailable, match=r"is only in the memory of another process, \d+ on "
            ):
                repo.load("main")
        with monkeypatch.context() as patch:  # nobody can tell
            call_us(patch, "elsewhere")
            with datastates.open(tmp_path) as repo:
                assert repo.state("main").uid == newest
                with pytest.raises(
                    Unavailable,
                    match="of which nothing is to be seen here; the nearest ancestor that can is",
                ) as caught:
                    repo.load("main")
                assert caught.value.nearest == kept
    assert status(tmp_path, newest) is Status.LOST  # the kernel says that it has ended


# A training that died


def test_the_same_script_goes_on_under_another_host_name(
    smith: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, newest = dead(smith, tmp_path)
    call_us(monkeypatch, "requeued")
    tracked = {"weight": torch.zeros(1000)}
    with datastates.open(tmp_path, config=CONFIG) as repo:
        assert repo.state(newest).status is Status.LOST
        run = repo.track(tracked=tracked, rng=False)
        assert run.resumed_from is not None
        assert run.resumed_from.uid == kept
        assert torch.equal(tracked["weight"], torch.ones(1000))
        assert len(os.listdir(tmp_path / "packs" / LEASES)) == 1  # its own


def test_a_run_that_nobody_can_settle_goes_on_from_the_nearest_state_that_is_here_and_says_so(
    smith: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, newest = dead(smith, tmp_path)
    shutil.rmtree(tmp_path / "packs" / LEASES)
    call_us(monkeypatch, "requeued")
    with (
        datastates.open(tmp_path, config=CONFIG) as repo,
        caplog.at_level(logging.WARNING, "datastates"),
    ):
        assert repo.state("main").uid == newest
        run = repo.track(tracked={"weight": torch.zeros(1000)}, rng=False)
        assert run.resumed_from is not None
        assert run.resumed_from.uid == kept
        assert repo.state("main").uid == kept
        (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        f"branch main goes back to state {kept[:10]} (step 1): state {newest[:10]} (step 2) cannot"
        " be restored: it was only"
    )


def test_a_lease_of_an_older_version_is_settled_when_it_is_free(
    smith: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, newest = dead(smith, tmp_path)
    database = Database(f"sqlite:///{tmp_path}/lineage.db")
    with database.write() as session:
        session.execute(text('UPDATE run SET config = \'{"datastates.packs": "/gone"}\''))
    database.close()
    for path in (tmp_path / "packs" / LEASES).iterdir():
        path.write_bytes(b"")
    (tmp_path / "packs" / ".identity").unlink()
    call_us(monkeypatch, "elsewhere")
    assert status(tmp_path, newest) is Status.LOST


# One folder of packs belongs to one lineage


def uid_of(database: Database) -> str:
    with database.read() as session:
        return repository_uid(session)


def test_a_second_lineage_is_refused_in_the_folder_of_the_first(tmp_path: Path) -> None:
    packs = tmp_path / "runs" / "packs"
    datastates.open(tmp_path / "other").close()
    with datastates.open(tmp_path / "runs") as repo:
        owner = uid_of(repo.core.database)
        before = sorted(packs.iterdir())
        with pytest.raises(Conflict, match="belongs to lineage") as caught:
            datastates.open(tmp_path / "other", packs=packs)
        assert sorted(packs.iterdir()) == before
    with datastates.open(tmp_path / "other") as other:
        for text_ in (owner, uid_of(other.core.database), str(packs), "packs=", "repair --lineage"):
            assert text_ in str(caught.value), text_
    with datastates.open(tmp_path / "runs") as repo:
        assert uid_of(repo.core.database) == owner


def test_a_second_lineage_is_refused_before_it_has_a_state(
    postgresql_url: str, tmp_path: Path
) -> None:
    datastates.open(tmp_path / "runs").close()
    with pytest.raises(Conflict, match="belongs to lineage"):
        datastates.open(postgresql_url, packs=tmp_path / "runs" / "packs")


def test_copies_of_a_lineage_share_its_folder_one_after_the_other(tmp_path: Path) -> None:
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        run = repo.track(tracked={"weight": torch.zeros(3)}, rng=False)
        made = run.capture().wait("durable")
    (tmp_path / "restored").mkdir()
    shutil.copy(tmp_path / "runs" / "lineage.db", tmp_path / "restored")
    with datastates.open(tmp_path / "restored", packs=tmp_path / "runs" / "packs") as repo:
        assert repo.load(made.uid)["tracked"]["weight"].tolist() == [0, 0, 0]


def test_a_lineage_that_is_rebuilt_from_manifests_owns_its_folder_again(
    postgresql: Postgresql, tmp_path: Path
) -> None:
    packs = tmp_path / "packs"
    first, second, third = (postgresql.migrated() for _ in range(3))
    with datastates.open(first, packs=packs, config=CONFIG) as repo:
        run = repo.track(tracked={"weight": torch.zeros(3)}, rng=False)
        run.capture().wait("durable")
        owner = uid_of(repo.core.database)
    with pytest.raises(Conflict, match="belongs to lineage"):
        datastates.open(second, packs=packs)
    assert datastates.reindex(second, packs=packs).lineage == owner
    datastates.open(second, packs=packs).close()
    with datastates.open(third, packs=tmp_path / "third", config=CONFIG) as repo:
        repo.track(tracked={"weight": torch.zeros(3)}, rng=False).capture().wait("durable")
    with pytest.raises(Conflict, match="belongs to lineage"):
        datastates.reindex(third, packs=packs, replace=True)
    for url in (first, second, third):
        postgresql.give_back(url)


def test_the_backup_of_another_lineage_is_refused(tmp_path: Path) -> None:
    for name in ("runs", "other"):
        with datastates.open(tmp_path / name, config=CONFIG) as repo:
            run = repo.track(tracked={"weight": torch.zeros(3)}, rng=False)
            run.capture().wait("durable")
    backup = Path("packs", "lineage.backup")
    shutil.copy(tmp_path / "other" / backup, tmp_path / "runs" / backup)
    (tmp_path / "runs" / "lineage.db").unlink()
    with pytest.raises(Conflict, match="belongs to lineage"):
        datastates.reindex(tmp_path / "runs")
    assert not (tmp_path / "runs" / "lineage.db").exists()


# Copies, moves and halves


def test_a_copy_looks_only_at_its_own_files(tmp_path: Path) -> None:
    tracked = {"weight": torch.zeros(1000)}
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        run = repo.track(tracked=tracked, rng=False)
        kept = run.capture().wait("durable")
        tracked["weight"].add_(1)
        taken = run.capture()
        newest = taken.wait()
        shutil.copytree(tmp_path / "runs", tmp_path / "copy")
        taken.wait("durable")
        with datastates.open(tmp_path / "copy") as copy:
            assert copy.state(newest.uid).status is Status.LOST
            assert copy.state("main").uid == kept.uid
            assert torch.equal(copy.load("main")["tracked"]["weight"], torch.zeros(1000))
        assert repo.state("main").status is Status.DURABLE
        assert not repo.recovered
    with datastates.open(tmp_path / "runs") as repo:
        assert repo.state("main").uid == newest.uid


def test_a_copy_of_the_packs_alone_says_nothing_of_whoever_trains_in_the_original(
    smith: Forge, tmp_path: Path, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a URL
    with lodging(smith, postgresql_url, packs=str(tmp_path / "packs")) as (_, kept, newest):  # type: ignore[arg-type]
        shutil.copytree(tmp_path / "packs", tmp_path / "copy")
        call_us(monkeypatch, "elsewhere")
        with datastates.open(postgresql_url, packs=tmp_path / "copy") as repo:
            assert repo.state("main").uid == newest
            assert repo.load(kept)["tracked"]["weight"].sum() == 1000
        with datastates.open(postgresql_url, packs=tmp_path / "others") as repo:
            assert repo.state("main").uid == newest
            with pytest.raises(
                Unavailable, match=f"in another folder of packs: {tmp_path}/copy on elsewhere"
            ):
                repo.load(kept)


def test_a_run_is_settled_in_its_own_folder_only(
    smith: Forge, tmp_path: Path, postgresql_url: str
) -> None:
    # a URL
    _, newest = dead(smith, postgresql_url, packs=str(tmp_path / "packs"))  # type: ignore[arg-type]
    for packs, expected in (("others", Status.CAPTURED), ("packs", Status.LOST)):
        with datastates.open(postgresql_url, packs=tmp_path / packs) as repo:
            assert repo.state(newest).status is expected


def test_files_that_were_deleted_are_called_so(tmp_path: Path) -> None:
    with datastates.open(tmp_path, config=CONFIG) as repo:
        run = repo.track(tracked={"weight": torch.zeros(10)}, rng=False)
        kept, gone = run.capture().wait("durable"), run.capture().wait("durable")
    (manifest,) = (tmp_path / "packs").glob(f"{gone.uid}.*.manifest")
    manifest.unlink()
    with datastates.open(tmp_path) as repo:
        with pytest.raises(
            Unavailable,
            match=f"it is durable, but its files are not in {tmp_path}/packs: bring them back",
        ) as caught:
            repo.load("main")
        assert caught.value.nearest == kept.uid


def test_packs_whose_lineage_is_an_empty_file_are_mentioned(tmp_path: Path) -> None:
    with (
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(tracked={"weight": torch.zeros(10)}, rng=False) as run,
    ):
        state = run.capture().wait("durable")
    (tmp_path / "lineage.db").write_bytes(b"")
    with pytest.raises(
        NotFound,
        match=(
            rf"holds 1 state, but their lineage, {tmp_path}/lineage.db, is empty.*"
            r"repair --lineage --replace`"
        ),
    ):
        datastates.open(tmp_path)
    assert (tmp_path / "lineage.db").read_bytes() == b""
    datastates.reindex(tmp_path, replace=True)
    with datastates.open(tmp_path) as repo:
        assert repo.state("main").uid == state.uid


def test_packs_whose_lineage_is_gone_are_mentioned(tmp_path: Path) -> None:
    with (
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(tracked={"weight": torch.zeros(10)}, rng=False) as run,
    ):
        run.capture()
    (tmp_path / "lineage.db").unlink()
    with pytest.raises(
        NotFound, match=rf"holds 1 state, but their lineage, {tmp_path}/lineage.db, is gone"
    ):
        datastates.open(tmp_path)
    done = CliRunner().invoke(app, ["--repo", str(tmp_path), "init"])
    assert (done.exit_code, "is gone: bring it back" in done.output) == (3, True)
    assert not (tmp_path / "lineage.db").exists()


def test_a_folder_that_is_deleted_under_a_training_is_named_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastates.engine.outbox.PATIENCE_S", 3.0)
    config = replace(CONFIG, durable_every=1, on_failure=OnFailure.RAISE)
    # the blocks are what is tested
    with pytest.raises(Unavailable, match="is gone"):  # noqa: PT012, SIM117
        with datastates.open(tmp_path / "runs", config=config) as repo:
            with repo.track(tracked={"weight": torch.zeros(10)}, rng=False) as run:
                run.capture().wait("durable")
                shutil.rmtree(tmp_path / "runs")
                run.capture().wait("durable")
    assert len({(record.name, record.msg) for record in caplog.records}) == len(caplog.records)


def test_a_training_begins_beside_one_whose_folder_was_deleted(tmp_path: Path) -> None:
    with datastates.open(
        tmp_path / "gone", config=replace(CONFIG, on_failure=OnFailure.RAISE)
    ) as gone:
        run = gone.track(tracked={"weight": torch.zeros(10)}, rng=False)
        (tmp_path / "gone").rename(tmp_path / "away")
        with (
            datastates.open(tmp_path / "here") as here,
            here.track(tracked={"weight": torch.zeros(10)}, rng=False) as other,
        ):
            assert other.capture().wait("durable").status is Status.DURABLE
        assert run.head is None


def test_bytes_are_dropped_whatever_the_host_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(tracked={"weight": torch.zeros(10)}, rng=False) as run,
    ):
        dropped = run.capture().wait("durable")
        run.capture()
    call_us(monkeypatch, "elsewhere")
    with datastates.open(tmp_path) as repo:
        evict(repo.core, dropped.uid)
        assert repo.state(dropped.uid).status is Status.EVICTED


def test_a_folder_keeps_one_identity_whoever_opens_it_first(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/lineage.db")
    (tmp_path / "packs").mkdir()
    barrier = threading.Barrier(8)

    def open_it(_: int) -> str | None:
        barrier.wait()
        return register_folder(locate(tmp_path), database).uid

    with ThreadPoolExecutor(8) as pool:
        uids = set(pool.map(open_it, range(8)))
    database.close()
    assert len(uids) == 1
    (tmp_path / "packs").rename(tmp_path / "moved")
    with datastates.open(tmp_path, packs=tmp_path / "moved") as repo:
        assert {repo.core.home.uid} == uids


def test_two_processes_with_one_configuration_do_not_differ(tmp_path: Path) -> None:
    for branch in ("one", "other"):
        with (
            datastates.open(tmp_path, config=CONFIG) as repo,
            repo.track(branch=branch, tracked={"w": torch.zeros(10)}, rng=False) as run,
        ):
            run.capture()
    with datastates.open(tmp_path) as repo, repo.core.database.read() as session:
        assert repo.diff("one", "other").config == {}
        assert detail.count(session).config == ()


def test_the_disk_of_a_replica_is_a_folder_whatever_the_host_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in ("first", "second"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        with (
            datastates.open(tmp_path, config=CONFIG) as repo,
            repo.track(tracked={"weight": torch.zeros(10)}, rng=False) as run,
        ):
            newest = run.capture().wait("durable")
    with datastates.open(tmp_path) as repo, repo.core.database.read() as session:
        assert [(one.tier, one.node) for one in replicas_of(session, newest.uid)] == [
            ("local", "first")
        ]


# Several users


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that a group shares, where any user can reach it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be several users")
    folder = Path(tempfile.mkdtemp(prefix="datastates-shared-", dir="/tmp"))
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    yield folder
    shutil.rmtree(folder)


def test_two_users_train_in_one_folder(smith: Forge, shared: Path) -> None:
    with lodging(smith, shared / "runs", user=ANN) as (_, _, newest):
        said = smith.run(
            "tests.support.lodgers:visit", folder=str(shared / "runs"), user=BEN, branch="bens"
        )
        assert said[0] == f"main {newest} captured"
        assert said[1].startswith("bens ")
    smith.run("tests.support.lodgers:visit", folder=str(shared / "runs"), user=BEN)
    with datastates.open(shared / "runs") as repo:
        assert repo.state(newest).status is Status.LOST
        assert repo.verify("main").status is Status.DURABLE
        assert repo.verify("bens").status is Status.DURABLE
    assert {path.stat().st_uid for path in (shared / "runs" / "packs").glob("*.manifest")} == {
        ANN[0],
        BEN[0],
    }


def test_a_commit_waits_for_a_lock_whose_file_is_another_users(smith: Forge, shared: Path) -> None:
    shared.chmod(0o777)
    assert smith.run("tests.support.lodgers:put_at_once", folder=str(shared), user=ANN) == ["put"]
    for path in shared.glob("s.*"):
        path.unlink()
    assert (shared / ".lock").stat().st_mode & 0o777 == 0o644
    with locked(shared, is_shared=False):
        assert smith.run("tests.support.lodgers:put_at_once", folder=str(shared), user=BEN) == [
            "waits"
        ]
    assert smith.run("tests.support.lodgers:put_at_once", folder=str(shared), user=BEN) == ["put"]


def test_a_user_who_may_only_read_opens_what_another_trains_in(smith: Forge, shared: Path) -> None:
    shared.chmod(0o755)
    os.chown(shared, ANN[0], GROUP)
    with lodging(smith, shared / "runs", user=ANN) as (_, _, newest):
        assert smith.run("tests.support.lodgers:visit", folder=str(shared / "runs"), user=BEN) == [
            f"main {newest} captured"
        ]
        job = smith.start(
            "tests.support.lodgers:visit", folder=str(shared / "runs"), user=BEN, branch="bens"
        )
        job.say()
        assert job.wait() == 1
    assert "this repository can only be read" in smith.errors()
