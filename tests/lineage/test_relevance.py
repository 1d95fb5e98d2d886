"""Which metrics matter and which way they get better: one rule here and on the page, which is
tested with the same table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from datastates.lineage.views.text import by_relevance, direction_of
from tests.support.effort import ROOT

TABLE: dict[str, Any] = json.loads(
    (ROOT / "api" / "ui" / "src" / "lib" / "relevance.test.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("keys", TABLE["ordered"], ids=lambda keys: keys[0])
def test_metrics_are_ordered_as_the_page_orders_them(keys: list[str]) -> None:
    assert by_relevance(reversed(keys)) == keys


@pytest.mark.parametrize(("key", "better"), TABLE["better"].items())
def test_metrics_get_better_as_the_page_takes_it(key: str, better: str) -> None:
    assert direction_of(key) == better
