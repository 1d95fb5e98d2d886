"""Names made, moved and deleted on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

import datastates
from tests.page.site import READER, TOKEN

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.page.site import Grown, Site

pytestmark = pytest.mark.long


def begin(page: Page, name: str, kind: str = "Tag…") -> Locator:
    """Fill the dialog of the state that is open, and send it."""
    page.get_by_role("button", name=kind).click()
    dialog = page.locator("[data-panel=ref]")
    dialog.get_by_label("Name", exact=True).fill(name)
    dialog.get_by_role("button", name="Make the").click()
    return dialog


def test_without_a_token_it_is_said_how_to_get_one(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"state={grown['main'].uid}&panel=detail"))
    page.get_by_role("button", name="Tag…").click()
    dialog = page.locator("[data-panel=ref]")
    expect(dialog).to_contain_text("datastates serve --write")
    expect(dialog).to_contain_text("--web-tokens")
    dialog.get_by_role("button", name="Enter a token").click()
    expect(page.locator("[data-panel=token]")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("[data-panel=token]")).to_have_count(0)
    expect(dialog).to_be_visible()


def test_a_tag_is_made_with_a_token_and_its_chip_appears(
    writable: Site, grown: Grown, page: Page
) -> None:
    state = grown["main~1"]
    page.goto(writable.address(f"state={state.uid}&panel=detail", token=TOKEN))
    page.get_by_role("button", name="Tag…").click()
    dialog = page.locator("[data-panel=ref]")
    dialog.get_by_label("Name", exact=True).fill("golden")
    dialog.get_by_label("Message").fill("the one")
    dialog.get_by_role("button", name="Make the tag").click()
    expect(dialog).to_have_count(0)
    expect(page.locator("[data-panel=detail] .chips")).to_contain_text("golden")
    expect(page.locator(f"#state-{state.uid}")).to_contain_text("golden")
    with datastates.open(writable.folder) as repo:
        assert repo.state("golden").uid == state.uid


def test_a_branch_is_made(writable: Site, grown: Grown, page: Page) -> None:
    page.goto(writable.address(f"state={grown['main~1'].uid}&panel=detail", token=TOKEN))
    expect(begin(page, "study/again", "Branch…")).to_have_count(0)
    expect(page.locator("[data-panel=detail] .chips")).to_contain_text("study/again")


def test_a_name_that_is_taken_shows_who_has_it(writable: Site, grown: Grown, page: Page) -> None:
    page.goto(writable.address(f"state={grown['main'].uid}&panel=detail", token=TOKEN))
    dialog = begin(page, "warm")
    expect(dialog).to_contain_text("That name is taken")
    dialog.get_by_role("button", name=grown["warm"].uid[:8]).click()
    expect(page.locator("[data-panel=detail] code.uid")).to_have_text(grown["warm"].uid)


def test_a_name_that_may_not_be_is_explained(writable: Site, grown: Grown, page: Page) -> None:
    page.goto(writable.address(f"state={grown['main'].uid}&panel=detail", token=TOKEN))
    dialog = begin(page, "a:b")
    expect(dialog.locator(".trouble")).to_contain_text("no spaces")
    expect(dialog.locator(".trouble")).to_contain_text("'a-b' would do")


def test_a_tag_is_moved_and_deleted_after_a_question(
    writable: Site, grown: Grown, page: Page
) -> None:
    page.goto(writable.address(f"state={grown['warm'].uid}&panel=detail", token=TOKEN))
    chips = page.locator("[data-panel=detail] .chips")
    chips.get_by_role("button", name="warm").click()
    dialog = page.locator("[data-panel=edit-ref]")
    dialog.get_by_label("Move to").fill("warm~1")
    dialog.get_by_role("button", name="Move…").click()
    dialog.get_by_role("button", name="Yes, move it").click()
    expect(dialog).to_have_count(0)
    expect(chips).to_have_count(0)
    page.goto(writable.address(f"state={grown['warm~1'].uid}&panel=detail"))
    chips.get_by_role("button", name="warm").click()
    dialog.get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="No").click()
    dialog.get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="Yes, delete it").click()
    expect(chips).to_have_count(0)


def test_who_was_too_late_is_told_to_look_again(writable: Site, grown: Grown, page: Page) -> None:
    page.goto(writable.address(f"state={grown['warm'].uid}&panel=detail", token=TOKEN))
    page.locator("[data-panel=detail] .chips").get_by_role("button", name="warm").click()
    dialog = page.locator("[data-panel=edit-ref]")
    dialog.get_by_role("button", name="Delete…").click()
    with datastates.open(writable.folder) as repo:
        repo.move("warm", "main", expected="warm")
    dialog.get_by_role("button", name="Yes, delete it").click()
    expect(dialog.get_by_role("alert")).to_contain_text("It moved meanwhile: look again")
    dialog.get_by_role("button", name="Look again").click()
    expect(dialog).to_contain_text(grown["main"].uid[:8])


def test_a_token_that_may_only_read_is_told_so(writable: Site, grown: Grown, page: Page) -> None:
    page.goto(writable.address(f"state={grown['main'].uid}&panel=detail", token=READER))
    page.get_by_role("button", name="Tag…").click()
    dialog = page.locator("[data-panel=ref]")
    expect(dialog).to_contain_text("Your token may only read.")
    expect(dialog.get_by_label("Name", exact=True)).to_be_disabled()
    expect(dialog.get_by_role("button", name="Make the")).to_be_disabled()
    page.keyboard.press("Escape")
    page.locator("[data-panel=detail] .chips").get_by_role("button", name="main").click()
    dialog = page.locator("[data-panel=edit-ref]")
    for name in ("Move…", "Delete…"):
        expect(dialog.get_by_role("button", name=name)).to_be_disabled()
