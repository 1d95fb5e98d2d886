"""The states that each branch has to itself, and summaries of its metrics. Existing lineages get both here: 21 s for a million states."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from alembic import op

from datastates.system.interrupts import checkpoint

revision = "datastates_0007"
down_revision = "datastates_0006"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
INDEX = "ix_state_segment_id_state_status_state_bytes_new"
COLUMNS = ("count", "gaps", "total", "least", "least_id", "most", "most_id", "first", "first_id", "last", "last_id", "gap_id")
STATES = 64
BATCH = 500


def upgrade() -> None:
    op.create_table(
        "segment",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("branch", sa.String(length=255), nullable=True),
        sa.Column("fork_id", sa.BigInteger(), nullable=True),
        sa.Column("first_id", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_segment")),
        sa.UniqueConstraint("branch", name=op.f("uq_segment_branch")),
    )
    op.create_table(
        "stretch",
        sa.Column("segment_id", ID, nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("gaps", sa.Integer(), nullable=False),
        sa.Column("total", sa.Double(), nullable=False),
        *(column for name in COLUMNS[3:-1:2] for column in (sa.Column(name, sa.Double()), sa.Column(f"{name}_id", sa.BigInteger()))),
        sa.Column("gap_id", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["segment_id"], ["segment.id"], name=op.f("fk_stretch_segment_id_segment")),
        sa.PrimaryKeyConstraint("segment_id", "key", "place", name=op.f("pk_stretch")),
        sqlite_with_rowid=False,
    )
    op.add_column("state", sa.Column("segment_id", sa.BigInteger(), nullable=True))
    fill(op.get_bind())
    op.create_index(op.f(INDEX), "state", ["segment_id", "status", "bytes_new"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f(INDEX), table_name="state")
    op.drop_column("state", "segment_id")
    op.drop_table("stretch")
    op.drop_table("segment")


def fill(connection: sa.Connection) -> None:
    """Give each branch the states that no branch made before it has, and summarise them."""
    branches = sorted(connection.execute(_BRANCHES), key=lambda row: (row.made or math.inf, row.name != "main", row.state_id))
    for segment, row in enumerate(branches, 1):
        path = sorted(connection.execute(_FREE, {"head": row.state_id}).all())
        fork = path[0][1] if path else row.state_id
        values = {"id": segment, "name": row.name, "fork": fork, "first": path[0][0] if path else None}
        connection.execute(_MAKE, values)
        for start in range(0, len(path), BATCH):
            ids = [id_ for id_, _, _ in path[start : start + BATCH]]
            connection.execute(_TAKE, {"segment": segment, "ids": ids})
            checkpoint()
        for rows in batches(stretches(connection, segment, path)):
            connection.execute(_INSERT, rows)
            checkpoint()  # an impatient user who interrupts gets the lineage back as it was
    if connection.dialect.name == "postgresql" and branches:
        connection.execute(sa.text("SELECT setval(pg_get_serial_sequence('segment', 'id'), :last)"), {"last": len(branches)})


def stretches(connection: sa.Connection, segment: int, path: list[Any]) -> Iterator[dict[str, object]]:
    """A row for each metric and complete stretch, and one for each metric of the whole segment. ``path`` is id, parent and generation."""
    if not path:
        return
    wholes: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    end = (path[-1][2] + 1) // STATES
    for place, states in groupby(path, key=lambda state: state[2] // STATES):
        parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for id_, key, value in connection.execute(_VALUES, {"ids": [state[0] for state in states]}):
            add(parts[key], id_, value)
            add(wholes[key], id_, value)
        if place < end:
            yield from ({"segment_id": segment, "key": key, "place": place, **part} for key, part in parts.items())
    yield from ({"segment_id": segment, "key": key, "place": -1, **whole} for key, whole in wholes.items())


def add(found: dict[str, Any], id_: int, value: float | None) -> None:
    """Add a later state's value. A value that is not finite is a gap."""
    if not found:
        found.update(dict.fromkeys(COLUMNS) | {"count": 0, "gaps": 0, "total": 0.0, "first": value, "first_id": id_})
    found["count"] += 1
    found["last"], found["last_id"] = value, id_
    if value is None or not math.isfinite(value):
        found["gaps"] += 1
        found["gap_id"] = found["gap_id"] or id_
        return
    found["total"] += value
    if found["least"] is None or value < found["least"]:
        found["least"], found["least_id"] = value, id_
    if found["most"] is None or value > found["most"]:
        found["most"], found["most_id"] = value, id_


def batches(rows: Iterable[dict[str, object]]) -> Iterator[list[dict[str, object]]]:
    batch: list[dict[str, object]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


_BRANCHES = sa.text(
    "SELECT ref.name, ref.state_id, (SELECT min(id) FROM ref_event WHERE ref_event.name = ref.name) AS made FROM ref WHERE kind = 'branch'"
)
# The conditions that end the walk are on the path: for a condition on the joined table SQLite would first read all of that table.
_FREE = sa.text(
    "WITH RECURSIVE path (id, parent_id, generation, segment_id) AS ("
    " SELECT id, parent_id, generation, segment_id FROM state WHERE id = :head"
    " UNION ALL SELECT state.id, state.parent_id, state.generation, state.segment_id FROM path"
    " JOIN state ON state.id = path.parent_id WHERE path.segment_id IS NULL"
    ") SELECT id, parent_id, generation FROM path WHERE segment_id IS NULL"
)
_MAKE = sa.text("INSERT INTO segment (id, name, branch, fork_id, first_id) VALUES (:id, :name, :name, :fork, :first)")
_TAKE = sa.text("UPDATE state SET segment_id = :segment WHERE id IN :ids").bindparams(sa.bindparam("ids", expanding=True))
_VALUES = sa.text("SELECT state_id, key, value FROM metric WHERE state_id IN :ids ORDER BY state_id").bindparams(
    sa.bindparam("ids", expanding=True)
)
_INSERT = sa.table("stretch", *(sa.column(name) for name in ("segment_id", "key", "place", *COLUMNS))).insert()
