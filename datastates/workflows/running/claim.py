"""Claims: they give a study one explorer and a variant one worker, even if others were told to do the same.

A claim is a lock on a file beside the packs. The kernel drops it with the process, however that ends (``locks``). The file says who
holds it. Claims work between hosts if their shared file system passes locks on; otherwise the compare-and-swap of branches still protects.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from datastates.system.locks import Held, hold, is_held
from datastates.system.sharing import make_folder_like

__all__ = ["Claim", "holder"]


class Claim:
    """An exclusive lock on ``<folder>/<name>``, with a note for others to read. Made by ``take``; a context manager."""

    def __init__(self, held: Held) -> None:
        self._held = held

    @classmethod
    def take(cls, folder: Path, name: str, note: str) -> Self | None:
        """The claim, or None if another process holds it."""
        make_folder_like(folder.parent, folder)
        held = hold(folder / name)
        if held is None:
            return None
        try:
            held.write(note)
        except BaseException:
            held.close()
            raise
        return cls(held)

    def close(self) -> None:
        """Release the claim and remove the file; idempotent. Does nothing in a forked child."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def holder(folder: Path, name: str) -> str | None:
    """The note of the claim's holder; None if nobody holds the claim."""
    path = folder / name
    try:
        return path.read_text() if is_held(path) else None
    except FileNotFoundError:
        return None
