"""Nothing serious is wrong for who cannot see or point, in any panel, theme and width: checked by axe-core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.page.site import ROOT, new_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.page.site import Grown, Site

pytestmark = pytest.mark.slow

AXE = ROOT / "api" / "ui" / "node_modules" / "axe-core" / "axe.min.js"
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
PANELS = (
    "branches",
    "compare",
    "graph",
    "studies",
    "now",
    "table",
    "detail",
    "tensors",
    "curves",
    "diff",
    "help",
    "ref",
    "edit-ref",
    "token",
)


@pytest.mark.in_turn
@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious(shared: Site, grown: Grown, browser: Browser, look: str) -> None:
    with new_page(browser, **LOOKS[look], reduced_motion="reduce") as page:
        serious = [f"{panel}: {fault}" for panel in PANELS for fault in faults(page, shared, grown, panel)]
    assert not serious, "\n".join(serious)


def faults(page: Page, site: Site, grown: Grown, panel: str) -> list[str]:
    """What axe finds in a panel."""
    show(page, site, grown, panel)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes']][:3]}" for one in serious]


def show(page: Page, site: Site, grown: Grown, panel: str) -> None:
    """Open a panel, and wait for what it shows."""
    uid, other = grown["warm"].uid, grown["hot"].uid
    query = {
        "branches": "view=branches",
        "compare": "view=compare&compare.beside=main,hot",
        "graph": "view=graph",
        "studies": "view=studies",
        "now": "view=now",
        "table": "",
        "curves": f"state={uid}&panel=curves",
        "diff": f"mark={uid}&state={other}&panel=diff",
        "help": "",
    }
    page.goto(site.address(query.get(panel, f"state={uid}&panel=detail")))
    awaited = {
        "branches": "[data-branch]",
        "compare": "[data-beside]",
        "graph": ".row",
        "studies": "[data-merge]",
        "now": "[data-tier]",
        "table": ".row",
        "curves": "[data-panel=curves] canvas",
        "diff": "tr[data-tensor]",
        "help": ".row",
    }
    page.locator(awaited.get(panel, "[data-panel=detail] [data-child]")).first.wait_for()
    if panel == "help":
        page.keyboard.press("?")
    elif panel == "tensors":
        page.locator(".tensors summary").click()
        page.locator(".tensors table").wait_for()
    elif panel in ("ref", "token"):
        page.get_by_role("button", name="Tag…").click()
        if panel == "token":
            page.get_by_role("button", name="Enter a token").click()
    elif panel == "edit-ref":
        page.locator(".chips").get_by_role("button", name="warm").click()
    if panel in ("help", "ref", "token", "edit-ref"):
        page.locator(f"[data-panel={panel}]").wait_for()
