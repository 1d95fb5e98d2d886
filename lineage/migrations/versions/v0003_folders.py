"""Folders of packs: which of them this lineage knows, by the uid stored in each."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0003"
down_revision = "datastates_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "folder",
        sa.Column("uid", sa.String(length=24), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_folder")),
    )


def downgrade() -> None:
    op.drop_table("folder")
