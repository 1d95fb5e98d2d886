"""The waits of a user: the opening view of a million states and 2,000 branches, and all actions in
the page.

    python benchmarks/web_first.py [--states N] [--branches N] [--rounds N] [--captures N] [--folder
    DIR]
                                   [--mlflow-python PATH] [--aim-python PATH] [--json FILE]

There are three parts. The first measures the first response of a new server, with a new server for
each query. The second measures loads of the opening view. It includes the pages of MLflow and Aim
if a Python that has them is named. The third repeats one user's actions while processes capture.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import web_aim
import web_mlflow
from common import machine, out, short, spread, table
from many_states import FURTHER, RUNS, make
from web_load import percentile
from web_page import PAINT
from web_parts import capturing, chromium, copied, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

API = "/api/v1/repositories/runs"
FIRST = {
    "branches, 100": f"{API}/branches?limit=100",
    "graph window, 100 states": f"{API}/graph?count=100",
    "graph window, folded": f"{API}/graph?count=100&fold=true",
    "stats": f"{API}/stats",
}
GOALS_MS = {
    "first paint": 1000.0,
    "first data": 1500.0,
    "first answer": 1000.0,
    "action, p99": 500.0,
}
LEAST = 10
READY = """([rows, least]) => document.querySelectorAll(rows).length > least && performance.now()"""
DRAWN = """() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))"""
ROWS = "[data-branch]"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=1_000_000)
    parser.add_argument("--branches", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--captures", type=int, default=4, help="processes that capture beside the actions"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "datastates-benchmark"
    )
    parser.add_argument("--mlflow-python", default=sys.executable)
    parser.add_argument("--aim-python", default=sys.executable)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["first", "loads", "actions"],
        default=["first", "loads", "actions"],
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    out(machine())
    root = repository(arguments.folder, arguments.states, arguments.branches)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    with copied(root) as copy:
        said = (
            f"{arguments.states:,} states, {arguments.branches:,} branches, {RUNS} runs,"
            f" {5 + len(FURTHER)} metrics"
        )
        if "first" in arguments.parts:
            found["first"] = {
                name: {"first answer": firsts(copy, path, arguments.rounds)}
                for name, path in FIRST.items()
            }
            out(
                f"\n{said}: the first answer of a server, ms since it"
                f" listens\n\n{report(found['first'], ['first answer'])}"
            )
        if {"loads", "actions"} & {*arguments.parts}:
            pages(found, copy, arguments, said)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    return 0


def repository(folder: Path, count: int, branches: int) -> Path:
    """Made unless it exists. It is copied, not changed."""
    root = folder / f"first-{count}-{branches}"
    if not (root / "lineage.db").exists():
        began, unfinished = time.monotonic(), folder / f"unfinished-{os.getpid()}"
        unfinished.mkdir(parents=True)
        make(unfinished / "lineage.db", count, branches, is_furnished=True)
        unfinished.rename(root)
        out(
            f"built {count:,} states in {time.monotonic() - began:.0f} s,"
            f" {(root / 'lineage.db').stat().st_size >> 20} MiB"
        )
    return root


def firsts(root: Path, path: str, rounds: int) -> list[float]:
    """Milliseconds of one query to new servers."""
    times = []
    for _ in range(rounds):
        with served(root) as base:
            began = time.perf_counter()
            with urllib.request.urlopen(base + path, timeout=120) as answer:
                answer.read()
            times.append((time.perf_counter() - began) * 1e3)
    return times


def pages(
    found: dict[str, dict[str, dict[str, list[float]]]],
    root: Path,
    arguments: argparse.Namespace,
    said: str,
) -> None:
    """Loads and actions in Chromium."""
    program = chromium()
    if program is None:
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, served(root) as base, ExitStack() as stack:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        if "loads" in arguments.parts:
            asked = {"datastates": (f"{base}/", ROWS)} | others(stack, arguments)
            loads: dict[str, dict[str, list[float]]] = {name: {} for name in asked}
            for _ in range(arguments.rounds):
                for name, (url, rows) in asked.items():
                    for what, value in load(browser, url, rows).items():
                        loads[name].setdefault(what, []).append(value)
            found["loads"] = {name: times for name, times in loads.items() if times}
            drawn = report(found["loads"], ["first paint", "first data"])
            out(f"\n{said}; Chromium {browser.version}, ms since the navigation began\n\n{drawn}")
        if "actions" in arguments.parts:
            with capturing(root, processes=arguments.captures, interval_s=0.2) as done:
                before, began = done.value, time.monotonic()
                actions = act(browser, base, 4 * arguments.rounds)
                rate = (done.value - before) / (time.monotonic() - began)
            found["actions"] = {name: {"ms": times} for name, times in actions.items()}
            out(
                f"\n{said}; one person beside {rate:.0f} captures a second; ms from the press to"
                f" the picture\n\n{percentiles(actions)}"
            )
        browser.close()


def others(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """The pages of other products, by address and selector of a row."""
    found = {}
    for name, module, python in (
        ("MLflow", web_mlflow, arguments.mlflow_python),
        ("Aim", web_aim, arguments.aim_python),
    ):
        why = module.missing(python)
        if why:
            out(f"{name} was not measured: {why}")
        else:
            found[f"{name}, {RUNS:,} runs"] = module.page(
                stack.enter_context(module.serving(python, arguments.folder, RUNS))
            )
    return found


def load(browser: Browser, url: str, rows: str) -> dict[str, float]:
    """One load with a new profile. Empty if no rows appear."""
    from playwright.sync_api import TimeoutError  # a separate profile

    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    try:
        page.goto(url, wait_until="commit")
        data = page.wait_for_function(READY, arg=[rows, LEAST], timeout=20_000).json_value()
        painted = page.wait_for_function(PAINT, timeout=10_000).json_value()
        return {"first paint": float(painted), "first data": float(data)}
    except TimeoutError as error:
        out(f"{url} was not measured: {str(error).splitlines()[0]}")
        return {}
    finally:
        context.close()


def act(browser: Browser, base: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each action, repeated, from the click until the result is drawn."""
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.set_default_timeout(60_000)
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        page.goto(f"{base}/?repo=runs", wait_until="commit")
        page.locator(ROWS).first.wait_for()
        for name, (press, answer) in actions(page, number).items():
            began = time.perf_counter()
            if answer:
                # mypy infers no lambda
                with page.expect_response(lambda response, part=answer: part in response.url):  # type: ignore[misc]
                    press()
            else:
                press()
            page.evaluate(DRAWN)
            times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
            page.wait_for_timeout(150)
    return times


