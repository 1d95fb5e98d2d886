"""The variants of studies as they were planned, with what they took and why they failed; and reports on outliers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "datastates_0009"
down_revision = "datastates_0008"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
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
        "report",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_report")),
        sa.UniqueConstraint("name", name=op.f("uq_report_name")),
    )
    op.create_table(
        "report_sample",
        sa.Column("report_id", ID, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("sample", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("picture", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["report_id"], ["report.id"], name=op.f("fk_report_sample_report_id_report")),
        sa.PrimaryKeyConstraint("report_id", "rank", name=op.f("pk_report_sample")),
    )


def downgrade() -> None:
    """Drop plans, costs, errors and reports; what studies trained stays."""
    op.drop_table("report_sample")
    op.drop_table("report")
    op.drop_table("variant")
