"""Files of tokens as they are to be: their owner's alone."""

from __future__ import annotations

from pathlib import Path


def keep(path: Path, text: str) -> Path:
    """The file, with this text."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path
