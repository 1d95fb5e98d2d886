"""Branches at a glance, over the web."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datastates import Repository
from datastates.api import cache
from datastates.lineage.query.names import replicas_of
from datastates.maintenance.retention_pass import evict
from tests.api.conftest import BASE, train

if TYPE_CHECKING:
    import pytest
    from fastapi.testclient import TestClient


def asked(client: TestClient, **params: Any) -> dict[str, Any]:
    answer = client.get(f"{BASE}/branches", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_each_branch_says_where_it_forked_how_it_went_and_what_can_be_restored(
    client: TestClient, repo: Repository
) -> None:
    assert asked(client)["metric"] == "val/loss", "a validation metric"
    found = asked(client, sort="name", metric="loss")
    assert (found["metric"], found["direction"], found["metrics"]) == (
        "loss",
        "min",
        ["loss", "val/loss"],
    )
    fork, lone, main, soup = found["items"]
    assert [item["name"] for item in found["items"]] == ["fork", "lone", "main", "soup"]

    states = repo.log("main")
    assert (main["fork"], main["states"], main["durable"], main["step"]) == (None, 8, 8, 8)
    best = min(states, key=lambda state: state.metrics["loss"])
    assert main["best"] == {
        "state": best.uid,
        "step": best.step,
        "value": best.metrics["loss"],
        "status": "durable",
    }
    assert main["best_restorable"] == main["best"]
    assert main["last"]["value"] == states[0].metrics["loss"]
    assert main["line"] == {
        "steps": list(range(1, 9)),
        "values": [state.metrics["loss"] for state in states[::-1]],
    }
    assert (main["run"], main["bytes"]) == (states[0].run, sum(state.bytes_new for state in states))

    assert fork["fork"] == {
        "state": repo.state("warm").uid,
        "step": 3,
        "branch": "main",
        "is_gone": False,
    }
    assert (fork["states"], fork["line"]["steps"]) == (3, [4, 5, 6])
    assert (soup["states"], soup["last"], soup["line"]["steps"]) == (1, None, [])
    assert {item["life"] for item in (fork, lone, main)} == {"ended"}


def test_bytes_are_those_on_disk_here(client: TestClient, repo: Repository) -> None:
    states = repo.log("lone")
    (before,) = asked(client, name="lone")["items"]
    assert before["bytes"] == sum(state.bytes_new for state in states)
    evict(repo.core, states[1].uid)
    with repo.core.reading() as session:
        held = [one.bytes for one in replicas_of(session, states[0].uid) if one.status == "ok"]
    assert 0 < sum(held) < before["bytes"]
    for found in (
        asked(client, name="lone")["items"][0],
        asked(client, sort="bytes", name="lone")["items"][0],
        client.get(f"{BASE}/branches/lone").json(),
    ):
        assert found["bytes"] == sum(held)


def test_nan_is_null(client: TestClient, repo: Repository) -> None:
    (main,) = asked(client, metric="val/loss", name="main")["items"]
    assert main["line"] == {"steps": [1, 3, 5, 7], "values": [1.0, None, 0.2, 1 / 7]}
    assert main["best"]["value"] == 1 / 7


def test_a_branch_that_is_trained_runs(client: TestClient, repo: Repository) -> None:
    with repo.track(branch="live", rng=False, value=1) as run:
        run.capture(metrics={"loss": 3.0})
        (live,) = asked(client, name="live")["items"]
        assert (live["life"], live["last"]["value"]) == ("running", 3.0)
        assert (
            client.get(f"{BASE}/runs", params={"limit": 1}).json()["items"][0]["life"] == "running"
        )


def test_pages_filters_and_orders(client: TestClient) -> None:
    whole = asked(client, sort="-states")
    assert [item["states"] for item in whole["items"]] == [1, 2, 3, 8]
    first = asked(client, sort="-states", limit=3)
    second = asked(client, sort="-states", limit=3, after=first["next"])
    # settings are those in which the branches of a page differ
    paged = [{**each, "settings": {}} for each in first["items"] + second["items"]]
    assert paged == [{**each, "settings": {}} for each in whole["items"]]
    assert second["next"] is None
    chosen = asked(client, q="attr.rate = 0.3")
    assert ([item["name"] for item in chosen["items"]], chosen["matching"], chosen["total"]) == (
        ["fork"],
        1,
        4,
    )
    best = asked(client, sort="best", direction="max")
    values = [item["best"]["value"] for item in best["items"] if item["best"]]
    assert values == sorted(values, reverse=True)
    assert best["items"][-1]["best"] is None


def test_among_many_states_branches_are_sorted_by_what_was_counted_last(
    client: TestClient, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of each is counted for each request all the same; and a branch that is new
    since is counted too."""
    monkeypatch.setattr(cache, "_AT_ONCE_S", 0.0)
    assert [item["name"] for item in asked(client, sort="durable")["items"]] == [
        "main",
        "fork",
        "lone",
        "soup",
    ]
    train(repo, "lone", 9)
    train(repo, "new", 12)
    during = {item["name"]: item["durable"] for item in asked(client, sort="durable")["items"]}
    assert during == {"new": 12, "main": 8, "fork": 3, "lone": 11, "soup": 1}
    assert list(during) == ["new", "main", "fork", "lone", "soup"]
    # the client knows it as any ASGI application
    (served,) = client.app.state.served.values()  # type: ignore[attr-defined]
    served.branch_counts.warm()
    served.branch_counts._background.join()
    assert [item["name"] for item in asked(client, sort="durable")["items"]] == [
        "new",
        "lone",
        "main",
        "fork",
        "soup",
    ]


def test_groups_stand_together(client: TestClient) -> None:
    found = asked(client, group="attr.rate")
    assert [group["value"] for group in found["groups"]] == [0.1, 0.3, None]
    assert [group["branches"] for group in found["groups"]] == [2, 1, 1]
    assert [item["group"] for item in found["items"]] == [0.1, 0.1, 0.3, None]


def test_a_search_with_a_wrong_name_says_which_one_is_close(client: TestClient) -> None:
    for query, column in (("metrics.los < 1", 1), ("step > 0 and los < 1", 14)):
        answer = client.get(f"{BASE}/branches", params={"q": query})
        assert (answer.status_code, answer.json()["column"]) == (400, column)
        assert "did you mean" in answer.json()["detail"]


def test_wrong_questions_are_refused(client: TestClient) -> None:
    first = asked(client, limit=1)
    for wrong, said in (
        ({"sort": "colour"}, "choose among changed"),
        ({"group": "colour"}, "name 'study'"),
        ({"after": first["next"], "sort": "name"}, "of another question"),
        ({"after": "!"}, "no cursor"),
        ({"limit": 0}, "greater than or equal to 1"),
        ({"direction": "up"}, "'min' or 'max'"),
    ):
        answer = client.get(f"{BASE}/branches", params=wrong)
        assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text


def test_only_what_changed_is_sent(client: TestClient, repo: Repository) -> None:
    etag = client.get(f"{BASE}/branches").headers["etag"]
    assert client.get(f"{BASE}/branches", headers={"If-None-Match": etag}).status_code == 304
    train(repo, "main", 1)
    assert client.get(f"{BASE}/branches", headers={"If-None-Match": etag}).status_code == 200
    item, *_ = asked(client, fields="name,best")["items"]
    assert set(item) == {"name", "best"}
