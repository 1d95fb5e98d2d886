"""Two states compared on the page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from tests.page.site import Grown, Site

pytestmark = pytest.mark.slow


def test_a_marked_state_is_compared_with_the_selected_one(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"state={grown['warm'].uid}&panel=detail"))
    page.get_by_role("button", name="Mark for diff").click()
    page.goto(page.url.replace(f"state={grown['warm'].uid}", f"state={grown['hot'].uid}"))
    page.get_by_role("button", name=f"Diff with {grown['warm'].uid[:8]}").click()
    diff = page.locator("[data-panel=diff]")
    expect(diff).to_contain_text("The new one came from the old one, 12 steps later.")
    expect(diff.get_by_role("row", name=re.compile("^lr ")).first).to_contain_text("0.1500")
    expect(diff.locator("tr[data-tensor='model/classes.weight']")).to_contain_text("changed")


def test_swap_turns_the_sign_of_what_changed(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"mark={grown['warm'].uid}&state={grown['hot'].uid}&panel=diff"))
    change = page.locator("[data-panel=diff]").get_by_role("row", name=re.compile("^lr ")).first.locator("td").last
    expect(change).to_have_text("+0.1300")
    page.get_by_role("button", name="Swap old and new").click()
    expect(change).to_have_text("-0.1300")


def test_cousins_name_their_common_ancestor(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"mark={grown['no-dropout'].uid}&state={grown['hot'].uid}&panel=diff"))
    expect(page.locator("[data-panel=diff]")).to_contain_text(f"Both came from {grown['warm'].uid[:8]}")


def test_tensors_are_sorted_and_filtered(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"mark={grown['warm'].uid}&state={grown['hot'].uid}&panel=diff"))
    diff = page.locator("[data-panel=diff]")
    rows = diff.locator("tr[data-tensor]")
    expect(rows.first).to_be_visible()
    assert _percents(rows.locator(".relative").all_inner_texts())[:5] == sorted(
        _percents(rows.locator(".relative").all_inner_texts())[:5], reverse=True
    )
    diff.get_by_role("button", name="path").click()
    expect(diff.get_by_role("columnheader", name="path")).to_have_attribute("aria-sort", "ascending")
    paths = rows.evaluate_all("rows => rows.map(row => row.dataset.tensor)")
    assert paths == sorted(paths, key=str.lower)
    diff.get_by_role("searchbox").fill("classes")
    expect(rows).to_have_count(3)  # the weight and two moments, without the count of steps


def test_without_a_mark_the_panel_says_what_to_do(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"state={grown['hot'].uid}&panel=diff"))
    expect(page.locator("[data-panel=diff]")).to_contain_text("needs two states")


def _percents(texts: list[str]) -> list[float]:
    return [float(found[1]) for text in texts if (found := re.search(r"([\d.e-]+) %", text))]
