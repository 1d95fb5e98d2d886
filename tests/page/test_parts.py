"""States of several ranks on the page: what waits and what was given up, whose part is where,
and what each rank measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

import datastates
from tests.page.conftest import serving
from tests.page.site import ROOT
from tests.support.parts import Job, run_job

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Job]]:
    """The address of a server of a job of three ranks, and its states."""
    if not (ROOT / "api" / "static" / "index.html").exists():
        pytest.skip("the page is not built: make ui")
    with datastates.open(tmp_path_factory.mktemp("job") / "runs", memory_bytes=16 << 20) as repo:
        made = run_job(repo.core.database, size=3)
        with serving(repo) as address:
            yield address, made


def test_what_waits_and_what_was_given_up_stand_among_what_goes_on_now(
    job: tuple[str, Job], page: Page
) -> None:
    address, made = job
    page.goto(f"{address}/?view=now")
    waits = page.locator(f"[data-waiting='{made.waits}'] td")
    expect(waits).to_have_count(5)
    assert waits.all_inner_texts()[:3] == ["ddp", "6", "rank 2 of 3"]
    dropped = page.locator(f"[data-given-up='{made.given_up}']")
    expect(dropped).to_contain_text("rank 1 of 3")
    expect(dropped).to_contain_text("skipped: there was no room in memory")


def test_the_detail_of_a_state_lists_its_parts_by_rank(job: tuple[str, Job], page: Page) -> None:
    address, made = job
    page.goto(f"{address}/?view=states&panel=detail&state={made.whole[0]}")
    rows = page.get_by_role("table", name="Parts by rank").locator("tbody tr")
    expect(rows).to_have_count(3)
    assert [row.split("\t")[:5] for row in rows.all_inner_texts()] == [
        [str(rank), f"{rank + 1}.0 MiB", f"memory on host{rank // 2}", f"{rank + 1}.0 KiB", loss]
        for rank, loss in enumerate(("1.800", "2", "2.200"))
    ]
    expect(page.locator("[data-panel=detail]")).not_to_contain_text("loss@")


def test_what_ranks_measured_is_one_band_and_each_rank_on_demand(
    job: tuple[str, Job], page: Page
) -> None:
    page.goto(f"{job[0]}/?view=states&panel=curves")
    chart = page.locator("[data-panel=curves] [data-key=loss]")
    expect(chart).to_have_attribute("data-curves", "1")
    expect(page.locator("[data-panel=curves] [data-key]")).to_have_count(1)
    expect(chart.locator("table.legend tbody tr")).to_contain_text("3 ranks")
    assert chart.locator("table.legend tbody tr td").nth(1).inner_text().split()[::2] == [
        "0.8000",
        "1.200",
    ]
    chart.get_by_role("button", name="Each rank").click()
    expect(chart).to_have_attribute("data-curves", "3")
    titles = chart.locator("table.legend tbody th").evaluate_all(
        "cells => cells.map(cell => cell.title)"
    )
    assert titles == ["ddp, rank 0", "ddp, rank 1", "ddp, rank 2"]
    assert "curves.ranks" in page.url
