"""Branches by settings and metrics, and states beside each other: a real study of sixty
variants."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

import datastates
from datastates.maintenance.retention_pass import evict
from tests.page.site import Site
from tests.page.study import STUDY, study

pytestmark = pytest.mark.long

BEST = "lr=0.1,weight_decay=0.0,dropout=0.0,activation=relu"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The study, served; of one variant the newest state is evicted."""
    if not (Path(__file__).parents[2] / "api" / "static" / "index.html").exists():
        pytest.skip("the page is not built: make ui")
    folder = tmp_path_factory.mktemp("study") / "runs"
    study(folder)
    with datastates.open(folder) as repo:
        evict(repo.core, repo.state(f"{STUDY}/{BEST}~1").uid, is_forced=True)
    site = Site(folder)
    site.start()
    yield site
    site.kill()
    shutil.rmtree(folder)


def asked(site: Site, path: str, **query: Any) -> Any:
    """What the API says."""
    return httpx.get(
        f"http://127.0.0.1:{site.port}/api/v1/repositories/runs/{path}", params=query
    ).json()


def open_(page: Page, site: Site, query: str = "") -> Locator:
    page.goto(site.address("view=compare" + query))
    page.locator("[data-line]").first.wait_for()
    return page.locator("[data-scene=compare]")


def lines(page: Page) -> set[str]:
    return {
        str(name)
        for name in page.locator("[data-near]").evaluate_all(
            "paths => paths.map(path => path.dataset.near)"
        )
    }


def drag(page: Page, key: str, start: float, end: float) -> None:
    """Along an axis, from one place to another; 0 is its low end."""
    page.locator(f"[data-axis='{key}']").scroll_into_view_if_needed()
    box = page.locator(f"[data-axis='{key}'] > line").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"], box["y"] + (1 - start) * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"], box["y"] + (1 - end) * box["height"], steps=4)
    page.mouse.up()


def test_sixty_variants_are_drawn_over_what_varies(sweep: Site, page: Page) -> None:
    scene = open_(page, sweep)
    found = asked(sweep, "parallels")
    assert lines(page) == {one["branch"] for one in found["branches"]}
    assert len(lines(page)) == 61
    axes = scene.locator("[data-axis]").evaluate_all("axes => axes.map(axis => axis.dataset.axis)")
    assert axes[:4] == ["config.activation", "config.dropout", "config.lr", "config.weight_decay"]
    assert set(axes[4:]) == {"metrics.loss", "metrics.val_loss", "metrics.val_accuracy"}
    expect(scene).to_contain_text(re.compile(r"\d+ settings are the same in all of these branches"))
    loss = next(axis["values"] for axis in found["axes"] if axis["key"] == "metrics.loss")
    scale = page.get_by_role("figure", name=re.compile("Colours: loss"))
    expect(scale).to_contain_text(f"{min(loss):.4g}"[:5])
    paths = page.locator("[data-line]").evaluate_all(
        "paths => paths.map(path => path.getAttribute('d'))"
    )
    assert len(set(paths)) >= 60, "lines through one value lie beside each other"


def test_ranges_on_axes_keep_what_has_its_values_in_all_of_them(sweep: Site, page: Page) -> None:
    scene = open_(page, sweep)
    drag(page, "config.lr", 0.7, 1.02)
    drag(page, "config.activation", 0.8, 1.02)
    drawn = asked(sweep, "parallels")
    values = {axis["key"]: axis["values"] for axis in drawn["axes"]}
    want = {
        one["branch"]
        for place, one in enumerate(drawn["branches"])
        if values["config.lr"][place] in (0.03, 0.1)
        and values["config.activation"][place] == "tanh"
    }
    assert len(want) == 12
    expect(scene.get_by_role("status").first).to_have_text(re.compile("12 of 61 branches"))
    assert lines(page) == want
    assert (
        set(scene.locator("[data-kept]").evaluate_all("rows => rows.map(row => row.dataset.kept)"))
        == want
    )

    page.reload()
    expect(page.locator("[data-near]")).to_have_count(12)
    page.get_by_role("button", name="Clear 2 ranges").click()
    expect(page.locator("[data-near]")).to_have_count(61)


