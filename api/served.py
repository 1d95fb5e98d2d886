"""A repository that is served: its name, and what the server keeps of it between requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Path, Request

from datastates.errors import NotFound
from datastates.lineage.database import deadline
from datastates.lineage.views.branch_rows import Lines, counts_of
from datastates.lineage.views.detail import count
from datastates.maintenance.core import Core

from .cache import Forecasts, Kept, Norms
from .curves import Curves
from .graph_windows import Windows
from .live import LiveEvents, Pictures
from .payload import ConcurrencyLimit

if TYPE_CHECKING:
    from datastates.lineage.session import Session


DOWNLOADS = 8
"""How many downloads may be under way at once."""

QUESTIONS = 8
"""How many requests may read the lineage at once: the training needs the processor too."""

PAYLOAD_READS = 4
"""How many requests may read payload at once: each occupies a thread, and the disk."""

ANSWER_S = 10.0
"""How long an answer may use the database, and how long it may wait for its turn."""

Uid = Annotated[
    str,
    Path(
        pattern="^[0-9a-f]{24}$",
        description="A state's uid, whole: `/resolve` finds it for a revision",
    ),
]


class Served:
    """One repository of a server.

    Safe from any thread. ``close`` ends the work that it began, and leaves the repository open."""

    def __init__(self, name: str, core: Core) -> None:
        self.name, self.core = name, core
        self.live = LiveEvents(core.looking, name=name)
        self.downloads = ConcurrencyLimit(
            DOWNLOADS,
            "as many downloads as may be are under way: try again in a moment",
            wait_s=0,
            retry_s=1,
        )
        self.windows = Windows(core.reading)
        self.curves = Curves()
        self.forecasts = Forecasts(core)
        self.counts = Kept(
            "statistics",
            core.reading,
            lambda session: (count(session), core.tiers.durable.bytes_stored),
        )
        self.lines = Lines()
        self.branch_counts = Kept(
            "branch-counts", core.reading, lambda session: counts_of(session, core.home.uid)
        )
        self._questions = ConcurrencyLimit(
            QUESTIONS,
            f"{QUESTIONS} requests ask {name!r} just now: try again later",
            wait_s=ANSWER_S,
            retry_s=5,
        )
        self.payload_reads = ConcurrencyLimit(
            PAYLOAD_READS,
            f"{PAYLOAD_READS} requests read states of this repository just now: try again in a few"
            " seconds",
            wait_s=2.0,
            retry_s=2,
        )
        self.norms = Norms()
        self.pictures: Pictures | None = None

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session for one request; it sees every capture made so far by this process. Do not nest
        them.

        :raises InvalidInput: the query takes longer than ``ANSWER_S``.
        :raises Refusal: too many requests are reading.
        """
        with self._questions.one(), deadline(ANSWER_S), self.core.reading() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A durable transaction; captures of this process see it at once."""
        with self.core.writing() as session:
            yield session
        self.live.look()

    def warm(self) -> None:
        """Read everything once, in the background: otherwise the first request about a million
        states would wait for seconds."""

        def warm_counts() -> None:
            self.counts.warm()
            self.branch_counts.warm()

        self.windows.warm(then=warm_counts)

    def close(self) -> None:
        self.live.close()
        self.windows.close()
        self.counts.close()
        self.branch_counts.close()


def _choose(
    request: Request,
    repository: Annotated[str, Path(description="The repository's name on this server")],
) -> Served:
    served: dict[str, Served] = request.app.state.served
    if repository not in served:
        raise NotFound(
            f"this server has no repository {repository!r}: it has {', '.join(sorted(served))}"
        )
    return served[repository]


Chosen = Annotated[Served, Depends(_choose)]
"""The repository that a route's path names."""
