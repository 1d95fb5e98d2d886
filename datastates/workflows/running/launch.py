"""Several processes of this machine that are the ranks of one job of torch.distributed; they begin together and end together.

``torch.multiprocessing`` starts them, and ends the others if one fails. Each writes its outcome to a file of its own, as torchrun's
ranks do; the earliest recorded failure is the cause. They end with the process that began them (``process.end_with_parent``).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar

import msgspec
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, start_processes

from .outcome import Outcome
from .process import PRELOADED, begin_worker

__all__ = ["launch"]

_logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_GRACE_S = 10.0

A = TypeVar("A")


def launch(
    count: int, work: Callable[[A], Outcome], given: A, variant: str, *, look: Callable[[], None], settle: Callable[[], object]
) -> Outcome:
    """The outcome of ``work(given)`` in ``count`` processes that have met: that of rank 0, or of the first rank that failed.

    If a rank fails or dies, the others are ended; if this raises, all are. ``work`` and ``given`` are pickled.

    :param look: called twice a second meanwhile; an error that it raises ends all ranks.
    :param settle: called when a rank has failed, before the others are waited for: what they wait for may be lost with it.
    """
    from torch import distributed

    with tempfile.TemporaryDirectory(prefix="datastates-ranks-") as name:
        # on a port that nobody else has
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # torch does not list it
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")  # the host's name may resolve elsewhere
        environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        ranks = start_processes(_begin, (environ, name, work, given), nprocs=count, join=False, start_method="forkserver")
        try:
            while not _is_over(ranks):
                look()
            if not any(process.exitcode for process in ranks.processes):
                return _said(Path(name), 0) or _silent(variant, ranks, 0)
            settle()
            found = _failure(variant, ranks, Path(name))
            with suppress(ProcessExitedException, ProcessRaisedException):
                ranks.join(grace_period=_GRACE_S)  # ranks that wait for the failed one notice by themselves
            return found
        finally:
            _end(ranks)


def _begin(rank: int, environ: dict[str, str], folder: str, work: Callable[[A], Outcome], given: A) -> None:
    """Run in a rank: meet the others, work, and write the outcome."""
    from torch import distributed

    begin_worker({**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    distributed.init_process_group()
    found = work(given)
    path = Path(folder) / str(rank)
    path.with_suffix(".part").write_bytes(msgspec.msgpack.encode(found))
    path.with_suffix(".part").replace(path)
    if found.error is not None:
        sys.exit(1)
    distributed.destroy_process_group()


def _is_over(ranks: ProcessContext) -> bool:
    """Wait a while; returns whether all ended, or one failed."""
    wait([process.sentinel for process in ranks.processes if process.is_alive()], _LOOK_S)
    codes = [process.exitcode for process in ranks.processes]
    return any(codes) or None not in codes


def _failure(variant: str, ranks: ProcessContext, folder: Path) -> Outcome:
    """The report of the rank that failed first. A rank that was killed reports nothing, and is the cause of the others' failures."""
    ended = [rank for rank, process in enumerate(ranks.processes) if process.exitcode]
    silent = [rank for rank in ended if not (folder / str(rank)).exists()]
    if silent:
        return _silent(variant, ranks, silent[0])
    first = min(ended, key=lambda rank: (folder / str(rank)).stat().st_mtime_ns)
    said = _said(folder, first) or _silent(variant, ranks, first)
    return replace(said, error=f"rank {first} of {len(ranks.processes)}: {said.error}")


def _silent(variant: str, ranks: ProcessContext, rank: int) -> Outcome:
    code = ranks.processes[rank].exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no result"
    return Outcome(variant, None, f"rank {rank} of {len(ranks.processes)} {how}", is_death=True)


def _said(folder: Path, rank: int) -> Outcome | None:
    try:
        return msgspec.msgpack.decode((folder / str(rank)).read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None


def _end(ranks: ProcessContext) -> None:
    """End the ranks that are left in an orderly way, then at once."""
    for process in ranks.processes:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + _GRACE_S
    for rank, process in enumerate(ranks.processes):
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            _logger.warning("rank %d (process %d) does not end, it is killed", rank, process.pid)
            process.kill()
            process.join()
