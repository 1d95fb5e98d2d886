"""What is shown is saved: whole tables in full precision, and figures that stand on their own."""

from __future__ import annotations

import csv
import math
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Download, Page, expect

import datastates
from datastates.lineage import NewState, Status
from datastates.lineage.write import record
from tests.page.conftest import serving
from tests.support.lineages import told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.page.conftest import Wood
    from tests.page.site import Grown, Site

pytestmark = pytest.mark.long

SVG = "{http://www.w3.org/2000/svg}"


def save(page: Page, what: str, kind: str) -> Download:
    """Save one of the things that the menu offers, by keys alone."""
    opener = page.get_by_role("button", name="Export", exact=True)
    if opener.get_attribute("aria-expanded") == "false":
        opener.focus()
        page.keyboard.press("Enter")
    button = page.get_by_role("button", name=f"Save {what} as {kind}", exact=True)
    button.focus()
    with page.expect_download() as saved:
        page.keyboard.press("Enter")
    return saved.value


def rows(saved: Download) -> list[dict[str, str]]:
    with Path(saved.path()).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def texts(saved: Download) -> set[str]:
    """What a figure says. Parsed by a parser that takes nothing but XML."""
    tree = ElementTree.parse(saved.path()).getroot()
    assert tree.tag == f"{SVG}svg"
    ground = tree.find(f"{SVG}rect")
    assert ground is not None
    assert (ground.get("fill"), ground.get("width"), ground.get("height")) == (
        "#ffffff",
        tree.get("width"),
        tree.get("height"),
    )
    return {"".join(each.itertext()) for each in tree.iter(f"{SVG}text")}


def size_of_png(saved: Download) -> tuple[int, int]:
    data = Path(saved.path()).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.fixture(scope="module")
def formulas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[NewState]]]:
    """1,200 states on one branch, whose messages and keys a spreadsheet would take for formulas."""
    with datastates.open(
        tmp_path_factory.mktemp("formulas") / "runs", memory_bytes=1 << 20
    ) as repo:
        made: list[NewState] = []
        for step in range(1_200):
            parent = made[-1].facts.uid if made else None
            made.append(
                told(
                    f"{step + 1:024x}",
                    f"{step + 1:064x}",
                    parent,
                    "main",
                    None,
                    step,
                    metrics={"loss": 1 / (step + 3), "=gain": -step / 7, "odd": math.nan},
                    attributes={"note": '=HYPERLINK("http://x","y")'},
                    created_at=None,
                    message=f"-{step}, or so",
                    status=Status.DURABLE,
                    bytes_total=1,
                    bytes_new=1,
                    tier="local",
                    node="here",
                )
            )
        with repo.core.database.write() as session:
            record.record_all(session, made)
        with serving(repo) as address:
            yield address, made


def test_all_that_a_filter_finds_is_saved_in_full_and_no_text_is_a_formula(
    formulas: tuple[str, list[NewState]], page: Page
) -> None:
    address, made = formulas
    page.goto(f"{address}/?view=states&q=step+>=+1&sort=step+asc")
    page.locator("[role=row][id^=state-]").first.wait_for()
    saved = save(page, "Found states", "CSV")
    assert saved.suggested_filename == "wood-found.csv"
    found = rows(saved)
    assert [row["uid"] for row in found] == [state.facts.uid for state in made[1:]]
    assert [float(row["metrics.loss"]) for row in found] == [
        state.facts.metrics["loss"] for state in made[1:]
    ]
    assert [float(row["metrics.=gain"]) for row in found] == [
        state.facts.metrics["=gain"] for state in made[1:]
    ]
    assert {row["metrics.odd"] for row in found} == {"NaN"}
    assert found[1]["message"] == "'-2, or so"
    assert found[1]["attr.note"] == """'=HYPERLINK("http://x","y")"""
    expect(page.get_by_role("status").filter(has_text="1\u2009199 rows")).to_be_visible()


def test_a_long_export_says_how_far_it_is_and_can_be_given_up(
    formulas: tuple[str, list[NewState]], page: Page
) -> None:
    held = threading.Event()

    def hold(route: Any) -> None:
        if "after=" in route.request.url:
            held.set()  # and never answer
        else:
            route.continue_()

    page.goto(f"{formulas[0]}/?view=states&q=step+>=+1")
    page.locator("[role=row][id^=state-]").first.wait_for()
    page.route("**/states?*limit=1000*", hold)
    page.get_by_role("button", name="Export", exact=True).click()
    page.get_by_role("button", name="Save Found states as CSV").click()
    expect(page.get_by_role("status").filter(has_text="1\u2009000 read")).to_be_visible()
    assert held.wait(60)
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelled: wood-found.csv was not saved")).to_be_visible()
    expect(page.get_by_role("button", name="Export", exact=True)).to_be_focused()


