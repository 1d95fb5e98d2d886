"""The commands ``restore``, ``export``, ``import`` and ``clone``: states to and from other
places."""

from __future__ import annotations

import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datastates import values
from datastates.config import Config, Data
from datastates.errors import Conflict, InvalidInput, NotFound, OverBudget, Unavailable
from datastates.lineage.views.text import plural, short, size_text
from datastates.lineage.write.refs import check_name
from datastates.maintenance.location import DATABASE, Location

from .app import AsJson, Only, Repo, Shell, ref_names
from .interrupt import orderly

if TYPE_CHECKING:
    from datastates.files.bundle import Bundle
    from datastates.lineage.states import State
    from datastates.repository import Repository
    from datastates.transport.contract import Tls
    from datastates.transport.peer import Peer
    from datastates.transport.transfer import Cloned

_SHOWN = 20
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The file with the server's token (default: DATASTATES_TOKEN).",
        show_default=False,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="Use TLS, and trust the certificates in this file.",
        show_default=False,
    ),
]
_FORM = "tcp://HOST:PORT/REV"
_SPARE_BYTES = 64 << 20


_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def restore(
    context: typer.Context,
    revs: Annotated[
        list[str],
        typer.Argument(
            metavar="REV",
            help="A state: uid, name, main~3, main@best:val_loss, …; or several.",
            autocompletion=ref_names,
        ),
    ],
    into: Annotated[
        Path,
        typer.Option(
            "--into",
            metavar="FILE|FOLDER",
            help=(
                "FILE.safetensors or FILE.pt, or a folder with a safetensors file for each object."
            ),
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="torch, safetensors, hf (Hugging Face) or dcp (default: by the ending).",
            show_default=False,
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="NAME",
            help="A file for each state in the folder: 'step_{step}.pt', or with {uid}.",
            show_default=False,
        ),
    ] = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history", help="Also all ancestors that can be restored, a file for each state."
        ),
    ] = False,
    only: Only = None,
    nearest: Annotated[
        bool,
        typer.Option("--nearest", help="If its bytes are gone, take the nearest state by steps."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace files that are there.")
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Write states to files that PyTorch and other programs read.

    Safetensors files have the tensors, and are read back to check them. A FILE.pt has everything,
    as torch.save writes it. Use `export` to take states to another repository.
    """
    shell = Shell(context, repo, as_json)
    if pattern is not None or history or len(revs) > 1:
        if only or nearest or force:
            raise typer.BadParameter(
                "several states are written whole, to new files", param_hint="--only"
            )
        with shell.repository() as repository:
            return _restore_many(shell, repository, revs, into, kind, pattern, history=history)
    is_file = kind is None and into.suffix in _FILES
    if is_file and into.is_dir():
        raise InvalidInput(f"{into} is a folder: name a file in it")
    if kind is None and not is_file and into.suffix[1:].isalpha() and not into.is_dir():
        raise InvalidInput(
            f"{into} has an unknown ending: name a folder, or a file that ends in"
            f" {', '.join(_FILES)}"
        )
    if not is_file and into.is_file():
        raise InvalidInput(f"{into} is a file: name a folder, or a file that ends in .safetensors")
    with shell.repository() as repository:
        state = repository.core.state(revs[0], nearest=nearest)
        tree = repository.load(state.uid, only=only or None)
        if kind is None and (not is_file or into.suffix == ".safetensors"):
            written = _write_tensors(shell, state, tree, into, force=force)
        else:
            if only:
                tree = _objects(tree, only)
            written = _write_whole(state, tree, kind or "torch", into, force=force)
    if shell.as_json:
        return shell.write_json({"state": state.uid, "step": state.step, "files": written})
    for file in written:
        shell.write(
            f"{file['path']}: {file['tensors']} tensors, {size_text(int(str(file['bytes'])))}"
        )
    return None


def _write_tensors(
    shell: Shell, state: State, tree: object, into: Path, *, force: bool
) -> list[dict[str, object]]:
    """Write tensors to safetensors files and read them back. Returns a record of each file."""
    from datastates.files.checkpoints import export, plan_export

    plan = plan_export(tree, state, into)
    taken = [str(path) for path in plan if path.exists()]
    if taken and not force:
        raise InvalidInput(
            f"{', '.join(taken)} would be replaced: name another place, or add --force"
        )
    total, done = 2 * sum(file.bytes_total for file in plan.values()), 0
    with progress(shell, f"restoring {short(state.uid)}") as show:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            show(done, total)

        export(plan, on_progress=advance)
    return [
        {"path": str(path), "tensors": len(file.tensors), "bytes": file.bytes_total}
        for path, file in plan.items()
    ]


def _objects(tree: Any, names: Sequence[str]) -> dict[str, object]:
    """Whole objects of a state, by their names.

    :raises InvalidInput: a name is a pattern of tensors.
    """
    for name in names:
        if name not in tree:
            raise InvalidInput(
                f"this format has whole objects, and {name!r} is none: name some of"
                f" {', '.join(tree)}, or write a .safetensors file"
            )
    return {name: tree[name] for name in names}


def _write_whole(
    state: State, tree: Any, kind: str, into: Path, *, force: bool
) -> list[dict[str, object]]:
    """Write a state as another program would have. Returns a record of the file or folder."""
    from datastates.files.checkpoints import Format, unwrapped, words_about, write
    from datastates.state.tree import flatten

    chosen = values.choice(kind, Format, "--format")
    if chosen is not Format.HUGGING_FACE:
        tree = unwrapped(tree, state.attributes)
    write(tree, chosen, into, words_about(state), is_replacing=force)
    tensors = flatten(tree).tensors
    size = sum(leaf.tensor.nbytes for leaf in tensors)
    return [{"path": str(into), "tensors": len(tensors), "bytes": size}]


def _restore_many(
    shell: Shell,
    repository: Repository,
    revs: list[str],
    into: Path,
    kind: str | None,
    pattern: str | None,
    *,
    history: bool,
) -> None:
    from datastates.files.importing import export_files

    chosen = {state.uid: state for state in map(repository.state, revs)}
    for uid in list(chosen) if history else ():
        chosen |= {
            state.uid: state for state in repository.ancestors(uid) if state.status.is_restorable
        }
    with progress(shell, "restoring", is_of_bytes=False) as show:
        done = export_files(
            repository,
            list(chosen.values()),
            into,
            format=kind or "torch",
            pattern=pattern,
            on_progress=show,
        )
    if shell.as_json:
        return shell.write_lines(
            {"state": each.state.uid, "step": each.state.step, "path": str(each.path)}
            for each in done
        )
    for each in done[:_SHOWN]:
        shell.write(f"{each.path}: step {each.state.step}, {short(each.state.uid)}")
    if len(done) > _SHOWN:
        shell.write(f"and {len(done) - _SHOWN} more")
    return None


@contextmanager
def progress(
    shell: Shell, what: str, *, is_of_bytes: bool = True
) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar on standard error, shown only to people. The function takes how much is done,
    and how much there is at most."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    of_bytes = DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(of_bytes if is_of_bytes else [MofNCompleteColumn()]),
        console=Console(stderr=True),
        transient=True,
        disable=not shell.is_watched,
    ) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


# --- ``export`` and ``import``: states as a folder, and checkpoint files of other tools ---


def export_states(
    context: typer.Context,
    revs: Annotated[
        list[str],
        typer.Argument(
            metavar="REV", help="States: uids, names, main~3, …", autocompletion=ref_names
        ),
    ],
    bundle: Annotated[Path, typer.Option("--bundle", metavar="FOLDER", help="A new folder.")],
    parents: Annotated[
        bool,
        typer.Option(
            "--parents", help="Also the parents of merged states, so that these can be verified."
        ),
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Write states with their lineage and tags to a folder, for `import` into another repository.

    Use `restore` to write files that other programs read."""
    shell = Shell(context, repo, as_json)
    with shell.repository() as repository:
        from datastates.files.bundle import export_bundle

        done = export_bundle(repository, revs, str(bundle), with_parents=parents)
    return _say(shell, done, f"to {bundle}", "written")


def import_states(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="What `export` wrote; with --pattern, a folder of checkpoint files.",
        ),
    ],
    digest: Annotated[
        str | None,
        typer.Option(
            "--digest",
            metavar="HEX",
            help="The digest that `export` printed; a bundle with another one is refused.",
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="NAME",
            help=(
                "Names of checkpoint files: 'step_{step}.pt', 'checkpoint-{step}'. Each is a state,"
                " in the order of steps."
            ),
            show_default=False,
        ),
    ] = None,
    branch: Annotated[
        str,
        typer.Option(
            "--branch",
            metavar="NAME",
            help="With --pattern: a new branch, or the branch of an earlier import.",
        ),
    ] = "imported",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="With --pattern: only print which files there are."),
    ] = False,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad", help="With --pattern: leave out files that are refused, and print why."
        ),
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Import the states of a folder that `export` wrote, and make them durable.

    States that no tag names get the tag import/UID. A repository that does not exist is made.

    With --pattern, a folder of checkpoints of torch.save, safetensors, Hugging Face or
    torch.distributed.checkpoint becomes a branch.

    No code in them is executed. Give the same command again to resume an interrupted import.
    """
    shell = Shell(context, repo, as_json)
    if pattern is not None:
        if digest is not None:
            raise InvalidInput("--digest belongs to a bundle: leave it out, or leave out --pattern")
        return _import_files(shell, folder, pattern, branch, dry_run=dry_run, skip_bad=skip_bad)
    if not (folder / "lineage.json").is_file():
        shell.hint(
            "a folder of checkpoint files is imported with --pattern, such as --pattern"
            " 'step_{step}.pt'"
        )
        raise NotFound(f"{folder} holds no bundle: name a folder that `export` wrote")
    with shell.repository(must_exist=False) as repository:
        from datastates.files.bundle import import_bundle

        done = import_bundle(repository, folder, digest=digest)
        named = {ref.state for ref in repository.refs()}
        for state in done.states:
            if state.uid not in named:
                repository.tag(f"import/{state.uid[:10]}", state.uid)
    return _say(shell, done, f"from {folder}", "new")


def _import_files(
    shell: Shell, folder: Path, pattern: str, branch: str, *, dry_run: bool, skip_bad: bool
) -> None:
    from datastates.files.importing import import_files

    with (
        shell.repository(must_exist=dry_run) as repository,
        progress(shell, "importing", is_of_bytes=False) as show,
    ):
        done = import_files(
            repository,
            folder,
            pattern,
            branch=branch,
            dry_run=dry_run,
            skip_bad=skip_bad,
            on_progress=show,
        )
    if shell.as_json:
        shell.write_json(
            {
                "branch": done.branch,
                "states": [state.uid for state in done.states],
                "known": [source.name for source in done.known],
                "waiting": [source.name for source in done.waiting],
                "refused": done.refused,
            }
        )
        return
    for name, why in done.refused.items():
        shell.write(f"{name} was left out: {why}")
    known = f"; {len(done.known)} were there already" * bool(done.known)
    if not dry_run:
        shell.write(f"{plural(len(done.states), 'state')} on branch {done.branch}{known}")
        return
    for source in done.waiting:
        shell.write(f"step {source.step}: {source.name} ({source.format})")
    shell.write(f"{plural(len(done.waiting), 'file')} would go to branch {done.branch}{known}")


def _say(shell: Shell, done: Bundle, where: str, what: str) -> None:
    record = {
        "states": [state.uid for state in done.states],
        "ancestors": done.ancestors,
        "tags": [ref.name for ref in done.tags],
        "bytes": done.bytes_new,
        "digest": done.digest,
    }
    tags = f", tags {', '.join(ref.name for ref in done.tags)}" if done.tags else ""
    text = (
        f"{plural(len(done.states), 'state')} {where}, {size_text(done.bytes_new)} {what};"
        f" {plural(done.ancestors, 'ancestor')} without bytes{tags}"
    )
    shell.report(record, text, f"its digest is {done.digest}")


# --- TLS for commands that connect to other processes ---


def trusting(ca: Path | None) -> Tls | None:
    """TLS with servers whose certificates are signed by those in a file. Without a file, None."""
    from datastates.transport.contract import Tls  # the transport takes a while to import

    return None if ca is None else Tls(trusted=ca)


# --- ``clone``: a state that another process serves becomes a state of a local repository ---


def clone(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help=(
                f"{_FORM}; what follows the port is the revision: quote ~ and @{{}} for the shell."
            ),
        ),
    ],
    branch: Annotated[
        str | None,
        typer.Option(
            "--branch",
            "-b",
            metavar="NAME",
            help="Begin this branch at it (default: tag it clone/…).",
            show_default=False,
        ),
    ] = None,
    tags: Annotated[
        bool, typer.Option("--tags", help="Take over the tags of the state and of its ancestors.")
    ] = False,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            metavar="URL",
            help="A further source (tcp://HOST:PORT), to share the work. May be repeated.",
            show_default=False,
        ),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    data: Annotated[
        Data | None,
        typer.Option(
            "--data",
            help="What carries the bytes (default: DATASTATES_DATA, else auto). ucx needs ucx://.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.1,
            help="Treat a source that is silent for this long as dead.",
        ),
    ] = 10.0,
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo",
            "-r",
            "--into",
            metavar="URL",
            help=(
                "The repository that takes it; made if it is not there (default: as for other"
                " commands)."
            ),
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Clone a state that another process serves, with its ancestry, and make it durable here.

    Bytes that are already here are not moved.
    """
    shell = Shell(context, repo, as_json)
    url, rev = split_source(source)
    if branch is not None:
        check_name(branch)
    location = shell.location(must_exist=False)
    import_module("datastates.repository")  # imports that take long come before anything is begun
    from datastates.transport.peer import connect

    orderly()
    with connect(
        [url, *(also or [])],
        token_file=token_file,
        tls=trusting(tls_ca),
        timeout_s=timeout,
        data=data,
    ) as peer:
        state = peer.state(rev)
        with _made(location), _opened(location, state) as repository:
            name = _Name.of(repository, state, branch)
            done = (
                None
                if repository.core.tiers.durable.has(state.uid)
                else _fetch(shell, peer, repository, state, tags=tags)
            )
            if done is not None:
                _make_durable(shell, repository, state)
            name.give(repository, state, source=url)
    _report(shell, state, done, location, name)


