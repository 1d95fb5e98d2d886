"""The page of a branch, what the list of branches shows of each, and the files of a state."""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from playwright.sync_api import Error, Locator, Page, expect

import datastates
from datastates import Repository
from datastates.maintenance.retention_pass import evict
from tests.page.conftest import serving
from tests.page.site import ROOT

if TYPE_CHECKING:
    from collections.abc import Collection

pytestmark = pytest.mark.long

LONG = "experiments/2026-11/a-transformer-of-some-size/a-mixture-of-datasets/warmup-2000-cosine"
SCRIPT = b"<html><script>document.title = 'run'</script></html>"


@dataclass(frozen=True)
class Filed:
    """A served repository of small trainings."""

    repo: Repository
    address: str

    def at(self, query: str) -> str:
        return f"{self.address}/?{query}"


def picture() -> bytes:
    """A white PNG of 3 x 2 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = (b"\0" + b"\xff" * 9) * 2
    header = struct.pack(">IIBBBBB", 3, 2, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    )


def train(
    repo: Repository,
    branch: str,
    steps: int,
    config: dict[str, Any],
    *,
    start: str | None = None,
    gaps: Collection[int] = (),
    spikes: Collection[int] = (),
) -> None:
    """Capture so many steps with a loss, which is NaN or infinite at ``gaps`` and huge at
    ``spikes``; the last with files."""
    weight = torch.zeros(8)
    with repo.track(
        weight=weight, branch=branch, start=start, durable_every=1, config=config, rng=False
    ) as run:
        for number in range(steps):
            weight += 1
            step = run.step + 1
            loss = 1e6 if step in spikes else 1 / step
            if step in gaps:
                loss = math.nan if step % 2 else math.inf
            files = {"samples": picture(), "page.html": SCRIPT} if number == steps - 1 else None
            run.capture(metrics={"loss": loss}, files=files).wait("durable")


@pytest.fixture(scope="module")
def filed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filed]:
    if not (ROOT / "api" / "static" / "index.html").exists():
        pytest.skip("the page is not built: make ui")
    common = {"alpha": 1, "beta": 2, "depth": 3, "lr": 0.1, "optimizer": "adamw"}
    folder = tmp_path_factory.mktemp("filed") / "it's runs"
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        train(repo, "main", 12, common)
        repo.tag("warm", "main@step:6")
        train(repo, LONG, 6, common, start="warm")
        train(repo, "fork/a", 6, common | {"lr": 0.03}, start="warm", gaps=(8, 9))
        train(repo, "lost", 5, common | {"lr": 0.3}, start="warm", gaps=(9, 10, 11))
        train(repo, "far", 6, common | {"lr": 3.0}, start="warm", spikes=(11, 12))
        train(repo, "alone", 3, common | {"optimizer": "sgd"})
        for step in (8, 9):
            evict(repo.core, repo.state(f"main@step:{step}").uid, is_forced=True)
        with serving(repo) as address:
            yield Filed(repo, address)


def row(page: Page, name: str) -> Locator:
    return page.locator(f"[data-branch='{name}']")


def open_branches(page: Page, filed: Filed, query: str = "") -> None:
    page.goto(filed.at(f"view=branches{query}"))
    page.locator("[data-branch]").first.wait_for()


def test_a_name_leads_to_the_page_of_the_branch(filed: Filed, page: Page) -> None:
    open_branches(page, filed)
    row(page, "fork/a").get_by_role("button", name="fork/a").click()
    shown = page.locator("[data-panel=branch]")
    expect(shown.get_by_role("heading", name="fork/a")).to_be_visible()
    expect(page).to_have_url(re.compile(r"view=branch.*head=fork%2Fa"))
    expect(shown.locator("[data-key=loss] canvas").first).to_be_visible()
    expect(shown.locator("[data-key=loss] .gaps")).to_contain_text("2 of the drawn values are NaN")
    differs = shown.locator("[data-differs] tbody tr")
    expect(differs.filter(has_text="lr")).to_have_text(re.compile(r"^lr\s*0.1\s*0.03$"))
    run = next(run for run in filed.repo.runs() if run.branch == "fork/a")
    expect(shown).to_contain_text(f"{run.user}@{run.host}")
    own = [state for state in filed.repo.log("fork/a") if state.step > 6]
    kept = shown.locator("[data-kept]")
    expect(kept).to_have_count(len(own))
    assert kept.evaluate_all("rows => rows.map((row) => row.dataset.kept)") == [
        state.uid for state in own
    ]
    facts = shown.locator("dl.facts").first
    expect(facts).to_contain_text("forked")
    facts.get_by_role("button", name="6", exact=True).click()
    expect(page.locator("[data-panel=detail] .uid")).to_have_text(filed.repo.state("warm").uid)
    facts.get_by_role("button", name="main").click()
    expect(shown.get_by_role("heading", name="main")).to_be_visible()
    expect(shown).to_contain_text("it begins with its own first state")
    expect(kept).to_have_count(10)
    page.go_back()
    expect(shown.get_by_role("heading", name="fork/a")).to_be_visible()


def test_the_lines_of_a_branch_and_of_a_state_run_as_they_are_pasted(
    filed: Filed, page: Page
) -> None:
    for query, rev, part in (
        ("view=branch&head=fork/a", "fork/a", 0),
        (f"state={filed.repo.state('main').uid}&panel=detail", "main", 1),
    ):
        page.goto(filed.at(query))
        lines = page.locator(".command code").filter(has_text="import datastates")
        text = lines.nth(part).inner_text()
        found: dict[str, Any] = {}
        exec(text, found)
        expected = filed.repo.load(rev)["weight"]
        assert torch.equal(found["tree"]["weight"], expected)
    page.goto(filed.at("view=branch&head=nowhere"))
    expect(page.get_by_role("alert")).to_contain_text("there is no branch 'nowhere'")
    page.get_by_role("button", name="Show all branches").click()
    expect(row(page, "main")).to_be_visible()


def test_a_branch_that_diverged_is_marked_and_gaps_are_red(filed: Filed, page: Page) -> None:
    open_branches(page, filed)
    expect(page.locator(".diverged")).to_have_count(2)
    for name in ("lost", "far"):
        expect(row(page, name).locator(".diverged")).to_be_visible()
    danger = row(page, "lost").locator(".diverged").evaluate("one => getComputedStyle(one).color")
    for name, count in (("fork/a", 2), ("lost", 3)):
        gaps = row(page, name).locator("path.gaps")
        assert str(gaps.get_attribute("d")).count("M") == count
        assert gaps.evaluate("one => getComputedStyle(one).stroke") == danger
    expect(row(page, "main").locator("path.gaps")).to_have_count(0)


def test_curves_share_a_scale_unless_each_is_to_have_its_own(filed: Filed, page: Page) -> None:
    def drawn(name: str) -> tuple[float, float]:
        """The highest and the lowest point."""
        said = str(row(page, name).locator(".line path").first.get_attribute("d"))
        places = [float(each.split()[1]) for each in re.findall(r"[\d.]+ [\d.]+", said)]
        return min(places), max(places)

    open_branches(page, filed)
    assert drawn("main") == (2, 22)
    assert drawn("fork/a")[0] > 18, "it begins where main had come to"
    page.get_by_role("checkbox", name="one scale").uncheck()
    expect(page).to_have_url(re.compile("branches.own=1"))
    assert drawn("fork/a") == drawn("main") == (2, 22)


def test_chips_show_in_what_the_listed_branches_differ(filed: Filed, page: Page) -> None:
    def chips(name: str) -> list[str]:
        return row(page, name).locator(".config .chip").all_inner_texts()

    open_branches(page, filed)
    assert chips("fork/a") == ["lr 0.1 → 0.03", "optimizer adamw"]
    assert chips("alone") == ["lr 0.1", "optimizer sgd"]
    open_branches(page, filed, "&q=config.optimizer+%3D+adamw")
    assert chips("main") == ["lr 0.1"]


def test_a_search_orders_branches_until_a_header_does(filed: Filed, page: Page) -> None:
    names = "rows => rows.map((row) => row.dataset.branch)"
    open_branches(page, filed, "&q=order+by+metrics.loss+desc+limit+3")
    assert page.locator("[data-branch]").evaluate_all(names) == ["far", "alone", "fork/a"]
    header = page.get_by_role("columnheader", name="Branch", exact=True)
    expect(header).to_have_attribute("aria-sort", "none")
    header.get_by_role("button").click()
    expect(page.get_by_role("combobox", name="Filter")).to_have_value("limit 3")
    expect(page.locator("[data-branch]").first).to_have_attribute("data-branch", "alone")
    assert page.locator("[data-branch]").evaluate_all(names)[1:] == [LONG, "far"]


@pytest.mark.parametrize("view", ["branches", "states", "compare"])
def test_the_examples_of_the_help_work_where_they_are_shown(
    filed: Filed, page: Page, view: str
) -> None:
    page.goto(filed.at(f"view={view}"))
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    examples = page.locator("[data-panel=help] .examples button")
    page.keyboard.press("?")
    expect(examples).to_have_count(10)
    for number in range(10):
        if number:
            page.keyboard.press("?")
        query = examples.nth(number).inner_text()
        with page.expect_response(lambda answer: "q=" in answer.url) as answered:
            examples.nth(number).click()
        assert answered.value.status == 200, query
        expect(page.get_by_role("combobox", name="Filter")).to_have_value(query)
        assert f"view={view}" in page.url or view == "states"
        expect(page.get_by_role("alert")).to_have_count(0)


def test_what_is_wrong_with_a_search_is_told_whole(filed: Filed, page: Page) -> None:
    open_branches(page, filed)
    field = page.get_by_role("combobox", name="Filter")
    for query, hint in (
        ("descendant_of(mian)", "main"),
        ("step ! 3", "'not'"),
    ):
        field.fill(query)
        with page.expect_response(lambda answer: "q=" in answer.url) as answered:
            field.press("Enter")
        said = answered.value.json()
        problem = page.locator("#filter-problem")
        expect(problem).to_be_visible()
        for part in said.get("expected") or [said["detail"].splitlines()[-1]]:
            expect(problem).to_contain_text(part)
        assert hint in said["detail"] or said["expected"]


def test_files_are_shown_and_saved_and_nothing_of_them_runs(
    filed: Filed, page: Page, tmp_path: Path
) -> None:
    uid = filed.repo.state("main").uid
    page.goto(filed.at(f"view=graph&state={uid}&panel=detail"))
    files = page.locator("[data-files]")
    image = files.get_by_role("img", name="samples")
    expect(image).to_be_visible()
    page.wait_for_function("document.querySelector('[data-files] img')?.naturalWidth === 3")
    expect(files.get_by_role("img")).to_have_count(1)
    with page.expect_download() as coming:
        files.get_by_role("button", name="page.html").click()
    coming.value.save_as(tmp_path / "saved")
    assert coming.value.suggested_filename == "page.html"
    assert (tmp_path / "saved").read_bytes() == SCRIPT
    assert page.title() != "run"
    plain = filed.repo.state("main~1").uid
    page.goto(filed.at(f"view=graph&state={plain}&panel=detail"))
    expect(page.locator("[data-panel=detail] .uid")).to_have_text(plain)
    expect(files).to_have_count(0)
    # opened by itself, it is saved and not shown
    page.goto("about:blank")
    address = f"{filed.address}/api/v1/repositories/wood/states/{uid}/files/page.html"
    with page.expect_download(), suppress(Error):  # no page comes of it
        page.goto(address)
    assert page.url == "about:blank"


def test_an_evicted_state_leads_to_the_nearest_that_can_be_restored(
    filed: Filed, page: Page
) -> None:
    gone, nearest = (filed.repo.state(f"main@step:{step}").uid for step in (9, 10))
    page.goto(filed.at(f"view=graph&state={gone}&panel=detail"))
    page.locator("[data-nearest]").click()
    expect(page.locator("[data-panel=detail] .uid")).to_have_text(nearest)


WIDER = "boxes => boxes.filter((box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.className)"


@pytest.mark.parametrize("width", [1440, 390])
def test_a_long_name_makes_nothing_wider_than_its_place(
    filed: Filed, page: Page, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    open_branches(page, filed)
    assert page.locator("[data-scene=branches]").evaluate_all(WIDER) == []
    page.goto(filed.at(f"view=branch&head={LONG}"))
    page.locator("[data-kept]").first.wait_for()
    expect(page.locator(".legend tbody tr").first).to_be_visible()
    assert page.locator(".legend, .scroll, .parts > div").evaluate_all(WIDER) == []
    page.goto(filed.at(f"view=graph&panel=curves&head={LONG}&head=main"))
    choices = page.locator(".pick .choice")
    expect(choices.filter(has_text=LONG)).to_be_attached()
    assert (
        choices.evaluate_all(
            "all => all.filter((one) => one.getBoundingClientRect().right"
            " > one.closest('.pick').getBoundingClientRect().right + 1).length"
        )
        == 0
    )
    assert page.locator(".picks").evaluate_all(WIDER) == []
