"""The view: all of it in the address, kept for the next visit, by keys, in both themes, on a
phone, and when something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from playwright.sync_api import Browser, Page, expect

import datastates
from tests.page.conftest import Wood, serving
from tests.page.site import new_page

pytestmark = pytest.mark.long

Open = Callable[[str], Page]


def said(page: Page) -> dict[str, str]:
    """The address's query."""
    return {name: values[0] for name, values in parse_qs(urlparse(page.url).query).items()}


def selected(page: Page) -> str:
    """The uid of the selected row."""
    row = page.locator("[role=row][aria-selected=true]")
    row.wait_for()
    return (row.get_attribute("id") or "").removeprefix("state-")


def test_a_link_shows_the_whole_view_again(woods: Wood, open_page: Open, browser: Browser) -> None:
    uid = woods.uid("main~3")
    page = open_page(woods.at())
    page.get_by_role("combobox", name="Filter").fill("branch = main")
    page.get_by_role("combobox", name="Filter").press("Enter")
    page.get_by_role("columnheader", name="Step").get_by_role("button").click()
    page.locator(f"#state-{uid}").click()
    page.get_by_role("button", name="Theme").click()
    expected = {
        "repo": "wood",
        "q": "branch = main",
        "sort": "step desc",
        "state": uid,
        "panel": "detail",
        "theme": "light",
    }
    assert said(page) == expected
    with new_page(browser) as other:
        other.goto(page.url)
        assert selected(other) == uid
        expect(other.get_by_role("combobox", name="Filter")).to_have_value("branch = main")
        expect(other.get_by_role("columnheader", name="Step")).to_have_attribute(
            "aria-sort", "descending"
        )
        expect(other.get_by_role("region", name="State")).to_be_visible()
        assert said(other) == expected


