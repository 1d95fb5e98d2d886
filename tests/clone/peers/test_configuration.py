"""What a training was configured with goes where its states go: by clones, pushes and bundles, on both databases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import datastates
from datastates import InvalidInput, PeerFault, Repository, State
from datastates.clone import records, serving
from datastates.clone.records import state_of, states_of
from datastates.export.bundle import export_bundle, import_bundle
from datastates.lineage.change import clones
from datastates.lineage.show.stats import count
from tests.clone.peers.pairs import Made, Training, train
from tests.export.conftest import rewrite

WARM = {"lr": 1e-3, "name": "warm", "depth": 3, "amp": True, "none": None, "huge": 2**60, "nan": math.nan}
FORKED = {"lr": 0.1, "name": "fork"}


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
def test_states_that_come_bring_their_configuration(bring: Callable[..., None], made: Made, other: Repository, tmp_path: Path) -> None:
    repo = forked(made)
    head = repo.state("fork").uid

    bring(repo, other, made, tmp_path)

    assert told(other.log(head)) == told(repo.log("fork"))
    assert [state.step for state in other.find("config.lr > 0.01 order by config.lr, step")] == [3, 4]
    assert [state.step for state in other.find("config.name = 'warm' order by step")] == [1, 2]
    assert told(other.log(head))[0] != told(other.log(head))[2]


def test_a_configuration_that_came_is_no_run_here(made: Made, other: Repository, tmp_path: Path) -> None:
    repo = forked(made)
    clone(repo, other, made, tmp_path)

    assert [state.run for state in other.log(repo.state("fork").uid)] == [None] * 4
    assert not other.find("run.host = ''")
    assert [run for run in other.runs() if not run.host] == []
    with other.core.reading() as session:
        uids = [state.uid for state in other.log(repo.state("fork").uid)]
        assert clones.trusted(session, uids, party="somebody") == [], "nobody takes them for captured here"
        assert count(session).runs == len(other.runs())


def test_a_state_goes_on_from_peer_to_peer_with_its_configuration(made: Made, other: Repository, tmp_path: Path) -> None:
    repo, last = forked(made), made.repo()
    head = repo.state("fork").uid
    clone(repo, other, made, tmp_path)

    made.peer(other.serve("memory://")).clone(head, repo=last)

    assert told(last.log(head)) == told(repo.log("fork"))


def test_branches_that_are_made_on_cloned_states_show_what_was_configured(made: Made, other: Repository, tmp_path: Path) -> None:
    repo = forked(made)
    clone(repo, other, made, tmp_path)
    states = other.log(repo.state("fork").uid)
    other.branch("theirs", states[2].uid)
    other.branch("forked", states[0].uid)

    found = {branch.name: branch for branch in other.overview(group="config.name")}

    assert (found["theirs"].group, found["forked"].group) == ("warm", "fork")
    assert ("lr", 0.1, 1e-3) in [(one.key, one.value, one.parent) for one in found["forked"].config]


def test_secrets_that_a_peer_sends_are_masked(made: Made, other: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = forked(made)
    real = records.record_of

    def with_secret(state: State) -> Any:
        return msgspec.structs.replace(real(state), config={"wandb_api_key": "0123456789abcdef", "lr": 1.0})

    monkeypatch.setattr(serving, "record_of", with_secret)
    clone(repo, other, made, tmp_path)

    assert other.state(repo.state("fork").uid).config == {"wandb_api_key": "***", "lr": 1.0}


def test_peers_and_bundles_of_before_bring_states_without_configuration(
    made: Made, other: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, third = forked(made), made.repo()
    head = repo.state("fork").uid
    export_bundle(repo, ["fork"], tmp_path / "bundle")

    def forget(plain: dict[str, Any]) -> None:
        del plain["configs"]
        for state in plain["states"]:
            del state["config"]

    rewrite(tmp_path / "bundle", forget)
    import_bundle(third, tmp_path / "bundle")
    bare = msgspec.structs.replace
    monkeypatch.setattr(serving, "record_of", lambda state: bare(records.record_of(state), config=None))
    monkeypatch.setattr(serving, "records_of", lambda states: (tuple(bare(records.record_of(state), config=None) for state in states), ()))
    clone(repo, other, made, tmp_path)

    for repository in (other, third):
        assert [(state.step, state.config) for state in repository.log(head)] == [(4, {}), (3, {}), (2, {}), (1, {})]


def test_what_cannot_be_a_configuration_is_refused_and_leaves_nothing(made: Made, other: Repository, tmp_path: Path) -> None:
    repo = forked(made)
    export_bundle(repo, ["fork"], tmp_path / "bundle")
    page, configs = records.records_of(repo.log("fork"))

    with pytest.raises(PeerFault):
        states_of(page, configs[:1])
    with pytest.raises(PeerFault):
        state_of(page[0])
    rewrite(tmp_path / "bundle", lambda plain: plain["configs"][0].update({"": 1}))
    with pytest.raises(InvalidInput):
        import_bundle(other, tmp_path / "bundle")
    rewrite(tmp_path / "bundle", lambda plain: plain["states"][0].update(config=7))
    with pytest.raises(datastates.Corrupt):
        import_bundle(other, tmp_path / "bundle")
    with other.core.reading() as session:
        assert count(session).states == 0


def test_a_configuration_travels_once_however_many_states_have_it(made: Made, tmp_path: Path) -> None:
    repo = made.repo()
    train(repo, Training(0), 20, config={f"key{n}": "x" * 50 for n in range(200)}).close()
    export_bundle(repo, ["main"], tmp_path / "bundle")

    assert len(json.loads((tmp_path / "bundle" / "lineage.json").read_text())["configs"]) == 1
    page, configs = records.records_of(repo.log("main"))
    assert len(page) == 20
    assert len(configs) == 1
