"""What becomes durable goes onto the user's tiers too; one that fails holds up nothing, and is
tried again."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Conflict, Repository, Status, Tracker, Unavailable
from datastates.engine import copies
from datastates.errors import InvalidInput
from datastates.lineage.query.names import replicas_of
from datastates.maintenance import keeper
from datastates.maintenance.retention_pass import evict
from datastates.policy.contract import CadenceChoice, Costs
from datastates.state.manifest import Manifest
from datastates.storage import KeyedTier
from datastates.storage.tier import Payload, Placed, SupportsManifests, Tier
from datastates.system.threads import Notifier
from datastates.testing import FaultyDisk, WrappedTier
from tests.storage.test_tiers import Archive

PATIENCE_S = 60.0


class Failing(Archive):
    """An archive that can be away, and says when it was asked in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.was_away = threading.Event()

    def put(self, payload: Payload, *, base: object = None) -> Placed:
        if self.is_away:
            self.was_away.set()
            raise OSError("no route to the archive")  # whatever a user's code raises
        return super().put(payload, base=base)


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(8, 8)


@pytest.fixture
def archive() -> Failing:
    return Failing()


@pytest.fixture
def repo(tmp_path: Path, archive: Failing) -> Iterator[Repository]:
    with datastates.open(tmp_path, config=Config(tiers=[archive], memory_bytes=32 << 20)) as opened:
        yield opened


@pytest.fixture
def run(repo: Repository, model: torch.nn.Module) -> Iterator[Tracker]:
    with repo.track(model=model) as tracker:
        yield tracker


def places(repo: Repository, uid: str) -> list[tuple[str, str]]:
    with repo.core.reading() as session:
        return [(one.tier, one.node) for one in replicas_of(session, uid)]


def test_a_state_that_becomes_durable_is_put_onto_further_tiers_and_its_status_says_so(
    repo: Repository, run: Tracker, archive: Failing
) -> None:
    first = run.capture().wait("external", PATIENCE_S)
    assert (first.status, repo.state(first.uid).status) == (Status.EXTERNAL, Status.EXTERNAL)
    assert ("archive", "") in places(repo, first.uid)
    second = run.capture().wait("captured", PATIENCE_S)
    assert (list(archive.uids()), second.status) == ([first.uid], Status.CAPTURED)


def test_closing_waits_until_what_is_durable_is_put_further(
    tmp_path: Path, model: torch.nn.Module
) -> None:
    archive = Failing()
    with (
        datastates.open(tmp_path, config=Config(tiers=[archive])) as repo,
        repo.track(model=model) as run,
    ):
        uid = run.capture().uid
    assert list(archive.uids()) == [uid]
    with datastates.open(tmp_path) as repo:
        assert repo.state("main").status is Status.EXTERNAL


def test_a_state_is_restored_from_a_further_tier_when_the_disk_is_gone(
    tmp_path: Path, model: torch.nn.Module
) -> None:
    archive = Failing()
    with (
        datastates.open(tmp_path, config=Config(tiers=[archive])) as repo,
        repo.track(model=model) as run,
    ):
        run.capture()
    weight = next(iter(model.parameters())).detach().clone()
    shutil.rmtree(tmp_path / "packs")
    again = Failing()
    again.states = archive.states
    with datastates.open(tmp_path, config=Config(tiers=[again])) as repo:
        torch.equal(repo.load("main")["model"]["weight"], weight)
        with repo.track(model=model) as run:
            assert run.resumed_from is not None
            run.capture().wait("durable", PATIENCE_S)  # on a disk that has nothing of the parent
    with datastates.open(tmp_path) as repo, pytest.raises(Unavailable, match="cannot be restored"):
        repo.load("main~1")


def test_a_tier_that_fails_is_tried_again_with_the_next_state(
    repo: Repository, run: Tracker, archive: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    archive.is_away = True
    first, second = run.capture(), run.capture()
    for handle in (first, second):
        assert handle.wait("durable", PATIENCE_S).status is Status.DURABLE
    with pytest.raises(Unavailable, match="no route to the archive; it is tried again"):
        first.wait("external", PATIENCE_S)
    with pytest.raises(Unavailable, match="no route"):
        second.wait("external", PATIENCE_S)
    archive.is_away = False
    third = run.capture()
    third.wait("external", PATIENCE_S)
    assert list(archive.uids()) == [
        first.uid,
        second.uid,
        third.uid,
    ], "in the order in which they became durable"
    assert first.wait("external", PATIENCE_S).status is Status.EXTERNAL
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line for line in said if "no route" in line] == [said[0]], "once, not for each state"
    assert said[-1] == "the archive tier takes states again"


