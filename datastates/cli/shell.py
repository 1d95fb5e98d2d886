"""What every command needs: the repository that is meant, and where and how to write."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.text import Text

from datastates.opening.location import Location, discover, locate

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.repository import Repository

__all__ = ["AsJson", "Globals", "Repo", "Shell"]

Repo = Annotated[
    str | None,
    typer.Option(
        "--repo",
        "-r",
        metavar="URL",
        help="The repository's folder or postgresql://… (default: DATASTATES_REPO, else found from here upwards, else ./runs).",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON; lists as one object a line.", show_default=False)]

PIPED_WIDTH = 10_000
"""Nothing is folded or cut when a program reads it."""


@dataclass(slots=True)
class Globals:
    """The options that stand before the command."""

    repo: str | None = None
    packs: str | None = None
    as_json: bool = False


class Shell:
    """Made first thing by each command, from its own options and those before it."""

    def __init__(self, context: typer.Context, repo: str | None = None, as_json: bool = False) -> None:
        options = context.ensure_object(Globals)
        options.as_json = self.as_json = as_json or options.as_json  # errors are said the same way
        self._repo, self._packs = repo or options.repo, options.packs
        width = None if sys.stdout.isatty() else PIPED_WIDTH
        self.console = Console(highlight=False, markup=False, emoji=False, width=width)

    @property
    def url(self) -> str:
        """The repository that is meant, as it was named or found."""
        return self._repo or discover(Path.cwd())

    def location(self, *, must_exist: bool = True) -> Location:
        """The location of the repository.

        :raises NotFound: ``must_exist``, and it does not.
        """
        return locate(self.url, self._packs, must_exist=must_exist)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that reads its lineage; does without torch."""
        from datastates.lineage import Database

        database = Database(self.location().database_url, create=False)
        try:
            with database.read() as session:
                yield session
        finally:
            database.close()

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A durable transaction that changes its lineage."""
        from datastates.lineage import Database

        database = Database(self.location().database_url, create=False)
        try:
            with database.write(durable=True) as session:
                yield session
        finally:
            database.close()

    @contextmanager
    def repository(self) -> Iterator[Repository]:
        """The whole repository, payload too: imports torch."""
        location = self.location()
        from datastates.repository import open as open_repository

        url = location.database_url if location.root is None else location.root
        with open_repository(url, packs=location.packs) as repository:
            yield repository

    def write(self, *renderables: RenderableType) -> None:
        """Write for people; trailing blanks of tables are cut when a program reads."""
        if self.console.is_terminal:
            for renderable in renderables:
                if isinstance(renderable, Text):  # print forgets what a Text says of itself
                    self.console.print(renderable, no_wrap=renderable.no_wrap, overflow=renderable.overflow)
                else:
                    self.console.print(renderable)
            return
        with self.console.capture() as captured:
            for renderable in renderables:
                self.console.print(renderable)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def hint(self, text: str) -> None:
        """A remark for people, beside what is written: on standard error."""
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(text, style="dim")

    def write_json(self, value: object) -> None:
        """One object, on a line of its own."""
        sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")

    def write_lines(self, values: Iterable[object]) -> None:
        """One object a line."""
        for value in values:
            self.write_json(value)