def test_keys_move_the_ends_of_a_range(sweep: Site, page: Page) -> None:
    open_(page, sweep)
    end = page.get_by_role("slider", name="lr, at most")
    end.focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    expect(end).to_have_attribute("aria-valuetext", "0.005")
    expect(page.locator("[data-near]")).to_have_count(25)  # twelve of each of two rates, and main
    page.keyboard.press("Delete")
    expect(page.locator("[data-near]")).to_have_count(61)


def test_a_point_names_its_branch_and_a_click_opens_it(sweep: Site, page: Page) -> None:
    scene = open_(page, sweep, "&q=" + quote("config.lr = 0.1"))
    expect(scene.locator("[data-point]")).to_have_count(12)
    point = scene.locator(f"[data-point='{STUDY}/{BEST}']")
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator(".tip")).to_contain_text(f"{STUDY}/{BEST}")
    page.mouse.down()
    page.mouse.up()
    expect(page).to_have_url(re.compile("view=branch"))
    expect(page.locator("[data-panel=branch]").get_by_role("heading", name=BEST)).to_be_visible()


def test_the_scatter_plot_has_logarithmic_axes_where_values_are_spaced_so(
    sweep: Site, page: Page
) -> None:
    scene = open_(page, sweep, "&compare.x=config.lr&compare.y=metrics.val_loss")
    plot = scene.get_by_role("img", name="val_loss against lr: 61 branches")
    expect(plot).to_contain_text("lr (log)")
    centres = {
        str(one[0]): float(one[1])
        for one in plot.locator("[data-point]").evaluate_all(
            "all => all.map(one => [one.dataset.point, one.getAttribute('cx')])"
        )
    }
    at = [
        centres[f"{STUDY}/lr={rate},weight_decay=0.0,dropout=0.0,activation=relu"]
        for rate in ("0.001", "0.01", "0.1")
    ]
    assert at[2] - at[1] == pytest.approx(at[1] - at[0], rel=1e-3)


def test_states_stand_beside_each_other_with_what_differs_on_top(sweep: Site, page: Page) -> None:
    scene = open_(page, sweep)
    for box in scene.get_by_role("checkbox", name=re.compile("^Put ")).all()[:2]:
        box.check()
    scene.get_by_role("combobox", name="A branch, a tag or a state to add").fill(
        f"{STUDY}/{BEST}~1"
    )
    scene.get_by_role("button", name="Add").click()
    heads = scene.locator("[data-beside]")
    expect(heads).to_have_count(3)
    revs = heads.evaluate_all("heads => heads.map(head => head.dataset.beside)")
    told = asked(sweep, "comparison", rev=revs)
    for section, kind in (("Configuration", "config"), ("Metrics", "metrics")):
        rows = scene.locator(f"[data-section={section}] [data-row]").evaluate_all(
            "rows => rows.map(row => row.dataset.row)"
        )
        assert rows == [row["key"] for row in told[kind] if row["differs"]]
    expect(scene.locator("[data-section=Configuration] summary")).to_contain_text(
        re.compile(r"(is|are) the same")
    )
    restore = scene.locator("[data-section=Restore]")
    expect(restore).to_contain_text("evicted")
    expect(
        restore.get_by_role("button", name=asked(sweep, "resolve", rev="warm")["uid"][:8])
    ).to_be_visible()
    page.reload()
    expect(heads).to_have_count(3)
    scene.get_by_role("button", name=f"Take {revs[0]} away").click()
    expect(heads).to_have_count(2)


def test_too_many_or_unknown_states_are_a_problem_that_can_be_mended(
    sweep: Site, page: Page
) -> None:
    scene = open_(page, sweep, "&compare.beside=main,mian")
    expect(scene.get_by_role("alert")).to_contain_text("mian")
    scene.get_by_role("button", name="Take mian away").click()
    expect(scene.get_by_role("alert")).to_have_count(0)
