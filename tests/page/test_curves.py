"""Curves of many branches: which are drawn, over what, averaged by what; and all of it in the
address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

import datastates
from tests.page.conftest import serving
from tests.page.seeds import RATES, sow
from tests.page.site import ROOT

pytestmark = pytest.mark.long

SEEDS, STEPS = 3, 30
BRANCHES = 1 + len(RATES) * SEEDS


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of ``main`` and twelve branches of four rates and three seeds."""
    if not (ROOT / "api" / "static" / "index.html").exists():
        pytest.skip("the page is not built: make ui")
    with datastates.open(tmp_path_factory.mktemp("study") / "runs", memory_bytes=16 << 20) as repo:
        sow(repo, seeds=SEEDS, steps=STEPS)
        with serving(repo) as address:
            yield address


def asked(study: str, route: str, **query: Any) -> dict[str, Any]:
    """What the API says."""
    found: dict[str, Any] = (
        httpx.get(f"{study}/api/v1/repositories/wood/{route}", params=query)
        .raise_for_status()
        .json()
    )
    return found


def open_(page: Page, study: str, query: str = "") -> Locator:
    """The curves of the loss in a view, when they are drawn."""
    page.goto(f"{study}/?view=branches&panel=curves&key=loss{query and '&' + query}")
    chart = page.locator("[data-panel=curves] [data-key=loss]")
    chart.locator("canvas").wait_for()
    return chart


def rows(chart: Locator) -> Locator:
    return chart.locator("table.legend tbody tr")


def names(chart: Locator) -> set[str]:
    return {
        str(name)
        for name in rows(chart).locator("th").evaluate_all("cells => cells.map(cell => cell.title)")
    }


def said(page: Page, name: str) -> str | None:
    """What the address says of the curves."""
    return parse_qs(urlparse(page.url).query).get(f"curves.{name}", [None])[0]


def branches(page: Page) -> Locator:
    return page.get_by_role("group", name="Branches")


def test_the_best_are_drawn_by_a_rule_that_the_address_says(study: str, page: Page) -> None:
    chart = open_(page, study)
    expect(rows(chart)).to_have_count(8)
    branches(page).get_by_role("button", name="Top 5").click()
    expect(rows(chart)).to_have_count(5)
    best = asked(study, "branches", metric="loss", sort="best", limit=5)["items"]
    assert names(chart) == {one["name"] for one in best}
    assert said(page, "pick") == "top5"
    branches(page).get_by_role("spinbutton").fill("2")
    branches(page).get_by_role("button", name="Bottom 2").click()
    expect(rows(chart)).to_have_count(2)
    worst = asked(study, "branches", metric="loss", sort="-best", limit=2)["items"]
    assert names(chart) == {one["name"] for one in worst}
    branches(page).get_by_role("button", name="All").click()
    expect(rows(chart)).to_have_count(BRANCHES)
    branches(page).get_by_role("button", name="None").click()
    expect(page.get_by_text("No branch is chosen.")).to_be_visible()
    page.reload()
    expect(page.get_by_text("No branch is chosen.")).to_be_visible()


def test_what_is_better_is_turned_round_for_chart_and_rule(study: str, page: Page) -> None:
    chart = open_(page, study, "curves.pick=top2")
    expect(rows(chart)).to_have_count(2)
    chart.get_by_role("button", name="best is lowest").click()
    most = asked(study, "branches", metric="loss", sort="best", direction="max", limit=2)["items"]
    expect(rows(chart).locator(f"th[title='{most[0]['name']}']")).to_be_visible()
    expect(chart.get_by_role("button", name="best is highest")).to_be_visible()
    assert said(page, "turned") == "loss"


def test_branches_are_searched_and_chosen_by_name(study: str, page: Page) -> None:
    chart = open_(page, study)
    search = branches(page).get_by_role("searchbox", name="Search branches")
    search.fill("SEED-1 0.3")
    expect(branches(page).locator("[aria-pressed].choice")).to_have_count(1)
    search.fill("seed-1")
    branches(page).get_by_role("button", name="Draw only these").click()
    expect(rows(chart)).to_have_count(len(RATES))
    assert names(chart) == {f"lr-{rate}/seed-1" for rate in RATES}
    branches(page).get_by_role("button", name="lr-0.3/seed-1").click()
    expect(rows(chart)).to_have_count(len(RATES) - 1)
    page.reload()
    expect(rows(chart)).to_have_count(len(RATES) - 1)
    assert "head=" not in page.url, "the history beside stays as it is"


def test_groups_are_means_with_a_band_that_is_said(study: str, page: Page) -> None:
    chart = open_(page, study, "curves.pick=all")
    page.get_by_role("combobox", name="Mean by").select_option("config.lr")
    expect(rows(chart)).to_have_count(len(RATES))
    lines = asked(
        study, "series", head=[f"lr-0.03/seed-{seed}" for seed in range(SEEDS)], key="loss"
    )["lines"]
    last = [line["values"][-1] for line in lines]
    row = rows(chart).filter(has_text="lr 0.03")
    expect(row).to_contain_text(f"{SEEDS} branches")
    expect(row.locator("td").nth(0)).to_have_text(f"{sum(last) / SEEDS:#.4g}")
    expect(row.locator("td").nth(1)).to_have_text(f"{min(last):#.4g} \u2013 {max(last):#.4g}")
    page.get_by_role("combobox", name="Band around the mean").select_option("sigma")
    mean = sum(last) / SEEDS
    sigma = (sum((value - mean) ** 2 for value in last) / (SEEDS - 1)) ** 0.5
    expect(row.locator("td").nth(1)).to_have_text(f"{sigma:#.4g}")
    expect(chart.get_by_role("columnheader", name="\u00b1 1 \u03c3")).to_be_visible()
    assert (said(page, "group"), said(page, "band")) == ("config.lr", "sigma")


