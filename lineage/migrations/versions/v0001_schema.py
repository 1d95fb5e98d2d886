"""Creates the tables of the lineage, and the row with its uid."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "datastates_0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NO_MOVE = "old_id IS NULL AND new_id IS NULL"
BEGINNING = 'left((text COLLATE "C"), 255)'


def upgrade() -> None:
    op.create_table(
        "folder",
        sa.Column("uid", sa.String(length=24), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_folder")),
    )
    op.create_table(
        "report",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_report")),
        sa.UniqueConstraint("name", name=op.f("uq_report_name")),
    )
    repository = op.create_table(
        "repository",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("uid", sa.String(length=24), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_repository")),
    )
    op.bulk_insert(repository, [{"id": 1, "uid": secrets.token_hex(12)}])
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
        sa.Column("process", sa.String(length=24), nullable=True),
        sa.Column("branch", sa.String(length=255), nullable=True),
        sa.Column("is_carried", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("uid", name=op.f("uq_run_uid")),
    )
    op.create_index(op.f("ix_run_process"), "run", ["process"], unique=False)
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
        "variant",
        sa.Column("study", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("parent", sa.String(length=255), nullable=True),
        sa.Column("epochs", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("planned_at", sa.BigInteger(), nullable=False),
        sa.Column("began_at", sa.BigInteger(), nullable=True),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("took_s", sa.Double(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("study", "name", name=op.f("pk_variant")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "part",
        sa.Column("state_uid", sa.String(length=24), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("run_id", ID, nullable=True),
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
    op.create_table(
        "report_sample",
        sa.Column("report_id", ID, autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sample", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("picture", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["report_id"], ["report.id"], name=op.f("fk_report_sample_report_id_report")
        ),
        sa.PrimaryKeyConstraint("report_id", "rank", name=op.f("pk_report_sample")),
    )
    op.create_table(
        "setting",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("type", sa.String(length=5), nullable=False),
        sa.Column("number", sa.Double(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_setting_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "key", name=op.f("pk_setting")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        op.f("ix_setting_key_setting_number_setting_run_id"),
        "setting",
        ["key", "number", "run_id"],
        unique=False,
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
        sa.Column("segment_id", sa.BigInteger(), nullable=True),
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
    op.create_index(
        op.f("ix_state_segment_id_state_status_state_bytes_new"),
        "state",
        ["segment_id", "status", "bytes_new"],
        unique=False,
    )
    op.create_index(op.f("ix_state_step"), "state", ["step"], unique=False)
    op.create_table(
        "stretch",
        sa.Column("segment_id", ID, nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("gaps", sa.Integer(), nullable=False),
        sa.Column("total", sa.Double(), nullable=False),
        sa.Column("least", sa.Double(), nullable=True),
        sa.Column("least_id", sa.BigInteger(), nullable=True),
        sa.Column("most", sa.Double(), nullable=True),
        sa.Column("most_id", sa.BigInteger(), nullable=True),
        sa.Column("first", sa.Double(), nullable=True),
        sa.Column("first_id", sa.BigInteger(), nullable=True),
        sa.Column("last", sa.Double(), nullable=True),
        sa.Column("last_id", sa.BigInteger(), nullable=True),
        sa.Column("gap_id", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["segment_id"], ["segment.id"], name=op.f("fk_stretch_segment_id_segment")
        ),
        sa.PrimaryKeyConstraint("segment_id", "key", "place", name=op.f("pk_stretch")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "attribute",
        sa.Column("state_id", ID, nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("type", sa.String(length=5), nullable=False),
        sa.Column("number", sa.Double(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["state_id"], ["state.id"], name=op.f("fk_attribute_state_id_state")
        ),
        sa.PrimaryKeyConstraint("state_id", "key", name=op.f("pk_attribute")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        op.f("ix_attribute_key_attribute_number_attribute_state_id"),
        "attribute",
        ["key", "number", "state_id"],
        unique=False,
    )
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
    op.create_index(
        op.f("ix_metric_key_metric_value_metric_state_id"),
        "metric",
        ["key", "value", "state_id"],
        unique=False,
    )
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
    op.create_index(op.f("ix_note_branch"), "note", ["branch"], unique=False)
    op.create_index(op.f("ix_note_state_id"), "note", ["state_id"], unique=False)
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
    op.create_index(
        op.f("ix_ref_event_id"),
        "ref_event",
        ["id"],
        unique=False,
        sqlite_where=sa.text(NO_MOVE),
        postgresql_where=sa.text(NO_MOVE),
    )
    op.create_index(
        op.f("ix_ref_event_name_ref_event_id"), "ref_event", ["name", "id"], unique=False
    )
    op.create_table(
        "replica",
        sa.Column("state_id", ID, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("tier", sa.String(length=12), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("status", sa.String(length=8), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("is_near", sa.Boolean(), nullable=True),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_replica_state_id_state")),
        sa.PrimaryKeyConstraint("state_id", "rank", "tier", "node", name=op.f("pk_replica")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "seal",
        sa.Column("state_id", ID, autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["state_id"], ["state.id"], name=op.f("fk_seal_state_id_state")),
        sa.PrimaryKeyConstraint("state_id", name=op.f("pk_seal")),
    )
    for table, owner in (("attribute", "state_id"), ("setting", "run_id")):
        if op.get_bind().dialect.name == "postgresql":
            # an entry of an index there takes 2704 bytes at most
            op.create_index(
                op.f(f"ix_{table}_key_beginning_{owner}"),
                table,
                ["key", sa.text(BEGINNING), owner],
                unique=False,
            )
        else:
            op.create_index(
                op.f(f"ix_{table}_key_{table}_text_{table}_{owner}"),
                table,
                ["key", "text", owner],
                unique=False,
            )
