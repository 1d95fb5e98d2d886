"""The detail of a state and the curves, as a reader uses them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, Route, expect
from safetensors import safe_open

from tests.page.site import TOKEN, new_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

    from tests.page.site import Grown, Site

pytestmark = pytest.mark.long


def panel(page: Page, name: str) -> Locator:
    """A panel or a dialog."""
    return page.locator(f"[data-panel={name}]")


def test_a_click_on_a_row_opens_all_that_is_known_of_the_state(
    shared: Site, grown: Grown, page: Page
) -> None:
    state = grown["main"]
    page.goto(shared.address())
    page.locator(f"#state-{state.uid}").click()
    detail = panel(page, "detail")
    expect(detail).to_contain_text(state.uid)
    expect(detail).to_contain_text("durable")
    for part in (
        "loss",
        "variant",
        "Where its bytes are",
        "local",
        f"datastates restore {state.uid} --into",
    ):
        expect(detail).to_contain_text(part)
    assert state.uid in page.url


def test_keys_select_open_and_close(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address())
    page.locator(f"#state-{grown['soup'].uid}").wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(panel(page, "detail").locator("code.uid")).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel(page, "detail")).to_have_count(0)


def test_a_fork_names_the_branch_of_each_child_and_a_click_follows_it(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.goto(shared.address(f"state={grown['warm'].uid}&panel=detail"))
    detail = panel(page, "detail")
    expect(detail).to_contain_text("3 paths fork here")
    child = detail.locator(".kin dd > div", has_text="no-dropout")
    expect(child).to_have_count(1)
    child.locator("[data-child]").click()
    expect(detail.locator("dl.facts").first).to_contain_text(str(grown["warm"].step + 1))
    detail.locator(".kin dd > div").first.get_by_role("button").click()
    expect(detail.locator("code.uid")).to_have_text(grown["warm"].uid)


def test_tensors_are_filtered_and_their_norms_read_when_asked(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.goto(shared.address(f"state={grown['main'].uid}&panel=detail"))
    tensors = panel(page, "detail").locator(".tensors")
    tensors.locator("summary").click()
    expect(tensors.get_by_role("row", name="save model/classes.weight")).to_contain_text(
        re.compile("4 . 32")
    )
    expect(tensors.get_by_role("row", name="tied to")).to_have_count(1)
    tensors.get_by_role("searchbox").fill("CLASSES")
    # the weight, and what the optimizer keeps of it
    expect(tensors.locator("tbody tr")).to_have_count(1 + 3)
    expect(tensors.get_by_role("columnheader", name="norm")).to_have_count(0)
    tensors.get_by_role("button", name="read norms").click()
    expect(tensors.get_by_role("columnheader", name="norm")).to_be_visible()


def test_one_tensor_and_the_whole_state_are_downloaded(
    shared: Site, grown: Grown, page: Page, tmp_path: Path
) -> None:
    page.goto(shared.address(f"state={grown['main'].uid}&panel=detail"))
    tensors = panel(page, "detail").locator(".tensors")
    tensors.locator("summary").click()
    for label, expected in (
        ("save model/classes.weight", {"model/classes.weight"}),
        ("download all tensors", None),
    ):
        with page.expect_download() as coming:
            tensors.get_by_role("link", name=label).click()
        coming.value.save_as(tmp_path / "one.safetensors")
        with safe_open(tmp_path / "one.safetensors", "np") as file:
            keys = set(file.keys())
            assert keys == expected if expected else len(keys) > 10


def test_what_needs_a_token_is_downloaded_with_it(
    writable: Site, grown: Grown, page: Page, tmp_path: Path
) -> None:
    page.goto(writable.address(f"state={grown['main'].uid}&panel=detail", token=TOKEN))
    tensors = panel(page, "detail").locator(".tensors")
    tensors.locator("summary").click()
    with page.expect_download() as coming:
        tensors.get_by_role("button", name="save model/classes.weight").click()
    coming.value.save_as(tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", "np") as file:
        assert set(file.keys()) == {"model/classes.weight"}


def test_a_state_that_does_not_exist_is_a_problem_with_a_way_out(shared: Site, page: Page) -> None:
    page.goto(shared.address(f"state={'0' * 24}&panel=detail"))
    expect(panel(page, "detail").get_by_role("alert")).to_contain_text("0" * 24)
    panel(page, "detail").get_by_role("button", name="Try again").click()
    expect(panel(page, "detail").get_by_role("alert")).to_be_visible()


# Curves


def test_curves_of_branches_are_chosen_and_the_best_is_flagged(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.goto(shared.address("panel=curves"))
    curves = panel(page, "curves")
    chart = curves.locator("[data-key=loss]")
    rows = chart.locator("table.legend tbody tr")
    expect(chart.locator("canvas")).to_be_visible()
    expect(rows).to_have_count(5)
    curves.get_by_role("button", name="hot", exact=True).click()
    expect(rows).to_have_count(4)
    expect(chart.get_by_text("best of all").first).to_be_attached()
    curves.get_by_role("button", name="val/accuracy").click()
    accuracy = curves.locator("[data-key='val/accuracy']")
    expect(accuracy.get_by_role("button", name="best is highest")).to_be_visible()
    curves.get_by_role("button", name="loss", exact=True).click()
    expect(chart).to_have_count(0)
    assert "key=val%2Faccuracy" in page.url
    accuracy.locator("tbody").get_by_role("button").first.click()
    expect(accuracy).to_be_visible()
    expect(panel(page, "detail").locator("code.uid")).to_be_visible()


def test_a_click_on_a_point_opens_its_state_beside_the_curves_and_drag_zooms(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.goto(shared.address("panel=curves&head=main&key=loss"))
    over = panel(page, "curves").locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 20, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40, steps=4)
    page.mouse.up()
    reset = panel(page, "curves").get_by_role("button", name="Reset zoom")
    reset.click()
    expect(reset).to_have_count(0)
    over.click(position={"x": box["width"] - 3, "y": box["height"] / 2})
    expect(panel(page, "detail").locator("code.uid")).to_have_text(grown["main"].uid)
    expect(over).to_be_visible()
    panel(page, "curves").get_by_role("button", name="Close the selected state").click()
    expect(panel(page, "detail")).to_have_count(0)
    picked = panel(page, "curves").locator(".picked")
    expect(picked).to_contain_text(grown["main"].uid[:8])
    picked.get_by_role("button", name="Open").click()
    expect(panel(page, "detail").locator("code.uid")).to_have_text(grown["main"].uid)


def test_smoothing_and_logarithm_are_shown_beside_the_raw_values(shared: Site, page: Page) -> None:
    page.goto(shared.address("panel=curves&head=main&key=loss"))
    curves = panel(page, "curves")
    expect(curves.get_by_role("columnheader", name="smoothed")).to_have_count(0)
    curves.get_by_role("slider").fill("0.9")
    expect(curves.get_by_role("columnheader", name="smoothed")).to_be_visible()
    curves.get_by_role("checkbox", name="logarithmic").check()
    expect(curves.locator("canvas")).to_be_visible()


# Dialogs


def test_help_shows_keys_and_its_queries_can_be_used(shared: Site, page: Page) -> None:
    page.goto(shared.address())
    page.keyboard.press("?")
    expect(panel(page, "help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel(page, "help")).to_have_count(0)
    page.keyboard.press("?")
    panel(page, "help").get_by_role("button", name="branch = main").click()
    expect(panel(page, "help")).to_have_count(0)
    expect(page.get_by_role("grid", name="States that were found")).to_be_visible()


def test_the_focus_stays_in_a_dialog(shared: Site, page: Page) -> None:
    page.goto(shared.address())
    page.keyboard.press("?")
    panel(page, "help").wait_for()
    for _ in range(25):
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || document.activeElement.closest('dialog')"
            " !== null"
        )


def test_a_token_is_asked_for_and_kept_for_the_tab_only(
    writable: Site, grown: Grown, browser: Browser
) -> None:
    with new_page(browser) as page:
        page.goto(writable.address())
        dialog = panel(page, "token")
        dialog.get_by_label("Token", exact=True).fill(TOKEN)
        dialog.get_by_role("button", name="Use it").click()
        expect(page.locator(f"#state-{grown['soup'].uid}")).to_be_visible()
        assert page.evaluate("JSON.stringify(localStorage)").find(TOKEN) < 0
        assert TOKEN in page.evaluate("JSON.stringify(sessionStorage)")
        assert TOKEN not in page.url


def test_curves_of_a_state_are_those_of_its_branches(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.goto(shared.address(f"state={grown['hot@step:12'].uid}&panel=detail"))
    page.locator(".actions").get_by_role("button", name="Curves").click()
    rows = panel(page, "curves").locator("[data-key=loss] table.legend tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="hot/cooler")).to_have_count(1)


def test_curves_of_a_state_are_those_of_its_branches_before_the_page_has_read_any(
    shared: Site, grown: Grown, page: Page
) -> None:
    late: list[Route] = []
    # what the page asks is not answered; the button is
    page.route("**/refs", lambda route: route.continue_() if late else late.append(route))
    page.goto(shared.address(f"state={grown['hot@step:12'].uid}&panel=detail"))
    page.locator(".actions").get_by_role("button", name="Curves").click()
    expect(panel(page, "curves").locator("[data-key=loss] table.legend tbody tr")).to_have_count(2)


def test_on_a_phone_a_panel_covers_the_page_until_it_is_closed(
    shared: Site, grown: Grown, browser: Browser
) -> None:
    with new_page(browser, viewport={"width": 390, "height": 844}) as page:
        page.goto(shared.address())
        page.locator(f"#state-{grown['soup'].uid}").click()
        panel(page, "detail").locator("code.uid").wait_for()
        assert page.evaluate(
            "document.elementFromPoint(5, 400).closest('[data-panel=detail], .place') !== null"
        )
        assert page.evaluate("document.documentElement.scrollWidth") == 390, (
            "nothing is wider than the screen"
        )
        page.get_by_role("button", name="Close state").click()
        expect(panel(page, "detail")).to_have_count(0)
