"""A revision of the schema that comes after ours, as a later version of datastates would bring
it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from datastates.lineage import database
from datastates.lineage.migrations import HEAD, KNOWN, upgrade

if TYPE_CHECKING:
    import pytest
    from alembic.config import Config
    from sqlalchemy import Connection

NEXT = "datastates_next"

_SCRIPT = f"""
import sqlalchemy as sa
from alembic import op

revision = "{NEXT}"
down_revision = "{HEAD}"
branch_labels = None
depends_on = None


def upgrade():
    op.create_table("mood", sa.Column("id", sa.Integer(), nullable=False), sa.PrimaryKeyConstraint("id"))
    op.add_column("state", sa.Column("mood", sa.Text(), nullable=True))
    states = op.get_bind().execute(sa.text("SELECT id FROM state ORDER BY id")).scalars().all()
    for state in states:
        op.get_bind().execute(sa.text("UPDATE state SET mood = :mood WHERE id = :id"), {{"mood": "good " * 100, "id": state}})
"""


def add(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process know the revision, whose script is written into ``folder``, until
    ``patch`` is undone."""
    folder.mkdir(exist_ok=True)
    (folder / "next.py").write_text(_SCRIPT)
    ours = upgrade.config

    def config(connection: Connection | None = None) -> Config:
        made = ours(connection)
        made.set_main_option(
            "version_locations", f"{Path(upgrade.__file__).parent / 'versions'}{os.pathsep}{folder}"
        )
        return made

    patch.setattr(upgrade, "config", config)
    patch.setattr(database, "HEAD", NEXT)
    patch.setattr(database, "KNOWN", (*KNOWN, NEXT))
