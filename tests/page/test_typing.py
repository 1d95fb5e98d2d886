"""A server that dies while somebody types a filter: no letter is lost, nothing false is shown,
and the answer comes with the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from tests.page.site import Grown, Site

pytestmark = pytest.mark.long

SOON_MS = 20_000  # the page waits up to 15 s before it tries again


@pytest.mark.parametrize("view", ["branches", "graph", "states"])
def test_a_filter_that_was_half_written_when_the_server_died_is_answered_when_it_is_back(
    site: Site, grown: Grown, page: Page, view: str
) -> None:
    page.goto(site.address(f"view={view}"))
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.locator("[data-branch], .row[id]").first).to_be_visible()
    filter_ = page.get_by_role("combobox", name="Filter")
    filter_.click()
    page.keyboard.type("step >= 18 a", delay=20)
    site.kill()
    page.keyboard.type("nd branch = main", delay=20)
    expect(page.get_by_text("offline").or_(page.get_by_text("reconnecting")).first).to_be_visible(
        timeout=SOON_MS
    )
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(filter_).to_have_value("step >= 18 and branch = main")
    expect(filter_).to_be_focused()
    site.start()
    expect(page.get_by_role("alert")).to_have_count(0, timeout=SOON_MS)
    expect(filter_).to_have_value("step >= 18 and branch = main")
    if view == "branches":
        expect(page.locator("[data-branch]")).to_have_count(1, timeout=SOON_MS)
        expect(page.locator("[data-branch=main]")).to_be_visible()
    else:
        expect(page.get_by_role("grid", name="States that were found")).to_have_attribute(
            "aria-rowcount", "2", timeout=SOON_MS
        )
        expect(page.locator(f"#state-{grown['main'].uid}")).to_be_visible()
