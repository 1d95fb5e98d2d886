"""What every command needs: its repository, and where and how to write."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from datastates.lineage.show.texts import clean

from .cleaning import Cleaned, clean_line
from .interrupt import orderly
from .tables import Table, cut

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from sqlalchemy.orm import Session

    from datastates.lineage.database import Database
    from datastates.lineage.states import State
    from datastates.opening.location import Location
    from datastates.repository import Repository

__all__ = ["MOST", "AsJson", "Globals", "Limit", "Repo", "Shell", "is_terminal"]

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

MOST = 10**9
"""The largest number that an option which counts takes: databases count to 2**63 at most."""

Limit = Annotated[int, typer.Option("--limit", "-n", min=0, max=MOST, help="Show at most this many; 0 shows all.")]

PIPED_WIDTH = 10_000
"""The width for output that a program reads, so that nothing is folded or cut."""


@dataclass(slots=True)
class Globals:
    """The options before the command."""

    repo: str | None = None
    packs: str | None = None
    as_json: bool = False


class Shell:
    """The context of a command, which makes it first from its own options and those before it."""

    def __init__(self, context: typer.Context, repo: str | None = None, as_json: bool = False) -> None:
        options = context.ensure_object(Globals)
        options.as_json = self.as_json = as_json or options.as_json  # errors are reported the same way
        self._repo, self._packs = repo or options.repo, options.packs

    @cached_property
    def console(self) -> Console:
        """rich's console, for colours and for output that moves or folds."""
        from rich.console import Console

        return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)

    @property
    def width(self) -> int | None:
        """The columns of the terminal; None if a program reads the output."""
        return shutil.get_terminal_size().columns if is_terminal() else None

    @property
    def url(self) -> str:
        """The url of the command's repository, as it was named or found."""
        from datastates.opening.location import discover

        return self._repo or discover()

    def location(self, *, must_exist: bool = True) -> Location:
        """The location of the repository.

        :raises NotFound: with ``must_exist``, the repository does not exist.
        """
        from datastates.opening.location import locate

        return locate(self.url, self._packs, must_exist=must_exist)

    @contextmanager
    def database(self) -> Iterator[Database]:
        """The lineage, open; needs torch only if a lease is free, because then the states of dead processes are settled first."""
        from datastates.lineage.database import Database
        from datastates.opening.lease import held_in

        location = self.location()
        if held_in(location.packs, is_held=False):
            with self.repository() as repository:
                yield repository.core.database
            return
        database = Database(location.database_url, create=False)
        try:
            yield database
        finally:
            database.close()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that reads its lineage."""
        with self.database() as database, database.read() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A durable transaction that changes its lineage."""
        orderly()
        with self.database() as database:
            with database.write(durable=True) as session:
                yield session
            from datastates.opening.chronicler import tell_now

            tell_now(database, self.location().packs)

    @contextmanager
    def repository(self, *, must_exist: bool = True) -> Iterator[Repository]:
        """The whole repository, including payload: imports torch. Without ``must_exist``, a repository that is missing is made."""
        location = self.location(must_exist=must_exist)
        from datastates.repository import open as open_repository

        orderly()
        url = location.database_url if location.root is None else location.root
        with open_repository(url, packs=location.packs) as repository:
            yield repository

    def write(self, *items: str | Text | Table | RenderableType) -> None:
        """Write for people; a ``str`` is a line. On a terminal nothing is wider than it; for a program there are neither colours nor
        trailing blanks. Whatever others wrote into it cannot steer the terminal.
        """
        for item in items:
            if isinstance(item, Table):
                self._write_lines(item.lines(self.width))
                left_out = item.left_out(self.width)
                if left_out:
                    self.hint(f"no room here for {', '.join(left_out)}: a wider terminal shows more")
            elif isinstance(item, str | Text):
                self._write_lines([Text(item) if isinstance(item, str) else item])
            else:
                self._write_rich(item)

    def write_cut(self, lines: Iterable[Text]) -> None:
        """Write lines that may be cut to the width of a terminal, but must not fold."""
        self._write_lines([line if self.width is None else cut(line, self.width) for line in lines])

    def _write_lines(self, lines: Iterable[Text]) -> None:
        has_colours = is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")
        for line in map(clean_line, lines):
            if has_colours:
                self.console.print(line, soft_wrap=True)
            else:
                sys.stdout.write(line.plain + "\n")

    def _write_rich(self, item: RenderableType) -> None:
        item = Cleaned(item)
        if self.console.is_terminal:
            self.console.print(item)
            return
        with self.console.capture() as captured:
            self.console.print(item)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def hint(self, text: str) -> None:
        """Write a remark of one line for people beside the output: on standard error, and not with JSON."""
        if self.as_json:
            return
        sys.stdout.flush()  # the output that it refers to comes first
        text = clean(text)
        is_dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        sys.stderr.write((typer.style(text, dim=True) if is_dim else text) + "\n")

    def write_json(self, value: object) -> None:
        """Write one object, on a line of its own."""
        import msgspec

        sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")

    def write_lines(self, values: Iterable[object]) -> None:
        """Write one object a line."""
        for value in values:
            self.write_json(value)

    def write_states(self, states: Iterable[State]) -> None:
        """Write one state a line; ``restorable`` tells whether some tier holds its bytes."""
        import msgspec

        self.write_lines({**msgspec.to_builtins(each, enc_hook=str), "restorable": each.status.is_restorable} for each in states)


def is_terminal() -> bool:
    """Whether a person reads standard output."""
    forced = os.environ.get("FORCE_COLOR")
    return sys.stdout.isatty() if forced is None else forced != ""
