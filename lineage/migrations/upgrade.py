"""Runs Alembic from the program, without alembic.ini, so that it works from an installed
package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config

if TYPE_CHECKING:
    from sqlalchemy import Connection


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration; ``env.py`` runs on ``connection``, inside its transaction."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    made.attributes["connection"] = connection
    return made


def upgrade(connection: Connection) -> None:
    """Bring the schema to ``HEAD`` in the transaction of ``connection``.

    One thread at a time: Alembic has globals."""
    command.upgrade(config(connection), "head")
