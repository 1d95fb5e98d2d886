"""Indexes of texts hold their beginnings on PostgreSQL, where an entry takes 2704 bytes at most; SQLite's take a text of any length."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0012"
down_revision = "datastates_0011"
branch_labels = None
depends_on = None

BEGINNING = 'left((text COLLATE "C"), 255)'


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table, owner in (("attribute", "state_id"), ("setting", "run_id")):
            op.drop_index(op.f(f"ix_{table}_key_{table}_text_{table}_{owner}"), table_name=table)
            op.create_index(op.f(f"ix_{table}_key_beginning_{owner}"), table, ["key", sa.text(BEGINNING), owner], unique=False)


def downgrade() -> None:
    """Index whole texts again; a text that is too long for that keeps the lineage from going back."""
    if op.get_bind().dialect.name == "postgresql":
        for table, owner in (("attribute", "state_id"), ("setting", "run_id")):
            op.drop_index(op.f(f"ix_{table}_key_beginning_{owner}"), table_name=table)
            op.create_index(op.f(f"ix_{table}_key_{table}_text_{table}_{owner}"), table, ["key", "text", owner], unique=False)
