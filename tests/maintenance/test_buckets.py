"""Repositories whose packs are in a bucket: each node has a folder for those on their way there."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Status
from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.maintenance import further
from tests.support.stores import S3Server

PATIENCE_S = 60.0
_numbers = count()


@pytest.fixture
def url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return f"{s3.bucket('packs')}/run-{next(_numbers)}"


_NODE = """
import sys, time, torch, datastates
folder, url, scratch, copied, more = sys.argv[1:]
weight = torch.zeros(8)
with datastates.open(folder, packs=url, scratch=scratch) as repo:
    run = repo.track(weight=weight, rng=False)
    for step in range(int(copied)):
        weight += 1
        run.capture().wait("external", 60)
    if int(more):
        repo.core.runner().copies.end_by(0.0)  # the bucket gets nothing more
    for step in range(int(more)):
        weight += 1
        run.capture().wait("durable", 60)
    print("ready", flush=True)
    time.sleep(100)
"""


def node(folder: Path, url: str, scratch: Path, *, copied: int, more: int) -> subprocess.Popen[str]:
    """A training in a process of its own, once its states are where they are said to be."""
    words = [str(folder), url, str(scratch), str(copied), str(more)]
    process = subprocess.Popen(
        [sys.executable, "-c", _NODE, *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_training_goes_on_from_the_bucket_on_another_node(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(further, "_OBSERVED_S", 4.0)
    process = node(tmp_path / "run", url, tmp_path / "one", copied=3, more=2)
    kill(process)
    shutil.rmtree(tmp_path / "one")
    weight = torch.zeros(8)
    with datastates.open(tmp_path / "run", packs=url, scratch=tmp_path / "two") as repo:
        lost = [state.uid for state in repo.log("main", limit=2)]
        with caplog.at_level(logging.INFO), repo.track(weight=weight, rng=False) as run:
            assert weight[0] == 3, "the newest in the bucket"
            assert "branch main goes back to state" in caplog.text
            assert f"Lost: {lost[0][:10]}, {lost[1][:10]}" in caplog.text
            weight += 1
            new = run.capture().wait("external", PATIENCE_S)
        assert repo.state("main").uid == new.uid
        assert repo.state("main").step == 4


def test_a_branch_whose_node_lives_is_refused_on_another_node(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as on another host, where the kernel sees no such process
    monkeypatch.setattr("datastates.maintenance.lease.is_running", lambda run: None)
    process = node(tmp_path / "run", url, tmp_path / "one", copied=1, more=0)
    try:
        with datastates.open(tmp_path / "run", packs=url, scratch=tmp_path / "two") as repo:
            with pytest.raises(Conflict, match=f"is held by process {process.pid}"):
                repo.track(weight=torch.zeros(8), rng=False)
            with repo.track(branch="other", weight=torch.zeros(8), rng=False) as run:
                run.capture().wait("external", PATIENCE_S)
    finally:
        kill(process)


def test_states_in_the_bucket_leave_the_folder_of_the_node(url: str, tmp_path: Path) -> None:
    weight = torch.zeros(100_000)
    config = Config(retention="latest:1")
    with datastates.open(
        tmp_path / "run", packs=url, scratch=tmp_path / "one", config=config
    ) as repo:
        with repo.track(weight=weight, rng=False) as run:
            captures = []
            for _ in range(5):
                weight += 1
                captures.append(run.capture().wait("external", PATIENCE_S))
        repo.prune()
        assert len(list((tmp_path / "one").glob("*.manifest"))) == 1
        assert {repo.state(each.uid).status for each in captures} == {Status.EXTERNAL}
        for number, each in enumerate(captures, 1):
            assert repo.load(each.uid)["weight"][0] == number


def test_the_lineage_is_rebuilt_from_the_bucket(url: str, tmp_path: Path) -> None:
    kill(node(tmp_path / "run", url, tmp_path / "one", copied=2, more=0))
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "one")
    report = datastates.reindex(tmp_path / "run", packs=url)
    assert (report.states, report.restorable) == (2, 2)
    weight = torch.zeros(8)
    with (
        datastates.open(tmp_path / "run", packs=url) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        assert weight[0] == 2
        run.capture().wait("external", PATIENCE_S)


def test_scratch_without_a_bucket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is the folder for packs on their way to a bucket"):
        datastates.open(tmp_path / "run", scratch=tmp_path / "one")


def test_verify_reads_the_bucket(url: str, s3: S3Server, tmp_path: Path) -> None:
    weight = torch.rand(1_500_000)
    with (
        datastates.open(tmp_path / "run", packs=url, scratch=tmp_path / "one") as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        first = run.capture().wait("external", PATIENCE_S)
        weight[:10] += 1
        second = run.capture().wait("external", PATIENCE_S)
    for leftover in (tmp_path / "one").glob("*.*"):
        leftover.unlink()
    with datastates.open(tmp_path / "run", packs=url, scratch=tmp_path / "two") as repo:
        whole = repo.verify()
        assert (whole.states, whole.damage, whole.elsewhere) == (2, (), {})
        assert whole.bytes == 6_000_000 + 4 * (1 << 20), "a chunk that both share is read once"
    shown = run_command("verify", "--repo", tmp_path / "run")
    assert "2 states only on the s3 tier: `datastates --repo" in shown
    assert "2 states, " in run_command("verify", "--tier", "s3", "--repo", tmp_path / "run")
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    listing = s3.request("GET", f"/{bucket}?prefix={prefix}/{second.uid}").body.decode()
    (pack,) = re.findall(r"<Key>([^<]*\.safetensors)</Key>", listing)
    body = bytearray(s3.request("GET", pack := f"/{bucket}/{pack}").body)
    body[-5000] ^= 1
    assert s3.request("PUT", pack, bytes(body)).status == 200
    with datastates.open(tmp_path / "run", packs=url, scratch=tmp_path / "two") as repo:
        (found,) = repo.verify().damage
        assert (found.state, found.chunk, found.tensors) == (second.uid, 0, ("weight",))
        assert s3.request("DELETE", f"/{bucket}/{prefix}/{first.uid}.0.manifest").status == 204
        damage = {each.state: each.chunk for each in repo.verify(tier="s3").damage}
        assert damage == {first.uid: None, second.uid: 0}
        with pytest.raises(NotFound, match="has no tier 'far' here"):
            repo.verify(tier="far")
        with pytest.raises(InvalidInput, match="belong to a check of everything"):
            repo.verify("main", tier="s3")  # type: ignore[call-overload]


def run_command(*words: object) -> str:
    command = [sys.executable, "-m", "datastates", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
