"""States over the web."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from datastates import Repository
from datastates.api import cache
from datastates.api.models import StateDetail
from datastates.cli.app import app as terminal
from datastates.state.tree import flatten
from tests.api.conftest import BASE

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


def get(client: TestClient, path: str, **query: Any) -> Any:
    answer = client.get(f"{BASE}{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown(*arguments: str) -> Any:
    """What the terminal says."""
    done = CliRunner().invoke(terminal, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# One


def test_a_revision_is_resolved(client: TestClient, repo: Repository) -> None:
    assert get(client, "/resolve", rev="main~3")["uid"] == repo.state("main~3").uid
    assert (
        get(client, "/resolve", rev="main@best:val/loss")["uid"]
        == repo.state("main@best:val/loss").uid
    )
    wrong = client.get(f"{BASE}/resolve", params={"rev": "main~~("})
    assert (wrong.status_code, wrong.json()["kind"], wrong.json()["column"]) == (400, "syntax", 7)


def test_all_that_is_known_of_a_state_is_what_show_says(
    client: TestClient, repo: Repository
) -> None:
    for rev in ("main", "warm", "best", "lone~1"):
        uid = repo.state(rev).uid
        detail = get(client, f"/states/{uid}")
        said = shown("--repo", str(repo.location.root), "show", uid)
        assert detail == {key: value for key, value in said.items() if key in detail}
        assert set(said) - set(detail) == {"configured", "files"}
        assert list(detail) == [field.name for field in dataclasses.fields(StateDetail)]
    warm = get(client, f"/states/{repo.state('warm').uid}")
    on_main, on_fork = repo.state("main~4").uid, repo.state("fork~2").uid
    assert warm["children"] == [on_main, on_fork]
    assert warm["origins"] == {warm["uid"]: "main", on_main: "main", on_fork: "fork"}
    assert [ref["name"] for ref in warm["refs"]] == ["warm"]
    assert warm["run_record"]["uid"] == warm["run"]
    assert warm["packs"]
    assert warm["metrics"]["val/loss"] is None


def test_a_merge_is_a_child_of_all_its_parents(client: TestClient, repo: Repository) -> None:
    soup = repo.state("soup")
    for parent in soup.parents:
        assert get(client, f"/states/{parent}", fields="children") == {"children": [soup.uid]}


def test_a_detail_changes_its_etag_with_what_it_says(client: TestClient, repo: Repository) -> None:
    path = f"{BASE}/states/{repo.state('main').uid}"
    etag = client.get(path).headers["etag"]
    assert client.get(path, headers={"If-None-Match": f'"other", {etag}'}).status_code == 304
    repo.tag("new", "main")
    assert client.get(path, headers={"If-None-Match": etag}).status_code == 200


@pytest.mark.parametrize("path", ["/states/{}", "/states/{}/log", "/states/{}/tensors"])
def test_unknown_states_are_not_found_and_no_uid_is_refused(client: TestClient, path: str) -> None:
    assert client.get(BASE + path.format("0" * 24)).json()["kind"] == "not-found"
    for wrong in ("main", "0" * 23, "0" * 25, "..%2f..%2fetc", "G" * 24):
        assert client.get(BASE + path.format(wrong)).status_code in (400, 404)


# Many


def test_a_search_comes_page_by_page(client: TestClient, repo: Repository) -> None:
    query = "metrics.loss < 0.6 order by metrics.loss"
    found: list[str] = []
    after = None
    while True:
        page = get(client, "/states", q=query, limit=3, **({"after": after} if after else {}))
        found += [state["uid"] for state in page["items"]]
        after = page["next"]
        if after is None:
            break
        assert len(page["items"]) == 3
    assert found == [state.uid for state in repo.find(query)]


def test_without_a_search_all_states_come_the_newest_first(
    client: TestClient, repo: Repository
) -> None:
    assert [state["uid"] for state in get(client, "/states")["items"]] == [
        state.uid for state in repo.find("")
    ]


def test_fields_are_chosen(client: TestClient) -> None:
    page = get(client, "/states", limit=2, fields="uid,metrics.loss")
    assert [set(item) for item in page["items"]] == [{"uid", "metrics"}] * 2
    assert client.get(f"{BASE}/states", params={"fields": "nope"}).status_code == 400


def test_a_search_that_is_wrong_says_where(client: TestClient) -> None:
    answer = client.get(f"{BASE}/states", params={"q": "metrics.loss << 3"})
    assert (answer.status_code, answer.json()["kind"], answer.json()["column"]) == (
        400,
        "syntax",
        15,
    )


def test_what_is_too_large_or_foreign_is_refused(client: TestClient) -> None:
    cursor = get(client, "/states", limit=1)["next"]
    for query in (
        {"q": "x" * 5000}, {"limit": 0}, {"limit": 1001}, {"after": "x"},
        {"q": "step > 1", "after": cursor}, {"q": "not " * 900 + "step > 1"},
    ):  # fmt: skip
        assert client.get(f"{BASE}/states", params=query).status_code == 400, query


def test_a_log_follows_first_parents_page_by_page(client: TestClient, repo: Repository) -> None:
    soup = repo.state("soup")
    path = [soup.uid, *(state.uid for state in repo.log("main"))]
    assert [state["uid"] for state in get(client, f"/states/{soup.uid}/log")["items"]] == path
    found, after = [], None
    while True:
        page = get(
            client, f"/states/{soup.uid}/log", limit=4, **({"after": after} if after else {})
        )
        found += [state["uid"] for state in page["items"]]
        after = page["next"]
        if after is None:
            break
        assert after == found[-1]
    assert found == path


def test_a_log_goes_on_only_after_one_of_its_own(client: TestClient, repo: Repository) -> None:
    main, fork, child = repo.state("main"), repo.state("fork"), repo.state("soup")
    for after in (fork.uid, child.uid):
        answer = client.get(f"{BASE}/states/{main.uid}/log", params={"after": after})
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid-input")


# Tensors


def test_tensors_are_listed_from_the_manifest(client: TestClient, repo: Repository) -> None:
    state = repo.state("main")
    for pack in repo.location.packs.glob("*.safetensors"):
        pack.write_bytes(b"")  # not a byte of them is needed
    page = get(client, f"/states/{state.uid}/tensors")

    weight = page["items"][0]
    assert weight == {
        "path": "model/0.weight",
        "dtype": "float32",
        "shape": [4, 6],
        "bytes": 96,
        "tied_to": None,
        "norm": None,
    }
    assert sum(item["bytes"] for item in page["items"]) == state.bytes_total
    assert page["next"] is None


def test_norms_are_those_of_torch_and_read_once(
    client: TestClient, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = repo.state("main").uid
    items = get(client, f"/states/{uid}/tensors", norms=True)["items"]
    tree = {leaf.path: leaf.tensor for leaf in flatten(repo.load(uid)).tensors}

    assert {item["path"]: item["norm"] for item in items} == {
        path: pytest.approx(float(tensor.double().norm()), rel=1e-12)
        for path, tensor in tree.items()
    }
    monkeypatch.setattr(cache, "pieces", None)
    assert get(client, f"/states/{uid}/tensors", norms=True)["items"] == items


def test_tied_tensors_name_each_other(repo: Repository, client: TestClient) -> None:
    weight = torch.ones(3, 4)
    with repo.track(branch="tied", rng=False, model={"a": weight, "b": weight}) as run:
        uid = run.capture().wait("durable").uid
    one, other = get(client, f"/states/{uid}/tensors", norms=True)["items"]
    assert (one["tied_to"], other["tied_to"]) == (None, "model/a")
    assert other == {**one, "path": "model/b", "tied_to": "model/a"}


def test_tensors_of_a_state_without_bytes_are_unavailable(
    client: TestClient, repo: Repository
) -> None:
    state = repo.state("main")
    repo.core.tiers.durable.remove(state.uid)
    answer = client.get(f"{BASE}/states/{state.uid}/tensors")
    assert answer.json()["kind"] == "unavailable"
    assert answer.status_code in (404, 409, 410, 503)


def test_a_damaged_state_is_named(client: TestClient, repo: Repository) -> None:
    state = repo.state("lone")
    pack = repo.location.packs / f"{state.uid}.0.safetensors"
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    answer = client.get(f"{BASE}/states/{state.uid}/tensors", params={"norms": True})
    assert answer.json()["kind"] == "corrupt"
