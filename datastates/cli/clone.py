"""``clone``: clones a state that another process serves into a repository of one's own, where it outlives this command."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.config import Data
from datastates.errors import Conflict, InvalidInput, OverBudget, Unavailable
from datastates.opening.location import DATABASE, Location

from .interrupt import orderly
from .peers import TlsCa, TokenFile, trusting
from .shell import AsJson, Shell

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress

    from datastates.clone.peer import Peer
    from datastates.clone.transfer import Cloned
    from datastates.lineage.states import State
    from datastates.repository import Repository

__all__ = ["register", "split_source"]

_FORM = "tcp://HOST:PORT/REV"
_SPARE_BYTES = 64 << 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(clone)


def clone(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help=f"{_FORM}; what follows the port is the revision: quote ~ and @{{}} for the shell."),
    ],
    branch: Annotated[
        str | None,
        typer.Option("--branch", "-b", metavar="NAME", help="Begin this branch at it (default: tag it clone/…).", show_default=False),
    ] = None,
    tags: Annotated[bool, typer.Option("--tags", help="Take over the tags of the state and of its ancestors.")] = False,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also", metavar="URL", help="A further source (tcp://HOST:PORT), to share the work; may be repeated.", show_default=False
        ),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    data: Annotated[
        Data | None,
        typer.Option("--data", help="What carries the bytes (default: DATASTATES_DATA, else auto). ucx needs ucx://.", show_default=False),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Treat a source that is silent for this long as dead.")
    ] = 10.0,
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo",
            "-r",
            "--into",
            metavar="URL",
            help="The repository that takes it; made if it is not there (default: as for other commands).",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Clone a state that another process serves, with its ancestry, and make it durable here. Only what is not here yet is moved."""
    shell = Shell(context, repo, as_json)
    url, rev = split_source(source)
    if branch is not None:
        _check_name(branch)
    location = shell.location(must_exist=False)
    import_module("datastates.repository")  # imports that take long come before anything is begun
    from datastates.clone.peer import connect

    orderly()
    with connect([url, *(also or [])], token_file=token_file, tls=trusting(tls_ca), timeout_s=timeout, data=data) as peer:
        state = peer.state(rev)
        with _made(location), _opened(location, state) as repository:
            name = _Name.of(repository, state, branch)
            done = None if _holds(repository, state.uid) else _fetch(shell, peer, repository, state, tags=tags)
            if done is not None:
                _make_durable(shell, repository, state)
            name.give(repository, state, source=url)
    _report(shell, state, done, location, name)


def split_source(source: str) -> tuple[str, str]:
    """The url of a server, and the revision: everything after the first slash behind host and port, whatever it contains.

    :raises InvalidInput: one of them is missing.
    """
    scheme, colons, rest = source.partition("://")
    place, _, rev = rest.partition("/")
    if not (scheme and colons and place):
        raise InvalidInput(f"{source!r} names no server: write {_FORM}, such as tcp://10.0.0.2:4711/main")
    if not rev:
        raise InvalidInput(f"{source!r} names no revision: write {scheme}://{place}/main, or another that `datastates refs` lists there")
    return f"{scheme}://{place}", rev


@dataclass(frozen=True, slots=True)
class _Name:
    """The name that keeps the state after this command has ended."""

    kind: str
    name: str
    is_there: bool

    @classmethod
    def of(cls, repository: Repository, state: State, branch: str | None) -> _Name:
        """A branch if one is asked for, else a tag; a name that already names this state is used again.

        :raises Conflict: the name is taken.
        """
        kind, name = ("tag", f"clone/{state.uid[:10]}") if branch is None else ("branch", branch)
        found = next((ref for ref in repository.refs() if ref.name == name), None)
        if found is not None and (found.kind.value, found.state) != (kind, state.uid):
            raise Conflict(f"{found.kind} {name!r} is at {found.state[:10]} in {repository.location}: choose another name with --branch")
        return cls(kind, name, found is not None)

    def give(self, repository: Repository, state: State, *, source: str) -> None:
        """Give the state this name."""
        if self.is_there:
            return
        if self.kind == "branch":
            repository.branch(self.name, state.uid)
        else:
            repository.tag(self.name, state.uid, message=f"cloned from {source}")


def _check_name(branch: str) -> None:
    from datastates.lineage.change.refs import check_name

    check_name(branch)