def actions(page: Page, number: int) -> dict[str, tuple[Callable[[], object], str]]:
    """The actions of a user, in order. Each has a part of its request that no background refresh
    contains."""
    field = page.get_by_role("combobox", name="Filter")

    def search(text: str) -> None:
        field.fill(text)
        field.press("Enter")

    def header(title: str) -> Callable[[], object]:
        return page.get_by_role("columnheader", name=title, exact=True).get_by_role("button").click

    def scene(title: str) -> Callable[[], object]:
        return (
            page.get_by_role("group", name="What is shown").get_by_role("button", name=title).click
        )

    return {
        "sort by best": (header("Best"), "sort=best"),
        "sort by bytes": (header("Bytes"), "sort=bytes"),
        "filter branches": (lambda: search(f"metrics.loss < 0.{3 + number % 6}"), "q=metrics.loss"),
        "group by a setting": (
            lambda: page.get_by_label("grouped by").select_option("config.optimizer"),
            "group=",
        ),
        "history of a branch": (
            lambda: page.locator(f"{ROWS} .enter").nth(number % 20).click(),
            "/graph?",
        ),
        "open a state": (lambda: page.locator("[role=row][id^=state-]").nth(2).click(), "/states/"),
        "the one above": (lambda: page.keyboard.press("ArrowUp"), "/states/"),
        "close it": (lambda: page.keyboard.press("Escape"), ""),
        "curves": (lambda: page.keyboard.press("c"), "/series"),
        "every state": (scene("States"), "/graph?"),
        "to the end": (lambda: page.keyboard.press("End"), ""),
        "find states": (
            lambda: search(f"metrics.rare > 0.5 and step > {number}"),
            "q=metrics.rare",
        ),
        "back to the branches": (scene("Branches"), ""),
    }


def report(found: dict[str, dict[str, list[float]]], columns: list[str]) -> str:
    rows = [
        [
            name,
            *(
                f"{spread(values[column])}{judged(name, column, values[column])}"
                for column in columns
            ),
        ]
        for name, values in found.items()
    ]
    return table(["", *columns], rows)


def judged(name: str, column: str, values: list[float]) -> str:
    if column not in GOALS_MS or name.startswith(("MLflow", "Aim")):
        return ""
    return (
        f" ({GOALS_MS[column]:g}:"
        f" {'met' if percentile(values, 0.5) <= GOALS_MS[column] else 'MISSED'})"
    )


def percentiles(found: dict[str, list[float]]) -> str:
    rows = []
    for name, values in found.items():
        p50, p99 = (percentile(values, share) for share in (0.5, 0.99))
        rows.append(
            [
                name,
                short(p50),
                short(p99),
                f"500: {'met' if p99 <= GOALS_MS['action, p99'] else 'MISSED'}",
            ]
        )
    return table(["action", "p50", "p99", "goal (p99)"], rows)


if __name__ == "__main__":
    sys.exit(main())
