"""The page in Chromium, over lineages that were recorded without a training: many states, forks,
merges, and one that grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Page  # noqa: TC002  # pytest reads it

import datastates
from datastates import Repository
from datastates.api.app import create_app
from tests.page.forest import Forest, plant
from tests.page.site import ROOT
from tests.page.site import administered as administered
from tests.page.site import browser as browser
from tests.page.site import grown as grown
from tests.page.site import grown_folder as grown_folder
from tests.page.site import page as page
from tests.page.site import shared as shared
from tests.page.site import site as site
from tests.page.site import training as training
from tests.page.site import writable as writable


@dataclass
class Wood:
    """A served lineage, and what was planted in it."""

    repo: Repository
    forest: Forest
    address: str

    def at(self, query: str = "") -> str:
        """The page's address with this view; of states, unless it says another."""
        return (
            f"{self.address}/?{query}"
            if "view=" in query
            else f"{self.address}/?{'&'.join(filter(None, (query, 'view=states')))}"
        )

    def uid(self, rev: str) -> str:
        """Of the state that a revision names."""
        return self.repo.state(rev).uid

    def history(self) -> list[str]:
        """The uids of all states, newest first."""
        return [state.uid for state in self.repo.find("order by created desc limit 100000")]

    def capture(self, branch: str, count: int) -> list[str]:
        """As a training would: that many more states on a branch, oldest first."""
        made = []
        for _ in range(count):
            with self.repo.core.database.write() as session:
                self.forest.session = session
                made.append(self.forest.grow(branch, 1))
        return made


class _Server(uvicorn.Server):
    """Runs in a thread: signals are the main thread's."""

    def install_signal_handlers(self) -> None:
        """None."""


@contextmanager
def serving(repo: Repository) -> Iterator[str]:
    """The address of a server of a repository, as long as the block lasts."""
    server = _Server(
        uvicorn.Config(
            create_app({"wood": repo}), port=0, log_level="warning", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, name="page-server")
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it listened"
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def planted(folder: Path, rounds: int) -> Iterator[Wood]:
    """A repository with so many rounds of forks and merges, served."""
    if not (ROOT / "api" / "static" / "index.html").exists():
        pytest.skip("the page is not built: make ui")
    with datastates.open(folder, memory_bytes=16 << 20) as repo:
        forest = plant(repo, rounds=rounds)
        with serving(repo) as address:
            yield Wood(repo, forest, address)


@pytest.fixture(scope="session")
def woods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wood]:
    """About 1000 states, to be read only."""
    with planted(tmp_path_factory.mktemp("woods") / "wood", 4) as wood:
        yield wood


@pytest.fixture
def wood(tmp_path: Path) -> Iterator[Wood]:
    """About 300 states, the test's own."""
    with planted(tmp_path / "wood", 1) as wood:
        yield wood


@pytest.fixture
def open_page(page: Page) -> Callable[[str], Page]:
    """Opens an address and waits for its first rows."""

    def open_(address: str) -> Page:
        page.goto(address)
        page.locator("[role=row][id^=state-]").first.wait_for()
        return page

    return open_
