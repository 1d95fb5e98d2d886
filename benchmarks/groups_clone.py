"""The time of a clone from the ranks of a job: a state in the memory of 1, 2 and 4 processes, each
with its part, compared with one raw stream."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import machine, out, short, spread, table

import datastates
from datastates import Config
from datastates.ranks import TorchGroup
from datastates.transport import same_host, serving
from datastates.transport.peer import Peer

_MIB = 1 << 20
_TENSORS = 16
_SOURCES = (1, 2, 4)
_FLOOR = "one raw stream"


def main(folder: Path, *, mib: int, rounds: int, paces: list[float]) -> None:
    """Print a table for each pace: the highest rate of one source in MB a second, or 0 without a
    limit."""
    out(machine())
    out(
        f"{mib} MiB in {_TENSORS} tensors, over TCP on loopback, into live tensors, verified;"
        f" {rounds} rounds in turns, after one more\n"
    )
    os.environ[same_host.SWITCH] = (
        "0"  # otherwise chunks are read from the source's memory, without a stream
    )
    torch.set_num_threads(1)
    for pace in paces:
        out(f"each source gives {f'at most {pace:g} MB/s' if pace else 'what it can'}\n")
        _part(folder, mib, rounds, pace)


def _part(folder: Path, mib: int, rounds: int, pace: float) -> None:
    with ExitStack() as stack:
        floor = stack.enter_context(_raw(mib * _MIB, pace))
        peers = {count: stack.enter_context(_job(folder, count, mib, pace)) for count in _SOURCES}
        tensors = _tensors(mib, 0)
        taken: dict[str, list[float]] = {_FLOOR: [], **{_name(count): [] for count in _SOURCES}}
        busy: dict[str, list[float]] = {name: [] for name in taken}
        for _ in range(rounds + 1):
            for name, work in [
                (_FLOOR, floor),
                *((_name(count), partial(_clone, peers[count], tensors)) for count in _SOURCES),
            ]:
                began, cpu = time.perf_counter(), _cpu_s()
                work()
                taken[name].append(time.perf_counter() - began)
                busy[name].append(_cpu_s() - cpu)
        assert all(
            torch.equal(tensor, wanted)
            for tensor, wanted in zip(tensors.values(), _tensors(mib, 1).values(), strict=True)
        )
    rows = []
    for name, seconds in taken.items():
        ratios = [each / first for each, first in zip(seconds[1:], taken[_FLOOR][1:], strict=True)]
        alone = [each / first for each, first in zip(seconds[1:], taken[_name(1)][1:], strict=True)]
        speed = mib * _MIB / 1e6 / statistics.median(seconds[1:])
        rows.append(
            [
                name,
                spread(seconds[1:]),
                short(speed),
                spread(ratios),
                spread(alone),
                spread(busy[name][1:]),
            ]
        )
    header = [
        "from",
        "s",
        "MB/s",
        "time / raw stream of the round",
        "time / one source of the round",
        "receiver's CPU, s",
    ]
    out(table(header, rows) + "\n")


def _name(count: int) -> str:
    return "1 source" if count == 1 else f"{count} sources"


def _tensors(mib: int, seed: int) -> dict[str, torch.Tensor]:
    size = mib * _MIB // 4 // _TENSORS
    count = torch.arange(size, dtype=torch.float32)
    return {f"t{number:02}": count + 1000.0 * seed + number for number in range(_TENSORS)}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _clone(peer: Peer, tensors: dict[str, torch.Tensor]) -> None:
    peer.clone("main", weights=tensors, atomic=False)


@contextmanager
def _job(folder: Path, count: int, mib: int, pace: float) -> Iterator[Peer]:
    """A peer that is connected to a job of ``count`` ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        pipes, workers = [], []
        for rank in range(count):
            here, there = multiprocessing.Pipe()
            worker = context.Process(
                target=_serve, args=(there, rank, count, place, mib, pace), daemon=True
            )
            worker.start()
            pipes.append(here)
            workers.append(worker)
        try:
            urls = [pipe.recv() for pipe in pipes]
            with datastates.connect(urls[0], timeout_s=30) as peer:
                yield peer
        finally:
            for pipe, worker in zip(pipes, workers, strict=True):
                pipe.send("end")
                worker.join(30)
                worker.kill()


def _serve(pipe: Connection, rank: int, count: int, place: str, mib: int, pace: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch's own, of what it calls itself
    os.environ |= {same_host.SWITCH: "0", "GLOO_SOCKET_IFNAME": "lo"}
    if pace:
        _slow_down(pace)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=count
    )
    group = TorchGroup()
    config = Config(memory_bytes=(mib // count + 16 * 4) * 2 * _MIB, durable_interval_s=None)
    with datastates.open(Path(place) / "runs", config=config) as repo:
        tracker = repo.track(weights=_tensors(mib, 1), group=group, check=None, rng=False)
        tracker.capture().wait()
        server = repo.serve("tcp://127.0.0.1:0", group=group)
        pipe.send(server.url)
        pipe.recv()
    os._exit(0)  # states that were only in memory are not written


def _slow_down(pace: float) -> None:
    """A link with a rate in MB a second. Chunks leave in sequence, each after its time."""
    line, chunk = asyncio.Lock(), serving.StateSource.chunk
    free_at = 0.0

    async def slow(self: serving.StateSource, index: int) -> Any:
        nonlocal free_at
        async with line:
            now = time.monotonic()
            free_at = max(now, free_at) + self.lengths[index] / (pace * 1e6)
            await asyncio.sleep(free_at - now)
        return await chunk(self, index)

    serving.StateSource.chunk = slow  # type: ignore[method-assign]  # a machine behind a slow link


@contextmanager
def _raw(size: int, pace: float) -> Iterator[Any]:
    """A function that receives so many bytes from another process over one connection, into touched
    memory, without checks."""
    context = multiprocessing.get_context("spawn")
    here, there = multiprocessing.Pipe()
    worker = context.Process(target=_send, args=(there, size, pace), daemon=True)
    worker.start()
    memory = memoryview(bytearray(size))
    port = here.recv()

    def take() -> None:
        with socket.create_connection(("127.0.0.1", port)) as stream:
            done = 0
            while done < size:
                done += stream.recv_into(memory[done : done + 4 * _MIB])

    try:
        yield take
    finally:
        worker.kill()
        worker.join()


def _send(pipe: Connection, size: int, pace: float) -> None:
    piece = memoryview(bytearray(os.urandom(4 * _MIB)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            stream, _ = listener.accept()
            with stream:
                began = time.monotonic()
                for done in range(0, size, len(piece)):
                    stream.sendall(piece[: min(len(piece), size - done)])
                    if pace:
                        left = began + (done + len(piece)) / (pace * 1e6) - time.monotonic()
                        threading.Event().wait(max(0.0, left))
