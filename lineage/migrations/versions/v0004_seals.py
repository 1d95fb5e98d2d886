"""Seals: the digest of what a state's chunks hold, for states that were exported, imported or verified."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0004"
down_revision = "datastates_0003"
branch_labels = None
depends_on = None

_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "seal",
        sa.Column("state_id", _Id, nullable=False, autoincrement=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_seal_state_id_state")),
        sa.PrimaryKeyConstraint("state_id", name=op.f("pk_seal")),
    )


def downgrade() -> None:
    op.drop_table("seal")
