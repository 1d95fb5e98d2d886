"""Drops the tables of packs: the manifests beside a pack say which states need it, and nothing else does."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0005"
down_revision = "datastates_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("pack_ref")
    op.drop_table("pack")


def downgrade() -> None:
    """Recreate the tables, empty: what they said is in the manifests."""
    id_ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "pack",
        sa.Column("id", id_, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pack")),
        sa.UniqueConstraint("name", name=op.f("uq_pack_name")),
    )
    op.create_table(
        "pack_ref",
        sa.Column("pack_id", id_, nullable=False),
        sa.Column("state_id", id_, nullable=False),
        sa.ForeignKeyConstraint(["pack_id"], ["pack.id"], name=op.f("fk_pack_ref_pack_id_pack")),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_pack_ref_state_id_state")),
        sa.PrimaryKeyConstraint("pack_id", "state_id", name=op.f("pk_pack_ref")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_pack_ref_state_id"), "pack_ref", ["state_id"], unique=False)