@contextmanager
def _made(location: Location) -> Iterator[None]:
    """Remove what this command makes of the repository if it fails, unless somebody uses it by then."""
    root, packs = location.root, location.packs
    if root is None or location.is_present:
        yield
        return
    folders = [folder for folder in (packs, root, *root.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError, sqlite3.Error):
            _unmake(root, packs, folders)
        raise


def _unmake(root: Path, packs: Path, folders: Sequence[Path]) -> None:
    """Remove a repository, with the ``folders`` that were made for it, unless it has a state or somebody has it open."""
    from datastates.lineage import anchor
    from datastates.opening.lease import held_in

    with anchor.alone(root / DATABASE) as is_alone:
        if not is_alone or held_in(packs) or any(packs.glob("*.manifest")) or not _is_empty(root / DATABASE):
            return
        for path in root.glob(f"{DATABASE}*"):
            path.unlink()
        if packs in folders:
            shutil.rmtree(packs, ignore_errors=True)
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()


def _is_empty(path: Path) -> bool:
    """Whether a lineage that nobody has open has no state. What a killed process left in its log counts as one."""
    if not path.exists():
        return True
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        return False
    # immutable: the locks that it would take are held by us
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        has_table = connection.execute("SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'state')").fetchone()[0]
        return not (has_table and connection.execute("SELECT EXISTS (SELECT 1 FROM state)").fetchone()[0])


@contextmanager
def _opened(location: Location, state: State) -> Iterator[Repository]:
    """The repository, with memory for the state: the size in DATASTATES_MEMORY, else a quarter of what is free, or what the state takes."""
    from datastates.config import Config
    from datastates.repository import open as open_repository
    from datastates.system.memory import available_memory_bytes

    needed, free = state.bytes_total + state.bytes_total // 8 + _SPARE_BYTES, available_memory_bytes()
    chosen = Config.from_environment().memory_bytes
    if (free if chosen is None else chosen) < state.bytes_total:
        limit = f"only {free} are free here" if chosen is None else f"DATASTATES_MEMORY allows {chosen}"
        raise OverBudget(f"the {state.bytes_total} bytes of state {state.uid[:10]} pass through memory, and {limit}: make room for it")
    budget = chosen or max(min(needed, free), free // 4)
    with open_repository(
        str(location) if location.root else location.database_url, packs=location.packs, memory_bytes=budget
    ) as repository:
        yield repository


def _holds(repository: Repository, uid: str) -> bool:
    return repository.core.tiers.durable.has(uid)


def _fetch(shell: Shell, peer: Peer, repository: Repository, state: State, *, tags: bool) -> Cloned:
    with _progress(shell) as progress:
        bar = progress.add_task(f"cloning {state.uid[:10]}", total=None)
        transfer = peer.begin_clone(
            state.uid, repo=repository, tags=tags, on_progress=lambda done, total: progress.update(bar, completed=done, total=total)
        )
        try:
            return transfer.wait()
        except BaseException:  # including SIGTERM: nothing may be written any more when the repository is closed
            transfer.cancel()
            with suppress(Exception):  # that it was cancelled, or what the error below says already
                transfer.wait()
            raise


def _make_durable(shell: Shell, repository: Repository, state: State) -> None:
    """Wait until the state is on disk.

    :raises Unavailable: it could not be written.
    """
    with shell.console.status("writing it to disk") if _is_watched(shell) else nullcontext():
        host = repository.core.host()
        host.want(state.uid)
        host.drain()
    if not _holds(repository, state.uid):
        raise Unavailable(f"state {state.uid[:10]} came, but could not be written to {repository.location.packs}: is the disk full?")


def _report(shell: Shell, state: State, done: Cloned | None, location: Location, name: _Name) -> None:
    moved, seconds, sources = (done.bytes_moved, done.seconds, dict(done.by_source)) if done else (0, 0.0, {})
    if shell.as_json:
        shell.write_json(
            {"state": state.uid, "step": state.step, "digest": state.digest, "bytes": state.bytes_total, "bytes_moved": moved}
            | {"seconds": seconds, "sources": sources, "repository": str(location), name.kind: name.name}
        )
        return
    from .render import size_text

    came = f"{size_text(moved)} of {size_text(state.bytes_total)} came in {seconds:.2f} s" if done else "it was here already"
    shell.console.print(
        f"state {state.uid} (step {state.step}): {came}, durable in {location}, {name.kind} {name.name}\n"
        f"to write its tensors: datastates restore {name.name} --repo {location} --into FILE.safetensors",
        soft_wrap=True,  # to be copied: not folded
    )


def _is_watched(shell: Shell) -> bool:
    from rich.console import Console

    return not shell.as_json and shell.console.is_terminal and Console(stderr=True).is_terminal


def _progress(shell: Shell) -> Progress:
    """A progress bar on standard error, shown only to people."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not _is_watched(shell))
