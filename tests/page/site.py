"""What the tests of the panels share: a repository, a server of it that can be killed, a
browser, and a training to command."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

import datastates
from tests.page.grown import grow
from tests.support import warm
from tests.support.effort import IS_THOROUGH

if TYPE_CHECKING:
    from datastates import State

ROOT = Path(__file__).parents[2]
TOKEN = "may-write-" + "w" * 22
READER = "may-only-read-" + "r" * 18
TIMEOUT_MS = 40_000
"""What a page may take on a machine whose cores others have."""
expect.set_options(timeout=TIMEOUT_MS)


@dataclass
class Site:
    """A served repository. The port stays when the server is started again."""

    folder: Path
    token: str | None = None
    scope: str = "write"
    port: int = field(default_factory=lambda: _free_port())
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        command = [
            sys.executable,
            "-m",
            "tests.page.server",
            str(self.folder),
            str(self.port),
            *([f"{self.scope}:{self.token}", f"read:{READER}"] if self.token else []),
        ]
        self.process = warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """At once, as by a crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def address(self, query: str = "", *, token: str | None = None) -> str:
        """Of the page; a token is handed over as ``datastates serve --write`` prints it."""
        view = "" if "view=" in query else "&view=states"
        return f"http://127.0.0.1:{self.port}/?repo=runs{view}{query and '&' + query}{f'#token={token}' if token else ''}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def grown_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with forks, made once: to be read or copied, not changed."""
    if not (ROOT / "api" / "static" / "index.html").exists():
        pytest.skip("the page is not built: make ui")
    folder = tmp_path_factory.mktemp("grown") / "runs"
    grow(folder, 18)
    return folder


@dataclass(frozen=True)
class Grown:
    """States of the grown repository by revision."""

    states: dict[str, State]

    def __getitem__(self, rev: str) -> State:
        return self.states[rev]


REVISIONS = (
    "main",
    "main~1",
    "main~2",
    "warm",
    "warm~1",
    "no-dropout",
    "hot",
    "hot/cooler",
    "hot@step:12",
    "soup",
)


@pytest.fixture(scope="session")
def grown(grown_folder: Path) -> Grown:
    """Some states of it."""
    with datastates.open(grown_folder) as repo:
        return Grown({rev: repo.state(rev) for rev in REVISIONS})


def chromium() -> str | None:
    """Where it lies: in the gate the one without a window, which does half of the work for the
    same page; else the whole one."""
    names = ("chromium-headless-shell", "chromium")
    return next(filter(None, map(shutil.which, reversed(names) if IS_THOROUGH else names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium.

    While it is there an event loop runs in this thread, which tests with loops of their own
    cannot have."""
    found = chromium()
    if found is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        # a third less to do for each window
        fewer_processes = [
            "--in-process-gpu",
            "--renderer-process-limit=1",
        ]
        options = {"executable_path": found, "args": ["--no-sandbox", *fewer_processes]}
        try:
            browser = playwright.chromium.launch(**options)  # type: ignore[arg-type]
        except Error:
            # on a busy machine, Chromium sometimes crashes while it starts: it gets a second chance
            browser = playwright.chromium.launch(**options)  # type: ignore[arg-type]
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A window of 1280 x 800. An error of the page's own code fails the test."""
    with new_page(browser) as page:
        yield page


@contextmanager
def new_page(browser: Browser, **options: object) -> Iterator[Page]:
    """A window with a session of its own."""
    # Playwright's own
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})  # type: ignore[arg-type]
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert not errors


@pytest.fixture(scope="session")
def shared(grown_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A copy of it, served to everybody for reading: one server for all tests that change
    nothing."""
    with serving(grown_folder, tmp_path_factory.mktemp("shared")) as site:
        yield site


@pytest.fixture
def site(grown_folder: Path, tmp_path: Path) -> Iterator[Site]:
    """A copy of the test's own, served to everybody for reading."""
    with serving(grown_folder, tmp_path) as site:
        yield site


@pytest.fixture
def writable(grown_folder: Path, tmp_path: Path) -> Iterator[Site]:
    """A copy of it, served to who has ``TOKEN``."""
    with serving(grown_folder, tmp_path, TOKEN) as site:
        yield site


@pytest.fixture
def administered(grown_folder: Path, tmp_path: Path) -> Iterator[Site]:
    """A copy of it, served to who has ``TOKEN``, which may do everything."""
    with serving(grown_folder, tmp_path, TOKEN, "admin") as site:
        yield site


@contextmanager
def serving(
    folder: Path, place: Path, token: str | None = None, scope: str = "write"
) -> Iterator[Site]:
    """A server of a copy."""
    shutil.copytree(folder, place / "runs")
    site = Site(place / "runs", token, scope)
    site.start()
    try:
        yield site
    finally:
        site.kill()


class Training:
    """A real training in a process of its own that makes a step when it is told to."""

    def __init__(self, folder: Path, branch: str, start: str | None) -> None:
        command = [sys.executable, "-m", "tests.page.grown", str(folder), branch, start or ""]
        self.process = warm.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> str:
        """One more step, captured and recorded; gives the state's uid."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Let it close its repository."""
        self.process.communicate()


@pytest.fixture
def training() -> Iterator[Callable[..., Training]]:
    """``training(folder, branch, start)``: begins one; it ends with the test."""
    with ExitStack() as stack:

        def begin(folder: Path, branch: str, start: str | None = None) -> Training:
            begun = Training(folder, branch, start)
            stack.callback(begun.end)
            return begun

        yield begin