def test_branches_and_the_history_are_saved_whole(woods: Wood, page: Page) -> None:
    page.goto(woods.at("view=branches&metric=loss"))
    page.locator("[data-branch]").first.wait_for()
    found = {row["branch"]: row for row in rows(save(page, "Branches", "CSV"))}
    branches = {branch.name: branch for branch in woods.repo.overview(metric="loss")}
    assert found.keys() == branches.keys()
    for name, branch in branches.items():
        assert (found[name]["head"], found[name]["states"]) == (branch.head, str(branch.states))
        assert found[name]["loss.best"] == ("" if branch.best is None else repr(branch.best.value))
    page.goto(woods.at("view=states"))
    page.locator("[role=row][id^=state-]").first.wait_for()
    history = rows(save(page, "History", "CSV"))
    assert len(history) == len({row["uid"] for row in history}) == len(woods.history())
    assert {row["states"] for row in history} == {"1"}
    graph = save(page, "History", "SVG")
    assert {"Graph", "Names", "Step", "its bytes are gone"} <= texts(graph)


def test_curves_are_saved_as_numbers_and_as_a_picture_with_axes_and_legend(
    shared: Site, grown: Grown, page: Page
) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(shared.address("view=graph&panel=curves&key=loss&head=main&head=hot"))
    page.locator("[data-panel=curves] canvas").first.wait_for()
    saved = save(page, "Curves of loss", "CSV")
    assert saved.suggested_filename == "runs-curves-loss.csv"
    points = {(row["branch"], row["state"]): row for row in rows(saved)}
    newest = grown["main"]
    assert (points["main", newest.uid]["step"], float(points["main", newest.uid]["loss"])) == (
        str(newest.step),
        newest.metrics["loss"],
    )
    assert len([1 for branch, _ in points if branch == "main"]) == newest.step
    assert {"loss", "step", "main", "hot", "fork"} <= texts(save(page, "Curves of loss", "SVG"))
    width, height = size_of_png(save(page, "Curves of loss", "PNG"))
    assert width == 1800
    assert height > 700


def test_a_diff_saves_its_tensors_and_the_histogram(shared: Site, grown: Grown, page: Page) -> None:
    old, new = grown["warm"], grown["hot"]
    page.goto(
        shared.address(
            f"view=graph&mark={old.uid}&state={new.uid}&panel=diff&diff.tensor=model/head.weight"
        )
    )
    page.locator("[data-spread] svg").wait_for()
    found = {row["path"]: row for row in rows(save(page, "Changes of tensors", "CSV"))}
    assert found["model/classes.weight"]["shape"] == "4x32"
    bins = rows(save(page, "Histogram of model/head.weight", "CSV"))
    assert [
        sum(int(row[f"{name}.count"]) for row in bins)
        for name in (f"old {old.uid[:8]}", f"new {new.uid[:8]}")
    ] == [128, 128]
    assert {"value", "elements in a bin", "Values of model/head.weight"} <= texts(
        save(page, "Histogram of model/head.weight", "SVG")
    )


def test_comparing_saves_axes_points_and_states(shared: Site, page: Page) -> None:
    page.goto(
        shared.address(
            "view=compare&compare.beside=main,hot&compare.axes=metrics.lr,metrics.loss&compare.x=metrics.lr&compare.y=metrics.loss"
        )
    )
    page.locator("[data-beside]").first.wait_for()
    page.locator("[data-line]").first.wait_for()
    assert {row["branch"] for row in rows(save(page, "Parallel coordinates", "CSV"))} >= {
        "main",
        "hot",
        "no-dropout",
    }
    assert {"lr", "loss", "coloured by loss (log)"} <= texts(
        save(page, "Parallel coordinates", "SVG")
    )
    saved = save(page, "Scatter of loss against lr", "SVG")
    assert saved.suggested_filename == "runs-scatter-lr-loss.svg"
    assert {"lr (log)", "loss (log)", "loss against lr"} <= texts(saved)
    beside = {
        (row["kind"], row["name"]): row
        for row in rows(save(page, "States beside each other", "CSV"))
    }
    assert (beside["metric", "lr"]["main"], beside["metric", "lr"]["hot"]) == ("0.02", "0.15")
