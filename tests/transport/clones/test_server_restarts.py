"""A PostgreSQL server that is killed, has forgotten what it said, and comes back: nothing that a
training captured is lost."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import make_url

import datastates
from datastates import Config, Repository, Status, Tracker, Unavailable
from datastates.engine import outbox
from tests.conftest import Postgresql

SLOT = 4 << 20
AWAY = ["the lineage does not answer", "the lineage answers again"]


@pytest.fixture
def url(mortal_postgresql: Postgresql) -> str:
    return mortal_postgresql.migrated()


@pytest.fixture
def opened(
    url: str, tmp_path: Path, mortal_postgresql: Postgresql
) -> Iterator[Callable[..., Repository]]:
    made: list[Repository] = []

    def open_repository(slots: int = 16, **options: Any) -> Repository:
        config = Config(memory_bytes=slots * SLOT, durable_interval_s=None)
        made.append(datastates.open(url, packs=tmp_path / "packs", config=config, **options))
        return made[-1]

    yield open_repository
    for repo in made:
        repo.close()


class Training:
    """A weight of one slot that counts."""

    def __init__(self, repo: Repository, branch: str = "main") -> None:
        self.weight = torch.zeros(SLOT // 4)
        self.run: Tracker = repo.track(
            weight=self.weight, branch=branch, rng=False, config={"lr": 0.1, "name": branch}
        )

    def capture(self, count: int = 1) -> list[datastates.Capture]:
        made = []
        for _ in range(count):
            self.weight += 1
            step = self.run.step + 1
            made.append(
                self.run.capture(
                    metrics={"loss": 1 / step},
                    attributes={"name": f"step-{step}"},
                    message=f"the {step}th",
                )
            )
        return made


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings, by how they begin; not those of commits that the server may have lost or
    not."""
    assert not any(record.exc_info for record in caplog.records), "a traceback"
    found = [
        re.split(":| after", record.getMessage())[0]
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]
    return [line for line in found if "had forgotten" not in line]


def forget(server: Postgresql, url: str, since: str, *, with_run: bool = False) -> None:
    """Kill the server, and take from its data the state ``since`` and all that was committed
    after it, before it comes back."""
    with server._connect("postgres") as connection:
        connection.execute("CHECKPOINT")  # it loses what is taken from it, and nothing else
    server.kill()
    server.start_again(name="aside")
    with server._connect(str(make_url(url).database), "aside") as connection:
        connection.execute("SET session_replication_role = replica")  # no foreign keys for now
        (first,) = connection.execute("SELECT id FROM state WHERE uid = %s", [since]).fetchall()[0]
        (event,) = connection.execute(
            "SELECT min(id) FROM ref_event WHERE new_id = %s", [first]
        ).fetchall()[0]
        for name in ("metric", "attribute", "replica"):
            connection.execute(f"DELETE FROM {name} WHERE state_id >= %s", [first])
        connection.execute(
            "UPDATE ref SET state_id = e.old_id FROM ref_event e WHERE e.id = %s AND ref.name ="
            " e.name AND e.old_id IS NOT NULL",
            [event],
        )
        connection.execute("DELETE FROM ref WHERE state_id >= %s", [first])
        connection.execute("DELETE FROM ref_event WHERE id >= %s", [event])
        connection.execute("DELETE FROM state WHERE id >= %s", [first])
        if with_run:
            connection.execute("DELETE FROM setting")
            connection.execute("DELETE FROM run")
    server.kill()
    server.start_again()


def check_log(repo: Repository, handles: list[datastates.Capture], branch: str = "main") -> None:
    """All that was captured is there, in order, with all that belongs to it."""
    states = [handle.wait(timeout_s=60) for handle in handles]
    log = repo.log(branch)
    assert [state.uid for state in reversed(log)] == [state.uid for state in states]
    assert log[0].config.items() >= {"lr": 0.1, "name": branch}.items()
    assert all(state.config == log[0].config for state in log if state.run is not None), (
        "a run that was forgotten is told again whole"
    )
    for state, above in zip(log, [*log[1:], None], strict=True):
        assert state.parents == (() if above is None else (above.uid,))
        assert state.metrics == {"loss": 1 / state.step}
        assert (state.attributes, state.message) == (
            {"name": f"step-{state.step}"},
            f"the {state.step}th",
        )
    assert [event.new for event in repo.reflog(branch)] == [state.uid for state in log]


def test_captures_go_on_while_the_server_is_away_and_are_recorded_when_it_is_back(
    opened: Callable[..., Repository],
    mortal_postgresql: Postgresql,
    caplog: pytest.LogCaptureFixture,
) -> None:
    repo = opened()
    training = Training(repo)
    handles = training.capture(2)
    repo.flush()
    mortal_postgresql.kill()
    handles += training.capture(5)
    repo.flush()
    assert {handle.state for handle in handles[2:]} == {None}
    with pytest.raises(Unavailable):
        repo.log("main")
    mortal_postgresql.start_again()
    handles += training.capture(2)
    check_log(repo, handles)
    assert handles[-1].wait("durable", timeout_s=60).status is Status.DURABLE
    repo.close()
    assert lines(caplog) == AWAY


