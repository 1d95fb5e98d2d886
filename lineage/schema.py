"""The tables of the lineage. One naming convention names every constraint.

Times are UTC, stored as microseconds since the epoch, so that SQLite and PostgreSQL order and
compare them alike. With ``sqlite_with_rowid=False``, SQLite stores the rows in their primary key:
one tree to write instead of two.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    and_,
    collate,
    func,
    literal_column,
    text,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# SQLite autoincrements row ids only for INTEGER keys; PostgreSQL gets 64 bits.
Id = BigInteger().with_variant(Integer, "sqlite")

NAMING = {
    "ix": "ix_%(column_0_N_label)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


def beginning(text: ColumnElement[str]) -> ColumnElement[str]:
    """As much of a text column as an index of PostgreSQL holds, compared by code point.

    An entry there takes 2704 bytes at most."""
    return func.left(collate(text, "C"), literal_column("255"))


def is_finite(column: ColumnElement[float]) -> ColumnElement[bool]:
    """Whether a number is neither infinite nor NaN, which is NULL. The result is never NULL."""
    return and_(column.is_not(None), column > -math.inf, column < math.inf)


def _of_texts(table: str, owner: str) -> tuple[Index, Index]:
    """The indexes of texts by key, one for each database (``info``). SQLite indexes whole texts."""
    return (
        Index(None, "key", "text", owner, info={"dialect": "sqlite"}),
        Index(
            f"ix_{table}_key_beginning_{owner}",
            "key",
            beginning(literal_column("text")),
            owner,
            info={"dialect": "postgresql"},
        ),
    )


metadata = MetaData(naming_convention=NAMING)
"""All tables; Alembic compares a database with it."""


RUN = Table(
    "run",
    metadata,
    Column("id", Id, primary_key=True),
    Column("uid", String(24), nullable=False, unique=True),
    Column("process", String(24), index=True),
    Column("branch", String(255)),
    Column("host", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("argv", JSON, nullable=False),
    Column("git_commit", Text),
    Column("git_dirty", Boolean),
    Column("config", JSON, nullable=False),
    Column("versions", JSON, nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    Column("is_carried", Boolean),
)
"""A process that tracked; or one training of it, with the uid of its ``process`` and the
``branch`` that it moves.

``config`` holds the settings that nobody chose (``datastates.…``); those that somebody chose
are in the settings table. ``is_carried`` is true of a row that is no run here: a configuration
that came with states of another lineage. Of our own runs it is NULL.
"""


SETTING = Table(
    "setting",
    metadata,
    Column("run_id", ForeignKey("run.id"), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("type", String(5), nullable=False),
    Column("number", Double),
    Column("text", Text),
    Index(None, "key", "number", "run_id"),
    *_of_texts("setting", "run_id"),
    sqlite_with_rowid=False,
)
"""One value of a run's configuration, stored by type as an attribute is; dots separate
nested names."""


STATE = Table(
    "state",
    metadata,
    Column("id", Id, primary_key=True),
    Column("uid", String(24), nullable=False, unique=True),
    Column("digest", String(64), nullable=False, index=True),
    Column("parent_id", ForeignKey("state.id"), index=True),
    Column("generation", Integer, nullable=False),
    Column("jump_id", ForeignKey("state.id")),
    Column("jump_step", BigInteger),
    Column("run_id", ForeignKey("run.id"), index=True),
    Column("step", BigInteger, nullable=False, index=True),
    Column("micro_step", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False, index=True),
    Column("status", String(12), nullable=False),
    Column("bytes_total", BigInteger, nullable=False),
    Column("bytes_new", BigInteger, nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("message", Text),
    # no foreign key: each capture would pay for the check, and segments stay
    Column("segment_id", BigInteger),
    Index(None, "segment_id", "status", "bytes_new"),
)
"""A node. ``generation`` counts first parents to the root; ``jump_id`` is an ancestor for O(log
n) walks, and ``jump_step`` the lowest step from the first parent up to it, so that a search for
a step can jump too.

