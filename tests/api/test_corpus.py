"""Every question that once did harm is answered or refused, and so are some that are made of
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from datastates import Repository
from tests.api.asking import CORPUS, Asker, check_changed

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


@pytest.fixture
def asker(client: TestClient, repo: Repository) -> Asker:
    return Asker(client, repo)


def test_kept_questions_do_no_harm(asker: Asker) -> None:
    for text in CORPUS["queries"]:
        asker.search(text)
    for rev in CORPUS["revisions"]:
        asker.resolve(rev)
    for text, place in CORPUS["cursors"]:
        asker.turn(text, place)


def test_changed_questions_do_no_harm(asker: Asker) -> None:
    check_changed(asker, 150)
