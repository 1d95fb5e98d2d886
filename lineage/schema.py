"""The tables of the lineage, as typed SQLAlchemy models. One naming convention names every
constraint.

Times are UTC, stored as microseconds since the epoch, so that SQLite and PostgreSQL order and
compare them alike.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    collate,
    func,
    literal_column,
    text,
)

if TYPE_CHECKING:
    from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
else:
    from sqlalchemy import Boolean, Column, Double, Integer, MetaData, String, Table

    _TYPES = {"bool": Boolean, "float": Double, "int": Integer, "str": String}
    _OPTIONAL = " | None"

    class Mapped:
        """The annotation of a column; only its text is ever used."""

    class DeclarativeBase:
        """The root of the classes that share ``metadata``."""

        metadata: MetaData

        def __init_subclass__(cls) -> None:
            name = cls.__dict__.get("__tablename__")
            if name is None:
                return
            said = cls.__dict__.get("__table_args__", ())
            parts, options = (
                ((), said)
                if isinstance(said, dict)
                else (tuple(p for p in said if not isinstance(p, dict)), {})
            )
            options = options or next((dict(part) for part in said if isinstance(part, dict)), {})
            columns = [_column(cls, field, noted) for field, noted in cls.__annotations__.items()]
            cls.__table__ = Table(name, cls.metadata, *columns, *parts, **options)
            for column in columns:
                setattr(cls, column.key, column)

        @classmethod
        def __clause_element__(cls) -> Table:
            """The table, which SQLAlchemy uses in place of the class."""
            return cls.__table__

    def mapped_column(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A column whose name, and all that is not given here, come from the annotation."""
        return arguments, options

    def _column(cls: type, name: str, noted: str) -> Column[Any]:
        """The column for ``x: Mapped[int | None] = mapped_column(…)``; annotations are strings
        here."""
        inner = noted.removeprefix("Mapped[").removesuffix("]")
        arguments, options = cls.__dict__.get(name, ((), {}))
        plain = inner.removesuffix(_OPTIONAL)
        # a foreign key has the type of the column that it refers to
        type_ = () if arguments else (_TYPES[plain](),)
        is_key = options.get("primary_key", False)
        return Column(
            name, *type_, *arguments, **{"nullable": inner != plain and not is_key, **options}
        )


# The tables of the lineage, as typed SQLAlchemy models. One naming convention names every
# constraint.


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# SQLite autoincrements row ids only for INTEGER keys; PostgreSQL gets 64 bits.
Id = BigInteger().with_variant(Integer, "sqlite")

# On SQLite the rows are then stored in their primary key: one tree to write instead of two.
NO_ROWID = {"sqlite_with_rowid": False}

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


def _of_texts(table: str, owner: str) -> tuple[Index, Index]:
    """The index of texts by key, whose ``info`` says the database that it is for: SQLite indexes
    whole texts."""
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


class Base(DeclarativeBase):
    """The base class of the models; Alembic compares with its metadata."""

    metadata = MetaData(naming_convention=NAMING)


class RunRow(Base):
    """A process that tracked; or one training of it, with the uid of its ``process`` and the
    ``branch`` that it moves.

    ``config`` holds the settings that nobody chose (``datastates.…``); those that somebody chose
    are in the settings table. ``is_carried`` is true of a row that is no run here: a configuration
    that came with states of another lineage. Of our own runs it is NULL.
    """

    __tablename__ = "run"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    uid: Mapped[str] = mapped_column(String(24), unique=True)
    process: Mapped[str | None] = mapped_column(String(24), index=True)
    branch: Mapped[str | None] = mapped_column(String(255))
    host: Mapped[str] = mapped_column(Text)
    user: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    argv: Mapped[list[str]] = mapped_column(JSON)
    git_commit: Mapped[str | None] = mapped_column(Text)
    git_dirty: Mapped[bool | None]
    config: Mapped[dict[str, object]] = mapped_column(JSON)
    versions: Mapped[dict[str, str]] = mapped_column(JSON)
    started_at: Mapped[int] = mapped_column(BigInteger)
    finished_at: Mapped[int | None] = mapped_column(BigInteger)
    is_carried: Mapped[bool | None]


