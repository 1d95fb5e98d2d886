"""The tables of the foundation: runs, states and their metrics, refs and their log, replicas, packs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "pack",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pack")),
        sa.UniqueConstraint("name", name=op.f("uq_pack_name")),
    )
    op.create_table(
        "run",
        sa.Column("id", ID, nullable=False),
        sa.Column("uid", sa.String(length=24), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("argv", sa.JSON(), nullable=False),
        sa.Column("git_commit", sa.Text(), nullable=True),
        sa.Column("git_dirty", sa.Boolean(), nullable=True),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("uid", name=op.f("uq_run_uid")),
    )
    op.create_table(
        "state",
        sa.Column("id", ID, nullable=False),
        sa.Column("uid", sa.String(length=24), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("parent_id", ID, nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("jump_id", ID, nullable=True),
        sa.Column("jump_step", sa.BigInteger(), nullable=True),
        sa.Column("run_id", ID, nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("micro_step", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=12), nullable=False),
        sa.Column("bytes_total", sa.BigInteger(), nullable=False),
        sa.Column("bytes_new", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["jump_id"], ["state.id"], name=op.f("fk_state_jump_id_state")),
        sa.ForeignKeyConstraint(["parent_id"], ["state.id"], name=op.f("fk_state_parent_id_state")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_state_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_state")),
        sa.UniqueConstraint("uid", name=op.f("uq_state_uid")),
    )
    op.create_index(op.f("ix_state_created_at"), "state", ["created_at"], unique=False)
    op.create_index(op.f("ix_state_digest"), "state", ["digest"], unique=False)
    op.create_index(op.f("ix_state_parent_id"), "state", ["parent_id"], unique=False)
    op.create_index(op.f("ix_state_run_id"), "state", ["run_id"], unique=False)
    op.create_index(op.f("ix_state_step"), "state", ["step"], unique=False)
    op.create_table(
        "attribute",
        sa.Column("state_id", ID, nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("type", sa.String(length=5), nullable=False),
        sa.Column("number", sa.Double(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_attribute_state_id_state")),
        sa.PrimaryKeyConstraint("state_id", "key", name=op.f("pk_attribute")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_attribute_key_attribute_number_attribute_state_id"), "attribute", ["key", "number", "state_id"], unique=False)
    op.create_index(op.f("ix_attribute_key_attribute_text_attribute_state_id"), "attribute", ["key", "text", "state_id"], unique=False)
    op.create_table(
        "edge",
        sa.Column("child_id", ID, nullable=False),
        sa.Column("parent_id", ID, nullable=False),
        sa.Column("kind", sa.String(length=12), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["child_id"], ["state.id"], name=op.f("fk_edge_child_id_state")),
        sa.ForeignKeyConstraint(["parent_id"], ["state.id"], name=op.f("fk_edge_parent_id_state")),
        sa.PrimaryKeyConstraint("child_id", "parent_id", "kind", name=op.f("pk_edge")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_edge_parent_id"), "edge", ["parent_id"], unique=False)
    op.create_table(
        "metric",
        sa.Column("state_id", ID, nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_metric_state_id_state")),
        sa.PrimaryKeyConstraint("state_id", "key", name=op.f("pk_metric")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_metric_key_metric_value_metric_state_id"), "metric", ["key", "value", "state_id"], unique=False)
    op.create_table(
        "pack_ref",
        sa.Column("pack_id", ID, nullable=False),
        sa.Column("state_id", ID, nullable=False),
        sa.ForeignKeyConstraint(["pack_id"], ["pack.id"], name=op.f("fk_pack_ref_pack_id_pack")),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_pack_ref_state_id_state")),
        sa.PrimaryKeyConstraint("pack_id", "state_id", name=op.f("pk_pack_ref")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_pack_ref_state_id"), "pack_ref", ["state_id"], unique=False)
    op.create_table(
        "ref",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=6), nullable=False),
        sa.Column("state_id", ID, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_ref_state_id_state")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_ref")),
    )
    op.create_index(op.f("ix_ref_state_id"), "ref", ["state_id"], unique=False)
    op.create_table(
        "ref_event",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=6), nullable=False),
        sa.Column("old_id", ID, nullable=True),
        sa.Column("new_id", ID, nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["new_id"], ["state.id"], name=op.f("fk_ref_event_new_id_state")),
        sa.ForeignKeyConstraint(["old_id"], ["state.id"], name=op.f("fk_ref_event_old_id_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ref_event")),
    )
    op.create_index(op.f("ix_ref_event_name_ref_event_id"), "ref_event", ["name", "id"], unique=False)
    op.create_table(
        "replica",
        sa.Column("state_id", ID, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("tier", sa.String(length=12), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("status", sa.String(length=8), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_replica_state_id_state")),
        sa.PrimaryKeyConstraint("state_id", "rank", "tier", "node", name=op.f("pk_replica")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("replica")
    op.drop_table("ref_event")
    op.drop_table("ref")
    op.drop_table("pack_ref")
    op.drop_table("metric")
    op.drop_table("edge")
    op.drop_table("attribute")
    op.drop_table("state")
    op.drop_table("run")
    op.drop_table("pack")
