"""Windows of graphs that are kept: what is current, what is drawn in the background, what is
forgotten."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datastates.api import graph_windows
from datastates.api.cache import Background
from datastates.api.graph_windows import Windows
from datastates.api.models import GraphPage
from datastates.errors import NotFound
from datastates.lineage import Database, Edge, EdgeKind
from datastates.lineage.query.walk import log
from datastates.lineage.views.graph import lanes
from datastates.lineage.write import record, refs
from tests.support.lineages import told


class Lineage:
    """A database, its windows, and branches that grow."""

    def __init__(self, database: Database) -> None:
        self.database, self.windows = database, Windows(database.read)
        self.tips: dict[str, str | None] = {}

    def grow(
        self, branch: str, count: int = 1, *, start: str | None = None, merge: str | None = None
    ) -> str:
        with self.database.write() as session:
            tip = self.tips.get(branch)
            if tip is None and start is not None:
                tip = start
                refs.branch(session, branch, start)
            for _ in range(count):
                edges = () if merge is None else (Edge(merge, EdgeKind.MERGE),)
                new = told(
                    secrets.token_hex(12), secrets.token_hex(32), tip, branch, None, 0, edges=edges
                )
                tip = record.record(session, new).uid
        assert tip is not None
        self.tips[branch] = tip
        return tip

    def page(
        self, *heads: str, first: int = 0, count: int = 1000, around: str | None = None
    ) -> GraphPage:
        with self.database.read() as session:
            return self.windows.page(session, heads, first=first, count=count, around=around)


@contextmanager
def opened(path: Path) -> Iterator[Lineage]:
    database = Database(f"sqlite:///{path}")
    made = Lineage(database)
    yield made
    made.windows.close()
    database.close()


@pytest.fixture
def lineage(tmp_path: Path) -> Iterator[Lineage]:
    with opened(tmp_path / "lineage.db") as made:
        yield made


def lanes_of(page: GraphPage) -> list[int]:
    return [row.lane for row in page.rows]


def test_a_window_is_part_of_the_whole(lineage: Lineage) -> None:
    start = lineage.grow("main", 400)
    side = lineage.grow("side", 300, start=start)
    lineage.grow("main", 200, merge=side)
    whole = lineage.page("main")
    with lineage.database.read() as session:
        drawn = list(lanes(log(session, str(lineage.tips["main"]))))

    for first in (0, 1, 255, 256, 257, 640, 899):
        part = lineage.page("main", first=first, count=50)
        assert (part.rows, part.total, part.version) == (
            whole.rows[first : first + 50],
            900,
            whole.version,
        )
    for row, one in zip(whole.rows, drawn, strict=True):
        assert (row.state.uid, row.lane, row.above, row.below, row.joins, row.parents) == (
            one.uid, one.lane, one.above, one.below, one.joins, one.parents,
        )  # fmt: skip
    assert lineage.page("main", first=900).rows == ()


def test_a_window_around_a_state_has_it_in_the_middle(lineage: Lineage) -> None:
    middle = lineage.grow("main", 50)
    lineage.grow("main", 60)
    page = lineage.page(around=middle, count=11)

    assert page.first == 55
    assert page.rows[5].state.uid == middle
    assert lineage.page(around=str(lineage.tips["main"]), count=11).first == 0


def test_a_state_outside_the_history_is_not_found(lineage: Lineage) -> None:
    lineage.grow("main", 3)
    other = lineage.grow("other", 3)
    with pytest.raises(NotFound, match=f"{other} is not in the history of main"):
        lineage.page("main", around=other)


def test_heads_are_followed_as_they_capture(lineage: Lineage) -> None:
    lineage.grow("main", 300)
    lineage.grow("side", 300, start=lineage.tips["main"])
    before = lineage.page()
    tip = lineage.grow("main", 2)
    after = lineage.page()

    assert after.rows[0].state.uid == tip
    assert after.is_current
    assert (after.total, after.version == before.version) == (602, False)
    assert set(after.heads) == set(lineage.tips.values())
    assert lanes_of(after)[2:302] == lanes_of(before)[:300], "side stays in its column"


def test_a_lineage_that_was_made_anew_has_another_version(lineage: Lineage, tmp_path: Path) -> None:
    with opened(tmp_path / "anew.db") as anew:
        for each in (lineage, anew):
            each.grow("main", 3)

        assert lanes_of(anew.page()) == lanes_of(lineage.page())
        assert anew.page().version != lineage.page().version


def test_a_large_graph_is_drawn_in_the_background(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage.grow("main", 30)
    old = lineage.grow("other", 30, start=lineage.tips["main"])
    before = lineage.page()
    monkeypatch.setattr(graph_windows, "_AT_ONCE", 10)
    with lineage.database.write() as session:
        refs.delete_ref(session, "other")

    stale = lineage.page()
    lineage.windows.background.join()
    fresh = lineage.page()

    assert [(row.state.uid, row.lane) for row in stale.rows] == [
        (row.state.uid, row.lane) for row in before.rows
    ]
    assert [ref.name for row in stale.rows for ref in row.refs] == ["main"], (
        "names are those of now"
    )
    assert not stale.is_current
    assert (fresh.total, fresh.is_current) == (30, True)
    assert old in stale.heads
    assert old not in fresh.heads


def test_only_some_sets_of_heads_are_kept(lineage: Lineage) -> None:
    lineage.grow("main", 30)
    for number in range(20):
        lineage.page(f"main~{number}")
    assert len(lineage.windows._kept) == 8


def test_an_empty_lineage_has_an_empty_window(lineage: Lineage) -> None:
    page = lineage.page()
    assert (page.total, page.lanes, page.rows, page.heads, page.is_current) == (0, 0, (), (), True)


def test_many_readers_beside_a_writer_see_whole_windows(lineage: Lineage) -> None:
    lineage.grow("main", 300)
    problems: list[str] = []

    def read() -> None:
        for _ in range(15):
            page = lineage.page(count=400)
            for row, following in zip(page.rows, page.rows[1:], strict=False):
                if row.state.parents != (following.state.uid,) or row.lane != 0:
                    problems.append(row.state.uid)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        lineage.grow("main", 2)
    for thread in threads:
        thread.join()
    assert not problems
    assert lineage.page().total == 330


def test_work_in_the_background_ends_when_it_is_closed() -> None:
    background, begun = Background("test"), threading.Event()

    def work() -> None:
        pause = background.pacer()
        while True:
            begun.set()
            pause()

    assert background.start("work", work)
    assert not background.start("work", work), "one at a time"
    begun.wait()
    background.close()
    assert not background.is_running("work")
    assert not background.start("work", work)
