"""After a training was killed everything that reads agrees: what was open before, what is opened
then, the terminal and the web."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import datastates
from datastates import Repository, Status, Unavailable
from datastates.api.app import create_app
from datastates.api.live import LiveEvents
from datastates.cli.app import app
from datastates.lineage.lookup import id_of
from datastates.lineage.query.curves import lost_parts
from datastates.lineage.views.branches import branches
from tests.support.forge import Forge, forge
from tests.support.holding import CONFIG, DURABLE, STEPS, begin
from tests.training.test_takeover import holding

BASE = "/api/v1/repositories/runs"


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts trainings."""
    with forge(tmp_path_factory.mktemp("forge"), ["tests.support.holding"]) as opened:
        yield opened


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Path]:
    """A folder that shows what is in ``runs``, and in which nothing can be written."""
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "sealed"
    folder.mkdir()
    for command in (
        ["mount", "--bind", f"{tmp_path}/runs", f"{folder}"],
        ["mount", "-o", "remount,ro,bind", f"{folder}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def told(repo: Repository, branch: str = "main") -> dict[str, Any]:
    """What a repository returns of a branch: head, best, how many can be restored, and the
    newest lost step."""
    with repo.core.reading() as session:
        (found,) = branches(session, names=[branch], metric="loss")
    assert found.best_restorable is not None
    head = repo.state(branch)
    assert found.head == head.uid
    assert (
        {ref.name: ref.state for ref in repo.refs()}[branch] == repo.log(branch)[0].uid == head.uid
    )
    assert head.status is Status.CAPTURED or not repo.find(
        f"status = captured and branch = {branch}"
    )
    return {
        "step": head.step,
        "restorable": found.restorable,
        "best": found.best_restorable.step,
        "lost_step": found.lost_step,
    }


def web(repo: Repository) -> TestClient:
    """A client of a server of the repository."""
    return TestClient(create_app({"runs": repo}), base_url="http://127.0.0.1:8642")


def in_terminal(folder: Path, *command: str) -> list[dict[str, Any]]:
    """The lines of JSON of a command."""
    done = CliRunner().invoke(app, [*command, "--json", "--repo", str(folder)])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def told_by_terminal(folder: Path) -> dict[str, Any]:
    """The same from the terminal, where each command is the first after the kill for itself."""
    (found,) = [
        line
        for line in in_terminal(folder, "branches", "--metric", "loss")
        if line["name"] == "main"
    ]
    (best,) = [
        line for line in in_terminal(folder, "branches", "--best", "loss") if line["name"] == "main"
    ]
    assert best["best_restorable"] == found["best_restorable"]
    assert in_terminal(folder, "log", "main", "-n", "1")[0]["uid"] == found["head"]
    return {
        "step": found["step"],
        "restorable": found["restorable"],
        "best": found["best_restorable"]["step"],
        "lost_step": found["lost_step"],
    }


SETTLED = {"step": DURABLE, "restorable": 1, "best": DURABLE, "lost_step": STEPS}


@pytest.mark.parametrize("first", ["open", "opened", "terminal", "refs", "web"])
def test_whoever_reads_first_after_a_kill_all_agree(
    smith: Forge, tmp_path: Path, first: str
) -> None:
    folder = tmp_path / "runs"
    with holding(smith, folder) as holder, datastates.open(folder, config=CONFIG) as repo:
        client = web(repo)
        assert told(repo)["step"] == STEPS
        holder.kill()
        if first == "opened":
            with datastates.open(folder) as other:
                assert told(other) == SETTLED
        if first == "terminal":
            assert told_by_terminal(folder) == SETTLED
        if first == "refs":
            assert [line["state"] for line in in_terminal(folder, "refs")] == [
                repo.state("main@step:2").uid
            ]
        if first == "web":
            assert client.get(f"{BASE}/branches").json()["items"][0]["restorable"] == 1
        assert told(repo) == told_by_terminal(folder) == SETTLED
        assert repo.state("main@best:loss").step == DURABLE
        assert repo.load("main")["tracked"] is not None
        found = client.get(f"{BASE}/series", params={"head": "main", "key": "loss"}).json()
        assert [line["steps"] for line in found["lines"]] == [list(range(1, DURABLE + 1))]
        assert [(line["head"], line["steps"]) for line in found["lost"]] == [
            ("main", list(range(DURABLE, STEPS + 1)))
        ]


def test_the_events_of_a_server_report_a_kill_while_nobody_asks(
    smith: Forge, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    with holding(smith, folder) as holder, datastates.open(folder, config=CONFIG) as repo:
        live: LiveEvents = create_app({"runs": repo}).state.served["runs"].live
        listener = live.listen()
        try:
            holder.kill()
            (event,) = asyncio.run(listener.next(60))
        finally:
            listener.close()
            live.close()
        assert (event.name, event.reason.split(":")[0]) == ("main", "recover")


def test_a_branch_that_goes_on_keeps_each_part_that_it_lost(smith: Forge, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with datastates.open(folder, config=CONFIG) as repo:
        for _ in range(2):
            with holding(smith, folder) as holder:
                holder.kill()
        with begin(repo) as run:
            newest = run.capture(step=9).wait("durable")
        with repo.core.reading() as session:
            parts = lost_parts(session, {"main": id_of(session, newest.uid)})["main"]
        assert [part.step for part in parts] == [STEPS, STEPS]
        assert all(repo.state(part.uid).status is Status.LOST for part in parts)
        repo.move("main", "main~2", expected="main")
        found = web(repo).get(f"{BASE}/series", params={"head": "main", "key": "loss"}).json()
        # the other part begins after where the branch is now
        assert [line["state"] for line in found["lost"]] == [parts[0].uid]


def test_a_branch_that_is_renamed_keeps_what_it_lost(smith: Forge, tmp_path: Path) -> None:
    with holding(smith, tmp_path / "runs") as holder:
        holder.kill()
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        before = told(repo)["lost_step"]
        repo.rename("main", "final")
        assert before is not None
        assert told(repo, "final")["lost_step"] == before
        repo.branch("main", "final")
        (made,) = [branch for branch in repo.overview() if branch.name == "main"]
        assert made.lost_step is None


def test_a_branch_that_lost_everything_begins_anew_and_shows_what_it_lost(
    smith: Forge, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    with (
        holding(smith, folder, durable=0) as holder,
        datastates.open(folder, config=CONFIG) as repo,
    ):
        holder.kill()
        assert not repo.refs()
        with begin(repo) as run:
            run.capture(step=1, metrics={"loss": 1.0}).wait()
        found = web(repo).get(f"{BASE}/series", params={"head": "main", "key": "loss"}).json()
        assert [line["steps"] for line in found["lines"]] == [[1]]
        assert [line["steps"] for line in found["lost"]] == [list(range(1, STEPS + 1))]


def test_a_folder_that_may_not_be_written_is_read_as_if_it_were_settled(
    smith: Forge, tmp_path: Path, sealed: Path
) -> None:
    folder = tmp_path / "runs"
    with (
        holding(smith, folder, branches=["other"]) as going_on,
        holding(smith, folder) as holder,
        datastates.open(sealed) as early,
    ):
        assert told(early)["step"] == STEPS
        before = sorted(path.name for path in folder.rglob("*"))
        holder.kill()
        assert told(early) == SETTLED
        with datastates.open(sealed) as late:
            assert told(late) == told_by_terminal(sealed) == SETTLED
            with pytest.raises(Unavailable, match="can only be read"):
                begin(late)
        assert told(early, "other")["step"] == STEPS
        going_on.kill()
        assert told(early, "other") == {**SETTLED, "lost_step": STEPS}
        assert sorted(path.name for path in folder.rglob("*")) == before
    with datastates.open(folder) as repo:
        assert told(repo) == told(repo, "other") == SETTLED
