"""The pictures of the page in the documents, taken of the page as it is.

    python -m tests.page.pictures [--into docs/pictures] [--only NAME ...]
    python -m tests.page.pictures --before FOLDER    # the built page of an older tree: its opening
    view, and ours beside it

Three repositories are served: 10,000 states on 40 branches, a small one whose tensors are there,
and a study of sixty variants. An older page is shown on the first of them: it asks the same server.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import datastates
from tests.page.conftest import serving
from tests.page.grown import grow
from tests.page.large import populate
from tests.page.site import chromium
from tests.page.study import study

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

ROOT = Path(__file__).parents[2]
DESKTOP = {"width": 1440, "height": 900}
TABLET = {"width": 1024, "height": 768}
PHONE = {"width": 390, "height": 844}
GAP = 24
TIMEOUT_MS = 30_000
COLOURS = 256
"""Of a picture: a screen has few, and a file of them is a third as large."""


@dataclass(frozen=True)
class Picture:
    """A view of one of the repositories: what to wait for, and how large the window is."""

    query: str
    awaited: str
    repository: str = "large"
    size: dict[str, int] = field(default_factory=lambda: DESKTOP)
    theme: str = "light"


PICTURES = {
    "page-light": Picture("view=branches&by=best", "[data-branch]"),
    "page-dark": Picture("view=branches&by=best", "[data-branch]", theme="dark"),
    "page-phone": Picture("view=branches&by=best", "[data-branch]", size=PHONE),
    "page-graph": Picture("view=graph", ".row", "small"),
    "page-curves": Picture(
        "panel=curves&view=graph&head=main&head=hot&head=no-dropout",
        "[data-panel=curves] canvas",
        "small",
    ),
    "page-compare": Picture("view=compare", "[data-kept]", "study"),
}
OPENING = {
    "light": Picture("", "[data-branch]"),
    "dark": Picture("", "[data-branch]", theme="dark"),
    "1024": Picture("", "[data-branch]", size=TABLET),
    "390": Picture("", "[data-branch]", size=PHONE),
}
"""What one sees first, and is put beside what one saw before."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", nargs="+", default=list(PICTURES), choices=list(PICTURES))
    parser.add_argument(
        "--before", type=Path, help="the built page of an older tree, its api/static"
    )
    arguments = parser.parse_args()
    wanted = (
        {"large"} if arguments.before else {PICTURES[name].repository for name in arguments.only}
    )
    with repositories(wanted) as addresses, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        if arguments.before:
            for name, one in OPENING.items():
                before = taken(browser, addresses["large"], one, arguments.before)
                save(
                    beside([before, taken(browser, addresses["large"], one)]),
                    arguments.into / f"before-after-{name}.png",
                )
        else:
            for name in arguments.only:
                one = PICTURES[name]
                save(taken(browser, addresses[one.repository], one), arguments.into / f"{name}.png")
        browser.close()


def taken(browser: Browser, address: str, one: Picture, built: Path | None = None) -> Image.Image:
    """A view as it is seen; of the page that lies in ``built``, which opens with the states,
    where that is given."""
    options: dict[str, Any] = {
        "viewport": one.size,
        "color_scheme": one.theme,
        "reduced_motion": "reduce",
    }
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    if built is not None:

        def instead(route: Route) -> None:
            path = urlsplit(route.request.url).path
            route.fulfill(path=built / (path.removeprefix("/") or "index.html"))

        page.route(lambda url: not urlsplit(url).path.startswith("/api/"), instead)
    page.goto(f"{address}/?{one.query}")
    page.locator(one.awaited if built is None else "[role=row][id^=state-]").first.wait_for()
    page.get_by_text("live", exact=True).wait_for(state="attached")
    page.wait_for_timeout(1500)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    page.context.close()
    return picture


def beside(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures from left to right, the older first."""
    made = Image.new(
        "RGB",
        (sum(one.width + GAP for one in pictures) - GAP, max(one.height for one in pictures)),
        "white",
    )
    left = 0
    for one in pictures:
        made.paste(one, (left, 0))
        left += one.width + GAP
    return made


def save(picture: Image.Image, path: Path) -> None:
    """As a file as small as it can be without being read worse."""
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


@contextmanager
def repositories(wanted: set[str]) -> Iterator[dict[str, str]]:
    """The addresses of those that are wanted, as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        small, sixty = Path(folder) / "small", Path(folder) / "sixty"
        if "small" in wanted:
            grow(small, 60)
        if "study" in wanted:
            study(sixty)
        with (
            datastates.open(small) as grown,
            datastates.open(sixty) as studied,
            large(Path(folder) / "large", is_wanted="large" in wanted) as many,
            serving(grown) as at_small,
            serving(studied) as at_study,
            serving(many) as at_large,
        ):
            yield {"small": at_small, "study": at_study, "large": at_large}


@contextmanager
def large(folder: Path, *, is_wanted: bool) -> Iterator[datastates.Repository]:
    """10,000 states on 40 branches, of one of which the training goes on."""
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        if not is_wanted:
            yield repo
            return
        populate(repo)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        with repo.track(
            model=model, optimizer=optimizer, branch="now", durable_every=1, config={"lr": 0.001}
        ) as run:
            for step in range(12):
                run.capture(metrics={"loss": 3.0 * 0.8**step})
            yield repo


if __name__ == "__main__":
    main()