A parent is always older than its child, so ``id`` orders the graph topologically: walks rely on
it. ``segment_id`` is the segment that it belongs to; NULL if no branch ever captured or adopted
it.
"""


EDGE = Table(
    "edge",
    metadata,
    Column("child_id", ForeignKey("state.id"), primary_key=True),
    Column("parent_id", ForeignKey("state.id"), primary_key=True, index=True),
    Column("kind", String(12), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("weight", Double, nullable=False),
    sqlite_with_rowid=False,
)
"""A further parent (merge, soup, clone); the first parent is in the state's own row."""


METRIC = Table(
    "metric",
    metadata,
    Column("state_id", ForeignKey("state.id"), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("value", Double),
    Index(None, "key", "value", "state_id"),
    sqlite_with_rowid=False,
)
"""One number of one state.

NULL is NaN: SQLite cannot store one, and no comparison with either is true."""


ATTRIBUTE = Table(
    "attribute",
    metadata,
    Column("state_id", ForeignKey("state.id"), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("type", String(5), nullable=False),
    Column("number", Double),
    Column("text", Text),
    Index(None, "key", "number", "state_id"),
    *_of_texts("attribute", "state_id"),
    sqlite_with_rowid=False,
)
"""One attribute of a state, stored by type: ``number`` for numbers and booleans, ``text`` for
strings.

``type`` is ``str``, ``int``, ``float``, ``bool`` or ``none``. An int beyond 2**53 has its exact
digits in ``text``; a float that is NaN has no number.
"""


REF = Table(
    "ref",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("kind", String(6), nullable=False),
    Column("state_id", ForeignKey("state.id"), nullable=False, index=True),
    Column("version", Integer, nullable=False),
    Column("message", Text),
)
"""A branch or a tag, moved by compare-and-swap on ``version``."""


_NO_MOVE = text("old_id IS NULL AND new_id IS NULL")


EVENT = Table(
    "ref_event",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(255), nullable=False),
    Column("kind", String(6), nullable=False),
    Column("old_id", ForeignKey("state.id")),
    Column("new_id", ForeignKey("state.id")),
    Column("reason", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index(None, "name", "id"),
    # the lines of notes and of metrics, which are counted
    Index(None, "id", sqlite_where=_NO_MOVE, postgresql_where=_NO_MOVE),
)
"""Append-only: every creation, move and deletion of a ref; the reflog and the source of live
events."""


REPLICA = Table(
    "replica",
    metadata,
    Column("state_id", ForeignKey("state.id"), primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("tier", String(12), primary_key=True),
    Column("node", String(255), primary_key=True),
    Column("status", String(8), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("is_near", Boolean),
    sqlite_with_rowid=False,
)
"""One rank's shard of one state is complete on a tier of a node (see ``holders``).

``status`` is ``ok`` or ``gone``. ``is_near``: a policy keeps the state off further tiers."""


PART = Table(
    "part",
    metadata,
    Column("state_uid", String(24), primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("world_size", Integer, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("run_id", ForeignKey("run.id"), index=True),
    Column("status", String(12), nullable=False),
    Column("tier", String(12), nullable=False),
    Column("node", String(255), nullable=False),
    Column("bytes_total", BigInteger, nullable=False),
    Column("bytes_new", BigInteger, nullable=False),
    Column("told_at", BigInteger, nullable=False),
    Column("place", Text),
    Column("said", Text),
    sqlite_with_rowid=False,
)
"""One rank's part of a state of several parts. While the state waits for other parts, ``place``
and ``said`` hold, as JSON, what the rank reported of the state.

Once the state is complete they are NULL, and there is a state of that uid.
"""


CLONE = Table(
    "clone",
    metadata,
    Column("id", Id, primary_key=True),
    Column("state_id", ForeignKey("state.id"), nullable=False, index=True),
    Column("source", Text, nullable=False),
    Column("source_repository", String(255), nullable=False),
    Column("node", String(255), nullable=False),
    Column("run_id", ForeignKey("run.id"), index=True),
    Column("bytes_moved", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)
"""A state that came here from another process: from where, into the memory of which run, and
how many bytes were moved for it."""


REPOSITORY = Table(
    "repository",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("uid", String(24), nullable=False),
)
"""The lineage itself: one row, created with the database.

Processes with the same uid share it."""


FOLDER = Table(
    "folder",
    metadata,
    Column("uid", String(24), primary_key=True),
    Column("path", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("seen_at", BigInteger, nullable=False),
)
"""A folder of packs, by the uid stored in it; path and host say where it was last seen. It
is the node of a replica on the local tier."""


SEAL = Table(
    "seal",
    metadata,
    Column("state_id", ForeignKey("state.id"), primary_key=True, autoincrement=False),
    Column("digest", String(64), nullable=False),
)
"""A state's seal: what its chunks hold, by a digest that nobody can forge (see
``datastates/storage/parallel_read.py``)."""


NOTE = Table(
    "note",
    metadata,
    Column("id", Id, primary_key=True),
    Column("uid", String(24), nullable=False, unique=True),
    Column("state_id", ForeignKey("state.id"), index=True),
    Column("branch", String(255), index=True),
    Column("author", String(255), nullable=False),
    Column("text", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("edited_at", BigInteger),
)
"""What somebody wrote about a state or a branch, in Markdown: one of ``state_id`` and
``branch`` is given.

The notes of a branch belong to its name. A note keeps its ``uid`` in bundles.
"""


SEGMENT = Table(
    "segment",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(255), nullable=False),
    Column("branch", String(255), unique=True),
    Column("fork_id", BigInteger),
    Column("first_id", BigInteger),
)
"""The states that one branch has to itself: a piece of a path of first parents, which begins
after ``fork_id``, or with a root.

``branch`` is the branch whose head is its newest state, or ``fork_id`` while it has no state;
NULL once that branch was deleted or moved elsewhere. ``name`` is the branch's name when the
segment began. States are named without foreign keys, since a segment is written before its
first state is.
"""


STRETCH = Table(
    "stretch",
    metadata,
    Column("segment_id", ForeignKey("segment.id"), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("count", Integer, nullable=False),
    Column("gaps", Integer, nullable=False),
    Column("total", Double, nullable=False),
    Column("least", Double),
    Column("least_id", BigInteger),
    Column("most", Double),
    Column("most_id", BigInteger),
    Column("first", Double),
    Column("first_id", BigInteger),
    Column("last", Double),
    Column("last_id", BigInteger),
    Column("gap_id", BigInteger),
    sqlite_with_rowid=False,
)
"""The summary of one metric over some states of a segment; ``tally.Tally`` explains each
column.

``place`` is the generation of the states, divided by ``tally.STATES``: such a row is written
once, when its last state is recorded. The row at ``tally.WHOLE`` covers the whole segment, and
grows with each state.
"""


VARIANT = Table(
    "variant",
    metadata,
    Column("study", String(255), primary_key=True),
    Column("name", String(255), primary_key=True),
    Column("place", Integer, nullable=False),
    Column("parent", String(255)),
    Column("epochs", BigInteger, nullable=False),
    Column("config", Text, nullable=False),
    Column("planned_at", BigInteger, nullable=False),
    Column("began_at", BigInteger),
    Column("ended_at", BigInteger),
    Column("attempts", Integer, nullable=False),
    Column("took_s", Double, nullable=False),
    Column("error", Text),
    sqlite_with_rowid=False,
)
"""One variant of a study as its plan has it, and what became of its training beside the states
that it recorded.

``place`` is its position in the plan; ``config`` is what it changes, as JSON. ``took_s`` is the
number of seconds for which its workers trained it, over all ``attempts``; a worker that was
killed reported none. ``ended_at`` is NULL while one is at work. ``error`` says why the last
attempt failed.
"""


REPORT = Table(
    "report",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
)
"""A report on outliers that is stored for people to look at.

``body`` is what it says of the whole, as JSON."""


REPORT_SAMPLE = Table(
    "report_sample",
    metadata,
    Column("report_id", ForeignKey("report.id"), primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("sample", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
    Column("picture", LargeBinary),
)
"""One of the samples that a report ranks highest: ``body`` is its score, as JSON;
``picture`` shows it, if one was drawn."""


def to_us(moment: datetime | None) -> int:
    """Microseconds since the epoch; None is now, and a time without a zone is local time, as
    everywhere in Python."""
    moment = datetime.now(UTC) if moment is None else moment
    return (moment.astimezone(UTC) - EPOCH) // timedelta(microseconds=1)


def from_us(stored: int) -> datetime:
    """The moment in UTC."""
    return EPOCH + timedelta(microseconds=stored)
