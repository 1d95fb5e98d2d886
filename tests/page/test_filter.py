"""The filter bar: the search grammar with help, errors where they are, and orders by a click on
a header."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.page.conftest import Wood

pytestmark = pytest.mark.long

Open = Callable[[str], Page]

LETTER = """(element) => {
    const canvas = document.createElement("canvas").getContext("2d");
    const { fontSize, fontFamily } = getComputedStyle(element);
    canvas.font = `${fontSize} ${fontFamily}`;
    return canvas.measureText("x").width;
}"""


def bar(page: Page) -> Locator:
    """Where one writes."""
    return page.get_by_role("combobox", name="Filter")


def steps(page: Page) -> list[int]:
    """The steps of the rows, from the top."""
    texts = page.locator("[role=row][id^=state-]").evaluate_all(
        "rows => rows.sort((a, b) => a.ariaRowIndex - b.ariaRowIndex).map(row =>"
        " row.querySelector('.step').textContent)"
    )
    return [int(text) for text in texts]


def test_or_finds_what_either_finds(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    bar(page).fill("step = 7 or step = 9 and branch = main")
    bar(page).press("Enter")
    expect(page.get_by_role("grid", name="States that were found")).to_have_attribute(
        "aria-rowcount", "3"
    )
    assert steps(page) == [9, 7]


def test_an_error_is_underlined_where_it_is(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    bar(page).fill("metrics.loss < 0.5 adn step > 3")
    bar(page).press("Enter")
    expect(page.locator(".wrong")).to_have_text("adn")
    expect(page.locator("#filter-problem")).to_contain_text("column 20")
    expect(page.locator("#filter-problem")).to_contain_text("'and'")
    expect(bar(page)).to_have_attribute("aria-invalid", "true")
    assert len(steps(page)) > 20, "what was there stays"
    under, over = page.locator(".wrong").bounding_box(), bar(page).bounding_box()
    assert under is not None
    assert over is not None
    letter = page.locator(".under").evaluate(LETTER)
    assert under["x"] - over["x"] == pytest.approx(19 * letter, abs=3)


def test_a_query_that_is_not_finished_is_no_mistake(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    bar(page).press_sequentially("metrics.loss < ")
    with page.expect_response(lambda answer: "q=metrics.loss" in answer.url):
        bar(page).press(" ")
    expect(page.locator(".wrong")).to_have_count(0)


def test_names_are_completed(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    page.keyboard.press("/")
    expect(bar(page)).to_be_focused()
    page.keyboard.type("val")
    option = page.get_by_role("option", name="metrics.val_loss")
    expect(option).to_contain_text("states")
    page.keyboard.press("ArrowDown")
    expect(option).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(bar(page)).to_have_value("metrics.val_loss ")
    page.get_by_role("option", name="<", exact=True).click()
    page.keyboard.type("0.5 and branch = rou")
    page.get_by_role("option", name="round-1/lr-0.03").click()
    expect(bar(page)).to_have_value("metrics.val_loss < 0.5 and branch = round-1/lr-0.03 ")


def test_more_is_found_as_one_scrolls(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at("q=step+>+0"))
    grid = page.get_by_role("grid", name="States that were found")
    expect(grid).to_have_attribute("aria-rowcount", "201")
    grid.evaluate("(element) => { element.scrollTop = 1e9; }")
    expect(grid).to_have_attribute("aria-rowcount", "401")


def test_a_header_sorts_down_up_and_not(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    header = page.get_by_role("columnheader", name="loss", exact=True)
    newest = steps(page)[0]
    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "descending")
    expect(page.locator("[role=row][id^=state-]").first).to_contain_text(
        f"{woods.repo.find('order by metrics.loss desc limit 1')[0].step}"
    )
    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "ascending")
    least = woods.repo.find("order by metrics.loss limit 3")
    expect(page.locator(f"#state-{least[0].uid}")).to_have_attribute("aria-rowindex", "2")
    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "none")
    expect(page.get_by_role("grid", name="History of states")).to_be_visible()
    assert steps(page)[0] == newest


def test_a_header_takes_the_place_of_the_order_that_was_written(
    woods: Wood, open_page: Open
) -> None:
    page = open_page(woods.at("q=branch+%3D+main+order+by+step+limit+5"))
    expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", "6")
    page.get_by_role("columnheader", name="Step").get_by_role("button").click()
    expect(bar(page)).to_have_value("branch = main limit 5")
    highest = woods.repo.find("branch = main order by step desc limit 1")[0]
    expect(page.locator(f"#state-{highest.uid}")).to_be_visible()


def test_what_was_found_is_shown_in_its_history(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at("q=step+%3D+45+and+branch+%3D+main"))
    uid = woods.uid("main@step:45")
    page.locator(f"#state-{uid}").click()
    page.get_by_role("button", name="Show the selected in history").click()
    expect(page.get_by_role("grid", name="History of states")).to_be_visible()
    expect(page.locator(f"#state-{uid}")).to_be_in_viewport()
    expect(bar(page)).to_have_value("")


def test_filters_of_before_are_offered_again(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    bar(page).fill("step > 100")
    bar(page).press("Enter")
    expect(page.get_by_role("grid", name="States that were found")).to_be_visible()
    page.get_by_role("button", name="Clear the filter").click()
    option = page.get_by_role("option", name="step > 100")
    expect(option).to_contain_text("recent")
    option.click()
    expect(page.get_by_role("grid", name="States that were found")).to_be_visible()


def test_nothing_found_says_so(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    bar(page).fill("step > 100000")
    bar(page).press("Enter")
    expect(page.get_by_text("No state matches")).to_be_visible()
    page.get_by_role("button", name="Show the history").click()
    expect(page.locator("[role=row][id^=state-]").first).to_be_visible()


def test_the_end_of_what_was_found_is_its_last_state_not_the_last_one_that_was_loaded(
    woods: Wood, open_page: Open
) -> None:
    page = open_page(woods.at("q=order+by+created"))
    found = page.get_by_role("grid", name="States that were found")
    expect(found).to_have_attribute("aria-rowcount", "201")
    page.keyboard.press("End")
    newest = woods.history()
    assert len(newest) > 800
    expect(page.locator(f"#state-{newest[0]}")).to_be_in_viewport()
    expect(found).to_have_attribute("aria-rowcount", str(len(newest) + 1))


def test_the_end_is_reached_although_the_search_would_be_repeated_meanwhile(
    woods: Wood, open_page: Open
) -> None:
    page = open_page(woods.at("q=order+by+created"))
    expect(page.get_by_role("grid", name="States that were found")).to_have_attribute(
        "aria-rowcount", "201"
    )

    def hold(route: Route) -> None:
        if "fields=uid" not in route.request.url:  # the last states themselves, not their count
            # longer than the page waits after an event, of which the first one says that it is
            # connected
            page.wait_for_timeout(3000)
        route.continue_()

    page.route("**/states?*after=*", hold)
    page.keyboard.press("End")
    expect(page.locator(f"#state-{woods.history()[0]}")).to_be_in_viewport()


def test_what_a_filter_speaks_of_has_columns(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at("q=attr.epoch+>+3+order+by+metrics.val_loss"))
    page.get_by_role("grid", name="States that were found").wait_for()
    titles = page.get_by_role("columnheader").all_inner_texts()
    assert [title.strip(" ▾▴") for title in titles[1:6]] == [
        "Names",
        "Step",
        "epoch",
        "val_loss",
        "loss",
    ]