@pytest.mark.parametrize(
    ("axis", "label"), [("time", "time"), ("elapsed", "time since it began"), ("epoch", "epoch")]
)
def test_curves_are_drawn_over_time_and_epochs_too(
    study: str, page: Page, axis: str, label: str
) -> None:
    chart = open_(page, study, "curves.lines=lr-0.1%252Fseed-1")
    page.get_by_role("combobox", name="What curves are drawn over").select_option(axis)
    expect(chart.get_by_role("img", name=f"loss over {label};")).to_be_visible()
    assert said(page, "x") == axis
    expect(rows(chart)).to_have_count(1)
    chart.locator(".u-over").hover()
    expect(chart.get_by_role("columnheader").nth(1)).to_contain_text(
        {"time": "at 20", "elapsed": "at after", "epoch": "at epoch"}[axis]
    )


def test_far_outliers_are_left_out_and_it_is_said(study: str, page: Page) -> None:
    chart = open_(page, study, "curves.pick=all")
    note = chart.get_by_role("status")
    expect(note).to_contain_text("lr-0.3/seed-0")
    note.get_by_role("button", name="Show all").click()
    expect(note).to_have_count(0)
    assert said(page, "y") == "all"
    page.get_by_role("combobox", name="Which values are in sight").select_option("90")
    expect(note).to_contain_text("the central 90 %")


def test_a_point_that_is_picked_opens_its_state_and_the_curves_stay(study: str, page: Page) -> None:
    chart = open_(page, study, "curves.lines=lr-0.1%252Fseed-1")
    over = chart.locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    over.click(position={"x": box["width"] - 3, "y": box["height"] / 2})
    newest = asked(study, "resolve", rev="lr-0.1/seed-1")["uid"]
    expect(
        page.get_by_role("complementary", name="The selected state").locator("code.uid")
    ).to_have_text(newest)
    expect(over).to_be_visible()
    page.get_by_role("group", name="Metrics").get_by_role("button", name="val_loss").first.click()
    expect(page.locator("[data-panel=curves] [data-key=val_loss] canvas")).to_be_visible()
    expect(page.get_by_role("complementary", name="The selected state")).to_be_visible()


def test_the_curves_fill_the_page_and_escape_brings_them_back(study: str, page: Page) -> None:
    chart = open_(page, study)
    page.get_by_role("button", name="Full screen").click()
    expect(page.get_by_role("table", name="Branches")).to_be_hidden()
    assert said(page, "full") == "1"
    page.keyboard.press("Escape")
    expect(page.get_by_role("table", name="Branches")).to_be_visible()
    expect(chart).to_be_visible()
    page.keyboard.press("Escape")
    expect(chart).to_have_count(0)


def test_the_size_of_the_panel_is_set_by_keys_or_dragged_and_remembered(
    study: str, page: Page
) -> None:
    open_(page, study)
    region = page.get_by_role("region", name="Curves", exact=True)

    def height() -> float:
        box = region.bounding_box()
        assert box is not None
        return box["height"]

    before = height()
    edge = page.get_by_role("separator", name="Size of the panel")
    edge.focus()
    page.keyboard.press("ArrowUp")
    assert height() == pytest.approx(before + 24, abs=2)
    box = edge.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 300, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 104, steps=3)
    page.mouse.up()
    assert height() == pytest.approx(before - 76, abs=3)
    page.reload()
    page.locator("[data-panel=curves] canvas").first.wait_for()
    assert height() == pytest.approx(before - 76, abs=3)
    edge.dblclick()
    assert height() == pytest.approx(before, abs=2)


def test_a_zoom_is_in_the_address(study: str, page: Page) -> None:
    chart = open_(page, study, "curves.zoom=25~40")
    expect(rows(chart)).to_have_count(8)
    chart.locator(".u-over").hover(position={"x": 4, "y": 40})
    expect(chart.get_by_role("columnheader").nth(1)).to_contain_text("at step 25")
    chart.get_by_role("button", name="Reset zoom").click()
    assert said(page, "zoom") is None


def test_what_takes_long_shows_how_far_it_is_and_can_be_left(study: str, page: Page) -> None:
    held: list[Route] = []
    answered: list[str] = []

    def hold(route: Route) -> None:
        heads = parse_qs(urlparse(route.request.url).query)["head"]
        if "key=" in route.request.url and answered:
            held.append(route)
        else:
            answered.extend(heads)
            route.continue_()

    page.route("**/series?*", hold)
    chart = open_(page, study, "curves.pick=all")
    status = page.locator("[data-panel=curves] .reading")
    expect(status).to_contain_text(f"1 of {BRANCHES} branches")
    expect(rows(chart)).to_have_count(1)
    status.get_by_role("button", name="Cancel").click()
    expect(status).to_contain_text(f"Stopped: 1 of {BRANCHES} branches are here")
    page.unroute("**/series?*")
    status.get_by_role("button", name="Read the rest").click()
    expect(rows(chart)).to_have_count(BRANCHES)
    expect(status).to_have_count(0)
    assert held, "there was something to leave"
