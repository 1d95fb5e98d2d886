"""Studies on the page: the tree of variants, why one failed, outliers with pictures, soups with
their weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

import datastates
from tests.page import studied
from tests.page.site import ROOT, serving

if TYPE_CHECKING:
    from datastates.lineage.views.study_trees import StudyDetail
    from tests.page.site import Site

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, to be read."""
    if not (ROOT / "api" / "static" / "index.html").exists():
        pytest.skip("the page is not built: make ui")
    made = tmp_path_factory.mktemp("studied") / "runs"
    studied.make(made)
    return made


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(folder, tmp_path_factory.mktemp("served")) as site:
        yield site


@pytest.fixture(scope="module")
def detail(folder: Path) -> StudyDetail:
    """The study as the lineage tells it."""
    from datastates.lineage.views.study_trees import study

    with datastates.open(folder) as repo, repo.core.reading() as session:
        return study(session, studied.STUDY)


def open_(page: Page, site: Site, query: str = "") -> None:
    page.goto(site.address(f"view=studies{query}"))
    page.locator("[data-variant]").first.wait_for()


def names(page: Page) -> list[str | None]:
    return [row.get_attribute("data-variant") for row in page.locator("[data-variant]").all()]


def test_two_clicks_lead_to_the_tree_of_a_study(
    served: Site, page: Page, detail: StudyDetail
) -> None:
    page.goto(served.address("view=branches"))
    page.get_by_role("button", name="Studies", exact=True).click()
    page.locator("[data-variant]").first.wait_for()
    assert names(page) == [each.name for each in detail.variants]
    expect(page.locator("[data-figure=stages]")).to_have_text("4 done, 1 failed, 1 skipped")
    best = next(each for each in detail.variants if each.rank == 1)
    expect(page.locator("tr.best")).to_have_attribute("data-variant", best.name)
    expect(page.locator("tr.best .rank")).to_have_text("★ 1")
    expect(page.locator("[data-variant=low-long] .config")).to_contain_text("weight_decay 0.1")
    expect(page.locator("[data-variant=low-long] .visually-hidden")).to_have_text("from low")
    expect(page.locator("[data-variant=high] .took")).to_contain_text("\N{MULTIPLICATION SIGN}2")


def test_a_failed_variant_says_why(served: Site, page: Page) -> None:
    open_(page, served)
    row = page.locator("[data-variant=high]")
    expect(row.locator(".stage")).to_have_text("failed")
    row.get_by_role("button", name="why").press("Enter")
    expect(page.locator("tr.error p")).to_have_text(
        "FloatingPointError: the loss is nan after 2 epochs: lr 0.5 is too high"
    )
    expect(page.locator("tr.error pre")).to_contain_text("Traceback")
    row.get_by_role("button", name="why").press("Enter")
    expect(page.locator("tr.error")).to_have_count(0)
    expect(page.locator("[data-variant=high-long] .stage")).to_have_text("skipped")


def test_variants_are_ordered_by_rank_and_the_metric_is_in_the_address(
    served: Site, page: Page, detail: StudyDetail
) -> None:
    open_(page, served)
    page.get_by_label("Order").select_option("rank")
    ranked = sorted(
        (each for each in detail.variants if each.rank), key=lambda each: each.rank or 0
    )
    assert names(page)[: len(ranked)] == [each.name for each in ranked]
    page.get_by_label("Metric").select_option("val_accuracy")
    expect(page.get_by_text("higher is better")).to_be_visible()
    assert "metric=val_accuracy" in page.url
    page.reload()
    expect(page.get_by_label("Metric")).to_have_value("val_accuracy")


def test_a_variant_leads_to_its_history_and_its_state(
    served: Site, page: Page, detail: StudyDetail
) -> None:
    open_(page, served)
    low = next(each for each in detail.variants if each.name == "low")
    page.locator("[data-variant=low] td.state button").click()
    expect(page.locator("[data-panel=detail]")).to_contain_text(str(low.state)[:8])
    page.locator("[data-variant=low]").get_by_role("button", name="low", exact=True).click()
    expect(page.locator(f"#state-{low.state}")).to_have_attribute("aria-selected", "true")


def test_outliers_have_pictures_and_more_come_on_demand(served: Site, page: Page) -> None:
    open_(page, served)
    gallery = page.get_by_role("region", name="Outliers")
    expect(gallery).to_contain_text("12 suspects among 120 samples")
    expect(gallery.locator("figure")).to_have_count(60)
    first = gallery.locator("figure").first
    first.scroll_into_view_if_needed()
    image = first.locator("img")
    image.wait_for()
    assert image.evaluate(
        "async (one) => { await one.decode(); return [one.naturalWidth, one.naturalHeight]; }"
    ) == [4, 4]
    assert str(image.get_attribute("src")).startswith("blob:")
    expect(first).to_contain_text("suspect")
    expect(first).to_contain_text("of 4")
    gallery.get_by_role("button", name="Show more").click()
    expect(gallery.locator("figure")).to_have_count(70)
    expect(gallery.get_by_role("button", name="Show more")).to_have_count(0)


def test_soups_show_their_parents_with_weights(served: Site, page: Page) -> None:
    open_(page, served)
    soup = page.locator("[data-merge]").first
    expect(soup).to_contain_text("weighted by hand")
    rows = [row.inner_text().split() for row in soup.locator("tbody tr").all()]
    assert [(row[0], row[3:5]) for row in rows] == [
        ("rates/low", ["50", "%"]),
        ("rates/low-long", ["30", "%"]),
        ("rates/middle", ["20", "%"]),
    ]


def test_an_empty_repository_says_how_studies_come_here(tmp_path: Path, page: Page) -> None:
    with datastates.open(tmp_path / "runs"):
        pass
    (tmp_path / "site").mkdir()
    with serving(tmp_path / "runs", tmp_path / "site") as site:
        page.goto(site.address("view=studies"))
        expect(page.get_by_role("heading", name="No studies yet")).to_be_visible()
        expect(page.locator("[data-scene=studies]")).to_contain_text('study="rates"')