def test_what_becomes_durable_while_the_server_is_away_is_told_when_it_is_back(
    opened: Callable[..., Repository],
    mortal_postgresql: Postgresql,
    caplog: pytest.LogCaptureFixture,
) -> None:
    repo = opened()
    training = Training(repo)
    early = training.capture()
    repo.flush()
    mortal_postgresql.kill()
    late = training.capture()
    with pytest.raises(TimeoutError):
        early[0].wait("durable", timeout_s=0.1)
    with pytest.raises(TimeoutError):
        late[0].wait("durable", timeout_s=0.1)
    mortal_postgresql.start_again()
    for handle in early + late:
        assert handle.wait("durable", timeout_s=60).status is Status.DURABLE
        assert repo.state(handle.uid).status is Status.DURABLE
    check_log(repo, early + late)
    repo.close()
    assert lines(caplog) == AWAY


@pytest.mark.parametrize("with_run", [False, True])
def test_what_the_server_has_forgotten_is_recorded_again_in_order(
    opened: Callable[..., Repository], mortal_postgresql: Postgresql, url: str, with_run: bool
) -> None:
    repo = opened()
    training = Training(repo)
    handles = training.capture(5)
    repo.flush()
    forget(mortal_postgresql, url, handles[2].uid, with_run=with_run)
    handles += training.capture()
    handles[-1].wait(timeout_s=60)
    check_log(repo, handles)
    training.capture()[0].wait("durable", timeout_s=60)
    training.run.close()
    repo.close()


def test_a_branch_that_the_server_has_forgotten_is_made_again(
    opened: Callable[..., Repository], mortal_postgresql: Postgresql, url: str
) -> None:
    repo = opened()
    training = Training(repo)
    handles = training.capture(3)
    repo.flush()
    forget(mortal_postgresql, url, handles[0].uid)
    handles += training.capture()
    handles[-1].wait(timeout_s=60)
    check_log(repo, handles)


def test_a_training_that_only_ends_makes_its_head_durable_although_the_server_has_forgotten_it(
    opened: Callable[..., Repository], mortal_postgresql: Postgresql, url: str, tmp_path: Path
) -> None:
    repo = opened()
    training = Training(repo)
    handles = training.capture(3)
    repo.flush()
    forget(mortal_postgresql, url, handles[1].uid)
    repo.close()
    with datastates.open(url, packs=tmp_path / "packs") as again:
        assert [state.uid for state in again.log("main")] == [
            handle.uid for handle in reversed(handles)
        ]
        assert again.state("main").status is Status.DURABLE
        assert torch.equal(again.load("main")["weight"], training.weight)


def test_two_trainings_are_told_again_in_the_order_of_their_captures(
    opened: Callable[..., Repository], mortal_postgresql: Postgresql, url: str
) -> None:
    repo = opened()
    training = Training(repo)
    handles = training.capture(2)
    repo.flush()
    other = Training(repo, "other")
    others = []
    for _ in range(3):
        others += other.capture()
        handles += training.capture()
    repo.flush()
    forget(mortal_postgresql, url, others[1].uid)
    others += other.capture()
    others[-1].wait(timeout_s=60)
    check_log(repo, handles)
    check_log(repo, others, "other")


def test_what_left_memory_in_commits_that_were_lost_is_evicted_again(
    opened: Callable[..., Repository], mortal_postgresql: Postgresql, url: str
) -> None:
    repo = opened(slots=3)
    training = Training(repo)
    handles = training.capture(8)
    repo.flush()
    forget(mortal_postgresql, url, handles[1].uid)
    handles += training.capture()
    handles[-1].wait(timeout_s=60)
    check_log(repo, handles)
    assert repo.core.tiers.captured is not None
    held = set(repo.core.tiers.captured.uids())
    repo.flush()
    training.capture()[0].wait(timeout_s=60)  # tells of what left memory until now
    for handle in handles[:5]:
        assert handle.uid not in held
        assert repo.state(handle.uid).status is Status.EVICTED


def test_closing_says_what_could_not_be_recorded(
    opened: Callable[..., Repository],
    mortal_postgresql: Postgresql,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(outbox, "PATIENCE_S", 0.0)
    repo = opened()
    training = Training(repo)
    training.capture(2)
    repo.flush()
    mortal_postgresql.kill()
    try:
        lost = training.capture(3)
        with pytest.raises(
            Unavailable,
            match=(
                r"lineage does not answer since \d+ s .* 3 states wait .* main step 5"
                rf" \({lost[-1].uid[:10]}\)"
            ),
        ):
            lost[-1].wait(timeout_s=60)
        with pytest.raises(Unavailable, match="3 states wait to be recorded"):
            repo.close()
        assert not [
            thread.name
            for thread in threading.enumerate()
            if thread.name in ("datastates-engine", "datastates-writer")
        ]
        assert lines(caplog) == AWAY[:1]
    finally:
        mortal_postgresql.start_again()