def split_source(source: str) -> tuple[str, str]:
    """The url of a server, and the revision: everything after the first slash behind host and port,
    with any content.

    :raises InvalidInput: one of them is missing.
    """
    scheme, colons, rest = source.partition("://")
    place, _, rev = rest.partition("/")
    if not (scheme and colons and place):
        raise InvalidInput(
            f"{source!r} names no server: write {_FORM}, such as tcp://10.0.0.2:4711/main"
        )
    if not rev:
        raise InvalidInput(
            f"{source!r} names no revision: write {scheme}://{place}/main, or another that"
            " `datastates refs` lists there"
        )
    return f"{scheme}://{place}", rev


@dataclass(frozen=True, slots=True)
class _Name:
    """The name that keeps the state after this command has ended."""

    kind: str
    name: str
    is_there: bool

    @classmethod
    def of(cls, repository: Repository, state: State, branch: str | None) -> _Name:
        """A branch if one is requested, else a tag. A name that already names this state is used
        again.

        :raises Conflict: the name is taken.
        """
        kind, name = ("tag", f"clone/{state.uid[:10]}") if branch is None else ("branch", branch)
        found = next((ref for ref in repository.refs() if ref.name == name), None)
        if found is not None and (found.kind.value, found.state) != (kind, state.uid):
            raise Conflict(
                f"{found.kind} {name!r} is at {found.state[:10]} in {repository.location}: choose"
                " another name with --branch"
            )
        return cls(kind, name, found is not None)

    def give(self, repository: Repository, state: State, *, source: str) -> None:
        if self.is_there:
            return
        if self.kind == "branch":
            repository.branch(self.name, state.uid)
        else:
            repository.tag(self.name, state.uid, message=f"cloned from {source}")


