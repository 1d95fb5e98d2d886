"""The pictures of the page in the documents, taken of the page as it is.

    python -m tests.page.pictures [--into docs/pictures] [--only NAME ...] [--prefix before-]

Two repositories are served: 10,000 states on 40 branches, and a small one whose tensors are there. With ``--prefix before-`` and an older
tree on the path the opening view of that tree is taken; ``--beside`` then puts both beside each other.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import datastates
from tests.page.conftest import serving
from tests.page.grown import grow
from tests.page.large import populate

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
DESKTOP = {"width": 1440, "height": 900}
TABLET = {"width": 1024, "height": 768}
PHONE = {"width": 390, "height": 844}
GAP = 24
TIMEOUT_MS = 30_000


@dataclass(frozen=True)
class Picture:
    """A view of one of the repositories: what to wait for, what to do first, and how large the window is."""

    query: str
    awaited: str
    repository: str = "large"
    size: dict[str, int] = field(default_factory=lambda: DESKTOP)
    theme: str = "light"
    act: Callable[[Page], object] = lambda _: None


PICTURES = {
    "page-light": Picture("view=branches&by=best", "[data-branch]"),
    "page-dark": Picture("view=branches&by=best", "[data-branch]", theme="dark"),
    "page-1024": Picture("view=branches&by=best", "[data-branch]", size=TABLET),
    "page-phone": Picture("view=branches&by=best", "[data-branch]", size=PHONE),
    "page-graph": Picture("view=graph", ".row", "small"),
    "page-curves": Picture("panel=curves&view=graph&head=main&head=hot&head=no-dropout", "[data-panel=curves] canvas", "small"),
}
OPENING = ("page-light", "page-dark", "page-1024", "page-phone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", nargs="+", default=list(PICTURES), choices=list(PICTURES))
    parser.add_argument("--prefix", default="", help="of the names of the files")
    parser.add_argument("--beside", type=Path, help="a folder of pictures of before: put both beside each other, and take none")
    arguments = parser.parse_args()
    if arguments.beside:
        for name in OPENING:
            beside(arguments.beside / f"before-{name}.png", arguments.into / f"{name}.png").save(
                arguments.into / f"before-after-{name.removeprefix('page-')}.png", optimize=True
            )
        return
    with repositories() as addresses, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in arguments.only:
            one = PICTURES[name]
            options: dict[str, Any] = {"viewport": one.size, "color_scheme": one.theme, "reduced_motion": "reduce"}
            page = browser.new_context(**options).new_page()
            page.set_default_timeout(TIMEOUT_MS)
            page.goto(f"{addresses[one.repository]}/?{one.query}" if not arguments.prefix else addresses[one.repository])
            page.locator(one.awaited if not arguments.prefix else "[role=row][id^=state-]").first.wait_for()
            page.get_by_text("live", exact=True).wait_for(state="attached")
            one.act(page)
            page.wait_for_timeout(1500)
            page.screenshot(path=arguments.into / f"{arguments.prefix}{name}.png")
            page.context.close()
        browser.close()


@contextmanager
def repositories() -> Iterator[dict[str, str]]:
    """The addresses of both, as long as the block lasts."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        grow(Path(folder) / "small", 60)
        with (
            datastates.open(Path(folder) / "large", memory_bytes=64 << 20) as large,
            datastates.open(Path(folder) / "small") as small,
        ):
            populate(large)
            with large.track(model=model, optimizer=optimizer, branch="now", durable_every=1, config={"lr": 0.001}) as run:
                for step in range(12):
                    run.capture(metrics={"loss": 3.0 * 0.8**step})
                with serving(large) as at_large, serving(small) as at_small:
                    yield {"large": at_large, "small": at_small}


def beside(before: Path, after: Path) -> Image.Image:
    """Both pictures, the older on the left."""
    pictures = [Image.open(path).convert("RGB") for path in (before, after)]
    made = Image.new("RGB", (sum(one.width for one in pictures) + GAP, max(one.height for one in pictures)), "white")
    made.paste(pictures[0], (0, 0))
    made.paste(pictures[1], (pictures[0].width + GAP, 0))
    return made


if __name__ == "__main__":
    main()
