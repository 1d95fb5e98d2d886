"""Tables that fit the terminal: narrow ones shorten long texts, then leave out what matters least, and say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

__all__ = ["Column", "Table", "cut"]

_GAP = 2
_LEAST = 8
"""The least width of a column that may be shortened, even if its header is shorter."""


def cut(text: Text, width: int) -> Text:
    """A copy of a text, at most this wide; an ellipsis shows that something is missing."""
    made = text.copy()
    made.truncate(width, overflow="ellipsis")
    return made


@dataclass(slots=True)
class Column:
    """A column. ``is_flexible``: its texts may be shortened. Of columns that may be left out, those with the highest ``rank`` go first."""

    name: str
    is_number: bool = False
    is_flexible: bool = False
    rank: int = 0
    cells: list[Text] = field(default_factory=list)

    @property
    def width(self) -> int:
        """The width of its widest text."""
        return max([cell_len(self.name), *(cell.cell_len for cell in self.cells)])

    @property
    def least(self) -> int:
        """The least width that it needs."""
        return min(self.width, max(_LEAST, cell_len(self.name))) if self.is_flexible else self.width


@dataclass(slots=True)
class Table:
    """Rows below a header; ``lines`` renders it."""

    columns: list[Column]

    def add(self, *cells: str | Text) -> None:
        """Add a row, a cell for each column."""
        for column, cell in zip(self.columns, cells, strict=True):
            column.cells.append(Text(cell) if isinstance(cell, str) else cell)

    def lines(self, width: int | None) -> list[Text]:
        """The header and the rows, at most this wide; None: as wide as they are."""
        columns = self._kept(width)
        widths = _widths(columns, width)
        rows = [[Text(column.name, "bold") for column in columns], *map(list, zip(*(column.cells for column in columns), strict=True))]
        return [_line(row, columns, widths) for row in rows]

    def left_out(self, width: int | None) -> list[str]:
        """The names of the columns for which there is no room."""
        kept = self._kept(width)
        return [column.name for column in self.columns if column not in kept and not _is_blank(column)]

    def _kept(self, width: int | None) -> list[Column]:
        kept = [column for column in self.columns if not _is_blank(column)] or self.columns[:1]
        while width is not None and len(kept) > 1 and sum(column.least for column in kept) + _GAP * (len(kept) - 1) > width:
            last = max(kept, key=lambda column: (column.rank, kept.index(column)))
            if last.rank == 0:
                break
            kept.remove(last)
        return kept


def _is_blank(column: Column) -> bool:
    return column.rank > 0 and bool(column.cells) and not any(column.cells)


def _widths(columns: Sequence[Column], width: int | None) -> list[int]:
    """The width of each column: flexible ones shrink first, beginning with the widest; if that is not enough, the last columns are cut."""
    widths = [column.width for column in columns]
    over = 0 if width is None else sum(widths) + _GAP * (len(widths) - 1) - width
    while over > 0:
        able = [place for place, column in enumerate(columns) if widths[place] > column.least]
        if not able:
            break
        widest = max(able, key=lambda place: widths[place])
        widths[widest] -= 1
        over -= 1
    for place in reversed(range(len(widths))):
        given = min(max(0, over), max(0, widths[place] - 1))
        widths[place] -= given
        over -= given
    return widths


def _line(row: Sequence[Text], columns: Sequence[Column], widths: Sequence[int]) -> Text:
    cells = [cut(cell, wide) for cell, wide in zip(row, widths, strict=True)]
    for cell, column, wide in zip(cells, columns, widths, strict=True):
        cell.align("right" if column.is_number else "left", wide)
    return Text(" " * _GAP).join(cells)
