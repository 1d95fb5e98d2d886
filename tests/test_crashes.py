"""Trainings that are killed, end badly, or have no room: what was promised is there afterwards,
and nothing else."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import datastates
from datastates import Config, OnFailure, Repository, Status, Unavailable
from datastates.lineage.query.names import replicas_of
from datastates.storage.local import LocalTier
from datastates.storage.pack import packs_of, payload_bytes
from datastates.testing import fail_at
from tests.support.effort import seeds
from tests.support.forge import Forge, Job, forge
from tests.support.training import begin, capture, digest, make

KILLS_OF_A_FOLDER = 10
STEPS = ["pack-written", "pack-renamed", "manifest-written", "manifest-renamed", "marked-durable"]


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts trainings."""
    with forge(tmp_path_factory.mktemp("forge")) as opened:
        yield opened


@dataclass
class Facts:
    """What trainings said, of all that ran in one folder."""

    live: dict[str, str] = field(default_factory=dict)
    durable: dict[str, str] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    begun: list[tuple[str, str, str]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def hear(self, line: str) -> None:
        match line.split():
            case ["captured", uid, live]:
                self.live[uid] = live
            case ["durable", uid, live]:
                self.durable[uid] = live
            case ["tag" | "branch", name, uid]:
                self.refs[name] = uid
            case ["begin", branch, uid, live]:
                self.begun.append((branch, uid, live))
            case _:
                raise AssertionError(f"half a line: {line!r}")


def hear(facts: Facts, job: Job, lines: int) -> None:
    """The next lines that a training says."""
    for _ in range(lines):
        facts.hear(job.lines.readline())


def restored(repo: Repository, uid: str) -> str:
    """The digest of a state put into fresh objects."""
    model, optimizer = make()
    report = repo.restore(uid, model=model, optimizer=optimizer)
    assert report.restored
    return digest(model, optimizer)


def check(folder: Path, facts: Facts) -> dict[str, str]:
    """Open a folder that a process died in: every promise holds; its refs.

    A state that was seen to restore is not looked at again.
    """
    with datastates.open(folder) as repo:
        _check_refs(repo, facts)
        _check_listed(repo, folder, facts)
        refs = {ref.name: ref.state for ref in repo.refs()}
    packs = folder / "packs"
    assert not list(packs.glob(".tmp-*"))
    assert not list((packs / "leases").iterdir())
    return refs


def _check_refs(repo: Repository, facts: Facts) -> None:
    refs = {ref.name: ref for ref in repo.refs()}
    for name, uid in facts.refs.items():
        if name.startswith("tag"):
            assert refs[name].state == uid
        else:
            assert name in refs or repo.reflog(name)[0].new is None
    for ref in refs.values():
        if ref.kind == "branch":
            assert repo.state(ref.state).status is Status.DURABLE  # and _check_listed restores it
        if any(event.reason.startswith("recover") for event in repo.reflog(ref.name)):
            assert ref.kind == "branch"


def _check_listed(repo: Repository, folder: Path, facts: Facts) -> None:
    """Whatever the lineage says of a state is so: no process lives, so each is durable or has no
    bytes."""
    listed = {state.uid: state for state in repo.find("step >= 0")}
    durable = {uid for uid, state in listed.items() if state.status is Status.DURABLE}
    assert {state.status for state in listed.values()} <= {
        Status.DURABLE,
        Status.LOST,
        Status.EVICTED,
    }
    assert set(facts.durable) <= durable
    for uid in durable - facts.seen:
        found = restored(repo, uid)
        assert found == facts.live.get(uid, found)
        assert found == facts.durable.get(uid, found)
    facts.seen |= durable
    on_disk = set(LocalTier(folder / "packs").uids())
    assert durable == on_disk <= set(listed)


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(5, more=3))
def test_nothing_that_was_reported_is_missing_after_a_kill(
    smith: Forge, tmp_path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    facts, refs = Facts(), dict[str, str]()
    for number in range(KILLS_OF_A_FOLDER):
        facts.begun.clear()
        job = smith.start(
            "tests.support.training:train", folder=str(tmp_path), seed=seed * 100 + number
        )
        hear(facts, job, choose.randrange(2, 40))
        threading.Event().wait(choose.random() * 0.02)  # anywhere between two lines
        job.kill(signal.SIGKILL)
        for line in job.lines.read().split("\n")[:-1]:
            facts.hear(line)
        assert job.wait() == -signal.SIGKILL
        for branch, uid, live in facts.begun:
            assert uid == refs.get(branch, "-")
            if uid in facts.live:
                assert live == facts.live[uid]
        refs = check(tmp_path, facts)
    facts.seen.clear()
    check(tmp_path, facts)
    assert facts.durable
    assert facts.refs


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("step", STEPS)
def test_a_death_after_any_durable_step_loses_nothing_reported_and_shows_nothing_half_made(
    smith: Forge, tmp_path: Path, step: str, after: int
) -> None:
    facts = Facts()
    job = smith.start(
        "tests.support.training:train", folder=str(tmp_path), seed=after, step=step, after=after
    )
    for line in job.say():
        facts.hear(line)
    assert job.wait() == 137
    check(tmp_path, facts)
    with datastates.open(tmp_path, memory_bytes=48 << 20) as repo:
        head = {ref.name: ref.state for ref in repo.refs()}.get("main")
        said: list[tuple[object, ...]] = []
        run, model, optimizer = begin(repo, "main", lambda *words: said.append(words))
        assert said[0][2] == (head or "-")
        taken = capture(run, model, optimizer, lambda *words: None)
        run.close()
        assert restored(repo, taken.uid) == digest(model, optimizer)


def test_a_state_that_was_whole_on_disk_when_its_process_died_is_durable(
    smith: Forge, tmp_path: Path
) -> None:
    facts, uid = die_unheard(smith, tmp_path)
    with datastates.open(tmp_path) as repo:
        assert repo.state(uid).status is Status.DURABLE
        assert restored(repo, uid) == facts.live[uid]
        with repo.core.database.read() as session:
            held = replicas_of(session, uid)
    (file,) = (tmp_path / "packs").glob("*.safetensors")
    assert [(pack.name, pack.size) for pack in packs_of(tmp_path / "packs", uid)] == [
        (file.name, file.stat().st_size)
    ]
    added = LocalTier(tmp_path / "packs").manifest(uid).bytes_new
    assert [(one.tier, one.bytes) for one in held] == [("local", added)]
    assert 0 < added <= payload_bytes(file), "other states may share the pack"


@pytest.mark.parametrize("damage", ["pack gone", "pack cut", "manifest cut"])
def test_a_state_that_is_not_whole_on_disk_is_lost_with_its_process(
    smith: Forge, tmp_path: Path, damage: str
) -> None:
    _, uid = die_unheard(smith, tmp_path)
    what, how = damage.split()
    (path,) = (tmp_path / "packs").glob(f"{uid}.*{'safetensors' if what == 'pack' else 'manifest'}")
    (
        path.unlink()
        if how == "gone"
        else os.truncate(path, 100 if what == "manifest" else path.stat().st_size - 1)
    )
    with datastates.open(tmp_path) as repo:
        assert repo.state(uid).status is Status.LOST


def test_a_repository_that_was_moved_finds_what_is_there(smith: Forge, tmp_path: Path) -> None:
    facts, uid = die_unheard(smith, tmp_path / "runs")
    (tmp_path / "runs").rename(tmp_path / "moved")
    with datastates.open(tmp_path / "moved") as repo:
        assert repo.state(uid).status is Status.DURABLE
        assert restored(repo, uid) == facts.live[uid]


def test_a_copy_takes_nothing_of_the_original_s_files_for_its_own(
    smith: Forge, tmp_path: Path
) -> None:
    _, uid = die_unheard(smith, tmp_path / "runs")
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")
    for path in (tmp_path / "copy" / "packs").glob(f"{uid}.*"):
        path.unlink()
    with datastates.open(tmp_path / "copy") as repo:
        assert repo.state(uid).status is Status.LOST
    with datastates.open(tmp_path / "runs") as repo:
        assert repo.state(uid).status is Status.DURABLE


def die_unheard(smith: Forge, folder: Path) -> tuple[Facts, str]:
    """A training ends when the first state is on disk, and before it could say so; that state."""
    facts = Facts()
    job = smith.start(
        "tests.support.training:train", folder=str(folder), seed=1, step="manifest-renamed"
    )
    for line in job.say():
        facts.hear(line)
    assert job.wait() == 137
    assert not facts.durable
    (path,) = (folder / "packs").glob("*.manifest")
    return facts, path.name.split(".")[0]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("SIGTERM", 128 + signal.SIGTERM),
        ("SIGHUP", 128 + signal.SIGHUP),
        ("SIGINT", -signal.SIGINT),
        ("sys.exit", 3),
        ("exception", 1),
        ("end", 0),
    ],
)
def test_what_was_to_become_durable_is_durable_however_the_training_ends(
    smith: Forge, tmp_path: Path, how: str, code: int
) -> None:
    facts = Facts()
    job = smith.start("tests.support.training:train_and_end", folder=str(tmp_path), how=how)
    hear(facts, job, 10)
    if how.startswith("SIG"):
        job.kill(getattr(signal, how))
    for line in job.say():
        facts.hear(line)
    assert job.wait() == code, smith.errors()
    with datastates.open(tmp_path) as repo:
        assert not repo.recovered
        heads = {ref.name: repo.state(ref.state) for ref in repo.refs()}
        assert set(heads) == {"main", "early", "aside"}
        assert all(state.status is Status.DURABLE for state in heads.values())
        # The signal may come between the capture and the word of it.
        newest = list(facts.live)[-1]
        assert newest in [state.uid for state in repo.log("main", limit=2)]
        assert heads["early"].uid == facts.refs["early"]
        assert heads["aside"].uid == facts.refs["aside"]
        for state in heads.values():
            assert restored(repo, state.uid) == facts.live.get(state.uid, restored(repo, state.uid))