class Mute(BaseException):
    """What foreign code may raise: no ``Exception``, and nothing that can be said."""

    def __str__(self) -> str:
        raise ArithmeticError


@pytest.mark.parametrize("error", [SystemExit(3), Mute()], ids=lambda error: type(error).__name__)
def test_a_tier_that_ends_its_thread_does_not(
    tmp_path: Path, error: BaseException, archive: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(payload: Payload, *, base: object = None) -> Placed:
        raise error

    with datastates.open(tmp_path, config=Config(tiers=[archive], memory_bytes=32 << 20)) as repo:
        with repo.track(weight=torch.zeros(8), rng=False) as run, monkeypatch.context() as away:
            away.setattr(archive, "put", refuse)
            first = run.capture()
            first.wait("durable", PATIENCE_S)
            repo.core.runner().drain()
            with pytest.raises(
                Unavailable,
                match=r"is durable and not on the archive tier: (3|Mute); it is tried again",
            ):
                first.wait("external", PATIENCE_S)
            away.undo()
            run.capture().wait("external", PATIENCE_S)
        assert archive.has(first.uid)


def test_a_state_that_has_rotted_is_not_put_further_and_holds_up_no_other(
    repo: Repository,
    run: Tracker,
    archive: Failing,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "_MEMORY_SHARE", 1 << 40)  # states are read from the folder
    archive.is_away = True
    rotten = run.capture()
    rotten.wait("durable", PATIENCE_S)
    assert archive.was_away.wait(PATIENCE_S)
    (pack,) = repo.location.packs.glob("*.safetensors")
    with pack.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"rot")
    archive.is_away = False
    torch.nn.init.zeros_(next(iter(model.parameters())))
    sound = run.capture()
    assert sound.wait("external", PATIENCE_S).status is Status.EXTERNAL
    with pytest.raises(Unavailable, match="fail their digest"):
        rotten.wait("external", PATIENCE_S)
    assert list(archive.uids()) == [sound.uid]


