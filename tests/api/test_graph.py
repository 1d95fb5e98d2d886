"""Windows of the graph over the web, against the lanes of the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datastates import Repository
from datastates.lineage.lanes import lanes
from tests.api.conftest import BASE

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


def window(client: TestClient, **query: Any) -> dict[str, Any]:
    answer = client.get(f"{BASE}/graph", params=query)
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


def test_all_refs_are_drawn_as_the_lanes_of_all_states(client: TestClient, repo: Repository) -> None:
    page = window(client)
    states = repo.find("")

    assert [row["state"]["uid"] for row in page["rows"]] == [state.uid for state in states]
    for made, row in zip(page["rows"], lanes(states), strict=True):
        assert (made["lane"], made["above"], made["below"]) == (row.lane, list(row.above), list(row.below))
        assert (made["joins"], made["parents"]) == (list(row.joins), list(row.parents))
    assert (page["first"], page["total"], page["is_current"]) == (0, len(states), True)
    assert page["lanes"] == 1 + max(max((row["lane"], *row["above"], *row["below"])) for row in page["rows"])