@contextmanager
def _made(location: Location) -> Iterator[None]:
    """Remove what this command makes of the repository if it fails, unless another process uses it
    by then."""
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
    """Remove a repository, with the ``folders`` that were made for it. It is kept if it has a state
    or a process has it open."""
    from datastates.lineage import sqlite_files
    from datastates.maintenance.lease import held_in

    with sqlite_files.exclusive(root / DATABASE) as is_alone:
        if (
            not is_alone
            or held_in(packs)
            or any(packs.glob("*.manifest"))
            or not _is_empty(root / DATABASE)
        ):
            return
        for path in root.glob(f"{DATABASE}*"):
            path.unlink()
        if packs in folders:
            shutil.rmtree(packs, ignore_errors=True)
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()


def _is_empty(path: Path) -> bool:
    """Whether a lineage that no process has open has no state.

    A state in the log of a killed process counts.
    """
    if not path.exists():
        return True
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        return False
    # immutable: the locks that it would take are held by us
    with closing(
        sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    ) as connection:
        has_table = connection.execute(
            "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'state')"
        ).fetchone()[0]
        return not (
            has_table and connection.execute("SELECT EXISTS (SELECT 1 FROM state)").fetchone()[0]
        )


@contextmanager
def _opened(location: Location, state: State) -> Iterator[Repository]:
    """The repository, with memory for the state: the size in DATASTATES_MEMORY, else a quarter
    of what is free, or what the state takes."""
    from datastates.repository import open as open_repository
    from datastates.system.memory import available_memory_bytes

    needed, free = (
        state.bytes_total + state.bytes_total // 8 + _SPARE_BYTES,
        available_memory_bytes(),
    )
    chosen = Config.from_environment().memory_bytes
    if (free if chosen is None else chosen) < state.bytes_total:
        limit = (
            f"only {free} are free here" if chosen is None else f"DATASTATES_MEMORY allows {chosen}"
        )
        raise OverBudget(
            f"the {state.bytes_total} bytes of state {state.uid[:10]} pass through memory, and"
            f" {limit}: make room for it"
        )
    budget = chosen or max(min(needed, free), free // 4)
    with open_repository(
        str(location) if location.root else location.database_url,
        packs=location.packs,
        memory_bytes=budget,
    ) as repository:
        yield repository


def _fetch(shell: Shell, peer: Peer, repository: Repository, state: State, *, tags: bool) -> Cloned:
    with progress(shell, f"cloning {state.uid[:10]}") as show:
        transfer = peer.begin_clone(state.uid, repo=repository, tags=tags, on_progress=show)
        try:
            return transfer.wait()
        except BaseException:
            # including SIGTERM: nothing may be written any more when the repository is closed
            transfer.cancel()
            with suppress(Exception):  # that it was cancelled, or the error that is reported below
                transfer.wait()
            raise


def _make_durable(shell: Shell, repository: Repository, state: State) -> None:
    """Wait until the state is on disk.

    :raises Unavailable: it could not be written.
    """
    with shell.console.status("writing it to disk") if shell.is_watched else nullcontext():
        runner = repository.core.runner()
        runner.want(state.uid)
        runner.drain()
    if not repository.core.tiers.durable.has(state.uid):
        raise Unavailable(
            f"state {state.uid[:10]} came, but could not be written to {repository.location.packs}:"
            " is the disk full?"
        )


def _report(
    shell: Shell, state: State, done: Cloned | None, location: Location, name: _Name
) -> None:
    moved, seconds, sources = (
        (done.bytes_moved, done.seconds, dict(done.by_source)) if done else (0, 0.0, {})
    )
    record = {
        "state": state.uid,
        "step": state.step,
        "digest": state.digest,
        "bytes": state.bytes_total,
        "bytes_moved": moved,
        "seconds": seconds,
        "sources": sources,
        "repository": str(location),
        name.kind: name.name,
    }
    came = (
        f"{size_text(moved)} of {size_text(state.bytes_total)} came in {seconds:.2f} s"
        if done
        else "it was here already"
    )
    shell.report(
        record,
        f"state {state.uid} (step {state.step}): {came}, durable in {location}, {name.kind}"
        f" {name.name}",
        f"to write its tensors: datastates restore {name.name} --repo {shlex.quote(str(location))}"
        " --into FILE.safetensors",
    )