def test_what_could_not_be_put_further_by_the_end_stays_durable_and_is_said(
    tmp_path: Path, model: torch.nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    archive = Failing()
    archive.is_away = True
    with (
        datastates.open(tmp_path, config=Config(tiers=[archive])) as repo,
        repo.track(model=model) as run,
    ):
        handle = run.capture()
        handle.wait("durable", PATIENCE_S)
        archive.was_away.wait(PATIENCE_S)
    with pytest.raises(Unavailable, match="on the archive tier"):
        handle.wait("external", PATIENCE_S)
    assert (
        f"not on the archive tier: 1 state that became durable, the last of them {handle.uid};"
        " they are copied when the repository is next opened for writing"
    ) in caplog.messages
    with datastates.open(tmp_path) as repo:
        assert repo.state("main").status is Status.DURABLE


def test_a_state_that_left_memory_is_waited_for_until_it_is_put_further(tmp_path: Path) -> None:
    archive = Held(Failing())
    # one slot: of two, memory holds one state while the next is captured
    model = torch.nn.Linear(1024, 1024)
    with (
        datastates.open(tmp_path, config=Config(tiers=[archive], memory_bytes=8 << 20)) as repo,
        repo.track(model=model) as run,
    ):
        first = run.capture()
        first.wait("durable", PATIENCE_S)
        assert archive.is_waiting.wait(PATIENCE_S)
        for _ in range(4):
            run.capture().wait("captured", PATIENCE_S)
        captured = repo.core.tiers.captured
        assert captured is not None
        assert not captured.has(first.uid)
        archive.go_on.set()
        assert first.wait("external", PATIENCE_S).status is Status.EXTERNAL


class Held(WrappedTier):
    """Lets nothing in before it is told to."""

    name = "held"

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.is_waiting, self.go_on = threading.Event(), threading.Event()

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        self.is_waiting.set()
        self.go_on.wait(PATIENCE_S)
        return super().put(payload, base=base)


class Knowing(WrappedTier):
    """Notes which base it is offered."""

    name = "knowing"

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.bases: list[str | None] = []

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        self.bases.append(None if base is None else base.origin.uid)
        return super().put(payload, base=base)

    def manifest(self, uid: str) -> Manifest:
        with self.inner.open(uid) as reader:
            return reader.manifest


def test_a_tier_that_shows_manifests_is_offered_that_of_the_parent(
    tmp_path: Path, model: torch.nn.Module
) -> None:
    tier = Knowing(Failing())
    assert isinstance(tier, SupportsManifests)
    with (
        datastates.open(tmp_path, config=Config(tiers=[tier])) as repo,
        repo.track(model=model) as run,
    ):
        first = run.capture().wait("external", PATIENCE_S)
        run.capture().wait("external", PATIENCE_S)
    assert tier.bases == [None, first.uid]


def test_eviction_leaves_further_tiers_what_they_have(repo: Repository, run: Tracker) -> None:
    first = run.capture().wait("external", PATIENCE_S)
    run.capture().wait("external", PATIENCE_S)
    evict(repo.core, first.uid)
    assert (repo.state(first.uid).status, places(repo, first.uid)) == (
        Status.EXTERNAL,
        [("archive", "")],
    )
    assert repo.load(first.uid)["model"]["weight"].shape == (8, 8)


@pytest.mark.parametrize("tiers", ["archive", 5, [object()]])
def test_what_is_no_list_of_tiers_is_refused(tmp_path: Path, tiers: object) -> None:
    with pytest.raises(InvalidInput, match="tiers"):
        # what users may give
        datastates.open(tmp_path, config=Config(tiers=tiers))  # type: ignore[arg-type]


class EveryFourthFurther(datastates.Cadence):
    """Writes each capture, and lets every fourth of them go on."""

    __slots__ = ()

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        return current or CadenceChoice("mine", "for a test", every=1, further_every=4, costs=costs)


def test_a_policy_lets_some_states_go_on_and_keeps_others_near_until_they_are_tagged(
    tmp_path: Path, archive: Failing
) -> None:
    config = Config(tiers=[archive], memory_bytes=32 << 20, cadence=EveryFourthFurther(1, None))
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        while run.cadence.costs is None:
            run.capture().wait("durable", PATIENCE_S)
        assert run.cadence.costs.further_s is not None
        states = [run.capture() for _ in range(9)]
        repo.core.runner().drain()
        near = [state.uid for state in states if not archive.has(state.uid)]
        assert 6 <= len(near) <= 7
        repo.tag("kept", near[0])
        repo.core.runner().drain()
        assert archive.has(near[0])
        assert not archive.has(near[1])
        states[-1].wait("external", PATIENCE_S)


def test_a_state_that_was_kept_near_and_left_memory_goes_on_when_somebody_waits_for_it(
    tmp_path: Path, archive: Failing
) -> None:
    config = Config(
        tiers=[archive], memory_bytes=32 << 20, memory_latest=1, cadence=EveryFourthFurther(1, None)
    )
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        while run.cadence.costs is None:
            run.capture().wait("durable", PATIENCE_S)
        states = [run.capture() for _ in range(9)]
        repo.core.runner().drain()
        near = next(state for state in states[:-1] if not archive.has(state.uid))
        captured = repo.core.tiers.captured
        assert captured is not None
        while captured.has(near.uid):
            run.capture().wait("durable", PATIENCE_S)
        assert near.status is Status.DURABLE
        assert near.wait("external", PATIENCE_S).status is Status.EXTERNAL
        assert archive.has(near.uid)


def test_states_that_wait_for_their_copy_are_not_pruned(tmp_path: Path) -> None:
    """With ``latest:1`` and a slow tier, 7 of 12 states never left the node."""
    slow, weight = Held(Failing()), torch.zeros(8)
    config = Config(tiers=[slow], retention="latest:1", memory_bytes=32 << 20)
    with datastates.open(tmp_path, config=config) as repo:
        with repo.track(weight=weight, rng=False) as run:
            for _ in range(5):
                weight += 1
                run.capture().wait("durable", PATIENCE_S)
            pruned = repo.prune()
            assert pruned.dropped == ()
            assert pruned.kept["it waits for its copy to the held tier"] == 4, "all but the head"
            with datastates.open(tmp_path) as other:  # as `datastates prune` does
                assert other.prune(datastates.Retention.parse("latest:1")).dropped == ()
            slow.go_on.set()
            repo.core.runner().drain()
        assert len(repo.prune().dropped) == 4
    assert len(list(slow.uids())) == 5


def test_a_state_that_leaves_the_disk_before_its_copy_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Held(Failing())
    config = Config(tiers=[slow], memory_bytes=32 << 20)
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        captures = [run.capture() for _ in range(3)]
        for capture in captures:
            capture.wait("durable", PATIENCE_S)
        gone = captures[1]
        with pytest.raises(Conflict, match="still to be copied to the held tier"):
            evict(repo.core, gone.uid)
        evict(repo.core, gone.uid, is_forced=True)
        with pytest.raises(Unavailable, match="left the disk before it was copied to the held"):
            gone.wait("external", PATIENCE_S)
        slow.go_on.set()
        captures[2].wait("external", PATIENCE_S)
    assert f"state {gone.uid} left the disk before it was copied to the held tier" in caplog.text
    assert gone.uid not in list(slow.uids())


class Forgetful(KeyedTier):
    """A store that takes everything, and forgets what does not begin with ``keeps``."""

    name = "forgetful"

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps, self.objects = keeps, dict[str, bytes]()

    def read(self, key: str) -> bytes:
        return self.objects[key]

    def write(self, key: str, data: bytes) -> None:
        if key.startswith(self.keeps):
            self.objects[key] = data

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.objects if key.startswith(prefix)]


