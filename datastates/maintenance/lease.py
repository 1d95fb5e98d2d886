"""Leases show which processes are alive: each tracking process locks a separate file for as long as
it lives.

The kernel drops the lock when the process ends, however it ends; a pid alone might have been
reused. The file records its own inode, because a copy of a folder also contains copies of its
leases, which no process will ever lock.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from datastates.errors import Conflict, Unavailable
from datastates.lineage.states import Life, Run
from datastates.system.files import (
    FileLock,
    hold,
    is_held,
    make_folder_like,
    make_regular,
    may_read,
    read_regular,
    sync_folder,
)

from .environment import is_running, node_id

if TYPE_CHECKING:
    from datastates.lineage.database import Database
    from datastates.lineage.session import Session

    from .location import Location

LEASES = "leases"
"""The folder of the leases, inside the folder of packs."""


class LeaseState(StrEnum):
    """The state of a lease: held, free, a copy of a lease, or missing."""

    HELD = "held"
    FREE = "free"
    COPY = "copy"
    NOTHING = "nothing"


def beat_at(packs: Path, uid: str) -> datetime | None:
    """When a process last noted that it is at work; None if its lease cannot be seen."""
    try:
        return datetime.fromtimestamp((packs / LEASES / uid).stat().st_mtime, UTC)
    except OSError:
        return None


def held_in(packs: Path, *, is_held: bool = True) -> list[str]:
    """The runs whose leases in a folder are held, or may be, so that processes may be at work
    there; else those whose leases are not."""
    folder = packs / LEASES
    return [
        name
        for name in sorted(os.listdir(folder) if folder.is_dir() else ())
        if (look(packs, name) is LeaseState.HELD) is is_held
    ]


def look(packs: Path, uid: str) -> LeaseState:
    """The state of a lease, seen from here.

    It counts as held if it cannot be read, or if the file system has no locks."""
    path = packs / LEASES / uid
    try:
        if is_held(path):
            return LeaseState.HELD
        note = path.read_bytes()
        inode = path.stat().st_ino
    except FileNotFoundError:
        return LeaseState.NOTHING
    except OSError:
        return LeaseState.HELD
    try:
        return (
            LeaseState.FREE if not note or json.loads(note)["inode"] == inode else LeaseState.COPY
        )
    except (ValueError, LookupError, TypeError):
        return LeaseState.FREE


@dataclass(frozen=True, slots=True)
class HeldByAgent:
    """The process that holds a lease for a dead training, together with its memory: its address
    for processes of its node, and the time at which it makes states durable, in seconds since the
    epoch."""

    address: str
    node: str
    host: str
    pid: int
    until: float

    @property
    def is_here(self) -> bool:
        """Whether the process is on this node."""
        return self.node == node_id()

    def describe(self) -> str:
        """Who holds a branch, and for how long, in words."""
        left = max(0.0, self.until - time.time())
        return (
            f"the agent on {self.host} (process {self.pid}), for a training that died. It makes its"
            f" states durable in {left:.0f} s: try again then, or track the branch on that node"
            " with Config(agent='process') to continue from its memory"
        )


def agent_note(inode: int, address: str, until: float) -> bytes:
    """The note in a lease that an agent holds; see ``HeldByAgent``."""
    note = {
        "inode": inode,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "agent": address,
        "node": node_id(),
        "until": until,
    }
    return json.dumps(note).encode()


def held_by_agent(packs: Path, uid: str) -> HeldByAgent | None:
    """Who holds the lease of a run, if that is an agent; else None."""
    if look(packs, uid) is not LeaseState.HELD:
        return None
    try:
        note = json.loads(read_regular(packs / LEASES / uid, most=_PAGE))
        return HeldByAgent(
            str(note["agent"]),
            str(note["node"]),
            str(note["host"]),
            int(note["pid"]),
            note["until"],
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


# The folder of packs, which a repository recognizes by a uid stored in it, not by its path or by
# the host. It belongs to one lineage, whose uid is stored there too. No other lineage may
# delete its files.


FOLDER = "datastates.folder"
"""The key in the record of a run for the uid of the folder with its lease and its packs."""

PACKS = "datastates.packs"
"""The key there for the path that this folder had, for people to read."""

TIERS = "datastates.tiers"
"""The key there for the names of the further tiers that this process filled, joined by spaces."""

_PAGE = 4096
_IDENTITY = ".identity"
_LINES = re.compile(r"([0-9a-f]{24})\n([0-9a-f]{24})")


@dataclass(frozen=True, slots=True)
class PackFolder:
    """A folder of packs. ``uid`` is None if it has none and none could be written.

    ``is_beside``: the lineage is in the same folder, so both are copied together. ``read_only`` is
    the reason why nothing can be written here; None if it can.
    """

    path: Path
    uid: str | None
    is_beside: bool
    read_only: str | None

    def check_writable(self) -> str:
        """The folder's uid, if a training may write here.

        :raises Unavailable: it may not.
        """
        if self.read_only is not None or self.uid is None:
            raise Unavailable(
                f"this repository can only be read: {self.read_only}; get the right to write there,"
                " or copy the repository to where you may write and open the copy"
            )
        return self.uid

    def lease(self, run: str) -> FileLock:
        """A lock on the run's file in ``leases``, which shows that this process lives. ``touch``
        shows that it is at work, for ``beat_at``.

        :raises Unavailable: it cannot be made.
        """
        folder = self.path / LEASES
        try:
            make_folder_like(self.path, folder)
            held = hold(folder / run)
            if held is None:
                raise BlockingIOError(errno.EAGAIN, "another process holds it")
            note = {"inode": held.inode, "host": socket.gethostname(), "pid": os.getpid()}
            try:
                held.write(json.dumps(note))
            except OSError:
                held.close()
                raise
        except OSError as exc:
            raise Unavailable(
                f"no lease can be made in {folder} ({exc.strerror}): every process that"
                " tracks locks a file there. Get the right to write in that folder, on a file"
                " system with locks"
            ) from exc
        return held


def read_only_folder(location: Location) -> PackFolder:
    """The folder of packs for a caller that only reads; nothing is written.

    :raises Unavailable: its identity cannot be read.
    """
    is_beside = location.root is not None and location.packs == location.root / "packs"
    found = owner_of(location.packs)
    uid = None if found is None else found[0]
    return PackFolder(location.packs, uid, is_beside, "it was opened for looking only")


def register_folder(location: Location, database: Database) -> PackFolder:
    """The folder of packs. If both may be written, the folder is recorded in its lineage.

    :raises Unavailable: its identity cannot be read, or cannot be written.
    :raises Conflict: it belongs to another lineage.
    """
    # commands that only read the lineage need none of these, which take 0.1 s
    from datastates.lineage.write import attachments
    from datastates.lineage.write.clones import repository_uid

    packs = location.packs
    is_beside = location.root is not None and packs == location.root / "packs"
    read_only = database.read_only or (
        None if _may_write(packs) else f"{packs} may not be written by this process"
    )
    with database.read() as session:
        lineage = repository_uid(session)
    uid = identity(packs, lineage, may_write=database.read_only is None)
    if uid is not None and database.read_only is None:
        with database.read() as session:
            known = attachments.get(session, uid)
        if known is None or known.path != str(packs):
            with database.write() as session:
                attachments.note(session, uid, path=str(packs), host=socket.gethostname())
    return PackFolder(packs, uid, is_beside, read_only)


def identity(packs: Path, lineage: str, *, may_write: bool = True) -> str | None:
    """The uid of the folder of packs of a lineage. A folder that has none gets one, and belongs to
    the lineage from then on; None if it may not be written.

    :raises Unavailable: it cannot be read, or cannot be written.
    :raises Conflict: it belongs to another lineage.
    """
    try:
        found = owner_of(packs)
        if found is None and may_write and _may_write(packs):
            found = _identify(packs, lineage)
    except OSError as error:
        next_step = "see that its disk is well and has room, or choose another folder"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            next_step = (
                "raise the limit of open files (`ulimit -n`), or close what this process holds open"
            )
        raise Unavailable(
            f"{packs} cannot be made a home of states ({error}): {next_step}"
        ) from error
    if found is not None and found[1] != lineage:
        raise Conflict(
            f"{packs} belongs to lineage {found[1]} (see its file {_IDENTITY}), and this database"
            f" holds lineage {lineage}: name another folder for its states (packs=), or the"
            f" database of {found[1]}. If that is lost, `datastates repair --lineage` rebuilds it"
            " in an empty one"
        )
    return None if found is None else found[0]


def _may_write(packs: Path) -> bool:
    return os.access(packs, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def owner_of(packs: Path) -> tuple[str, str] | None:
    """The uids of a folder of packs and of its lineage; None if it has none yet.

    :raises Unavailable: they cannot be read.
    """
    path = packs / _IDENTITY
    try:
        text = read_regular(path, most=_PAGE).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise Unavailable(
            f"{path} cannot be read ({exc.strerror}), and it identifies the folder: get the right"
            " to read it"
        ) from exc
    lines = _LINES.fullmatch(text)
    if lines is None:
        raise Unavailable(
            f"{path} says {text[:60]!r}, which is no identity of a folder: bring the file back from"
            " a copy, or delete it"
        )
    return lines[1], lines[2]


def _identify(packs: Path, lineage: str) -> tuple[str, str]:
    """The identity of the folder, which is written unless another process was first."""
    # imports torch, which callers that only read do without
    from datastates.storage.durable_files import (
        TEMPORARY,
        locked,
        write_file,
    )

    with locked(packs, is_shared=False):
        found = owner_of(packs)
        if found is not None:
            return found
        made, path = secrets.token_hex(12), packs / f"{TEMPORARY}identity"
        fd = make_regular(path)
        try:
            write_file(fd, path, f"{made}\n{lineage}\n".encode())
            may_read(packs, fd)
            path.rename(packs / _IDENTITY)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        sync_folder(packs)
    return made, lineage


# Whether the process of a run lives, as far as this process can know. Imports no torch.


def is_dead(run: Run, home: PackFolder) -> bool:
    """Whether the process of a run that did not finish has certainly ended, as far as this folder
    is concerned.

    A free lease proves it, whatever host wrote it, unless the kernel sees the process running. A
    copy of a lease proves it if the lineage was copied with it: that process writes to the
    original. A missing lease proves nothing. Then the kernel is queried, if the process ran where
    this one can see it.
    """
    folder = run.config.get(FOLDER)
    if folder is not None and folder != home.uid:
        return False
    seen = look(home.path, run.process or run.uid)
    if seen is LeaseState.HELD:
        return False
    if seen is LeaseState.COPY and home.is_beside:
        return True
    running = is_running(run)
    if seen is LeaseState.FREE:
        return running is not True
    return running is False and folder is not None


def is_alive(run: Run, home: PackFolder) -> bool:
    """Whether the process of a run is seen to live.

    A process that is neither alive nor dead is unknown."""
    if run.finished_at is not None or is_dead(run, home):
        return False
    return look(home.path, run.process or run.uid) is LeaseState.HELD or is_running(run) is True


def life_of(run: Run, home: PackFolder) -> Life:
    """What is known of a run's process."""
    if run.is_imported and run.finished_at is None:
        return Life.UNKNOWN
    if run.finished_at is not None or is_dead(run, home):
        return Life.ENDED
    return Life.RUNNING if is_alive(run, home) else Life.UNKNOWN


def check_idle(session: Session, branch: str, home: PackFolder) -> None:
    """Raise if a training may still move a branch.

    :raises Conflict: the process of one is alive, or nothing can be found out about it; the error
        names the process.
    """
    from datastates.lineage.write.runs import unfinished

    for run in unfinished(session, branch):
        if life_of(run, home) is not Life.ENDED:
            raise Conflict(
                f"branch {branch!r} has a training: process {run.pid} on {run.host}, as far as"
                " known; end it, then try again"
            )
