"""The folder of packs, which a repository recognizes by a uid stored in it, not by its path or by the host that sees it.

The uid goes along when the folder is moved, mounted elsewhere or copied. Runs record the uid of the folder that has their leases and
bytes, and a lineage has a ``folder`` row for each folder that it knows.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from datastates.errors import Unavailable
from datastates.lineage.change import folders
from datastates.lineage.database import Database
from datastates.system.regular import make_regular, read_regular
from datastates.system.sharing import may_read

from .environment import node_name
from .lease import LEASES, Lease
from .location import Location
from .neighbours import Neighbours

__all__ = ["FOLDER", "PACKS", "Home", "identity", "look_at", "settle_in"]

FOLDER = "datastates.folder"
"""The key in the record of a run for the uid of the folder with its lease and its packs."""

PACKS = "datastates.packs"
"""The key there for the path that this folder had, for people to read."""

_PAGE = 4096
_IDENTITY = ".identity"
_UID = re.compile("[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class Home:
    """A folder of packs. ``uid`` is None if it has none and none could be written.

    ``is_beside``: the lineage lies beside it in one folder, so a copy of one comes with a copy of the other.
    ``read_only`` says why nothing can be written here; None if it can. ``neighbours`` are the other lineages that have states in it.
    """

    path: Path
    uid: str | None
    is_beside: bool
    read_only: str | None
    neighbours: Neighbours = field(repr=False, compare=False)

    def check_writable(self) -> str:
        """The folder's uid, if a training may write here.

        :raises Unavailable: it may not.
        """
        if self.read_only is not None or self.uid is None:
            raise Unavailable(
                f"this repository can only be read: {self.read_only}; get the right to write there, "
                "or copy the repository to where you may write and open the copy"
            )
        return self.uid

    def lease(self, run: str) -> Lease:
        """A new lease, which shows that a run of this process lives.

        :raises Unavailable: it cannot be made.
        """
        try:
            return Lease(self.path, run)
        except OSError as exc:
            raise Unavailable(
                f"no lease can be made in {self.path / LEASES} ({exc.strerror}): every process that tracks locks a file there; "
                "get the right to write in that folder, on a file system with locks"
            ) from exc


def look_at(location: Location) -> Home:
    """The folder of packs for a caller that only reads; nothing is written.

    :raises Unavailable: its identity cannot be read.
    """
    is_beside = location.root is not None and location.packs == location.root / "packs"
    return Home(location.packs, _read(location.packs), is_beside, "it was opened for looking only", Neighbours(location.packs))


def settle_in(location: Location, database: Database) -> Home:
    """The folder of packs; if both may be written, its lineage knows it from now on.

    :raises Unavailable: its identity cannot be read, or cannot be written.
    """
    packs = location.packs
    is_beside = location.root is not None and packs == location.root / "packs"
    read_only = database.read_only or (None if _may_write(packs) else f"{packs} may not be written by this process")
    uid = identity(packs) if database.read_only is None else _read(packs)
    if uid is not None and database.read_only is None:
        with database.read() as session:
            known = folders.get(session, uid)
        if known is None or known.path != str(packs):
            with database.write() as session:
                folders.note(session, uid, path=str(packs), host=node_name())
    return Home(packs, uid, is_beside, read_only, Neighbours(packs))


def identity(packs: Path) -> str | None:
    """The uid of a folder of packs, which gets one if it has none; None if it has none and may not be written.

    :raises Unavailable: it cannot be read, or cannot be written.
    """
    uid = _read(packs)
    if uid is not None or not _may_write(packs):
        return uid
    try:
        return _identify(packs)
    except OSError as error:
        next_step = "see that its disk is well and has room, or choose another folder"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            next_step = "raise the limit of open files (`ulimit -n`), or close what this process holds open"
        raise Unavailable(f"{packs} cannot be made a home of states ({error}): {next_step}") from error


def _may_write(packs: Path) -> bool:
    return os.access(packs, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _read(packs: Path) -> str | None:
    path = packs / _IDENTITY
    try:
        text = read_regular(path, most=_PAGE).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise Unavailable(f"{path} cannot be read ({exc.strerror}): it says which folder this is; get the right to read it") from exc
    if not _UID.fullmatch(text):
        raise Unavailable(f"{path} says {text[:40]!r}, which is no identity of a folder: bring the file back from a copy, or delete it")
    return text


def _identify(packs: Path) -> str:
    """The identity of the folder, which is written unless another process was first."""
    from datastates.store.files import TEMPORARY, locked, sync_folder, write_file  # imports torch, which callers that only read do without

    with locked(packs, is_shared=False):
        found = _read(packs)
        if found is not None:
            return found
        made, path = secrets.token_hex(12), packs / f"{TEMPORARY}identity"
        fd = make_regular(path)
        try:
            write_file(fd, path, made.encode() + b"\n")
            may_read(packs, fd)
            path.rename(packs / _IDENTITY)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        sync_folder(packs)
    return made