def test_back_and_forth_undo_and_redo(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    page.locator("[role=row][id^=state-]").nth(3).click()
    expect(page.get_by_role("region", name="State")).to_be_visible()
    page.keyboard.press("c")
    expect(page.get_by_role("region", name="Curves")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("region", name="State")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("region", name="State")).to_have_count(0)
    page.go_forward()
    expect(page.get_by_role("region", name="State")).to_be_visible()


def test_columns_are_chosen_moved_and_kept(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    page.get_by_role("button", name="Columns").click()
    page.get_by_role("checkbox", name="attr.variant").check()
    page.get_by_role("checkbox", name="Message").uncheck()
    page.get_by_role("button", name="Move attr.variant to the left").click()
    expect(page.get_by_role("columnheader", name="variant")).to_be_visible()
    titles = page.get_by_role("columnheader").all_inner_texts()
    assert [title.strip() for title in titles][-2:] == ["variant", "Age"]
    page.goto(f"{woods.address}/?view=states")
    expect(page.get_by_role("columnheader", name="variant")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Message")).to_have_count(0)


def test_keys_move_open_mark_compare_and_close(woods: Wood, open_page: Open) -> None:
    history = woods.history()
    page = open_page(woods.at())
    for key in ("j", "j", "ArrowDown", "k"):
        page.keyboard.press(key)
    expect(page.locator(f"#state-{history[1]}")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("m")
    assert said(page)["mark"] == history[1]
    page.keyboard.press("j")
    page.keyboard.press("d")
    expect(page.get_by_role("region", name="Diff")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("region", name="Diff")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="State")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("region", name="State")).to_be_visible()


def test_the_last_state_is_reached_by_a_key(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    page.keyboard.press("End")
    expect(page.locator(f"#state-{woods.history()[-1]}")).to_have_attribute("aria-selected", "true")
    expect(page.locator(f"#state-{woods.history()[-1]}")).to_be_in_viewport()
    page.keyboard.press("Home")
    expect(page.locator(f"#state-{woods.history()[0]}")).to_be_in_viewport()


def test_one_goes_to_a_revision(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    page.keyboard.press("g")
    page.keyboard.type("warm~3x")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("column")
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(f"#state-{woods.uid('warm~3')}")).to_be_in_viewport()
    assert selected(page) == woods.uid("warm~3")


def test_the_theme_follows_the_system_until_it_is_chosen(woods: Wood, browser: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with new_page(browser, color_scheme="dark") as page:
        page.goto(woods.at())
        page.locator("[role=row][id^=state-]").first.wait_for()
        dark = page.evaluate(ground)
        page.get_by_role("button", name="Theme: auto").click()
        light = page.evaluate(ground)
        assert (dark, light) == ("rgb(15, 18, 22)", "rgb(255, 255, 255)")
        page.reload()
        expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
        assert page.evaluate(ground) == light


def test_a_phone_has_fewer_columns_and_panels_that_fill_it(woods: Wood, browser: Browser) -> None:
    with new_page(
        browser, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    ) as page:
        page.goto(woods.at())
        row = page.locator("[role=row][id^=state-]").nth(2)
        row.wait_for()
        assert [text.strip() for text in page.get_by_role("columnheader").all_inner_texts()] == [
            "Graph",
            "Names",
            "Step",
            "loss",
        ]
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        row.tap()
        box = page.get_by_role("region", name="State").bounding_box()
        assert box == {"x": 0, "y": 0, "width": 390, "height": 844}
        page.get_by_role("button", name="Close state").tap()
        expect(page.get_by_role("region", name="State")).to_have_count(0)


def test_a_repository_without_states_says_how_to_capture_one(tmp_path: Path, page: Page) -> None:
    with (
        datastates.open(tmp_path / "empty", memory_bytes=16 << 20) as repo,
        serving(repo) as address,
    ):
        page.goto(address)
        expect(page.get_by_text("No states yet")).to_be_visible()
        expect(page.get_by_text("run.capture(metrics=")).to_be_visible()


def test_a_failure_says_what_is_wrong_and_is_tried_again(woods: Wood, page: Page) -> None:
    body = (
        '{"status": 503, "title": "Unavailable", "kind": "unavailable", "detail": "the database'
        ' does not answer"}'
    )
    page.route(
        "**/graph?*",
        lambda route: route.fulfill(status=503, body=body, content_type="application/problem+json"),
    )
    page.goto(woods.at())
    expect(page.get_by_role("alert")).to_contain_text("the database does not answer")
    page.unroute("**/graph?*")
    # the page may have tried by itself meanwhile, as when its stream of events begins: then there
    # is no button any more
    page.evaluate("document.querySelector('.trouble button.primary')?.click()")
    expect(page.locator("[role=row][id^=state-]").first).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_state_beside_the_chosen_heads_is_said_to_be_so(woods: Wood, open_page: Open) -> None:
    uid = woods.uid("round-2/lr-0.3")
    page = open_page(woods.at(f"head=warm&state={uid}&panel=detail"))
    expect(page.get_by_text("The selected state is not in this history.")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_role("button", name="Show all branches").click()
    expect(page.locator(f"#state-{uid}")).to_be_in_viewport()
    expect(page.get_by_text("The selected state is not in this history.")).to_have_count(0)


def test_without_a_mark_a_state_is_compared_with_its_parent(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at(f"state={woods.uid('main~1')}"))
    page.keyboard.press("d")
    expect(page.get_by_role("region", name="Diff")).to_be_visible()
    assert said(page)["mark"] == woods.uid("main~2")


def test_a_head_that_is_not_there_is_a_problem_with_a_way_out(woods: Wood, page: Page) -> None:
    page.goto(woods.at("head=nowhere"))
    expect(page.get_by_role("alert")).to_contain_text("nowhere")
    page.get_by_role("button", name="Show everything").click()
    expect(page.locator("[role=row][id^=state-]").first).to_be_visible()


def test_rows_are_announced_before_they_are_here(woods: Wood, page: Page) -> None:
    page.route("**/graph?*", lambda _: None)  # never answered
    page.goto(woods.at())
    expect(page.locator(".skeleton").first).to_be_visible()
    expect(page.get_by_role("grid")).to_have_attribute("aria-busy", "true")


def test_what_the_page_loads_comes_from_its_own_server(woods: Wood, page: Page) -> None:
    asked: list[str] = []
    refused: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on(
        "console",
        lambda message: (
            refused.append(message.text) if "Content Security Policy" in message.text else None
        ),
    )
    page.goto(woods.at())
    page.locator("[role=row][id^=state-]").nth(2).click()
    page.keyboard.press("c")
    expect(page.get_by_role("region", name="Curves")).to_be_visible()
    assert all(url.startswith((woods.address, "blob:")) for url in asked)
    assert refused == []
