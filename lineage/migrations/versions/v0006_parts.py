"""Parts of states that several ranks capture; each rank reports its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0006"
down_revision = "datastates_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "part",
        sa.Column("state_uid", sa.String(length=24), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("status", sa.String(length=12), nullable=False),
        sa.Column("tier", sa.String(length=12), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("bytes_total", sa.BigInteger(), nullable=False),
        sa.Column("bytes_new", sa.BigInteger(), nullable=False),
        sa.Column("told_at", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.Text(), nullable=True),
        sa.Column("said", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_part_run_id_run")),
        sa.PrimaryKeyConstraint("state_uid", "rank", name=op.f("pk_part")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_part_run_id"), "part", ["run_id"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_part_run_id"), table_name="part")
    op.drop_table("part")
