"""Clones: which lineage this is, and what came into it from others."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "datastates_0002"
down_revision = "datastates_0001"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    repository = op.create_table(
        "repository",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("uid", sa.String(length=24), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_repository")),
    )
    op.bulk_insert(repository, [{"id": 1, "uid": secrets.token_hex(12)}])
    op.create_table(
        "clone",
        sa.Column("id", ID, nullable=False),
        sa.Column("state_id", ID, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("source_repository", sa.String(length=255), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("run_id", ID, nullable=True),
        sa.Column("bytes_moved", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_clone_state_id_state")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_clone_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clone")),
    )
    op.create_index(op.f("ix_clone_run_id"), "clone", ["run_id"], unique=False)
    op.create_index(op.f("ix_clone_state_id"), "clone", ["state_id"], unique=False)


def downgrade() -> None:
    op.drop_table("clone")
    op.drop_table("repository")
