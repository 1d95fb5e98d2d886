"""Text in colours, and its width on a terminal: only as much as commands that look at a lineage need, without importing rich."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self
from unicodedata import combining, east_asian_width

if TYPE_CHECKING:
    import rich.text

__all__ = ["Text", "cut", "width_of"]

_CODES = {"bold": 1, "dim": 2, "italic": 3, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36, "bright_black": 90}


class Text:
    """Pieces of text, each with a style such as ``bold green``. Rich prints it too."""

    __slots__ = ("pieces",)

    def __init__(self, text: str = "", style: str = "") -> None:
        self.pieces: list[tuple[str, str]] = [(text, style)] if text else []

    @classmethod
    def assemble(cls, *parts: str | tuple[str, str] | Text) -> Self:
        """One text from several parts: plain, with a style, or texts themselves."""
        made = cls()
        for part in parts:
            made.append(*part) if isinstance(part, tuple) else made.append(part)
        return made

    def append(self, text: str | Text, style: str = "") -> Self:
        """Add to the end; returns the text itself."""
        self.pieces += text.pieces if isinstance(text, Text) else [(text, style)] if text else []
        return self

    def join(self, parts: Iterable[Text]) -> Text:
        """The parts, with this text between them."""
        made = Text()
        for number, part in enumerate(parts):
            made.append(self if number else "").append(part)
        return made

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def width(self) -> int:
        """The number of columns that it takes."""
        return sum(width_of(text) for text, _ in self.pieces)

    def cut(self, width: int) -> Text:
        """The text at most this wide; an ellipsis shows that something is missing."""
        if self.width <= width:
            return self
        made, left = Text(), width - 1
        for text, style in self.pieces:
            part = cut(text, left)
            made.append(part, style)
            left -= width_of(part)
            if part != text:
                break
        return made.append("…" if width > 0 else "")

    def padded(self, width: int, *, is_right: bool = False) -> Text:
        """The text exactly this wide, with blanks or by ``cut``."""
        short = self.cut(width)
        blanks = " " * (width - short.width)
        return Text(blanks).append(short) if is_right else Text().append(short).append(blanks)

    def ansi(self) -> str:
        """The text with the codes that terminals show as colours."""
        return "".join(_coded(text, style) for text, style in self.pieces)

    def __rich__(self) -> rich.text.Text:
        from rich.text import Text as RichText

        return RichText.assemble(*self.pieces)


def width_of(text: str) -> int:
    """The number of columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def cut(text: str, width: int) -> str:
    """As many of the first letters as fit."""
    while text and width_of(text) > width:
        text = text[: max(0, width)] if text.isascii() else text[:-1]
    return text


def _coded(text: str, style: str) -> str:
    codes = ";".join(str(_CODES[word]) for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text
