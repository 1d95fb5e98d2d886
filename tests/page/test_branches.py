"""The opening view: a row a branch, from which every history is one click away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import datastates
from tests.page.conftest import Wood, serving
from tests.page.site import new_page

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long

FORK = "round-3/lr-0.1"
ENDS_SEEN = """button => {
    const text = button.querySelector("bdi").firstChild, box = button.getBoundingClientRect(), range = document.createRange();
    return [0, text.length - 1].map((place) => {
        range.setStart(text, place);
        range.setEnd(text, place + 1);
        const at = range.getBoundingClientRect();
        return at.left >= box.left && at.right <= box.right;
    });
}"""
"""Whether the first letter of a name is in sight, and the last."""


def told(wood: Wood, **query: str) -> dict[str, Any]:
    """What the API says of the branches."""
    found: dict[str, Any] = httpx.get(
        f"{wood.address}/api/v1/repositories/wood/branches", params=query
    ).json()
    return found


def row(page: Page, name: str) -> Locator:
    return page.locator(f"[data-branch='{name}']")


def names(page: Page) -> list[str]:
    return [
        str(name)
        for name in page.locator("[data-branch]").evaluate_all(
            "rows => rows.map(row => row.dataset.branch)"
        )
    ]


def open_(page: Page, address: str) -> None:
    page.goto(address)
    page.locator("[data-branch]").first.wait_for()


def test_what_is_opened_first_are_the_branches(woods: Wood, page: Page) -> None:
    open_(page, woods.address)
    said = told(woods)
    assert names(page) == [one["name"] for one in said["items"]]
    expect(page.get_by_role("status").filter(has_text="branches")).to_have_text(
        f"{said['total']} branches"
    )
    one = next(one for one in said["items"] if one["name"] == FORK)
    there = row(page, FORK)
    expect(there.locator(".fork")).to_have_text(f"main @ {one['fork']['step']}")
    expect(there.locator(".best")).to_contain_text(f"{one['best']['value']:.4g}")
    expect(there.locator(".line path")).to_be_attached()
    expect(page.locator(".best .chief")).to_have_count(1)


def test_what_the_opening_view_asks_for_is_never_given_up(woods: Wood, page: Page) -> None:
    given_up: list[str] = []
    for each, query in (
        (page, ""),
        (page.context.new_page(), "?repo=wood"),
    ):
        # whoever leaves a page gives up what it asks just then
        each.on("requestfailed", lambda request: given_up.append(request.url))
        open_(each, f"{woods.address}/{query}")
    assert not [url for url in given_up if "/branches" in url]


def test_a_history_is_two_clicks_below_and_two_keys_back(woods: Wood, page: Page) -> None:
    open_(page, woods.address)
    row(page, FORK).get_by_role("button", name=FORK).click()
    page.get_by_role("button", name="History").click()
    expect(page.locator(f"#state-{woods.uid(FORK)}")).to_be_in_viewport()
    assert "view=graph" in page.url
    assert "head=round-3" in page.url
    page.go_back()
    expect(page.locator("[data-panel=branch]")).to_be_visible()
    page.go_back()
    expect(row(page, FORK)).to_be_visible()


def test_the_fork_of_a_branch_is_shown_among_all(woods: Wood, page: Page) -> None:
    open_(page, woods.address)
    fork = next(one for one in told(woods)["items"] if one["name"] == FORK)["fork"]["state"]
    row(page, FORK).locator(".fork button").click()
    expect(page.locator(f"#state-{fork}")).to_be_in_viewport()
    expect(page.locator(f"#state-{fork}")).to_have_attribute("aria-selected", "true")


def test_branches_are_sorted_grouped_and_filtered_and_the_address_says_it(
    woods: Wood, page: Page
) -> None:
    open_(page, woods.address)
    page.get_by_role("columnheader", name="Best", exact=True).get_by_role("button").click()
    best = [one["name"] for one in told(woods, sort="best")["items"]]
    expect(page.locator("[data-branch]").first).to_have_attribute("data-branch", best[0])
    assert names(page) == best
    page.get_by_label("grouped by").select_option("attr.epoch")
    expect(page.locator("tr.group").first).to_be_visible()
    page.get_by_role("combobox", name="Filter").fill("step > 300")
    page.keyboard.press("Enter")
    wanted = told(woods, q="step > 300")
    expect(page.get_by_role("status").filter(has_text="branches")).to_have_text(
        f"{wanted['matching']} of {wanted['total']} branches"
    )
    assert {"by=best", "group=attr.epoch", "q=step"} <= {
        part for part in ("by=best", "group=attr.epoch", "q=step") if part in page.url
    }
    page.get_by_role("combobox", name="Filter").fill("step > ")
    page.keyboard.press("Enter")
    expect(page.locator("#filter-problem")).to_be_visible()


def test_a_branch_that_is_captured_on_is_told_at_once(wood: Wood, page: Page) -> None:
    open_(page, wood.address)
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.locator("[data-branch]").first).to_have_attribute("data-branch", "main")
    wood.capture("round-0/lr-0.3", 2)
    expect(page.locator("[data-branch]").first).to_have_attribute("data-branch", "round-0/lr-0.3")


def test_keys_alone_lead_from_a_branch_to_its_states(woods: Wood, page: Page) -> None:
    open_(page, woods.address)
    page.keyboard.press("j")
    page.keyboard.press("j")
    chosen = names(page)[1]
    page.keyboard.press("Enter")
    newest = page.get_by_role("button", name="Newest state", exact=True)
    expect(newest).to_be_visible()
    while not newest.evaluate("one => one === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("[data-panel=detail] .uid")).to_have_text(woods.uid(chosen))


def test_a_long_name_is_cut_on_a_phone_and_whole_where_the_focus_is(
    tmp_path: Path, browser: Browser
) -> None:
    name = "sweep/learning_rate=0.0003,weight_decay=0.1,dropout=0.3"
    with datastates.open(tmp_path / "runs", memory_bytes=16 << 20) as repo:
        with repo.track(branch=name, rng=False, value=1, config={"lr": 0.1, "wd": 0.2}) as run:
            run.capture(metrics={"loss": 1.0}).wait()
        with (
            serving(repo) as address,
            new_page(browser, viewport={"width": 390, "height": 844}) as page,
        ):
            page.goto(f"{address}/?view=branches")
            button = page.get_by_role("button", name=name, exact=True)
            assert (
                button.evaluate(
                    "button => button.scrollWidth > button.clientWidth &&"
                    " getComputedStyle(button).textOverflow"
                )
                == "ellipsis"
            )
            # variants differ in the end of their names
            assert button.evaluate(ENDS_SEEN) == [
                False,
                True,
            ]
            assert (
                button.evaluate("button => getComputedStyle(button, '::after').content") == "none"
            )
            page.get_by_role("button", name="Branch", exact=True).focus()
            page.keyboard.press("Tab")
            while not button.evaluate("button => button === document.activeElement"):
                page.keyboard.press("Tab")
            assert button.evaluate(
                "button => getComputedStyle(button, '::after').content"
            ).startswith(f'"{name}"')
            expect(
                page.get_by_role("button", name=name, exact=True)
            ).to_be_focused()  # its name is the same
