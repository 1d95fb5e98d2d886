"""States over the web."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates import Repository
from tests.api.conftest import BASE

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


def test_a_revision_is_resolved(client: TestClient, repo: Repository) -> None:
    answer = client.get(f"{BASE}/resolve", params={"rev": "main~3"})

    assert answer.status_code == 200
    assert answer.json()["uid"] == repo.state("main~3").uid
