"""The page while a training goes on, and while its server does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from tests.page.site import READER, TOKEN

if TYPE_CHECKING:
    from tests.page.conftest import Wood
    from tests.page.site import Grown, Site, Training

pytestmark = pytest.mark.long

SOON_MS = 60_000  # the page waits up to 15 s before it tries again


def points(page: Page) -> int:
    """How many points the chart of the loss has."""
    return int(
        page.locator("[data-panel=curves] [data-key=loss]").get_attribute("data-points") or 0
    )


def test_rows_and_points_appear_while_a_training_captures(
    site: Site, grown: Grown, page: Page, training: Callable[..., Training]
) -> None:
    page.goto(site.address("panel=curves&head=main&key=loss"))
    expect(page.locator("[data-key=loss]")).to_have_attribute(
        "data-points", str(grown["main"].step)
    )
    page.evaluate("window.wasHere = true")
    begun = training(site.folder, "main")
    for count in (1, 2, 3):
        uid = begun.step()
        expect(page.locator(f"#state-{uid}")).to_be_visible()
        expect(page.locator("[data-key=loss]")).to_have_attribute(
            "data-points", str(grown["main"].step + count)
        )
    assert page.evaluate("window.wasHere")


def test_the_detail_of_a_state_learns_of_its_children(
    site: Site, grown: Grown, page: Page, training: Callable[..., Training]
) -> None:
    page.goto(site.address(f"state={grown['main'].uid}&panel=detail"))
    expect(page.locator("[data-panel=detail] .kin")).to_contain_text("soup")
    uid = training(site.folder, "more", grown["main"].uid).step()
    expect(page.locator(f"[data-panel=detail] [data-child='{uid}']")).to_be_visible()


def test_a_server_that_was_killed_is_found_again_and_no_event_is_missed(
    site: Site, grown: Grown, page: Page, training: Callable[..., Training]
) -> None:
    asked: list[str | None] = []
    page.on(
        "request",
        lambda request: (
            asked.append(request.headers.get("last-event-id")) if "/events" in request.url else None
        ),
    )
    page.goto(site.address("panel=curves&head=main&key=loss"))
    begun = training(site.folder, "main")
    first = begun.step()
    expect(page.locator(f"#state-{first}")).to_be_visible()
    site.kill()
    expect(page.get_by_text("offline").or_(page.get_by_text("reconnecting")).first).to_be_visible(
        timeout=SOON_MS
    )
    missed = [begun.step() for _ in range(3)]
    site.start()
    for uid in missed:
        expect(page.locator(f"#state-{uid}")).to_be_visible(timeout=SOON_MS)
    expect(page.locator("[data-key=loss]")).to_have_attribute(
        "data-points", str(grown["main"].step + 4)
    )
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    assert asked[0] is None
    assert asked[-1], "the stream goes on after the last event that was seen"


CHIPS = """() => {
    window.frames_ = { all: 0, wrong: [] };
    const look = () => {
        const rows = [...document.querySelectorAll("[role=row][id^=state-]")].sort((one, other) => one.ariaRowIndex - other.ariaRowIndex);
        const named = rows.filter((row) => [...row.querySelectorAll(".chip.branch")].some((chip) => chip.textContent === "main"));
        window.frames_.all += 1;
        if (named.length !== 1 || named[0] !== rows[0]) window.frames_.wrong.push(named.map((row) => row.ariaRowIndex));
        requestAnimationFrame(look);
    };
    look();
}"""


@pytest.mark.parametrize("view", ["graph", "states"])
def test_a_branch_s_name_never_leaves_the_newest_row_of_a_live_training(
    wood: Wood, open_page: Callable[[str], Page], view: str
) -> None:
    page = open_page(wood.at(f"view={view}"))
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    page.evaluate(CHIPS)
    for count in (1, 2, 1, 3, 1, 1):
        before = page.evaluate("window.frames_.all")
        made = wood.capture("main", count)
        expect(page.locator(f"#state-{made[-1]}")).to_be_visible()
        page.wait_for_function("before => window.frames_.all > before + 5", arg=before)
    frames = page.evaluate("window.frames_")
    assert not frames["wrong"], "in these frames the name stood in other rows, or in none"


def test_an_error_goes_when_the_server_is_back_and_what_the_filter_asks_for_is_shown(
    site: Site, grown: Grown, page: Page
) -> None:
    page.goto(site.address())
    expect(page.locator(f"#state-{grown['main'].uid}")).to_be_visible()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    site.kill()
    filter_ = page.get_by_role("combobox", name="Filter")
    filter_.fill("step = 3 and branch = main")
    filter_.press("Enter")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The rows behind this are not those of the filter.")
    site.start()
    expect(alert).to_have_count(0, timeout=SOON_MS)
    expect(page.get_by_role("grid", name="States that were found")).to_have_attribute(
        "aria-rowcount", "2"
    )


def test_a_page_that_was_opened_before_its_server_was_there_shows_it_once_it_is(
    site: Site, grown: Grown, page: Page
) -> None:
    page.route("**/api/v1/repositories", lambda route: route.abort())
    page.goto(site.address())
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    page.unroute("**/api/v1/repositories")
    expect(page.locator(f"#state-{grown['main'].uid}")).to_be_visible(timeout=SOON_MS)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_server_that_asks_for_a_token_is_not_called_offline(
    writable: Site, grown: Grown, page: Page
) -> None:
    page.goto(writable.address(token=READER))
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    page.route(
        "**/events*",
        lambda route: route.fulfill(
            status=401, json={"status": 401, "title": "Who are you?", "detail": "a token"}
        ),
    )
    writable.kill()
    writable.start()
    light = page.locator(".light")
    expect(light).to_contain_text("token needed", timeout=SOON_MS)
    page.unroute("**/events*")
    light.get_by_role("button", name="token needed").click()
    dialog = page.locator("[data-panel=token]")
    dialog.get_by_role("textbox", name="Token").fill(TOKEN)
    dialog.get_by_role("button", name="Use it").click()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.locator(f"#state-{grown['main'].uid}")).to_be_visible()
