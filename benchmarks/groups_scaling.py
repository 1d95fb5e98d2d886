"""The cost of a state of several ranks: bytes and blocked time of each rank, time to durable, and
wall overhead at every 5th step.

Jobs of 1, 2 and 4 ranks train the same model by DistributedDataParallel over gloo. In each job the
methods take turns, round after round. Each method has a segment of steps with a capture at every
5th step, between two segments without captures. It then makes one more capture and waits for it,
while no training runs. The floor is a copy of a rank's share into touched memory. The other methods
are torch.distributed.checkpoint's async_save by all ranks, and torch.save by rank 0.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from capture_peers import state_bytes, state_tensors, tree
from common import machine, out, short, spread, table
from gpt import SMALL, Trainer
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel

import datastates
from datastates import Config
from datastates.demo.model import Shape

_RANKS = (1, 2, 4)
_EVERY, _CAPTURES = 5, 2
_MIB = 1 << 20
_SHAPE = Shape(layers=6, heads=6, width=384, context=128, vocabulary=8_000)
"""13.8M parameters; with AdamW 158 MiB."""


@dataclass(slots=True)
class Taken:
    """The measurements of one method on one rank, in seconds: a value for each capture, or for each
    segment. ``stored`` are its bytes of one state."""

    step: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)
    stored: int = 0


Seen = dict[str, Taken]


def main(folder: Path, *, rounds: int, is_quick: bool) -> None:
    """Print a table for each number of ranks, and a table of datastates by number of ranks."""
    out(machine())
    shape = SMALL if is_quick else _SHAPE
    size = state_bytes(Trainer.make(shape).objects)
    out(
        f"a state of {size / _MIB:.0f} MiB, one torch thread a rank; {rounds} rounds after one"
        f" more; a capture at every {_EVERY}th step, {_CAPTURES} a segment; median [least .."
        " greatest]; blocked and durable are those of the slowest rank\n"
    )
    jobs: dict[int, list[Seen]] = {}
    for count in _RANKS:
        jobs[count] = _job(folder, count, shape, rounds)
        _print_job(count, jobs[count], size)
    _print_scaling(jobs)


def _print_job(count: int, ranks: list[Seen], size: int) -> None:
    out(
        f"{count} rank{'s' if count > 1 else ''}; a step without captures takes"
        f" {short(1e3 * _step_of(ranks))} ms\n"
    )
    rows = []
    for name in ranks[0]:
        if name == _Nothing.name:
            rows.append([name, "", "", "", spread(ranks[0][name].overhead, 100), ""])
            continue
        blocked, durable = _slowest(ranks, name, "blocked"), _slowest(ranks, name, "durable")
        stored = [seen[name].stored for seen in ranks]
        ratio = [
            one / floor
            for one, floor in zip(blocked, _slowest(ranks, _Floor.name, "blocked"), strict=True)
        ]
        share = f"{min(stored) / size:.3f} .. {max(stored) / size:.3f}"
        is_durable = name != _Floor.name
        rows.append(
            [
                name,
                spread(blocked, 1e3),
                spread(ratio),
                spread(durable, 1e3) if is_durable else "",
                spread(ranks[0][name].overhead, 100),
                share,
            ]
        )
    out(
        table(
            [
                "",
                "blocked, ms",
                "x floor",
                "to durable, ms",
                "wall overhead, %",
                "a rank's part of the state",
            ],
            rows,
        )
        + "\n"
    )


def _print_scaling(jobs: dict[int, list[Seen]]) -> None:
    name, rows = _Ours.name, []
    first = jobs[_RANKS[0]]
    for count, ranks in jobs.items():
        rows.append([str(count)])
        for what in ("blocked", "durable"):
            middle = statistics.median(_slowest(ranks, name, what))
            rows[-1] += [
                short(1e3 * middle),
                short(middle / statistics.median(_slowest(first, name, what))),
            ]
        stored = max(seen[name].stored for seen in ranks)
        rows[-1] += [short(stored / _MIB), short(stored / max(seen[name].stored for seen in first))]
    out(
        table(
            [
                "ranks",
                "blocked, ms",
                "of 1 rank's",
                "to durable, ms",
                "of 1 rank's",
                "MiB a rank",
                "of 1 rank's",
            ],
            rows,
        )
    )


def _slowest(ranks: list[Seen], name: str, what: str) -> list[float]:
    return [max(each) for each in zip(*(getattr(seen[name], what) for seen in ranks), strict=True)]


def _step_of(ranks: list[Seen]) -> float:
    return statistics.median(ranks[0][_Nothing.name].step)


class _Method(ABC):
    """One method to capture the training of a rank. All calls come from the training thread of each
    rank, in the same order.

    ``capture`` blocks the thread. ``fence`` comes before the next step of the optimizer. ``finish``
    returns when all captures of this rank are durable.
    """

    name: ClassVar[str]

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer, self._folder, self._count = trainer, folder / self.name.replace(" ", "-"), 0
        self._folder.mkdir(exist_ok=True)

    @abstractmethod
    def capture(self) -> None:
        """Take one state, or begin to."""

    def fence(self) -> None:
        """Does not wait."""
        return

    def finish(self) -> None:
        """Does not wait, because there is no background work."""
        return

    def stored(self) -> int:
        """The bytes of this rank in one state."""
        return 0

    def close(self) -> None:
        """Has no memory to free."""
        return


class _Nothing(_Method):
    """Steps without captures."""

    name = "no captures"

    def capture(self) -> None:
        """None."""


class _Floor(_Method):
    """A copy of an n-th of the tensors into touched memory."""

    name = "memcpy of a share"

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer, folder)
        rank, size = dist.get_rank(), dist.get_world_size()
        whole = [tensor.view(-1) for tensor in state_tensors(trainer.objects)]
        self._sources = [tensor.tensor_split(size)[rank] for tensor in whole]
        self._targets = [torch.empty_like(tensor).zero_() for tensor in self._sources]

    def capture(self) -> None:
        torch._foreach_copy_(self._targets, self._sources)

    def stored(self) -> int:
        return sum(tensor.nbytes for tensor in self._targets)


class _Ours(_Method):
    """``run.capture``. Each capture is durable: digested, written, fsynced, and recorded once all
    ranks have reported."""

    name = "datastates"

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer, folder)
        budget = int(3.2 * state_bytes(trainer.objects) / dist.get_world_size()) + (64 << 20)
        config = Config(memory_bytes=budget, durable_interval_s=None, durable_every=1)
        self._repo = datastates.open(self._folder, config=config)
        self._run = self._repo.track(**trainer.objects)
        self._captures: list[datastates.Capture] = []

    def capture(self) -> None:
        self._captures.append(self._run.capture(metrics={"loss": 1.0}))

    def fence(self) -> None:
        self._run.fence()

    def finish(self) -> None:
        for capture in self._captures:
            capture.wait("durable")
        self._captures = self._captures[-1:]

    def stored(self) -> int:
        return (
            (self._folder / "packs" / f"{self._captures[-1].uid}.{dist.get_rank()}.safetensors")
            .stat()
            .st_size
        )

    def close(self) -> None:
        self._run.close()
        self._repo.close()


class _Dcp(_Method):
    """``torch.distributed.checkpoint.async_save`` of all ranks, with fsync and a stager that is
    kept; one in flight, as documented."""

    name = "dcp.async_save"

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer, folder)
        self._saved: Future[Any] | None = None
        # its thread has its own collectives, separate from the training's
        self._group = dist.new_group(backend="gloo")
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)

    def capture(self) -> None:
        self.finish()
        self._count += 1
        writer = FileSystemWriter(
            self._folder / str(self._count % 2), sync_files=True, overwrite=True
        )
        found = async_save(
            tree(self._trainer.objects),
            storage_writer=writer,
            process_group=self._group,
            async_stager=self._stager,
        )
        self._saved = found if isinstance(found, Future) else found.upload_completion

    def finish(self) -> None:
        if self._saved is not None:
            self._saved.result()
            self._saved = None

    def stored(self) -> int:
        return sum(
            file.stat().st_size
            for file in (self._folder / str(self._count % 2)).glob(f"__{dist.get_rank()}_*")
        )

    def close(self) -> None:
        self.finish()
        self._stager.close()


class _TorchSave(_Method):
    """``torch.save`` by rank 0, with fsync. The other ranks continue until the next step."""

    name = "torch.save by rank 0"

    def capture(self) -> None:
        self._count += 1
        if dist.get_rank():
            return
        with self._path.open("wb") as file:
            torch.save(tree(self._trainer.objects), file)
            file.flush()
            os.fsync(file.fileno())

    def stored(self) -> int:
        return 0 if dist.get_rank() else self._path.stat().st_size

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._count % 2}.pt"


_METHODS: tuple[type[_Method], ...] = (_Nothing, _Floor, _Ours, _Dcp, _TorchSave)


def _job(folder: Path, count: int, shape: Shape, rounds: int) -> list[Seen]:
    """The measurements of each rank of a job, by rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        pipes = [multiprocessing.Pipe() for _ in range(count)]
        workers = [
            context.Process(target=_rank, args=(there, rank, count, place, shape, rounds))
            for rank, (_, there) in enumerate(pipes)
        ]
        for worker in workers:
            worker.start()
        try:
            return [_heard(here, worker) for (here, _), worker in zip(pipes, workers, strict=True)]
        finally:
            for worker in workers:
                worker.join(30)
                worker.kill()


