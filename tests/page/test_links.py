"""Links that others made: what they name and is not there is said, and they leave alone what
somebody has chosen for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from tests.page.conftest import Wood
    from tests.page.site import Site

pytestmark = pytest.mark.long


def test_a_repository_that_is_not_there_is_said_with_those_that_are(
    woods: Wood, page: Page
) -> None:
    page.goto(f"{woods.address}/?repo=forest&q=step+%3E+3&view=states")

    trouble = page.get_by_role("alert")
    expect(trouble).to_contain_text("There is no repository forest here")
    assert "repo=forest" in page.url
    trouble.get_by_role("button", name="wood").click()
    expect(trouble).to_have_count(0)
    expect(page.locator("[data-scene=branches]")).to_contain_text("main")
    page.go_back()
    expect(trouble).to_contain_text("forest")


def test_a_state_that_is_gone_is_said(woods: Wood, page: Page) -> None:
    page.goto(woods.at(f"repo=wood&state={'0' * 24}"))

    expect(page.get_by_text("There is no state")).to_contain_text("wood")
    page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_text("There is no state")).to_have_count(0)
    assert "state=" not in page.url


def test_a_link_of_somebody_else_leaves_my_columns_alone(woods: Wood, page: Page) -> None:
    page.goto(woods.at("repo=wood"))
    page.get_by_role("button", name="Columns").click()
    page.get_by_role("button", name="Move step to the left").or_(
        page.get_by_role("button", name="Move Step to the left")
    ).first.wait_for()
    page.get_by_role("checkbox").first.uncheck()
    mine = page.evaluate("localStorage.getItem('datastates.view.wood')")
    assert mine is not None

    page.goto(woods.at("repo=wood&columns=uid"))
    page.locator("[role=row][id^=state-]").first.wait_for()
    assert page.evaluate("localStorage.getItem('datastates.view.wood')") == mine


def test_a_view_with_a_name_is_shown_again_renamed_and_deleted(woods: Wood, page: Page) -> None:
    page.goto(woods.at("repo=wood&q=step+%3E+3&sort=step+desc"))
    menu = page.get_by_role("button", name="Saved views")
    menu.click()
    page.get_by_label("Name of what is shown").fill("late steps")
    page.keyboard.press("Enter")

    page.goto(f"{woods.address}/?repo=wood")
    menu.click()
    page.get_by_role("button", name="late steps", exact=True).click()
    page.locator("[role=row][id^=state-]").first.wait_for()
    assert "q=step+%3E+3" in page.url
    assert "sort=step+desc" in page.url

    page.get_by_role("button", name="Rename late steps").click()
    page.get_by_label("New name of late steps").fill("steps")
    page.keyboard.press("Enter")
    page.reload()
    menu.click()
    expect(page.get_by_role("button", name="steps", exact=True)).to_be_visible()
    page.get_by_role("button", name="Delete steps").click()
    expect(page.get_by_text("No view has a name yet")).to_be_visible()


def test_a_link_that_names_no_repository_draws_the_curves_that_it_names(
    shared: Site, page: Page
) -> None:
    page.goto(f"http://127.0.0.1:{shared.port}/?panel=curves&key=loss&curves.lines=main,hot")
    expect(page.locator("[data-panel=curves] [data-key=loss]")).to_have_attribute(
        "data-curves", "2"
    )
    expect(page.get_by_text("any more")).to_have_count(0)
