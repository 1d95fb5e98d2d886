"""The speed of a page: the first paint, the time until rows are drawn, and the frames a second
while scrolling."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from common import out, spread, table
from web_mlflow import RUNS
from web_parts import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTH, HEIGHT = 1280, 800
ROWS = 10
SCROLLED_S = 3.0
OURS, THEIRS = '[role="row"][id^="state-"]', ".ag-row"  # rows with content
GOALS = {"first paint": 1500.0, "frames a second": 30.0}

READY = """([rows, least]) => document.querySelectorAll(rows).length > least && performance.now()"""
PAINT = """() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"""
RECORD = """() => {
  const frames = (window.__frames = []);
  const tick = (now) => { frames.push(now); window.__recording = requestAnimationFrame(tick); };
  window.__recording = requestAnimationFrame(tick);
}"""
FRAMES = """() => { cancelAnimationFrame(window.__recording); return window.__frames; }"""
UNDER = """([x, y]) => [...document.elementsFromPoint(x, y)].map((each) => each.textContent).join('|')"""


def pages(
    ours: str, states: int, mlflow: str | None, *, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Prints and returns the results of this page, and of MLflow's page if it runs. Each load has a
    new browser profile."""
    program = chromium()
    if program is None:
        return {}
    from playwright.sync_api import sync_playwright

    asked = {f"datastates, {states:,} states": (ours, OURS)}
    if mlflow:
        asked[f"MLflow, {RUNS:,} runs"] = (f"{mlflow}/#/experiments/1/runs", THEIRS)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in asked}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(rounds):
            for name, (url, rows) in asked.items():
                for what, value in _visit(browser, url, rows).items():
                    found[name].setdefault(what, []).append(value)
        version = browser.version
        browser.close()
    out(_report(found, rounds, version))
    return found


def _visit(browser: Browser, url: str, rows: str) -> dict[str, float]:
    """One load and one scroll, in milliseconds since the navigation began, and frames a second."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    page = context.new_page()
    try:
        page.goto(url, wait_until="commit")
        drawn = page.wait_for_function(READY, arg=[rows, ROWS], timeout=60_000).json_value()
        painted = page.wait_for_function(
            PAINT, timeout=10_000
        ).json_value()  # reported a moment after it happened
        return {"first paint": float(painted), "rows drawn": float(drawn)} | _scroll(page, rows)
    finally:
        context.close()


def _scroll(page: Page, rows: str) -> dict[str, float]:
    """Send mouse wheel events over a row, as fast as the page handles them."""
    box = page.locator(rows).nth(ROWS // 2).bounding_box()
    if box is None:
        raise SystemExit(f"{page.url} has rows that are not to be seen")
    at = [min(box["x"] + box["width"] / 2, WIDTH - 50), box["y"] + box["height"] / 2]
    before = page.evaluate(UNDER, at)
    page.mouse.move(*at)
    page.evaluate(RECORD)
    until = time.perf_counter() + SCROLLED_S
    while time.perf_counter() < until:
        page.mouse.wheel(0, 120)
        page.wait_for_timeout(8)
    frames: list[float] = page.evaluate(FRAMES)
    gaps = [later - earlier for earlier, later in pairwise(frames)]
    if page.evaluate(UNDER, at) == before:
        raise SystemExit(f"the wheel did not move {page.url}: what is measured would say nothing")
    if not gaps:
        return {"frames a second": 0.0, "longest frame": SCROLLED_S * 1e3}
    return {"frames a second": 1e3 * len(gaps) / sum(gaps), "longest frame": max(gaps)}


def _report(found: dict[str, dict[str, list[float]]], rounds: int, version: str) -> str:
    columns = ("first paint", "rows drawn", "frames a second", "longest frame")
    rows = [
        [name, *(spread(measured[column]) for column in columns), _judge(name, measured)]
        for name, measured in found.items()
    ]
    head = [
        "page",
        "first paint ms",
        "rows drawn ms",
        "frames a second while scrolled",
        "longest frame ms",
        "goals",
    ]
    return (
        f"\nthe page, Chromium {version} without a GPU, {WIDTH} x {HEIGHT}, median [min .. max] of"
        f" {rounds} loads\n\n{table(head, rows)}"
    )


def _judge(name: str, measured: dict[str, list[Any]]) -> str:
    if not name.startswith("datastates"):
        return ""
    paint, frames = (sorted(measured[what])[len(measured[what]) // 2] for what in GOALS)
    said = [f"1.5 s: {'met' if paint <= GOALS['first paint'] else 'MISSED'}"]
    return ", ".join(
        [*said, f"30 a second: {'met' if frames >= GOALS['frames a second'] else 'MISSED'}"]
    )
