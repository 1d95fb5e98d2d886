"""A PostgreSQL server for one benchmark, with the default settings of its packages: with fsync, on
a socket in its folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of an empty database. It is deleted at the end of the block.

    :raises SystemExit: the server's programs are not installed.
    """
    places = [
        *Path("/usr/lib/postgresql").glob("*/bin"),
        Path(shutil.which("initdb") or "/none/x").parent,
    ]
    binaries = next((place for place in places if (place / "initdb").exists()), None)
    if binaries is None:
        raise SystemExit(
            "PostgreSQL's server programs (initdb, postgres) are not here: install them (Debian:"
            " apt-get install postgresql)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # the path of a socket must be short
    home = Path(tempfile.mkdtemp(prefix="datastates-pg-", dir="/tmp"))
    data = Path(tempfile.mkdtemp(prefix="postgresql-", dir=folder))
    try:
        if os.geteuid() == 0:
            for place in (home, data):
                shutil.chown(place, "postgres")
        _run(
            binaries,
            home,
            "initdb",
            "-D",
            str(data / "data"),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
        )
        _run(
            binaries,
            home,
            "pg_ctl",
            "start",
            "-w",
            "-D",
            str(data / "data"),
            "-l",
            str(home / "log"),
            "-o",
            f"-k {home} -c listen_addresses=''",
        )
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={home}"
        finally:
            _run(binaries, home, "pg_ctl", "stop", "-w", "-m", "fast", "-D", str(data / "data"))
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(data, ignore_errors=True)


def _run(binaries: Path, home: Path, program: str, *arguments: str) -> None:
    command = [str(binaries / program), *arguments]
    if os.geteuid() == 0:  # the server refuses to run as root
        command = ["runuser", "-u", "postgres", "--", *command]
    with (home / "out").open("ab") as out:
        done = subprocess.run(
            command, cwd=home, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False
        )
    if done.returncode:
        raise SystemExit(f"{program} failed:\n{(home / 'out').read_text(errors='replace')}")
