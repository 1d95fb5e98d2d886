"""Questions of whoever may read: searches, revisions and cursors, kept where they once did harm,
and changed at random.

    python -m tests.api.asking --count 20000

asks so many; the tests ask a few. What is found goes to ``tests/corpus/questions.json``.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import datastates
from datastates.api.app import create_app
from datastates.lineage.query import pages
from tests.api.conftest import BASE, NAME, build

if TYPE_CHECKING:
    from datastates import Repository

CORPUS: dict[str, list[Any]] = json.loads(
    (Path(__file__).parents[1] / "corpus" / "questions.json").read_text(encoding="utf-8")
)
PATIENCE_S = 60.0
"""More than an answer may take of the database, on a busy machine."""

_PIECES = [
    *"()'\"\\~^@{}:.,<>=!*%_-+ \t\n\x00\u00fc\u0301\U0001f600",
    *(
        " and ",
        " or ",
        "not ",
        " order by ",
        " limit ",
        " in (",
        " desc",
        "now-",
        "inf",
        "nan",
        "@best:",
        "@step:",
        "@{",
        "..",
        "metrics.",
    ),
    *("attr.", "config.", "branch", "ancestor_of(", "9" * 17, "9" * 20, "-1", "0", "1e400", "true"),
]
_NUMBERS: list[object] = [
    0,
    1,
    -1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    1.0,
    float("inf"),
    float("nan"),
    None,
    "x",
    "\x00",
    [],
]


def seal(text: str, place: object) -> str:
    """A cursor as anybody can make one who reads the source."""
    body = msgspec.msgpack.encode(place)
    return base64.urlsafe_b64encode(pages._digest(body, text) + body).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks a server, and looks at each answer: it comes in time, is no failure, and tells
    nothing of the inside."""

    client: TestClient
    repo: Repository

    def search(self, text: str, **more: Any) -> Any:
        return self._ask("/states", {"q": text, **more})

    def resolve(self, rev: str) -> None:
        self._ask("/resolve", {"rev": rev})
        self._ask("/graph", {"head": [rev, "main"]})

    def turn(self, text: str, place: object) -> None:
        """The page behind a cursor has only what the search finds."""
        page = self.search(text, after=seal(text, place), limit=100)
        if page is not None:
            assert len(page["items"]) <= 100
            bare = self.search(text, limit=1000)
            assert bare is not None
            assert (
                {state["uid"] for state in page["items"]}
                <= {state["uid"] for state in bare["items"]}
                or "limit" in text
                or "now" in text
            )

    def _ask(self, path: str, query: dict[str, Any]) -> Any:
        began = time.monotonic()
        try:
            answer = self.client.get(f"{BASE}{path}", params=query)
        except UnicodeEncodeError:
            return None  # no address can hold it
        assert time.monotonic() - began < PATIENCE_S, (path, query)
        assert answer.status_code in (200, 400, 404), (path, query, answer.text)
        for inside in (str(self.repo.location.root), "SELECT ", "[SQL", "Traceback", "sqlite"):
            assert answer.status_code == 200 or inside not in answer.text, (
                path,
                query,
                answer.text,
            )
        return answer.json() if answer.status_code == 200 else None


def check_changed(asker: Asker, count: int) -> None:
    """Ask that many of each kind, made of those that are kept by random changes."""
    quiet = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for seeds, ask in ((CORPUS["queries"], asker.search), (CORPUS["revisions"], asker.resolve)):
        quiet(given(_texts(seeds))(_of(ask)))()
    quiet(given(_cursors())(_of(lambda cursor: asker.turn(*cursor))))()


def _of(ask: Callable[[Any], object]) -> Callable[[Any], None]:
    def check(question: Any) -> None:
        ask(question)

    return check


def _texts(seeds: list[str]) -> st.SearchStrategy[str]:
    change = st.tuples(
        st.integers(0, 400),
        st.integers(0, 12),
        st.one_of(st.sampled_from(_PIECES), st.sampled_from(seeds)),
    )
    return st.builds(_changed, st.sampled_from(seeds), st.lists(change, max_size=4))


def _changed(text: str, changes: list[tuple[int, int, str]]) -> str:
    """With pieces put in at places, each in the place of so many characters."""
    for at, length, piece in changes:
        at %= len(text) + 1
        text = text[:at] + piece + text[at + length :]
    return text[:3000]


def _cursors() -> st.SearchStrategy[tuple[str, object]]:
    values = st.sampled_from(_NUMBERS)
    place = st.tuples(values, values, st.lists(values, max_size=4))
    kept = st.sampled_from([tuple(each) for each in CORPUS["cursors"]])
    return st.one_of(
        kept, st.tuples(st.sampled_from([text for text, _ in CORPUS["cursors"]]), place)
    )


def _askers() -> Iterator[Asker]:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "runs")
        with (
            datastates.open(Path(folder) / "runs") as repo,
            TestClient(create_app({NAME: repo}), base_url="http://127.0.0.1") as client,
        ):
            yield Asker(client, repo)


def main() -> None:
    """As said above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    count = parser.parse_args().count
    for asker in _askers():
        check_changed(asker, count)
    # a command says what it did
    print(f"{3 * count} questions were answered or refused")  # noqa: T201


if __name__ == "__main__":
    main()