def test_a_tier_that_does_not_show_what_it_took_is_refused_at_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the forgetful tier took an object and does not list"):
        datastates.open(tmp_path, config=Config(tiers=[Forgetful("state/")]))


def test_a_state_is_external_only_once_the_tier_confirms_it(tmp_path: Path) -> None:
    with (
        datastates.open(tmp_path, config=Config(tiers=[Forgetful("probe/")])) as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        capture = run.capture()
        with pytest.raises(Unavailable, match="the tier took the state and does not list it"):
            capture.wait("external", PATIENCE_S)
        assert capture.status is Status.DURABLE


class Segments(KeyedTier):
    """Lists by whole path segments, as obstore does: a key is no prefix of itself."""

    name = "segments"

    def __init__(self) -> None:
        super().__init__()
        self.objects = dict[str, bytes]()

    def read(self, key: str) -> bytes:
        return self.objects[key]

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def keys(self, prefix: str) -> list[str]:
        folder = prefix.rstrip("/") + "/"
        return [key for key in list(self.objects) if key.startswith(folder)]


def test_a_store_that_lists_by_path_segments_gives_its_states_back(tmp_path: Path) -> None:
    tier, weight = Segments(), torch.arange(8.0)
    with (
        datastates.open(tmp_path, config=Config(tiers=[tier])) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        run.capture().wait("external", PATIENCE_S)
    shutil.rmtree(tmp_path / "packs")
    again = Segments()
    again.objects = tier.objects
    with datastates.open(tmp_path, config=Config(tiers=[again])) as repo:
        assert torch.equal(repo.load("main")["weight"], weight)


def test_a_tier_that_hangs_delays_the_end_by_seconds_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies, "CLOSING_S", 0.5)
    monkeypatch.setattr(copies, "STALL_S", 0.2)
    hung = Held(Failing())
    try:
        with (
            datastates.open(tmp_path, config=Config(tiers=[hung])) as repo,
            repo.track(weight=torch.zeros(8), rng=False) as run,
        ):
            handles = [run.capture() for _ in range(3)]
            for handle in handles:
                handle.wait("durable", PATIENCE_S)
            assert hung.is_waiting.wait(PATIENCE_S)
            Notifier().wait_for(lambda: repo.trouble is not None, PATIENCE_S)
            assert re.fullmatch(
                r"the held tier has not responded for \d+ s; 3 states wait for it",
                str(repo.trouble),
            )
        assert "not on the held tier: 3 states that became durable" in caplog.text
        with pytest.raises(Unavailable, match="on the held tier when its repository was closed"):
            handles[0].wait("external", PATIENCE_S)
    finally:
        hung.go_on.set()


def test_what_was_not_copied_is_copied_when_the_repository_is_next_opened_for_writing(
    tmp_path: Path,
) -> None:
    with (
        datastates.open(tmp_path) as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        old = run.capture().wait("durable", PATIENCE_S)  # from before the tier was added
    away, here = Failing(), Failing()
    away.is_away = True
    with (
        datastates.open(tmp_path, config=Config(tiers=[away])) as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        late = run.capture().wait("durable", PATIENCE_S)
    here.states = away.states
    with datastates.open(tmp_path, config=Config(tiers=[here])) as repo:
        assert list(here.uids()) == [], "nothing is captured"
        with repo.track(weight=torch.zeros(8), rng=False) as run:
            new = run.capture().wait("external", PATIENCE_S)
            repo.core.runner().drain()
            assert set(here.uids()) >= {old.uid, late.uid, new.uid}
            assert repo.state(old.uid).status is Status.EXTERNAL


def test_a_full_disk_may_drop_states_that_wait_and_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LEAST_S", 0.1)
    slow, weight = Held(Failing()), torch.zeros(8)
    config = Config(tiers=[slow], retention="latest:1", memory_bytes=32 << 20)
    with (
        datastates.open(tmp_path, config=config) as repo,
        FaultyDisk(tmp_path / "packs") as disk,
        repo.track(weight=weight, rng=False) as run,
    ):
        uids = []
        for _ in range(6):
            weight += 1
            uids.append(run.capture().wait("durable", PATIENCE_S).uid)
        disk.fail(errno.ENOSPC)
        weight += 1
        last = run.capture()
        last.wait("captured", PATIENCE_S)
        repo.tag("wanted", last.uid)
        assert Notifier().wait_for(lambda: "left the disk before" in caplog.text, PATIENCE_S)
        disk.mend()
        last.wait("durable", PATIENCE_S)
        slow.go_on.set()
        repo.core.runner().drain()
        assert slow.is_waiting.is_set()
        gone = {uid for uid in uids if f"state {uid} left the disk before it was" in caplog.text}
        # the first is under way; each pass on a full disk releases the older half of the others
        assert len(gone) >= 2
        assert gone == {*uids[1 : 1 + len(gone)]}
        assert {*slow.uids()} == {*uids, last.uid} - gone


def test_the_repository_s_own_folder_is_no_further_tier(tmp_path: Path) -> None:
    datastates.open(tmp_path / "run").close()
    url = f"file://{tmp_path}/run/packs"
    with pytest.raises(InvalidInput, match="the repository's own folder of packs"):
        datastates.open(tmp_path / "run", config=Config(tiers=[url]))
    with pytest.raises(InvalidInput, match="the repository's own folder of packs"):
        datastates.open(tmp_path / "run", packs=url)


def test_copies_keep_to_their_rate(tmp_path: Path) -> None:
    url, weight = f"file://{tmp_path}/share", torch.zeros(16 << 10)
    config = Config(tiers=[url], copy_bytes_per_s=64 << 10)
    with (
        datastates.open(tmp_path / "run", config=config) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        began = time.monotonic()
        for _ in range(3):
            weight += 1
            last = run.capture()
        assert time.monotonic() - began < 1, "captures do not wait"
        last.wait("external", PATIENCE_S)
        assert time.monotonic() - began > 1.5, "the second and the third wait for a second each"
        repo.core.runner().drain()


def test_a_disk_that_was_full_drops_nothing_once_it_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LEAST_S", 3600.0)
    away, weight = Failing(), torch.zeros(8)
    away.is_away = True
    config = Config(tiers=[away], retention="latest:1", memory_bytes=32 << 20)
    with (
        datastates.open(tmp_path, config=config) as repo,
        FaultyDisk(tmp_path / "packs") as disk,
        repo.track(weight=weight, rng=False) as run,
    ):
        uids = []
        for _ in range(6):
            weight += 1
            uids.append(run.capture().wait("durable", PATIENCE_S).uid)
        disk.fail(errno.ENOSPC)
        weight += 1
        last = run.capture()
        last.wait("captured", PATIENCE_S)
        repo.tag("wanted", last.uid)
        kept = repo.core.engage().keeper
        assert isinstance(kept, keeper.Keeper)
        assert Notifier().wait_for(lambda: kept.error is not None, PATIENCE_S)  # nothing is removed
        disk.mend()
        last.wait("durable", PATIENCE_S)
    named = {uid for uid in uids if f"state {uid} left the disk before it was" in caplog.text}
    assert named
    with datastates.open(tmp_path, config=Config(tiers=[])) as repo:
        gone = {uid for uid in uids if repo.state(uid).status is Status.EVICTED}
    assert gone == named, "the last pass, on a disk with room, dropped others without a word"


def test_a_process_without_the_tier_names_the_states_that_a_full_disk_drops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LEAST_S", 3600.0)
    away, weight, uids = Failing(), torch.zeros(8), []
    away.is_away = True
    config = Config(tiers=[away], retention="latest:1", memory_bytes=32 << 20)
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        for _ in range(6):
            weight += 1
            uids.append(run.capture().wait("durable", PATIENCE_S).uid)
    with (
        datastates.open(tmp_path, config=replace(config, tiers=[])) as repo,
        FaultyDisk(tmp_path / "packs") as disk,
        repo.track(weight=weight, rng=False) as run,
    ):
        disk.fail(errno.ENOSPC)
        weight += 1
        last = run.capture()
        last.wait("captured", PATIENCE_S)
        repo.tag("wanted", last.uid)

        def gone() -> set[str]:
            return {uid for uid in uids if repo.state(uid).status is Status.EVICTED}

        assert Notifier().wait_for(lambda: bool(gone()), PATIENCE_S)
        disk.mend()
        last.wait("durable", PATIENCE_S)
        run.close()
        name = "left the disk before it was copied to the archive tier"
        assert gone() == {uid for uid in uids if f"state {uid} {name}" in caplog.text}
