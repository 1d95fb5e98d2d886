"""Nothing serious is wrong for who cannot see or point, in any panel, theme and width: checked
by axe-core."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import datastates
from tests.page.conftest import serving
from tests.page.site import ROOT, new_page

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from tests.page.site import Grown, Site

pytestmark = pytest.mark.long

UI = ROOT / "api" / "ui" / "src"
AXE = ROOT / "api" / "ui" / "node_modules" / "axe-core" / "axe.min.js"
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
SHOWN: dict[str, tuple[str, str]] = {
    "branches": ("view=branches", "[data-branch]"),
    "branch": ("view=branch&head=hot", "[data-kept]"),
    "compare": ("view=compare&compare.beside=main,hot", "[data-beside]"),
    "graph": ("view=graph", ".row"),
    "states": ("view=states", ".row"),
    "studies": ("view=studies", "[data-merge]"),
    "now": ("view=now", "[data-forecast]"),
    "detail": ("state={warm}&panel=detail", "[data-panel=detail] [data-child]"),
    "curves": ("state={warm}&panel=curves", "[data-panel=curves] canvas"),
    "diff": (
        "mark={warm}&state={hot}&panel=diff&diff.tensor=model/head.weight",
        "[data-spread] svg",
    ),
}
"""Addresses, and what is there once they are shown."""

OPENED: dict[str, tuple[str, str]] = {
    "help": ("states", "[data-panel=help]"),
    "goto": ("graph", "dialog[open]"),
    "export": ("curves", "[data-offer=curves]"),
    "views": ("branches", ".menu .drop"),
    "tensors": ("detail", ".tensors table"),
    "ref": ("detail", "[data-panel=ref]"),
    "edit-ref": ("detail", "[data-panel=edit-ref]"),
    "token": ("detail", "[data-panel=token]"),
}
"""What is opened in one of these, and what is there then."""


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious(shared: Site, grown: Grown, browser: Browser, look: str) -> None:
    with new_page(browser, **LOOKS[look], reduced_motion="reduce") as page:
        found = [
            f"{view}: {fault}"
            for view in (*SHOWN, *OPENED)
            for fault in faults(page, shared, grown, view)
        ]
    assert not found, "\n".join(found)


def test_axe_finds_nothing_serious_in_an_empty_repository(browser: Browser, tmp_path: Path) -> None:
    with (
        datastates.open(tmp_path / "runs", memory_bytes=16 << 20) as repo,
        serving(repo) as address,
        new_page(browser, **LOOKS["phone"], reduced_motion="reduce") as page,
    ):
        for view in ("branches", "graph", "compare", "studies", "now"):
            page.goto(f"{address}/?view={view}")
            page.get_by_text("Largest branches" if view == "now" else "yet", exact=False).wait_for()
            assert serious(page) == [], view


def test_no_view_panel_or_dialog_is_left_out() -> None:
    written = {
        name: (UI / "lib" / f"{name}.ts").read_text(encoding="utf-8")
        for name in ("address", "view.svelte")
    }

    def members(file: str, kind: str) -> set[str]:
        (said,) = re.findall(rf"^export type {kind} = (.+);$", written[file], re.MULTILINE)
        return set(re.findall(r'"([a-z]+)"', said)) - {"none"}

    every = (
        members("address", "Scene") | members("address", "Panel") | members("view.svelte", "Dialog")
    )
    assert len(every) >= 12
    assert every <= SHOWN.keys() | OPENED.keys()


def faults(page: Page, site: Site, grown: Grown, view: str) -> list[str]:
    """What axe finds in a view."""
    show(page, site, grown, view)
    return serious(page)


def serious(page: Page) -> list[str]:
    """What axe finds in what is shown."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes']][:3]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def show(page: Page, site: Site, grown: Grown, view: str) -> None:
    """Show a view, or open what lies in one, and wait for it."""
    place, awaited = OPENED.get(view, (view, ""))
    query, there = SHOWN[place]
    page.goto(site.address(query.format(warm=grown["warm"].uid, hot=grown["hot"].uid)))
    page.locator(there).first.wait_for()
    match view:
        case "help" | "goto":
            page.keyboard.press({"help": "?", "goto": "g"}[view])
        case "export":
            page.get_by_role("button", name="Export", exact=True).click()
        case "views":
            page.get_by_role("button", name="Saved views").click()
        case "tensors":
            page.locator(".tensors summary").click()
        case "ref" | "token":
            page.get_by_role("button", name="Tag…").click()
            if view == "token":
                page.get_by_role("button", name="Enter a token").click()
        case "edit-ref":
            page.locator(".chips").get_by_role("button", name="warm").click()
    if awaited:
        page.locator(awaited).first.wait_for()
