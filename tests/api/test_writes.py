"""What the web writes of a state: attributes, and that its bytes are gone; never of bytes that
somebody counts on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

import datastates
from datastates import Repository
from datastates.errors import Unavailable
from datastates.maintenance.retention_pass import evict
from tests.api.conftest import ADMIN, BASE, NAME, TOKENS, WRITE, Serve

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


@pytest.fixture
def admin(repo: Repository, serve: Serve) -> TestClient:
    return serve({NAME: repo}, token=ADMIN, tokens=TOKENS)


def annotate(client: TestClient, uid: str, **attributes: object) -> int:
    return client.patch(
        f"{BASE}/states/{uid}/attributes", json={"attributes": attributes}
    ).status_code


def test_attributes_are_set_and_taken_away(repo: Repository, serve: Serve) -> None:
    client, state = serve({NAME: repo}, token=WRITE, tokens=TOKENS), repo.state("warm")
    answer = client.patch(
        f"{BASE}/states/{state.uid}/attributes",
        json={"attributes": {"good": True, "n": 3, "x": 0.5, "rate": None}},
    )

    assert answer.status_code == 200
    assert answer.json()["attributes"] == {"branch": "main", "good": True, "n": 3, "x": 0.5}
    now = repo.state("warm")
    assert now.attributes == {"branch": "main", "good": True, "n": 3, "x": 0.5}
    assert isinstance(now.attributes["good"], bool)
    assert isinstance(now.attributes["n"], int)
    assert now.digest == state.digest
    assert [found.uid for found in repo.find("attr.good = true")] == [state.uid]
    assert annotate(client, state.uid) == 200


@pytest.mark.parametrize(
    ("attributes", "status"),
    [
        ({"": 1}, 400),
        ({"k" * 256: 1}, 400),
        ({"a\x00": 1}, 400),
        ({"a": "b\x00"}, 400),
        ({"a": [1]}, 400),
        ({"a": {}}, 400),
        ({"a": 10**400}, 400),
        ({"a": 2**63 - 1}, 200),
    ],
)
def test_only_what_can_be_stored_is(
    repo: Repository, serve: Serve, attributes: dict[str, object], status: int
) -> None:
    client, before = serve({NAME: repo}, token=WRITE, tokens=TOKENS), repo.state("warm").attributes

    assert annotate(client, repo.state("warm").uid, **attributes) == status
    assert repo.state("warm").attributes == {**before, **(attributes if status == 200 else {})}


def test_state_that_is_not_there_is_not_annotated(admin: TestClient) -> None:
    assert annotate(admin, "0" * 24, a=1) == 404
    assert annotate(admin, "main", a=1) == 400


def test_evicted_state_keeps_its_place_and_what_others_need(
    admin: TestClient, repo: Repository
) -> None:
    middle, others = repo.state("main~2"), [state for state in repo.log("main") if state.step != 6]
    before = {state.uid: repo.load(state.uid)["model"]["0.weight"].clone() for state in others}
    answer = admin.delete(f"{BASE}/states/{middle.uid}/payload")

    assert (answer.status_code, answer.json()["uid"]) == (200, middle.uid)
    assert answer.json()["bytes"] > 0
    assert repo.state(middle.uid).status == "evicted"
    assert repo.state(middle.uid).metrics == middle.metrics
    with pytest.raises(Unavailable) as gone:
        repo.load(middle.uid)
    assert gone.value.nearest == repo.state("main~3").uid
    for state in others:
        assert torch.equal(
            repo.load(repo.verify(state.uid).uid)["model"]["0.weight"], before[state.uid]
        )
    assert admin.delete(f"{BASE}/states/{middle.uid}/payload").json() == {
        "uid": middle.uid,
        "bytes": 0,
    }
    assert admin.get(f"{BASE}/states/{middle.uid}/payload").status_code == 410


def test_what_a_ref_names_goes_only_by_force(admin: TestClient, repo: Repository) -> None:
    for rev in ("warm", "main"):
        uid = repo.state(rev).uid
        refused = admin.delete(f"{BASE}/states/{uid}/payload")
        assert (refused.status_code, refused.json()["kind"]) == (409, "conflict")
        assert repr(rev) in refused.json()["detail"]
        assert repo.verify(uid).status == "durable"
        assert (
            admin.delete(f"{BASE}/states/{uid}/payload", params={"force": "true"}).status_code
            == 200
        )
        assert repo.state(uid).status == "evicted"


def test_last_state_of_a_branch_stays_by_any_force(admin: TestClient, repo: Repository) -> None:
    head, root = repo.log("lone")

    assert admin.delete(f"{BASE}/states/{root.uid}/payload").status_code == 200
    for force in ("false", "true"):
        assert (
            admin.delete(f"{BASE}/states/{head.uid}/payload", params={"force": force}).status_code
            == 409
        )
    assert repo.verify("lone").uid == head.uid
    repo.delete_ref("lone")
    assert admin.delete(f"{BASE}/states/{head.uid}/payload").status_code == 200


def test_state_to_which_a_branch_would_go_back_is_counted_on(
    admin: TestClient, repo: Repository
) -> None:
    head, root = repo.log("lone")
    assert (
        admin.delete(f"{BASE}/states/{head.uid}/payload", params={"force": "true"}).status_code
        == 200
    )

    assert (
        admin.delete(f"{BASE}/states/{root.uid}/payload", params={"force": "true"}).status_code
        == 409
    )
    assert repo.verify(root.uid).status == "durable"


def test_chunk_that_a_descendant_refers_to_stays(repo: Repository) -> None:
    frozen, live = torch.arange(2_000_000.0), torch.zeros(8)
    run = repo.track(
        branch="frozen", objects={"frozen": frozen}, live=live, rng=False, durable_every=1
    )
    first = run.capture().wait("durable")
    live += 1
    second = run.capture().wait("durable")
    run.close()

    freed = evict(repo.core, first.uid)
    assert freed < 1_000_000
    assert repo.verify(second.uid).uid == second.uid
    assert torch.equal(repo.load(second.uid)["frozen"], frozen)
    repo.close()
    with datastates.open(repo.location.root or "") as again:
        assert again.verify(second.uid).status == "durable"
        assert again.state(first.uid).status == "evicted"


def test_state_where_a_training_stands_is_not_dropped(admin: TestClient, repo: Repository) -> None:
    weight = torch.zeros(8)
    run = repo.track(branch="live", weight=weight, rng=False, durable_interval_s=1e9)
    durable = run.capture().wait("durable")
    first = run.capture().wait("captured")
    head = run.capture().wait("captured")

    assert (
        admin.delete(f"{BASE}/states/{head.uid}/payload", params={"force": "true"}).status_code
        == 409
    )
    assert admin.delete(f"{BASE}/states/{durable.uid}/payload").status_code == 409, (
        "all that is left when the training dies"
    )
    assert admin.delete(f"{BASE}/states/{first.uid}/payload").status_code == 200
    assert repo.state(first.uid).status == "evicted"
    run.capture().wait("durable")
    assert repo.verify("live").step == 4


def test_metrics_that_are_added_are_in_curves(repo: Repository, serve: Serve) -> None:
    client, state = serve({NAME: repo}, token=WRITE, tokens=TOKENS), repo.state("main~1")
    asked = {"head": "main", "key": "test"}
    assert client.get(f"{BASE}/series", params=asked).json()["lines"][0]["total"] == 0
    etag = client.get(f"{BASE}/series", params=asked).headers["etag"]
    newest = repo.reflog("main")[0].id

    repo.annotate(state, metrics={"test": 0.25, "n": math.nan}, author="ann")

    again = client.get(f"{BASE}/series", params=asked, headers={"If-None-Match": etag})
    assert (again.status_code, again.json()["lines"][0]["values"]) == (200, [0.25])
    added = client.get(f"{BASE}/states/{state.uid}").json()["added"]
    assert [line["reason"] for line in added] == ["metrics by ann: test=0.25, n=nan"]
    (event,) = repo.reflog(state.uid)
    assert event.id > newest, "a page gets it"
    lines = client.get(f"{BASE}/branches", params={"metric": "test", "name": "main"}).json()[
        "items"
    ][0]["line"]["values"]
    repo.annotate(state, metrics={"test": 0.5}, replace=True)
    now = client.get(f"{BASE}/branches", params={"metric": "test", "name": "main"}).json()["items"][
        0
    ]["line"]["values"]
    assert (lines, now) == ([0.25], [0.5])
