"""The location of a repository: what its URL means, and which repository a terminal command uses
when none is named."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from datastates import values
from datastates.errors import InvalidInput, NotFound, Unavailable
from datastates.lineage.views.text import plural
from datastates.system import logs

DATABASE = "lineage.db"
"""The lineage's file in a repository's folder; its presence is what makes a folder a repository."""

DEFAULT = "runs"
"""The folder that is used when nothing else names one."""


@dataclass(frozen=True, slots=True)
class Location:
    """The two halves of a repository: the lineage's database and the folder of packs.

    Both may still be missing. With ``bucket``, its URL, the packs are in that bucket, and the
    folder has those that this node wrote or still needs."""

    database_url: str = field(repr=False)  # it may have a password
    packs: Path
    bucket: str = ""

    @property
    def root(self) -> Path | None:
        """The repository's folder; None when the lineage is on a database server."""
        url = make_url(self.database_url)
        return (
            Path(url.database).parent
            if url.get_backend_name() == "sqlite" and url.database
            else None
        )

    @property
    def is_present(self) -> bool:
        """Whether the lineage's file is there, and not empty, as an interrupted copy or a full disk
        leaves it.

        A database server counts as present: no connection is made before it is opened.
        """
        if self.root is None:
            return True
        file = self.root / DATABASE
        return file.is_file() and file.stat().st_size > 0

    def __str__(self) -> str:
        """A text that may be shown: the folder, or the server's URL without its password."""
        return str(self.root or _hidden(make_url(self.database_url)))


def locate(
    url: str | os.PathLike[str],
    packs: str | os.PathLike[str] | None = None,
    *,
    scratch: str | os.PathLike[str] | None = None,
    must_exist: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Location:
    """The location of ``url``, which names a folder with SQLite and packs, or a PostgreSQL database
    whose packs are in the folder ``packs``. If ``packs`` is the URL of a bucket, ``scratch`` is the
    folder of this node for packs that are not there yet.

    Paths become absolute, so that they keep their meaning when the process changes its directory.
    For a database server, ``packs`` falls back on ``DATASTATES_PACKS``. ``scratch`` falls back on
    ``DATASTATES_SCRATCH``. No file is created.

    :raises InvalidInput: the url is neither, or no packs are named for a server.
    :raises NotFound: with ``must_exist``, there is no repository there.
    :raises Unavailable: this process may not look there, or the file system does not answer.
    """
    text = values.path(url, "url")
    packs = None if packs is None else values.path(packs, "packs")
    environ = os.environ if environ is None else environ
    is_server, bucket = "://" in text, ""
    packs = packs or (environ.get("DATASTATES_PACKS") if is_server else None)
    scratch = scratch or environ.get("DATASTATES_SCRATCH")
    if packs is not None and "://" in os.fspath(packs):
        bucket, packs = os.fspath(packs), scratch or (_cache(text, packs) if is_server else None)
    elif scratch is not None:
        raise InvalidInput(
            f"scratch={os.fspath(scratch)!r} is the folder for packs on their way to a bucket: give"
            " packs='s3://bucket/run', or leave scratch out"
        )
    location = _on_server(text, packs) if is_server else _in_folder(text, packs)
    location = replace(location, bucket=bucket)
    if must_exist and not location.is_present:
        raise NotFound(
            f"no repository in {location}: make one with `datastates init {logs.text(text)}`, "
            "or name another with --repo or DATASTATES_REPO"
        )
    return location


def check_whole(location: Location) -> None:
    """Raise if a new lineage must not be made here.

    :raises NotFound: the packs of an old lineage are there.
    """
    if location.is_present or not location.packs.is_dir():
        return
    count = len({path.name.partition(".")[0] for path in location.packs.glob("[!.]*.manifest")})
    if count:
        is_empty = location.root is not None and (location.root / DATABASE).exists()
        raise NotFound(
            f"{location.packs} holds {plural(count, 'state')}, but their lineage,"
            f" {location.root}/{DATABASE}, is {'empty' if is_empty else 'gone'}: bring it back from"
            " a copy, rebuild it from the packs by"
            f" `datastates repair --lineage{' --replace' if is_empty else ''}`, or begin again in"
            " another folder"
            " (`datastates import` takes in a bundle)"
        )


def discover(directory: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
    """The repository that is used in ``directory`` (None: the working directory) when none is
    named.

    It is ``DATASTATES_REPO``, or the nearest of the directory and its parents that is a repository,
    or ``runs`` in the directory.

    :raises NotFound: the working directory was deleted.
    """
    named = (os.environ if environ is None else environ).get("DATASTATES_REPO")
    if named:
        return named
    directory = _absolute("") if directory is None else directory
    for folder in (directory, *directory.parents):
        if (folder / DATABASE).is_file():
            return str(folder)
    return str(directory / DEFAULT)


def _in_folder(text: str, packs: str | os.PathLike[str] | None) -> Location:
    if not text:
        raise InvalidInput(
            "the repository's url is empty: name a folder, or postgresql://user@host/database"
        )
    root = _absolute(text)
    if root.name == DATABASE and root.is_file():
        raise InvalidInput(
            f"{text} is the lineage of a repository: name its folder, {Path(text).parent}"
        )
    if root.exists() and not root.is_dir():
        raise InvalidInput(f"{text} is a file: a repository is a folder")
    database = URL.create("sqlite", database=str(root / DATABASE)).render_as_string()
    return Location(database, root / "packs" if packs is None else _packs_folder(packs))


def _on_server(text: str, packs: str | os.PathLike[str] | None) -> Location:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as exc:
        raise InvalidInput(
            "the database's url does not parse: write postgresql://user:password@host:port/database"
        ) from exc
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise InvalidInput(
            f"{url.drivername}:// is no repository: name a folder, or"
            " postgresql://user@host/database"
        )
    if not packs:
        raise InvalidInput(
            f"{_hidden(url)} holds no packs: name their folder with packs= or DATASTATES_PACKS"
        )
    url = url.set(drivername="postgresql+psycopg")
    return Location(url.render_as_string(hide_password=False), _packs_folder(packs))


def _cache(url: str, packs: str | os.PathLike[str]) -> str:
    """The folder of this user for packs on their way to a bucket."""
    name = sha256(f"{url} {os.fspath(packs)}".encode()).hexdigest()[:24]
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "datastates", name)


def _packs_folder(packs: str | os.PathLike[str]) -> Path:
    return _absolute(os.fspath(packs))


def _absolute(text: str) -> Path:
    try:
        found = Path(text).expanduser().absolute()
    except FileNotFoundError:
        raise NotFound(
            "the working directory of this process was deleted or moved away: change to a folder"
            " that is there, or name the repository by its absolute path"
        ) from None
    except RuntimeError:
        raise InvalidInput(
            f"{text}: that user has no home directory here. Write out the path, or ./~… for a"
            " folder of that name"
        ) from None
    try:
        str(found).encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            f"{str(found)!a} is no UTF-8, in which lineages note where folders are: rename that"
            " folder, or make a symbolic link to it and give that"
        ) from None
    try:
        found.stat()
    except OSError as exc:
        if exc.errno == errno.ENAMETOOLONG:
            raise InvalidInput(
                f"a path of {len(str(found))} characters, {str(found)[:60]}…, is too long for this"
                " system: name another folder"
            ) from None
        if exc.errno in (errno.EACCES, errno.EIO, errno.ESTALE):
            raise Unavailable(
                f"{found} cannot be looked at ({exc.strerror}): check the permissions of its"
                " folders, and the file system"
            ) from exc
    return found


def _hidden(url: URL) -> str:
    return logs.text(url.render_as_string(hide_password=True))
