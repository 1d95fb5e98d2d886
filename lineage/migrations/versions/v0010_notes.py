"""Notes on states and branches; and configurations that came with states of other lineages, stored in rows of runs that are no runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0010"
down_revision = "datastates_0009"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("run", sa.Column("is_carried", sa.Boolean(), nullable=True))
    op.create_table(
        "note",
        sa.Column("id", ID, nullable=False),
        sa.Column("uid", sa.String(length=24), nullable=False),
        sa.Column("state_id", ID, nullable=True),
        sa.Column("branch", sa.String(length=255), nullable=True),
        sa.Column("author", sa.String(length=255), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("edited_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_note_state_id_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_note")),
        sa.UniqueConstraint("uid", name=op.f("uq_note_uid")),
    )
    op.create_index(op.f("ix_note_state_id"), "note", ["state_id"], unique=False)
    op.create_index(op.f("ix_note_branch"), "note", ["branch"], unique=False)


def downgrade() -> None:
    """Drop notes, and configurations that came with states; those states have none again."""
    op.drop_table("note")
    op.execute("UPDATE state SET run_id = NULL WHERE run_id IN (SELECT id FROM run WHERE is_carried)")
    op.execute("DELETE FROM setting WHERE run_id IN (SELECT id FROM run WHERE is_carried)")
    op.execute("DELETE FROM run WHERE is_carried")
    op.drop_column("run", "is_carried")
