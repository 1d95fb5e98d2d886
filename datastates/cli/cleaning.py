"""What others wrote, on its way to a terminal: without anything that the terminal would obey, but in its own colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates.lineage.show.texts import clean

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

__all__ = ["Cleaned", "clean_line", "clean_lines"]


def clean_line(line: Text) -> Text:
    """A line in its colours, without trailing blanks."""
    made = line.copy()
    made.plain = clean(line.plain)  # as long as before, so that the styles stay at their letters
    made.rstrip()
    return made


def clean_lines(text: str) -> str:
    """A text of several lines."""
    return "\n".join(map(clean, text.split("\n")))


class Cleaned:
    """Anything that rich can print."""

    def __init__(self, item: RenderableType) -> None:
        self._item = item

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._item, options):
            yield segment if segment.control else segment._replace(text=clean_lines(segment.text))