def _heard(pipe: Connection, worker: Any) -> Seen:
    while not pipe.poll(1):
        if not worker.is_alive():
            raise SystemExit(f"a rank ended with {worker.exitcode}: see above")
    found: Seen = pipe.recv()
    return found


def _rank(pipe: Connection, rank: int, count: int, place: str, shape: Shape, rounds: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch's own, of what it calls itself
    # DCP warns at each save that it overwrites, as configured
    warnings.simplefilter("ignore", UserWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=count
    )
    trainer = Trainer.make(shape)
    trained = DistributedDataParallel(trainer.model)
    trainer.model = trained  # type: ignore[assignment]  # called and captured as what it wraps
    methods = [kind(trainer, Path(place)) for kind in _METHODS]
    seen: Seen = {method.name: Taken() for method in methods}
    for number in range(rounds + 1):
        before = (
            None
            if number == 0
            else _segment(trainer, methods[0], seen[methods[0].name], is_counted=True)
        )
        for method in methods[1:]:
            taken = seen[method.name]
            wall = _segment(trainer, method, taken, is_counted=number > 0)
            method.finish()
            _alone(trainer, method, taken, is_counted=number > 0)
            after = _segment(trainer, methods[0], seen[methods[0].name], is_counted=number > 0)
            if before is not None:
                taken.overhead.append(2 * wall / (before + after) - 1)
                seen[methods[0].name].overhead.append(abs(after / before - 1))
            before = after if number else None
    for method in methods:
        seen[method.name].stored = method.stored()
    dist.barrier()
    for method in reversed(methods):
        method.close()
    pipe.send(seen)
    dist.barrier()
    dist.destroy_process_group()


def _segment(trainer: Trainer, method: _Method, taken: Taken, *, is_counted: bool) -> float:
    """The wall time of some steps, with a capture after the first of every five. The blocked time
    of each capture is recorded."""
    os.sync()
    dist.barrier()
    blocked, began = 0.0, time.perf_counter()
    for step in range(_EVERY * _CAPTURES):
        trainer.backward()
        at = time.perf_counter()
        method.fence()
        blocked += time.perf_counter() - at
        trainer.optimizer.step()
        if step % _EVERY == 0:
            if step and is_counted:
                taken.blocked.append(blocked)
            at = time.perf_counter()
            method.capture()
            blocked = time.perf_counter() - at
    dist.barrier()
    wall = time.perf_counter() - began
    if is_counted:
        taken.blocked.append(blocked)
        taken.step.append(wall / (_EVERY * _CAPTURES))
    return wall


def _alone(trainer: Trainer, method: _Method, taken: Taken, *, is_counted: bool) -> None:
    """One capture, from its begin until it is durable on this rank."""
    trainer.backward()
    trainer.optimizer.step()
    os.sync()
    dist.barrier()
    at = time.perf_counter()
    method.capture()
    method.finish()
    if is_counted:
        taken.durable.append(time.perf_counter() - at)
    dist.barrier()