class SettingRow(Base):
    """One value of a run's configuration, stored by type as an attribute is; dots separate
    nested names."""

    __tablename__ = "setting"
    __table_args__ = (
        Index(None, "key", "number", "run_id"),
        *_of_texts("setting", "run_id"),
        NO_ROWID,
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    type: Mapped[str] = mapped_column(String(5))
    number: Mapped[float | None]
    text: Mapped[str | None] = mapped_column(Text)


class StateRow(Base):
    """A node. ``generation`` counts first parents to the root; ``jump_id`` is an ancestor for O(log
    n) walks, and ``jump_step`` the lowest step from the first parent up to it, so that a search for
    a step can jump too.

    A parent is always older than its child, so ``id`` orders the graph topologically: walks rely on
    it. ``segment_id`` is the segment that it belongs to; NULL if no branch ever captured or adopted
    it.
    """

    __tablename__ = "state"
    __table_args__ = (Index(None, "segment_id", "status", "bytes_new"),)

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    uid: Mapped[str] = mapped_column(String(24), unique=True)
    digest: Mapped[str] = mapped_column(String(64), index=True)
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("state.id"), index=True)
    generation: Mapped[int] = mapped_column(Integer)
    jump_id: Mapped[int | None] = mapped_column(ForeignKey("state.id"))
    jump_step: Mapped[int | None] = mapped_column(BigInteger)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"), index=True)
    step: Mapped[int] = mapped_column(BigInteger, index=True)
    micro_step: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[int] = mapped_column(BigInteger, index=True)
    status: Mapped[str] = mapped_column(String(12))
    bytes_total: Mapped[int] = mapped_column(BigInteger)
    bytes_new: Mapped[int] = mapped_column(BigInteger)
    world_size: Mapped[int] = mapped_column(Integer)
    message: Mapped[str | None] = mapped_column(Text)
    # no foreign key: each capture would pay for the check, and segments stay
    segment_id: Mapped[int | None] = mapped_column(BigInteger)


class EdgeRow(Base):
    """A further parent (merge, soup, clone); the first parent is in the state's own row."""

    __tablename__ = "edge"
    __table_args__ = NO_ROWID

    child_id: Mapped[int] = mapped_column(ForeignKey("state.id"), primary_key=True)
    parent_id: Mapped[int] = mapped_column(ForeignKey("state.id"), primary_key=True, index=True)
    kind: Mapped[str] = mapped_column(String(12), primary_key=True)
    position: Mapped[int] = mapped_column(Integer)
    weight: Mapped[float]


