"""Three captures a second, and a page that is looked at in every frame: does each name stand where
its branch does?

    python -m tests.drivers.live_page [--seconds 120] [--rate 3] [--branches 3] [--views graph
    states]

Captures go to several branches by turns. In each frame, of the graph and then of the states, the
newest row must have the name of a branch, no name may be in two rows, and each only in rows of
states at which its branch stood. Whether anything was wrong is the exit status.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.page.conftest import Wood, planted
from tests.page.site import TIMEOUT_MS

WATCH = """() => {
    window.frames_ = { all: 0, wrong: [], places: new Set() };
    const look = () => {
        const rows = [...document.querySelectorAll("[role=row][id^=state-]")].sort((one, other) => one.ariaRowIndex - other.ariaRowIndex);
        const chips = rows.map((row) => [...row.querySelectorAll(".chip.branch")].map((chip) => chip.textContent));
        const names = chips.flat();
        rows.forEach((row, index) => chips[index].forEach((name) => window.frames_.places.add(`${name} ${row.id.slice(6)}`)));
        window.frames_.all += 1;
        if (!chips[0]?.length || new Set(names).size < names.length) window.frames_.wrong.push(chips);
        requestAnimationFrame(look);
    };
    look();
}"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--rate", type=float, default=3)
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument(
        "--views", nargs="+", default=["graph", "states"], choices=["graph", "states"]
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, planted(Path(folder) / "wood", 1) as wood:
        wrong = [look(wood, view, arguments) for view in arguments.views]
    return int(any(wrong))


def look(wood: Wood, view: str, arguments: argparse.Namespace) -> bool:
    """Capture for so long while a page shows it; whether a frame was wrong."""
    names = ["main", *(f"round-0/lr-{lr}" for lr in (0.03, 0.1, 0.3))][: arguments.branches]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(wood.at(f"view={view}"))
        page.get_by_text("live", exact=True).wait_for()
        page.locator("[role=row][id^=state-]").first.wait_for()
        page.evaluate(WATCH)
        stood = {(name, wood.uid(name)) for name in wood.forest.heads}
        made: list[tuple[str, str]] = []
        thread = threading.Thread(target=capture, args=(wood, names, arguments, made))
        thread.start()
        while thread.is_alive():
            page.wait_for_timeout(200)
        page.locator(f"#state-{made[-1][1]}").wait_for()
        frames = page.evaluate("({ ...window.frames_, places: [...window.frames_.places] })")
        browser.close()
    elsewhere = [
        place for place in frames["places"] if tuple(place.split(" ")) not in stood | {*made}
    ]
    bad = frames["wrong"] + elsewhere
    sys.stdout.write(
        f"{view}: {len(made)} captures, {frames['all']} frames, {len(frames['places'])} places of"
        f" names, {len(bad)} wrong {bad[:3] or ''}\n"
    )
    return bool(bad)


def capture(
    wood: Wood, names: list[str], arguments: argparse.Namespace, made: list[tuple[str, str]]
) -> None:
    """One state after the other, on each branch by turns."""
    count = int(arguments.seconds * arguments.rate)
    began = time.monotonic()
    for number in range(count):
        name = names[number % len(names)]
        made += [(name, uid) for uid in wood.capture(name, 1)]
        time.sleep(max(0.0, began + (number + 1) / arguments.rate - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
