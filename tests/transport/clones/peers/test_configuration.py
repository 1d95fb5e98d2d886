"""What a training was configured with goes where its states go: by clones, pushes and bundles,
on both databases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from datastates import Repository, State
from datastates.errors import Corrupt, InvalidInput
from datastates.files.bundle import export_bundle, import_bundle
from datastates.lineage.states import Life, Run
from datastates.lineage.views.detail import count
from datastates.lineage.write import clones, runs
from datastates.maintenance.lease import life_of
from datastates.transport import untrusted
from tests.files.conftest import rewrite
from tests.transport.clones.peers.pairs import Made, Training, train

WARM = {
    "rate": 1e-3,
    "name": "warm",
    "depth": 3,
    "amp": True,
    "none": None,
    "huge": 2**60,
    "nan": math.nan,
}
FORKED = {"rate": 0.1, "name": "fork"}


@pytest.fixture(params=["sqlite", "postgresql"])
def other(request: pytest.FixtureRequest, made: Made, tmp_path: Path) -> Repository:
    """Where states come to."""
    if request.param == "sqlite":
        return made.repo()
    return made.repo(request.getfixturevalue("postgresql_url"), packs=tmp_path / "packs")


def forked(made: Made) -> Repository:
    """Two states of one configuration, and two of another that was forked from them."""
    repo = made.repo()
    train(repo, Training(0), 2, config=WARM).close()
    train(repo, Training(0), 2, branch="fork", start="main", config=FORKED).close()
    return repo


def told(states: list[State]) -> list[tuple[int, str]]:
    return [(state.step, repr(sorted(state.config.items()))) for state in states]


def clone(repo: Repository, other: Repository, made: Made, folder: Path) -> None:
    made.peer(repo.serve("memory://")).clone("fork", repo=other)


def push(repo: Repository, other: Repository, made: Made, folder: Path) -> None:
    made.peer(other.serve("memory://", is_writable=True)).push("fork", repo=repo)


def carry(repo: Repository, other: Repository, made: Made, folder: Path) -> None:
    export_bundle(repo, ["fork"], folder / "bundle")
    import_bundle(other, folder / "bundle")


@pytest.mark.parametrize("bring", [clone, push, carry])
def test_states_that_come_bring_their_configuration(
    bring: Callable[..., None], made: Made, other: Repository, tmp_path: Path
) -> None:
    repo = forked(made)
    head = repo.state("fork").uid

    bring(repo, other, made, tmp_path)

    assert told(other.log(head)) == told(repo.log("fork"))
    assert [
        state.step for state in other.find("config.rate > 0.01 order by config.rate, step")
    ] == [3, 4]
    assert [state.step for state in other.find("config.name = 'warm' order by step")] == [1, 2]
    assert told(other.log(head))[0] != told(other.log(head))[2]


@pytest.mark.parametrize("bring", [clone, push, carry])
def test_states_that_come_bring_the_record_of_their_run(
    bring: Callable[..., None], made: Made, other: Repository, tmp_path: Path
) -> None:
    repo = forked(made)
    head = repo.state("fork").uid
    theirs = {run.branch: run for run in repo.runs()}

    bring(repo, other, made, tmp_path)

    came = {run.branch: run for run in other.runs() if run.is_imported}
    assert came.keys() == {"main", "fork"}
    for branch, run in came.items():
        expected = replace(
            theirs[branch], uid=run.uid, pid=0, process=None, config=run.config, is_imported=True
        )
        assert (run, run.chosen) == (expected, theirs[branch].chosen)
    assert [state.run for state in other.log(head)] == [
        came[name].uid for name in ("fork", "fork", "main", "main")
    ]
    assert len(other.find(f"run.user = '{came['main'].user}'")) == 4


def test_a_run_that_came_is_not_a_process_here(
    made: Made, other: Repository, tmp_path: Path
) -> None:
    repo = forked(made)
    clone(repo, other, made, tmp_path)

    with other.core.reading() as session:
        uids = [state.uid for state in other.log(repo.state("fork").uid)]
        assert clones.trusted(session, uids, party="somebody") == [], (
            "nobody takes them for captured here"
        )
        assert not [run for run in runs.unfinished(session) if run.is_imported]
        assert not [run for run in runs.unfinished(session, "main") if run.is_imported]
        assert count(session).runs == len(other.runs())
    made_of = [run for run in other.runs() if run.is_imported]
    assert {life_of(replace(run, finished_at=None), other.core.home) for run in made_of} == {
        Life.UNKNOWN
    }


def test_a_run_that_comes_by_two_ways_is_recorded_once(
    made: Made, other: Repository, tmp_path: Path
) -> None:
    repo, last = forked(made), made.repo()
    head = repo.state("fork").uid
    clone(repo, other, made, tmp_path)
    other.tag("theirs", head)

    made.peer(other.serve("memory://")).clone(head, repo=last)
    carry(repo, last, made, tmp_path)

    assert len([run for run in last.runs() if run.is_imported]) == 2
    assert [run for run in last.runs() if run.is_imported] == [
        run for run in other.runs() if run.is_imported
    ]


def test_a_state_goes_on_from_peer_to_peer_with_its_configuration(
    made: Made, other: Repository, tmp_path: Path
) -> None:
    repo, last = forked(made), made.repo()
    head = repo.state("fork").uid
    clone(repo, other, made, tmp_path)

    made.peer(other.serve("memory://")).clone(head, repo=last)

    assert told(last.log(head)) == told(repo.log("fork"))


def test_branches_that_are_made_on_cloned_states_show_what_was_configured(
    made: Made, other: Repository, tmp_path: Path
) -> None:
    repo = forked(made)
    clone(repo, other, made, tmp_path)
    states = other.log(repo.state("fork").uid)
    other.branch("theirs", states[2].uid)
    other.branch("forked", states[0].uid)

    found = {branch.name: branch for branch in other.overview(group="config.name")}

    assert (found["theirs"].group, found["forked"].group) == ("warm", "fork")
    assert ("rate", 0.1, 1e-3) in [
        (one.key, one.value, one.parent) for one in found["forked"].config
    ]


def test_secrets_that_a_peer_sends_are_masked(
    made: Made, other: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = forked(made)
    real = untrusted._run_record

    def with_secret(run: Run) -> Any:
        argv = ("train.py", "--api-key=0123456789abcdef")
        return msgspec.structs.replace(
            real(run), argv=argv, config={"wandb_api_key": "0123456789abcdef", "rate": 1.0}
        )

    monkeypatch.setattr(untrusted, "_run_record", with_secret)
    clone(repo, other, made, tmp_path)

    assert other.state(repo.state("fork").uid).config == {"wandb_api_key": "***", "rate": 1.0}
    assert {run.argv for run in other.runs() if run.is_imported} == {("train.py", "--api-key=***")}


def test_states_whose_runs_do_not_come_have_none(
    made: Made, other: Repository, tmp_path: Path
) -> None:
    repo = forked(made)
    head = repo.state("fork").uid
    export_bundle(repo, ["fork"], tmp_path / "bundle")
    rewrite(tmp_path / "bundle", lambda plain: plain["runs"].clear())

    import_bundle(other, tmp_path / "bundle")

    assert [(state.step, state.config, state.run) for state in other.log(head)] == [
        (step, {}, None) for step in (4, 3, 2, 1)
    ]


def test_what_cannot_be_a_run_is_refused_and_leaves_nothing(
    made: Made, other: Repository, tmp_path: Path
) -> None:
    repo = forked(made)
    export_bundle(repo, ["fork"], tmp_path / "bundle")

    def broken(**changed: object) -> None:
        rewrite(tmp_path / "bundle", lambda plain: plain["runs"][0].update(changed))

    broken(started_at_us=1 << 62)
    with pytest.raises(Corrupt):
        import_bundle(other, tmp_path / "bundle")
    broken(started_at_us=0, config={"": 1})
    with pytest.raises(InvalidInput):
        import_bundle(other, tmp_path / "bundle")
    broken(config=7)
    with pytest.raises(Corrupt):
        import_bundle(other, tmp_path / "bundle")
    with other.core.reading() as session:
        assert count(session).states == 0


def test_a_configuration_travels_once_however_many_states_have_it(
    made: Made, tmp_path: Path
) -> None:
    repo = made.repo()
    train(repo, Training(0), 20, config={f"key{n}": "x" * 50 for n in range(200)}).close()
    export_bundle(repo, ["main"], tmp_path / "bundle")

    assert len(json.loads((tmp_path / "bundle" / "lineage.json").read_text())["runs"]) == 1
    with repo.core.reading() as session:
        page, made_by = untrusted.records_of(session, repo.log("main"))
    assert len(page) == 20
    assert len(made_by) == 1
