"""Ranks whose database does not answer reach it through one whose does: they open, track, capture, restore and search as the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy.engine import make_url

import datastates
from datastates import ranks
from datastates.config import Config
from datastates.errors import InvalidInput, Unavailable
from datastates.ranks.way import _sslmode
from datastates.transport.clone.groups import SoloGroup
from tests.support.jobs import Say, job, run

HERE = "tests.ranks.test_reach"
FAR = 2
"""The first rank whose node does not reach the database."""


def urls(postgresql_url: str, tmp_path: Path) -> dict[str, str]:
    """The database's URL, and the same where nobody answers."""
    nowhere = make_url(postgresql_url).set(query={"host": str(tmp_path / "nowhere")}).render_as_string(hide_password=False)
    return {"near": postgresql_url, "far": nowhere}


def train(near: str, far: str, packs: str, say: Say, steps: int, is_first: bool) -> None:
    """Go on with the branch, and say what there is."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0 if is_first else 1 + rank)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    url = near if rank < FAR else far
    if rank >= FAR:
        os.environ.update(PGPORT="77", PGHOSTADDR="127.0.0.1")  # as on a node of a cluster whose databases listen there
        try:
            datastates.open(url, packs=packs)
        except Unavailable:
            say("unreached")
    with ranks.reach(url) as reached, datastates.open(reached, packs=packs, memory_bytes=64 << 20) as repo:
        assert (reached == url) is (rank < FAR)
        run = repo.track(model=model, optimizer=optimizer, durable_interval_s=None)
        say("from", run.step)
        for _ in range(steps):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken = run.capture(metrics={"loss": 1.0})
        state = taken.wait("durable", timeout_s=60)
        assert run.head is not None
        say("head", run.head.uid, len(repo.find("metrics.loss > 0")), float(model.weight.detach().sum()).hex())
        again = torch.nn.Linear(4, 4)
        repo.restore(state.uid, into={"model": again})
        assert torch.equal(again.weight, model.weight)
        run.close()


def lose(near: str, far: str, packs: str, say: Say) -> None:
    """Capture until rank 0 is gone; the lineage is reached through the next one."""
    rank, config = torch.distributed.get_rank(), Config(memory_bytes=64 << 20, durable_interval_s=None, group_patience_s=5.0)
    with (
        ranks.reach(near if rank < FAR else far) as url,
        datastates.open(url, packs=packs, config=config) as repo,
    ):
        run = repo.track(model=torch.nn.Linear(4, 4))
        say("whole", run.capture().wait("durable", timeout_s=60).uid)
        try:
            while True:
                run.capture().wait(timeout_s=60)
        except Unavailable as error:
            say("given up", error)
        say("states", len(repo.find("step >= 0")) > 0)


def ask(near: str, say: Say, far: str = "", query: str = "", sslmode: str = "") -> None:
    """Reach nothing, and say why."""
    if sslmode:
        os.environ["PGSSLMODE"] = sslmode
    try:
        with ranks.reach(near if torch.distributed.get_rank() < FAR - 1 else far + query) as url:
            say("reached", url)
    except (Unavailable, InvalidInput) as error:
        say(type(error).__name__, error)


@pytest.mark.in_turn("reach")
def test_ranks_without_a_way_to_the_database_go_through_one_that_has_it(postgresql_url: str, tmp_path: Path) -> None:
    heads = []
    for turn in range(2):
        given: dict[str, Any] = {**urls(postgresql_url, tmp_path), "packs": str(tmp_path / "packs"), "steps": 3, "is_first": not turn}
        said = run(FAR + 1, f"{HERE}:train", **given)
        assert said[FAR].pop(0) == "unreached"
        assert said[0] == said[1] == said[FAR]
        assert said[0][0] == f"from {3 * turn}"
        heads.append(said[0][1].split())
    assert [int(head[2]) for head in heads] == [3, 6]


@pytest.mark.in_turn("reach")
def test_the_next_rank_that_can_is_taken_when_the_first_is_killed(postgresql_url: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {**urls(postgresql_url, tmp_path), "packs": str(tmp_path / "packs")}
    with job(FAR + 1, f"{HERE}:lose", **given) as running:
        for rank in range(FAR + 1):
            running.heard(rank, "whole")
        running.kill(0)
        for rank in range(1, FAR + 1):
            assert "because of rank 0 (late)" in running.heard(rank, "given up")
            assert running.heard(rank, "states") == "states True"


@pytest.mark.in_turn("reach")
def test_where_no_rank_reaches_the_database_all_hear_it(postgresql_url: str, tmp_path: Path) -> None:
    far = urls(postgresql_url, tmp_path)["far"]
    said = run(2, f"{HERE}:ask", near=far, far=far)
    assert all(lines[0].startswith("Unavailable no rank of this job reaches the database") for lines in said)


@pytest.mark.in_turn("reach")
@pytest.mark.parametrize("asked", [{"query": "&sslmode=verify-full"}, {"sslmode": "verify-full"}], ids=["URL", "environment"])
def test_a_rank_that_is_to_speak_tls_is_refused_where_it_would_not(asked: dict[str, str], postgresql_url: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {**urls(postgresql_url, tmp_path), **asked}
    said = run(2, f"{HERE}:ask", **given)
    assert all(lines[0].startswith("InvalidInput") and "sslmode=verify-full" in lines[0] for lines in said)


class Pair(SoloGroup):
    """A group of two, of which only this process is there."""

    size = 2


@pytest.mark.parametrize("url", ["postgresql://host:port/db", "://x", "postgresql://me:se@cr:et@db/x"])
def test_what_is_no_url_of_a_database_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="is no URL of a database") as caught, ranks.reach(url, group=Pair()):
        pass
    assert "et@" not in str(caught.value), "a part of a password"


def test_folders_and_processes_alone_are_reached_as_they_are(tmp_path: Path) -> None:
    with ranks.reach(str(tmp_path)) as url:
        assert url == str(tmp_path)
    with ranks.reach("postgresql://nobody@nowhere/nothing") as url:
        assert url == "postgresql://nobody@nowhere/nothing"


@pytest.mark.parametrize("enter", [lambda group: ranks.reach("postgresql://me@db/x", group=group), ranks.using], ids=["reach", "using"])
def test_what_is_no_group_is_refused_by_name(enter: Callable[[Any], AbstractContextManager[object]]) -> None:
    with pytest.raises(InvalidInput, match=r"group is .*: give a datastates\.ranks\.TorchGroup"), enter(3):
        pass


@pytest.mark.parametrize(
    ("environment", "query", "mode"),
    [
        ({}, "", "prefer"),
        ({}, "?sslmode=require", "require"),
        ({}, "?prepare_threshold=0&options=-c%20jit%3Doff", "prefer"),
        ({"PGSSLMODE": "verify-ca"}, "", "verify-ca"),
        ({"PGSSLMODE": "require"}, "?sslmode=prefer", "prefer"),
        ({"PGSSLROOTCERT": "system"}, "", "verify-full"),
        ({}, "?sslrootcert=system", "verify-full"),
        ({}, "?service=strict", "require"),
        ({"PGSERVICE": "strict"}, "", "require"),
    ],
)
def test_tls_that_a_node_asks_for_outside_the_url_counts_too(
    environment: dict[str, str], query: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = tmp_path / "services"
    services.write_text("[strict]\nhost=db\nport=77\nsslmode=require\n")
    for name in ("PGSSLMODE", "PGSSLROOTCERT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PGSERVICEFILE": str(services), **environment}.items():
        monkeypatch.setenv(name, value)
    assert _sslmode(make_url(f"postgresql://me@db/x{query}")) == mode
