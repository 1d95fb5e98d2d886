"""A configuration for each training: trainings are runs of a process, and their settings can be searched and sorted by."""

from __future__ import annotations

import json
import math

import sqlalchemy as sa
from alembic import op

revision = "datastates_0008"
down_revision = "datastates_0007"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
OURS = "datastates."


def upgrade() -> None:
    op.add_column("run", sa.Column("process", sa.String(length=24), nullable=True))
    op.add_column("run", sa.Column("branch", sa.String(length=255), nullable=True))
    op.create_index(op.f("ix_run_process"), "run", ["process"], unique=False)
    setting = op.create_table(
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
    op.create_index(op.f("ix_setting_key_setting_number_setting_run_id"), "setting", ["key", "number", "run_id"], unique=False)
    op.create_index(op.f("ix_setting_key_setting_text_setting_run_id"), "setting", ["key", "text", "run_id"], unique=False)
    _move(setting)


def downgrade() -> None:
    """Drop the settings; states keep their trainings, which then count as processes."""
    op.drop_table("setting")
    op.drop_index(op.f("ix_run_process"), table_name="run")
    op.drop_column("run", "branch")
    op.drop_column("run", "process")


def _move(setting: sa.Table) -> None:
    """Move what somebody chose from the records of runs to the settings."""
    run = sa.table("run", sa.column("id", ID), sa.column("config", sa.JSON()))
    connection = op.get_bind()
    for id_, config in connection.execute(sa.select(run.c.id, run.c.config)).all():
        chosen = {key: value for key, value in config.items() if not key.startswith(OURS)}
        if chosen:
            connection.execute(sa.insert(setting), [{"run_id": id_, "key": key[:255], **_columns(value)} for key, value in chosen.items()])
            ours = {key: value for key, value in config.items() if key not in chosen}
            connection.execute(sa.update(run).where(run.c.id == id_).values(config=ours))


def _columns(stored: object) -> dict[str, object]:
    """The columns that ``lineage/typed.py`` of this version would write; floats that JSON cannot express were ``{"float": "nan"}``."""
    value = float(stored["float"]) if isinstance(stored, dict) else stored
    match value:
        case None:
            return {"type": "none", "number": None, "text": None}
        case bool():
            return {"type": "bool", "number": float(value), "text": None}
        case int():
            return {"type": "int", "number": float(value), "text": None if abs(value) <= 2**53 else str(value)}
        case float():
            return {"type": "float", "number": None if math.isnan(value) else value, "text": None}
    return {"type": "str", "number": None, "text": value if isinstance(value, str) else json.dumps(value)}
