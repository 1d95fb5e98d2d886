"""Addresses of states, for arguments that take a path: ``runs/main``, ``datastates://runs/main~3``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from datastates import values
from datastates.errors import InvalidInput
from datastates.opening.location import DATABASE

__all__ = ["SCHEME", "Address", "address_of", "is_address"]

SCHEME = "datastates://"
_BRANCH = "main"


@dataclass(frozen=True, slots=True)
class Address:
    """The folder of a repository, and a revision in it."""

    folder: str
    revision: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.folder}/{self.revision}"


def is_address(value: object) -> bool:
    """Whether a value can only be meant as an address: a text or a path that begins with ``datastates://``."""
    return isinstance(value, str | os.PathLike) and os.fsdecode(value).startswith(SCHEME)


def address_of(value: object, what: str = "the address") -> Address:
    """The address that a text or a path means, with or without ``datastates://``.

    The folder ends where a repository lies; if there is none yet, it ends before the last slash. The folder of a repository by itself
    means its branch ``main``.

    :raises InvalidInput: the value is not an address.
    """
    text = values.path(value, what).removeprefix(SCHEME)
    if "://" in text:
        raise InvalidInput(
            f"{what} is {text!r}: name a folder and a revision, such as 'runs/main'; open other repositories by datastates.open"
        )
    parts = text.split("/")
    for end in range(1, len(parts)):
        folder, revision = "/".join(parts[:end]), "/".join(parts[end:])
        if revision and _is_repository(folder):
            return Address(folder, revision)
    if _is_repository(text):
        return Address(text.rstrip("/"), _BRANCH)
    folder, _, revision = text.rpartition("/")
    if not folder or not revision:
        raise InvalidInput(f"{what} is {text!r}: name the folder of a repository and a revision in it, such as 'runs/main'")
    return Address(folder, revision)


def _is_repository(folder: str) -> bool:
    return bool(folder) and (Path(folder).expanduser() / DATABASE).is_file()
