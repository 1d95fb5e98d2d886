"""Two states compared on the page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

import datastates
from datastates.maintenance.retention_pass import evict

if TYPE_CHECKING:
    from tests.page.site import Grown, Site

pytestmark = pytest.mark.long


def test_a_marked_state_is_compared_with_the_selected_one(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.goto(shared.address(f"state={grown['warm'].uid}&panel=detail"))
    page.get_by_role("button", name="Mark for diff").click()
    page.goto(page.url.replace(f"state={grown['warm'].uid}", f"state={grown['hot'].uid}"))
    page.get_by_role("button", name=f"Diff with {grown['warm'].uid[:8]}").click()
    diff = page.locator("[data-panel=diff]")
    expect(diff).to_contain_text("The new one came from the old one, 12 steps later.")
    expect(diff.get_by_role("row", name=re.compile("^lr ")).first).to_contain_text("0.1500")
    expect(diff.locator("tr[data-tensor='model/classes.weight']")).to_contain_text("changed")


def test_swap_turns_the_sign_of_what_changed(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"mark={grown['warm'].uid}&state={grown['hot'].uid}&panel=diff"))
    change = (
        page.locator("[data-panel=diff]")
        .get_by_role("row", name=re.compile("^lr "))
        .first.locator("td")
        .last
    )
    expect(change).to_have_text("+0.1300")
    page.get_by_role("button", name="Swap old and new").click()
    expect(change).to_have_text("-0.1300")


def test_cousins_name_their_common_ancestor(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"mark={grown['no-dropout'].uid}&state={grown['hot'].uid}&panel=diff"))
    expect(page.locator("[data-panel=diff]")).to_contain_text(
        f"Both came from {grown['warm'].uid[:8]}"
    )


def test_tensors_are_sorted_and_filtered(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"mark={grown['warm'].uid}&state={grown['hot'].uid}&panel=diff"))
    diff = page.locator("[data-panel=diff]")
    rows = diff.locator("tr[data-tensor]")
    expect(rows.first).to_be_visible()
    assert _percents(rows.locator(".relative").all_inner_texts())[:5] == sorted(
        _percents(rows.locator(".relative").all_inner_texts())[:5], reverse=True
    )
    diff.get_by_role("button", name="path").click()
    expect(diff.get_by_role("columnheader", name="path")).to_have_attribute(
        "aria-sort", "ascending"
    )
    paths = rows.evaluate_all("rows => rows.map(row => row.dataset.tensor)")
    assert paths == sorted(paths, key=str.lower)
    diff.get_by_role("searchbox").fill("classes")
    expect(rows).to_have_count(3)  # the weight and two moments, without the count of steps


def test_a_heat_map_shows_how_much_each_parameter_changed_as_torch_says(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.goto(shared.address(f"mark={grown['warm'].uid}&state={grown['hot'].uid}&panel=diff"))
    row = page.locator("[data-heat='body.0.weight']")
    with datastates.open(shared.folder) as repo:
        old, new = repo.load(grown["warm"].uid), repo.load(grown["hot"].uid)
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        one, other = (
            (
                tree["model"]["body.0.weight"]
                if kind == "weights"
                else tree["optimizer"]["state"]["body.0.weight"][kind]
            ).double()
            for tree in (old, new)
        )
        cell = row.locator(f"[data-kind='{kind}']")
        assert float(cell.get_attribute("data-relative") or "nan") == pytest.approx(
            float((other - one).norm() / one.norm())
        )
    expect(page.get_by_role("figure", name=re.compile("Norm of the change"))).to_contain_text("%")


def test_a_cell_of_the_heat_map_opens_the_histogram_of_its_tensor(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.goto(shared.address(f"mark={grown['warm'].uid}&state={grown['hot'].uid}&panel=diff"))
    page.get_by_role("button", name=re.compile("^body.0.weight, exp_avg_sq: ")).click()
    spread = page.locator("[data-spread='optimizer/state/body.0.weight/exp_avg_sq']")
    expect(spread.get_by_role("img", name=re.compile("^Histograms of"))).to_be_visible()
    with datastates.open(shared.folder) as repo:
        most = [
            float(
                repo.load(grown[rev].uid)["optimizer"]["state"]["body.0.weight"]["exp_avg_sq"].max()
            )
            for rev in ("warm", "hot")
        ]
    shown = [
        float(text)
        for text in (
            spread.get_by_role("row", name=re.compile("^most")).locator("td").all_inner_texts()
        )
    ]
    assert shown == pytest.approx(most, rel=1e-2)
    spread.get_by_label("bins by").select_option("log")
    expect(spread.locator("path.new")).to_be_attached()
    page.reload()
    expect(spread.get_by_label("bins by")).to_have_value("log")


def test_a_diff_of_an_evicted_state_tells_all_else_and_offers_the_nearest(
    site: Site, grown: Grown, page: Page
) -> None:
    site.kill()
    gone, nearest, hot = grown["main~1"].uid, grown["main~2"].uid, grown["hot"].uid
    with datastates.open(site.folder) as repo:
        evict(repo.core, gone)
    site.start()
    page.goto(site.address(f"mark={gone}&state={hot}&panel=diff"))
    diff = page.locator("[data-panel=diff]")
    expect(diff.get_by_role("row", name=re.compile("^lr ")).first).to_be_visible()
    expect(diff).to_contain_text("cannot be compared")
    diff.get_by_role("button", name=re.compile(f"^Compare {nearest[:8]} .* instead")).click()
    expect(diff.locator("tr[data-tensor]").first).to_be_visible()
    assert f"mark={nearest}" in page.url


def test_without_a_mark_the_panel_says_what_to_do(shared: Site, grown: Grown, page: Page) -> None:
    page.goto(shared.address(f"state={grown['hot'].uid}&panel=diff"))
    expect(page.locator("[data-panel=diff]")).to_contain_text("needs two states")


def _percents(texts: list[str]) -> list[float]:
    return [float(found[1]) for text in texts if (found := re.search(r"([\d.e-]+) %", text))]
