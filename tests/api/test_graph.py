"""Windows of the graph over the web, against the lanes of the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datastates import Repository
from datastates.lineage.views.graph import lanes
from tests.api.conftest import BASE, train

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


def window(client: TestClient, **query: Any) -> dict[str, Any]:
    answer = client.get(f"{BASE}/graph", params=query)
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


def test_all_refs_are_drawn_as_the_lanes_of_all_states(
    client: TestClient, repo: Repository
) -> None:
    page = window(client)
    states = repo.find("")

    assert [row["state"]["uid"] for row in page["rows"]] == [state.uid for state in states]
    for made, row in zip(page["rows"], lanes(states, trunk=repo.state("main").uid), strict=True):
        assert (made["lane"], made["above"], made["below"]) == (
            row.lane,
            list(row.above),
            list(row.below),
        )
        assert (made["joins"], made["parents"]) == (list(row.joins), list(row.parents))
    assert (page["first"], page["total"], page["is_current"]) == (0, len(states), True)
    assert page["lanes"] == 1 + max(
        max((row["lane"], *row["above"], *row["below"])) for row in page["rows"]
    )


def test_heads_are_revisions(client: TestClient, repo: Repository) -> None:
    page = window(client, head=["main~2", "fork"])
    uids = {state.uid for rev in ("main~2", "fork") for state in repo.log(rev)}

    assert {row["state"]["uid"] for row in page["rows"]} == uids
    assert set(page["heads"]) == {repo.state("main~2").uid, repo.state("fork").uid}
    assert window(client, head=["fork", "main~2"])["version"] == page["version"]
    assert window(client, head="main")["version"] != page["version"]


def test_a_window_has_the_rows_that_were_asked_for(client: TestClient, repo: Repository) -> None:
    whole = window(client)
    part = window(client, first=4, count=3)
    warm = repo.state("warm").uid
    around = window(client, around=warm, count=3)

    seen = {str(row["branch"]) for row in part["rows"]}
    assert seen <= part["branches"].keys() <= whole["branches"].keys()
    assert part == {**whole, "first": 4, "rows": whole["rows"][4:7], "branches": part["branches"]}
    assert around["rows"][1]["state"]["uid"] == warm
    assert around["rows"] == whole["rows"][around["first"] : around["first"] + 3]


def test_who_has_a_window_gets_304_until_it_says_something_else(
    client: TestClient, repo: Repository
) -> None:
    path, query = f"{BASE}/graph", {"head": "main"}
    etag = client.get(path, params=query).headers["etag"]
    assert client.get(path, params=query, headers={"If-None-Match": etag}).status_code == 304
    train(repo, "main", 1)
    moved = client.get(path, params=query, headers={"If-None-Match": etag})
    assert (moved.status_code, moved.json()["rows"][0]["state"]["uid"]) == (
        200,
        repo.state("main").uid,
    )


def test_what_is_wrong_is_refused(client: TestClient, repo: Repository) -> None:
    lone = repo.state("lone").uid
    for query, status in (
        ({"count": 1001}, 400), ({"count": 0}, 400), ({"first": -1}, 400), ({"first": 2**60}, 400), ({"head": "x" * 501}, 400),
        ({"head": ["main"] * 65}, 400), ({"around": "main"}, 400), ({"head": "nobody"}, 404), ({"head": "main..fork"}, 400),
        ({"head": "main", "around": lone}, 404), ({"around": "0" * 24}, 404),
    ):  # fmt: skip
        assert client.get(f"{BASE}/graph", params=query).status_code == status, query
