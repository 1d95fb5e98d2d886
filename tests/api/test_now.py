"""What goes on and what lies where, over the web."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import datastates
from datastates import Config, Repository, Status
from datastates.cli.app import app
from datastates.lineage.write import clones
from datastates.maintenance.lease import LEASES, beat_at
from datastates.system.files import FileLock
from datastates.testing import FaultyDisk
from tests.api.conftest import BASE, NAME, Serve
from tests.support.parts import run_job

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi.testclient import TestClient


def asked(client: TestClient, what: str, **params: Any) -> dict[str, Any]:
    answer = client.get(f"{BASE}/{what}", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_nothing_runs(client: TestClient) -> None:
    assert asked(client, "processes") == {"items": [], "total": 0, "metric": "loss"}


def test_a_process_tells_what_its_trainings_do(client: TestClient, repo: Repository) -> None:
    with (
        repo.track(branch="one", rng=False, value=1) as one,
        repo.track(branch="two", rng=False, value=2),
    ):
        assert asked(client, "processes")["items"][0]["trainings"][0]["state"] is None
        for step in (1, 2, 3):
            one.capture(step=step, metrics={"loss": 3.0 / step}).wait()
        found = asked(client, "processes")
        (process,) = found["items"]
        assert (process["uid"], process["pid"], process["life"]) == (
            repo.core.run_uid,
            os.getpid(),
            "running",
        )
        first, second = process["trainings"]
        state = repo.state("one")
        assert (first["branch"], first["state"], first["step"], first["status"]) == (
            "one",
            state.uid,
            3,
            "captured",
        )
        assert (first["last"], found["metric"]) == (1.0, "loss")
        assert (second["branch"], second["state"], second["steps_per_s"]) == ("two", None, None)
        (branch,) = [each for each in asked(client, "branches")["items"] if each["name"] == "one"]
        assert (first["steps_per_s"], first["captured_at"]) == (
            branch["steps_per_s"],
            branch["changed_at"],
        )
    # the process lives, and may merge
    assert asked(client, "processes")["items"][0]["trainings"] == []


def test_the_engine_says_again_and_again_that_it_is_at_work(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = threading.Semaphore(0)
    plain = FileLock.touch

    def beat(self: FileLock) -> None:
        plain(self)
        beats.release()

    monkeypatch.setattr(FileLock, "touch", beat)
    with repo.track(branch="one", rng=False, value=1):
        uid = repo.core.run_uid
        assert uid is not None
        os.utime(repo.location.packs / LEASES / uid, (0, 0))
        while beats.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have begun before
            assert beats.acquire(timeout=30)
        seen = beat_at(repo.location.packs, uid)
        assert seen is not None
        assert abs((datetime.now(UTC) - seen).total_seconds()) < 30
    repo.close()
    assert beat_at(repo.location.packs, uid) is None


def test_a_dead_process_is_not_shown_as_running(client: TestClient, repo: Repository) -> None:
    other = datastates.open(repo.location.root or "", memory_bytes=64 << 20)
    with other, other.track(branch="there", rng=False, value=1) as run:
        run.capture().wait("durable")
        assert [each["trainings"][0]["branch"] for each in asked(client, "processes")["items"]] == [
            "there"
        ]
    assert asked(client, "processes")["items"] == []


def test_processes_are_bounded(client: TestClient) -> None:
    assert client.get(f"{BASE}/processes", params={"limit": 0}).status_code == 400
    assert client.get(f"{BASE}/processes", params={"limit": 501}).status_code == 400


def test_storage_agrees_with_the_states_and_the_stats(client: TestClient, repo: Repository) -> None:
    found = asked(client, "storage")
    states = repo.find("step >= 0")
    (disk,) = [tier for tier in found["tiers"] if tier["tier"] == "local"]
    assert (disk["replicas"], disk["bytes"]) == (
        len(states),
        sum(state.bytes_new for state in states),
    )
    assert disk["node"] == repo.core.node
    stats = asked(client, "stats")
    assert (stats["tiers"], stats["bytes_stored"]) == (found["tiers"], found["bytes_stored"])
    assert 0 < found["disk_free"] <= found["disk_total"]
    assert (found["memory_total"], found["memory_used"]) == (None, None)
    branches = asked(client, "branches", sort="bytes")["items"]
    assert sum(branch["bytes"] for branch in branches) == disk["bytes"]
    with repo.track(branch="more", rng=False, weight=torch.zeros(5)) as run:
        run.capture().wait()
        again = asked(client, "storage")
        assert again["memory_total"] == 64 << 20
        assert 0 < again["memory_used"] <= again["memory_total"]


def test_what_keeps_states_from_being_written_is_told_until_it_is_over(
    tmp_path: Path, serve: Serve
) -> None:
    config = Config(memory_bytes=64 << 20, durable_every=1)
    with FaultyDisk(tmp_path / "packs") as disk, datastates.open(tmp_path, config=config) as repo:
        client = serve({NAME: repo})
        assert asked(client, "storage")["trouble"] is None
        with repo.track(rng=False, weight=torch.zeros(5)) as run:
            disk.fail(errno.ENOSPC)
            taken = run.capture()
            assert disk.is_met.wait(60)
            with pytest.raises(TimeoutError):
                taken.wait("durable", timeout_s=0.01)
            said = asked(client, "storage")["trouble"]
            assert said.startswith("nothing can be written since ")
            assert "1 state waits in memory" in said
            disk.mend()
            taken.wait("durable", timeout_s=60)
            assert asked(client, "storage")["trouble"] is None


def test_what_retention_would_drop_next_is_what_pruning_drops(
    built: Path, tmp_path: Path, serve: Serve
) -> None:
    shutil.copytree(built, tmp_path / "runs")
    with datastates.open(tmp_path / "runs", config=Config(retention="latest:1")) as repo:
        client = serve({NAME: repo})
        found, planned = asked(client, "retention", limit=2), repo.prune(dry_run=True)
        assert (found["policy"], found["total"]) == ("latest:1", len(planned.dropped))
        assert [
            (each["state"], each["branch"], each["step"], each["bytes"], each["reason"])
            for each in found["items"]
        ] == [
            (each.uid, each.branch, each.step, each.bytes, each.reason)
            for each in planned.dropped[:2]
        ]
        assert (found["bytes_before"], found["bytes_after"], found["kept"]) == (
            planned.bytes_before,
            planned.bytes_after,
            planned.kept,
        )
        # nothing was dropped by asking
        assert {state.status for state in repo.find("step >= 0")} == {Status.DURABLE}
        assert {each.uid for each in repo.prune().dropped} == {
            each["state"] for each in asked(client, "retention")["items"]
        }
        assert found["total"] > 2


def test_clones_and_connections_are_told(client: TestClient, repo: Repository) -> None:
    assert asked(client, "clones") == {"items": [], "next": None}
    uids = [repo.state(rev).uid for rev in ("main", "fork", "lone")]
    with repo.core.writing() as session:
        for number, uid in enumerate(uids):
            clones.note(
                session, uid, node="here", source="tcp://me:hunter2@there:7", bytes_moved=number
            )
    first = asked(client, "clones", limit=2)
    assert [(each["state"], each["bytes_moved"]) for each in first["items"]] == [
        (uids[2], 2),
        (uids[1], 1),
    ]
    assert first["items"][0]["source"] == "tcp://me:***@there:7"
    rest = asked(client, "clones", limit=2, after=first["next"])
    assert ([each["state"] for each in rest["items"]], rest["next"]) == ([uids[0]], None)

    assert asked(client, "servers")["items"] == []
    with repo.serve("memory://") as server, datastates.connect(server.url) as peer:
        peer.refs()
        (told,) = asked(client, "servers")["items"]
        assert (told["url"], told["peers"], told["peers_ever"]) == (server.url, 1, 1)


def test_the_terminal_says_the_same(serve: Serve, repo: Repository) -> None:
    def said(*words: str) -> list[Any]:
        done = CliRunner().invoke(app, [*words, "--repo", str(repo.location.root), "--json"])
        assert done.exit_code == 0, done.output
        return [msgspec.json.decode(line) for line in done.stdout.splitlines()]

    with repo.track(branch="one", rng=False, weight=torch.zeros(5)) as run:
        for step in (1, 2, 3):
            run.capture(step=step, metrics={"loss": 3.0 / step}).wait("durable")
        client = serve({NAME: repo})  # only now: a busy server counts the states now and then
        assert said("show") == [asked(client, "stats")]
        runs = asked(client, "runs")["items"]
        assert [{key: each[key] for key in runs[0]} for each in said("runs")] == runs
        (watched,) = said("branches", "--watch", "--times", "1", "--metric", "loss")
        branches = asked(client, "branches", metric="loss")
        assert watched["items"] == branches["items"]
        (process,) = asked(client, "processes")["items"]
        (one,) = [each for each in watched["items"] if each["name"] == "one"]
        (training,) = process["trainings"]
        assert (training["state"], training["steps_per_s"], training["last"]) == (
            one["head"],
            one["steps_per_s"],
            one["last"]["value"],
        )
        assert {each["uid"] for each in said("runs") if each["life"] == "running"} == {
            training["uid"]
        }


def test_states_that_wait_for_parts_and_those_that_were_given_up(
    client: TestClient, repo: Repository
) -> None:
    assert asked(client, "incomplete") == {"waiting": [], "given_up": [], "total_given_up": 0}
    job = run_job(repo.core.database)
    found = asked(client, "incomplete")
    (waits,), (dropped,) = found["waiting"], found["given_up"]
    assert (waits["uid"], waits["branch"], waits["missing"], waits["has_ended"]) == (
        job.waits,
        "ddp",
        [2],
        False,
    )
    assert (dropped["uid"], dropped["rank"], dropped["why"], dropped["reason"]) == (
        job.given_up,
        1,
        "skipped",
        "there was no room in memory",
    )
    assert asked(client, "incomplete", limit=0)["given_up"] == []
    assert repo.incomplete(limit=0).waiting == repo.incomplete().waiting != ()
    assert [part["rank"] for part in asked(client, f"states/{job.whole[0]}")["parts"]] == [0, 1, 2]
    assert asked(client, f"states/{repo.state('main').uid}")["parts"] == []