def test_a_full_disk_is_told_clearly_to_those_who_ask_for_it_and_training_may_go_on(
    tmp_path: Path,
) -> None:
    config = Config(
        memory_bytes=64 << 20,
        durable_interval_s=None,
        on_step=fail_at("pack-written"),
        on_failure=OnFailure.RAISE,
    )
    with datastates.open(tmp_path, config=config) as repo:
        run, model, optimizer = begin(repo, "main", _quiet)
        failed = capture(run, model, optimizer, _quiet)
        live = digest(model, optimizer)
        with pytest.raises(
            Unavailable, match=rf"state {failed.uid} was not written .* no space left, .* make room"
        ):
            failed.wait("durable")
        with pytest.raises(Unavailable, match=failed.uid):
            capture(run, model, optimizer, _quiet)
        assert not list((tmp_path / "packs").glob("*.manifest"))
        assert restored(repo, failed.uid) == live  # from memory: nothing is lost but the promise
        again = capture(run, model, optimizer, _quiet)
        assert again.wait("durable").status is Status.DURABLE
        assert repo.tag("kept", failed.uid).state == failed.uid
    with datastates.open(tmp_path) as repo:
        assert repo.state("kept").status is Status.DURABLE
        assert restored(repo, "kept") == live
        assert restored(repo, "main") == digest(model, optimizer)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_what_is_durable_and_works_again_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    config = Config(memory_bytes=64 << 20, durable_interval_s=None, on_failure=OnFailure.RAISE)
    with datastates.open(tmp_path / "runs", packs=small_disk, config=config) as repo:
        run, model, optimizer = begin(repo, "main", _quiet)
        live = {}
        first = capture(run, model, optimizer, _quiet).wait("durable").uid
        live[first] = digest(model, optimizer)
        filler = small_disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
        failed = capture(run, model, optimizer, _quiet)
        live[failed.uid] = digest(model, optimizer)
        with pytest.raises(Unavailable, match="No space left on device"):
            failed.wait("durable")
        assert {path.name.split(".")[0] for path in small_disk.glob("*.manifest")} == {first}
        with pytest.raises(Unavailable, match=failed.uid):
            run.capture()
        filler.unlink()
        last = capture(run, model, optimizer, _quiet).wait("durable").uid
        live[last] = digest(model, optimizer)
        for uid, found in live.items():
            assert restored(repo, uid) == found
    with datastates.open(tmp_path / "runs", packs=small_disk) as repo:
        assert restored(repo, "main") == live[last]
        assert restored(repo, first) == live[first]


def _quiet(*words: object) -> None:
    pass
