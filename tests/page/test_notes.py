"""Notes on the page: written, edited and deleted with a token; and whatever somebody writes, it
can do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.page.site import TOKEN

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.page.site import Grown, Site

pytestmark = pytest.mark.long

ATTACKS = (
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "<svg onload=window.hacked=1><animate onbegin=window.hacked=1 attributeName=x dur=1s>",
    '<iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>',
    "<style>* { display: none }</style>",
    '<form action="https://evil.invalid"><input name=q><button>x</button></form>',
    "[click](javascript:window.hacked=1)",
    "[click](JaVaScRiPt&#58;window.hacked=1)",
    "[click](&#x6A;avascript:window.hacked=1)",
    "[click](java\tscript:window.hacked=1)",
    "[click](data:text/html,<script>parent.hacked=1</script>)",
    "[click][ref]\n\n[ref]: javascript:window.hacked=1",
    "<javascript:window.hacked=1>",
    '[a](https://example.org/"onmouseover="window.hacked=1)',
    '[a](https://example.org "x\\" onclick=\\"window.hacked=1")',
    "![pixel](https://evil.invalid/pixel.png)",
    '![x](x" onerror="window.hacked=1)',
    '<a href="javascript:window.hacked=1" style="position:fixed;inset:0">all of it</a>',
    (
        '<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1'
        ' onerror=window.hacked=1&gt;">'
    ),
    "```<img src=x onerror=window.hacked=1>\n<script>window.hacked = 1</script>\n```",
    "# <details open ontoggle=window.hacked=1>",
    "| a |\n|---|\n| <img src=x onerror=window.hacked=1> |",
)


def write(site: Site, uid: str, text: str, author: str = "mallory") -> None:
    body = {"state": uid, "text": text, "author": author}
    made = httpx.post(
        f"http://127.0.0.1:{site.port}/api/v1/repositories/runs/notes",
        json=body,
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert made.status_code == 201


def section(page: Page, title: str = "Notes") -> Locator:
    return page.get_by_role("region", name=title, exact=True)


def test_a_note_is_written_edited_and_deleted(writable: Site, grown: Grown, page: Page) -> None:
    page.goto(writable.address(f"state={grown['main~1'].uid}&panel=detail", token=TOKEN))
    notes = section(page)
    expect(notes).to_contain_text("Nothing is noted", timeout=20_000)  # the server has just begun

    notes.get_by_role("button", name="Write a note").click()
    notes.get_by_label("Markdown").fill(
        "Diverges **here**, see [the log](https://example.org/log)\n\n- one\n- two"
    )
    notes.get_by_label("Your name").fill("ada")
    notes.get_by_role("button", name="Save").click()

    expect(notes.locator("article strong")).to_have_text("here")
    expect(notes.locator("article li")).to_have_text(["one", "two"])
    expect(notes.locator("article")).to_contain_text("ada")
    link = notes.get_by_role("link", name="the log")
    expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(link).to_have_attribute("href", "https://example.org/log")

    notes.get_by_role("button", name="Edit").click()
    notes.get_by_label("Markdown").fill("It did not.")
    notes.get_by_role("button", name="Save").click()
    expect(notes.locator("article .text")).to_have_text("It did not.")
    expect(notes.locator("article")).to_contain_text("edited")
    page.reload()
    expect(notes.locator("article .text")).to_have_text("It did not.")

    notes.get_by_role("button", name="Delete").click()
    notes.get_by_role("button", name="Yes, delete it").click()
    expect(notes.locator("article")).to_have_count(0)


def test_two_people_who_edit_one_note_lose_no_text(
    writable: Site, grown: Grown, page: Page
) -> None:
    uid = grown["main~2"].uid
    write(writable, uid, "first", author="ada")
    page.goto(writable.address(f"state={uid}&panel=detail", token=TOKEN))
    other = page.context.new_page()
    other.goto(writable.address(f"state={uid}&panel=detail", token=TOKEN))
    for who in (page, other):
        section(who).get_by_role("button", name="Edit").click()

    section(page).get_by_label("Markdown").fill("mine")
    section(page).get_by_role("button", name="Save").click()
    expect(section(page).locator("article .text")).to_have_text("mine")
    section(other).get_by_label("Markdown").fill("theirs")
    section(other).get_by_role("button", name="Save").click()

    expect(section(other)).to_contain_text("read it again")
    expect(section(other).get_by_label("Markdown")).to_have_value("theirs")
    section(other).get_by_role("button", name="Cancel").click()
    expect(
        section(other).locator("article .text"), "the event brought the other text"
    ).to_have_text("mine")
    section(page).get_by_role("button", name="Edit").click()
    section(other).get_by_role("button", name="Delete").click()
    section(other).get_by_role("button", name="Yes, delete it").click()
    expect(section(page).locator("article")).to_have_count(0)
    expect(section(page).get_by_label("Markdown")).to_have_value("mine")


def test_a_branch_has_notes_of_its_own(writable: Site, grown: Grown, page: Page) -> None:
    page.goto(writable.address(f"state={grown['main'].uid}&panel=detail", token=TOKEN))
    notes = section(page, "Notes on branch main")
    notes.get_by_role("button", name="Write a note").click()
    notes.get_by_label("Markdown").fill("the one that we ship")
    notes.get_by_role("button", name="Save").click()

    expect(notes.locator("article")).to_contain_text("the one that we ship")
    expect(section(page).locator("article")).to_have_count(0)


def test_whoever_may_only_read_gets_no_form(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"state={grown['main'].uid}&panel=detail"))
    expect(section(page)).to_contain_text("Nothing is noted")
    expect(page.get_by_role("button", name="Write a note")).to_have_count(0)


def test_what_somebody_writes_into_a_note_can_do_nothing(
    writable: Site, grown: Grown, page: Page
) -> None:
    uid = grown["warm~1"].uid
    for attack in ATTACKS:
        write(writable, uid, attack, author=attack[:255])
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    page.goto(writable.address(f"state={uid}&panel=detail", token=TOKEN))
    notes = section(page)
    expect(notes.locator("article")).to_have_count(len(ATTACKS))
    expect(notes.locator("article .text").last).not_to_be_empty()

    inside = (
        "script, img, svg, iframe, style, form, input, math, details, object, embed, [style],"
        " [onerror], [onclick], [onmouseover], [id]"
    )
    assert notes.locator("article").locator(inside).count() == 0
    addresses = notes.locator("article a").evaluate_all(
        "links => links.map((link) => [link.getAttribute('href'), link.rel, link.target])"
    )
    assert [
        address
        for address, _, _ in addresses
        if address is not None and not address.startswith(("https://", "mailto:"))
    ] == []
    assert {(rel, target) for _, rel, target in addresses} == {
        ("noopener noreferrer nofollow", "_blank")
    }
    notes.locator("article a:not([href^=http])").evaluate_all(
        "links => links.forEach((link) => link.click())"
    )
    assert page.evaluate("window.hacked") is None
    assert [
        url for url in asked if not url.startswith((f"http://127.0.0.1:{writable.port}/", "blob:"))
    ] == []
    expect(notes.locator("article").first).to_be_visible()
