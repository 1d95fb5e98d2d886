"""Amendments: which rows were written or changed in tables that do not only grow, in the order of the changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0011"
down_revision = "datastates_0010"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_THERE = (
    "SELECT 'run', uid, NULL FROM run WHERE finished_at IS NOT NULL ORDER BY id",
    "SELECT 'seal', state.uid, NULL FROM seal JOIN state ON state.id = seal.state_id ORDER BY state.id",
    "SELECT 'variant', name, study FROM variant ORDER BY study, place",
    "SELECT 'report', name, NULL FROM report ORDER BY id",
)


def upgrade() -> None:
    op.create_table(
        "amendment",
        sa.Column("id", ID, nullable=False),
        sa.Column("kind", sa.String(length=12), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("study", sa.String(length=255), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_amendment")),
    )
    for rows in _THERE:  # no folder was told of them so far
        op.execute(f"INSERT INTO amendment (kind, name, study) {rows}")


def downgrade() -> None:
    """Drop the table: folders are no longer told what changes."""
    op.drop_table("amendment")
