"""Files that hold tokens: made so that nobody else ever reads them, and refused if everybody could."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from datastates.errors import Conflict, InvalidInput

__all__ = ["append_secret", "is_sendable", "make_token", "read_secret", "write_secret"]

_OTHERS = stat.S_IROTH | stat.S_IWOTH


def make_token() -> str:
    """A token that cannot be guessed, of characters that every header and shell carries."""
    return secrets.token_urlsafe(32)


def is_sendable(token: str) -> bool:
    """Whether an HTTP header can carry the token."""
    return token.isascii() and token.isprintable() and " " not in token


def read_secret(path: str | os.PathLike[str], what: str) -> bytes:
    """The content of a secret file; ``what`` names it in messages. Only its owner and its group may read it.

    :raises InvalidInput: it cannot be read, or others can read or write it.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & _OTHERS:
                raise InvalidInput(
                    f"{what} can be read or written by every user of this machine (mode {mode:04o}): chmod o= {os.fspath(path)}, "
                    "and take another token, for this one is known"
                )
            return file.read()
    except OSError as exc:
        raise InvalidInput(f"{what} cannot be read ({exc.strerror}): name a file that holds it") from exc


def write_secret(path: Path, line: str) -> None:
    """Make a file of one line that only its owner can read, from the first moment.

    :raises Conflict: the file exists.
    """
    try:
        _write(path, line, os.O_EXCL)
    except FileExistsError as exc:
        raise Conflict(f"{path} is there already: move it away, or name another file") from exc


def append_secret(path: Path, line: str) -> None:
    """Add a line to such a file; makes the file if it does not exist."""
    if path.exists():
        read_secret(path, f"the file {os.fspath(path)!r}")
    _write(path, line, os.O_APPEND)


def _write(path: Path, line: str, how: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | how, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{line}\n")
