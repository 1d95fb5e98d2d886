"""The page while a training goes on, and while its server does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from tests.page.site import Grown, Site, Training

pytestmark = pytest.mark.slow

SOON_MS = 20_000  # the page waits up to 15 s before it tries again


def points(page: Page) -> int:
    """How many points the chart of the loss has."""
    return int(page.locator("[data-panel=curves] [data-key=loss]").get_attribute("data-points") or 0)


def test_rows_and_points_appear_while_a_training_captures(site: Site, grown: Grown, page: Page, training: Callable[..., Training]) -> None:
    page.goto(site.address("panel=curves&head=main&key=loss"))
    expect(page.locator("[data-key=loss]")).to_have_attribute("data-points", str(grown["main"].step))
    page.evaluate("window.wasHere = true")
    begun = training(site.folder, "main")
    for count in (1, 2, 3):
        uid = begun.step()
        expect(page.locator(f"#state-{uid}")).to_be_visible()
        expect(page.locator("[data-key=loss]")).to_have_attribute("data-points", str(grown["main"].step + count))
    assert page.evaluate("window.wasHere")


def test_the_detail_of_a_state_learns_of_its_children(site: Site, grown: Grown, page: Page, training: Callable[..., Training]) -> None:
    page.goto(site.address(f"state={grown['main'].uid}&panel=detail"))
    expect(page.locator("[data-panel=detail] .kin")).to_contain_text("soup")
    uid = training(site.folder, "more", grown["main"].uid).step()
    expect(page.locator(f"[data-panel=detail] [data-child='{uid}']")).to_be_visible()


def test_a_server_that_was_killed_is_found_again_and_no_event_is_missed(
    site: Site, grown: Grown, page: Page, training: Callable[..., Training]
) -> None:
    asked: list[str | None] = []
    page.on("request", lambda request: asked.append(request.headers.get("last-event-id")) if "/events" in request.url else None)
    page.goto(site.address("panel=curves&head=main&key=loss"))
    begun = training(site.folder, "main")
    first = begun.step()
    expect(page.locator(f"#state-{first}")).to_be_visible()
    site.kill()
    expect(page.get_by_text("offline").or_(page.get_by_text("reconnecting")).first).to_be_visible(timeout=SOON_MS)
    missed = [begun.step() for _ in range(3)]
    site.start()
    for uid in missed:
        expect(page.locator(f"#state-{uid}")).to_be_visible(timeout=SOON_MS)
    expect(page.locator("[data-key=loss]")).to_have_attribute("data-points", str(grown["main"].step + 4))
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    assert asked[0] is None
    assert asked[-1], "the stream goes on after the last event that was seen"