class MetricRow(Base):
    """One number of one state.

    NULL is NaN: SQLite cannot store one, and no comparison with either is true."""

    __tablename__ = "metric"
    __table_args__ = (Index(None, "key", "value", "state_id"), NO_ROWID)

    state_id: Mapped[int] = mapped_column(ForeignKey("state.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    value: Mapped[float | None]


class AttributeRow(Base):
    """One attribute of a state, stored by type: ``number`` for numbers and booleans, ``text`` for
    strings.

    ``type`` is ``str``, ``int``, ``float``, ``bool`` or ``none``. An int beyond 2**53 has its exact
    digits in ``text``; a float that is NaN has no number.
    """

    __tablename__ = "attribute"
    __table_args__ = (
        Index(None, "key", "number", "state_id"),
        *_of_texts("attribute", "state_id"),
        NO_ROWID,
    )

    state_id: Mapped[int] = mapped_column(ForeignKey("state.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    type: Mapped[str] = mapped_column(String(5))
    number: Mapped[float | None]
    text: Mapped[str | None] = mapped_column(Text)


class RefRow(Base):
    """A branch or a tag, moved by compare-and-swap on ``version``."""

    __tablename__ = "ref"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    kind: Mapped[str] = mapped_column(String(6))
    state_id: Mapped[int] = mapped_column(ForeignKey("state.id"), index=True)
    version: Mapped[int] = mapped_column(Integer)
    message: Mapped[str | None] = mapped_column(Text)


_NO_MOVE = text("old_id IS NULL AND new_id IS NULL")


class RefEventRow(Base):
    """Append-only: every creation, move and deletion of a ref; the reflog and the source of live
    events."""

    __tablename__ = "ref_event"
    __table_args__ = (
        Index(None, "name", "id"),
        # the lines of notes and of metrics, which are counted
        Index(None, "id", sqlite_where=_NO_MOVE, postgresql_where=_NO_MOVE),
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    kind: Mapped[str] = mapped_column(String(6))
    old_id: Mapped[int | None] = mapped_column(ForeignKey("state.id"))
    new_id: Mapped[int | None] = mapped_column(ForeignKey("state.id"))
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[int] = mapped_column(BigInteger)


class ReplicaRow(Base):
    """One rank's shard of one state is complete on a tier of a node (see ``holders``).

    ``status`` is ``ok`` or ``gone``."""

    __tablename__ = "replica"
    __table_args__ = NO_ROWID

    state_id: Mapped[int] = mapped_column(ForeignKey("state.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True)
    tier: Mapped[str] = mapped_column(String(12), primary_key=True)
    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    status: Mapped[str] = mapped_column(String(8))
    bytes: Mapped[int] = mapped_column(BigInteger)


class PartRow(Base):
    """One rank's part of a state of several parts. While the state waits for other parts, ``place``
    and ``said`` hold, as JSON, what the rank reported of the state.

    Once the state is complete they are NULL, and there is a state of that uid.
    """

    __tablename__ = "part"
    __table_args__ = NO_ROWID

    state_uid: Mapped[str] = mapped_column(String(24), primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True)
    world_size: Mapped[int] = mapped_column(Integer)
    digest: Mapped[str] = mapped_column(String(64))
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"), index=True)
    status: Mapped[str] = mapped_column(String(12))
    tier: Mapped[str] = mapped_column(String(12))
    node: Mapped[str] = mapped_column(String(255))
    bytes_total: Mapped[int] = mapped_column(BigInteger)
    bytes_new: Mapped[int] = mapped_column(BigInteger)
    told_at: Mapped[int] = mapped_column(BigInteger)
    place: Mapped[str | None] = mapped_column(Text)
    said: Mapped[str | None] = mapped_column(Text)


class CloneRow(Base):
    """A state that came here from another process: from where, into the memory of which run, and
    how many bytes were moved for it."""

    __tablename__ = "clone"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    state_id: Mapped[int] = mapped_column(ForeignKey("state.id"), index=True)
    source: Mapped[str] = mapped_column(Text)
    source_repository: Mapped[str] = mapped_column(String(255))
    node: Mapped[str] = mapped_column(String(255))
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"), index=True)
    bytes_moved: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)


class RepositoryRow(Base):
    """The lineage itself: one row, created with the database.

    Processes with the same uid share it."""

    __tablename__ = "repository"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    uid: Mapped[str] = mapped_column(String(24))


class FolderRow(Base):
    """A folder of packs, by the uid stored in it; path and host say where it was last seen. It
    is the node of a replica on the local tier."""

    __tablename__ = "folder"

    uid: Mapped[str] = mapped_column(String(24), primary_key=True)
    path: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    seen_at: Mapped[int] = mapped_column(BigInteger)


class SealRow(Base):
    """A state's seal: what its chunks hold, by a digest that nobody can forge (see
    ``datastates/storage/parallel_read.py``)."""

    __tablename__ = "seal"

    state_id: Mapped[int] = mapped_column(
        ForeignKey("state.id"), primary_key=True, autoincrement=False
    )
    digest: Mapped[str] = mapped_column(String(64))


class NoteRow(Base):
    """What somebody wrote about a state or a branch, in Markdown: one of ``state_id`` and
    ``branch`` is given.

    The notes of a branch belong to its name. A note keeps its ``uid`` in bundles.
    """

    __tablename__ = "note"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    uid: Mapped[str] = mapped_column(String(24), unique=True)
    state_id: Mapped[int | None] = mapped_column(ForeignKey("state.id"), index=True)
    branch: Mapped[str | None] = mapped_column(String(255), index=True)
    author: Mapped[str] = mapped_column(String(255))
    text: Mapped[str] = mapped_column(Text)
    created_at: Mapped[int] = mapped_column(BigInteger)
    edited_at: Mapped[int | None] = mapped_column(BigInteger)


class SegmentRow(Base):
    """The states that one branch has to itself: a piece of a path of first parents, which begins
    after ``fork_id``, or with a root.

    ``branch`` is the branch whose head is its newest state, or ``fork_id`` while it has no state;
    NULL once that branch was deleted or moved elsewhere. ``name`` is the branch's name when the
    segment began. States are named without foreign keys, since a segment is written before its
    first state is.
    """

    __tablename__ = "segment"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    branch: Mapped[str | None] = mapped_column(String(255), unique=True)
    fork_id: Mapped[int | None] = mapped_column(BigInteger)
    first_id: Mapped[int | None] = mapped_column(BigInteger)


class StretchRow(Base):
    """The summary of one metric over some states of a segment; ``tally.Tally`` explains each
    column.

    ``place`` is the generation of the states, divided by ``tally.STATES``: such a row is written
    once, when its last state is recorded. The row at ``tally.WHOLE`` covers the whole segment, and
    grows with each state.
    """

    __tablename__ = "stretch"
    __table_args__ = NO_ROWID

    segment_id: Mapped[int] = mapped_column(ForeignKey("segment.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    place: Mapped[int] = mapped_column(Integer, primary_key=True)
    count: Mapped[int] = mapped_column(Integer)
    gaps: Mapped[int] = mapped_column(Integer)
    total: Mapped[float]
    least: Mapped[float | None]
    least_id: Mapped[int | None] = mapped_column(BigInteger)
    most: Mapped[float | None]
    most_id: Mapped[int | None] = mapped_column(BigInteger)
    first: Mapped[float | None]
    first_id: Mapped[int | None] = mapped_column(BigInteger)
    last: Mapped[float | None]
    last_id: Mapped[int | None] = mapped_column(BigInteger)
    gap_id: Mapped[int | None] = mapped_column(BigInteger)


class VariantRow(Base):
    """One variant of a study as its plan has it, and what became of its training beside the states
    that it recorded.

    ``place`` is its position in the plan; ``config`` is what it changes, as JSON. ``took_s`` is the
    number of seconds for which its workers trained it, over all ``attempts``; a worker that was
    killed reported none. ``ended_at`` is NULL while one is at work. ``error`` says why the last
    attempt failed.
    """

    __tablename__ = "variant"
    __table_args__ = NO_ROWID

    study: Mapped[str] = mapped_column(String(255), primary_key=True)
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    place: Mapped[int] = mapped_column(Integer)
    parent: Mapped[str | None] = mapped_column(String(255))
    epochs: Mapped[int] = mapped_column(BigInteger)
    config: Mapped[str] = mapped_column(Text)
    planned_at: Mapped[int] = mapped_column(BigInteger)
    began_at: Mapped[int | None] = mapped_column(BigInteger)
    ended_at: Mapped[int | None] = mapped_column(BigInteger)
    attempts: Mapped[int] = mapped_column(Integer)
    took_s: Mapped[float]
    error: Mapped[str | None] = mapped_column(Text)


class ReportRow(Base):
    """A report on outliers that is stored for people to look at.

    ``body`` is what it says of the whole, as JSON."""

    __tablename__ = "report"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(255), unique=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    body: Mapped[str] = mapped_column(Text)


class ReportSampleRow(Base):
    """One of the samples that a report ranks highest: ``body`` is its score, as JSON;
    ``picture`` shows it, if one was drawn."""

    __tablename__ = "report_sample"

    report_id: Mapped[int] = mapped_column(
        ForeignKey("report.id"), primary_key=True, autoincrement=False
    )
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    sample: Mapped[int] = mapped_column(BigInteger)
    body: Mapped[str] = mapped_column(Text)
    picture: Mapped[bytes | None] = mapped_column(LargeBinary)


def table(model: type[Base]) -> Table:
    """The table of a model: statements on it avoid the ORM's share of the cost."""
    return cast("Table", model.__table__)


def to_us(moment: datetime | None) -> int:
    """Microseconds since the epoch; None is now, and a time without a zone is local time, as
    everywhere in Python."""
    moment = datetime.now(UTC) if moment is None else moment
    return (moment.astimezone(UTC) - EPOCH) // timedelta(microseconds=1)


def from_us(stored: int) -> datetime:
    """The moment in UTC."""
    return EPOCH + timedelta(microseconds=stored)
