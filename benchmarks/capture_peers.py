"""Methods to take a snapshot of live tensors: datastates, the floor, a bare prototype and other
libraries, behind one interface."""

from __future__ import annotations

import importlib
import mmap
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

import datastates
from datastates.config import Config

PAGE = 4096
WRITE_BYTES = 16 << 20
CHUNK_BYTES = 4 << 20

Objects = Mapping[str, Any]
"""The captured objects under their names for ``track``: modules, optimizers, or plain dicts of
tensors."""


def tree(objects: Objects) -> dict[str, Any]:
    """The nested state dict of the objects, its tensors live."""
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in objects.items()
    }


def state_tensors(objects: Objects) -> list[Tensor]:
    """Every tensor of the objects, tied tensors once."""
    found = {(tensor.data_ptr(), tensor.numel()): tensor for tensor in _walk(tree(objects))}
    return [tensor.detach() for tensor in found.values()]


def state_bytes(objects: Objects) -> int:
    """Bytes of all of them."""
    return sum(tensor.nbytes for tensor in state_tensors(objects))


def _walk(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item)


class Method(ABC):
    """One way to take a snapshot. All calls come from the training thread.

    ``capture`` is what blocks training. ``fence`` returns when the tensors may change (the
    optimizer steps right after it). ``finish`` returns when every snapshot is where the method
    claims to put it. ``close`` frees all of it.
    """

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, objects: Objects, folder: Path) -> None:
        """Allocate memory that all captures reuse. ``folder`` exists and belongs to this method."""

    @abstractmethod
    def capture(self) -> None:
        """Take one snapshot, or begin to."""

    def fence(self) -> None:
        """Does not wait, because ``capture`` has copied."""
        return

    def finish(self) -> None:
        """Does not wait, because there is no background work."""
        return

    def close(self) -> None:
        """Has no memory to free."""
        return


class Ours(Method):
    """``run.capture``. The arena holds ``states`` whole states, or has the default size.

    ``durable_every`` None keeps them in memory."""

    name = "datastates"
    _tiers: Sequence[str] = ()

    def __init__(self, *, durable_every: int | None = None, states: float | None = 3.2) -> None:
        self._durable_every, self._states = durable_every, states

    def prepare(self, objects: Objects, folder: Path) -> None:
        budget = self._states and int(self._states * state_bytes(objects)) + (64 << 20)
        config = Config(
            memory_bytes=budget or None,
            durable_interval_s=None,
            durable_every=self._durable_every,
            tiers=self._tiers,
        )
        self._repo = datastates.open(folder / "repository", config=config)
        self._run = self._repo.track(**objects)
        self._captures: list[datastates.Capture] = []

    def capture(self) -> None:
        self._captures.append(self._run.capture(metrics={"loss": 1.0}))

    def fence(self) -> None:
        self._run.fence()

    def finish(self) -> None:
        for index, capture in enumerate(self._captures):
            due = self._durable_every is not None and (index + 1) % self._durable_every == 0
            capture.wait("durable" if due else "captured")

    def close(self) -> None:
        self._run.close()
        self._repo.close()


class ForeachCopy(Method):
    """The floor: one ``_foreach_copy_`` into preallocated memory that has been touched."""

    name = "blocking memcpy"

    def prepare(self, objects: Objects, folder: Path) -> None:
        self._sources = state_tensors(objects)
        self._targets = [torch.empty_like(tensor).zero_() for tensor in self._sources]

    def capture(self) -> None:
        torch._foreach_copy_(self._targets, self._sources)

    def close(self) -> None:
        del self._targets


class TorchSave(Method):
    """``torch.save`` of the state dict, alternately to two files, with ``fsync`` unless they are in
    memory."""

    name = "torch.save"

    def __init__(self, *, fsync: bool) -> None:
        self._fsync = fsync

    def prepare(self, objects: Objects, folder: Path) -> None:
        self._objects, self._folder, self._count = objects, folder, 0

    def capture(self) -> None:
        self._count += 1
        with (self._folder / f"{self._count % 2}.pt").open("wb") as file:
            torch.save(tree(self._objects), file)
            if self._fsync:
                file.flush()
                os.fsync(file.fileno())


class DcpAsync(Method):
    """``torch.distributed.checkpoint.async_save``, without fsync; ``reuse`` keeps one stager with
    shared memory for all captures.

    One save is in flight at a time: the next capture waits for the last, as the documentation
    requires.
    """

    name = "dcp.async_save"

    def __init__(self, *, reuse: bool) -> None:
        self._reuse = reuse

    def prepare(self, objects: Objects, folder: Path) -> None:
        self._objects, self._folder, self._count = objects, folder, 0
        self._saved: Future[Any] | None = None
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options) if self._reuse else None

    def capture(self) -> None:
        self.finish()
        self._count += 1
        writer = FileSystemWriter(
            self._folder / str(self._count % 2), sync_files=False, overwrite=True
        )
        result = async_save(
            tree(self._objects), storage_writer=writer, no_dist=True, async_stager=self._stager
        )
        self._saved = result if isinstance(result, Future) else result.upload_completion

    def finish(self) -> None:
        if self._saved is not None:
            self._saved.result()
            self._saved = None

    def close(self) -> None:
        self.finish()
        if self._stager is not None:
            self._stager.close()


class TorchSnapshot(Method):
    """``torchsnapshot.Snapshot.async_take``; one snapshot in flight at a time."""

    name = "torchsnapshot"

    def prepare(self, objects: Objects, folder: Path) -> None:
        self._package: Any = importlib.import_module("torchsnapshot")
        self._app = {
            name: value if hasattr(value, "state_dict") else self._package.StateDict(**value)
            for name, value in objects.items()
        }
        self._folder, self._count = folder, 0
        self._pending: Any = None

    def capture(self) -> None:
        self.finish()
        self._count += 1
        path = self._folder / str(self._count % 2)
        self._pending = self._package.Snapshot.async_take(str(path), app_state=self._app)

    def finish(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def close(self) -> None:
        self.finish()


class Prototype(Method):
    """The least that a fenced capture can be: one thread copies into one of three arenas, another
    digests, writes and syncs.

    It has no tree, no lineage, no checks and no records. The difference to datastates is the cost
    of these.
    """

    name = "bare prototype"

    def __init__(self, *, durable_every: int | None) -> None:
        self._durable_every = durable_every

    def prepare(self, objects: Objects, folder: Path) -> None:
        self._sources, self._folder, self._count = state_tensors(objects), folder, 0
        self._free: queue.Queue[Arena] = queue.Queue()
        self._copies: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._writes: queue.Queue[Callable[[], None] | None] = queue.Queue()
        for _ in range(3):
            self._free.put(Arena(self._sources))
        self._threads = [
            threading.Thread(target=_serve, args=(jobs,), daemon=True)
            for jobs in (self._copies, self._writes)
        ]
        for thread in self._threads:
            thread.start()
        optimizer = next(
            (value for value in objects.values() if isinstance(value, torch.optim.Optimizer)), None
        )
        self._hook = (
            optimizer.register_step_pre_hook(lambda *_: self.fence()) if optimizer else None
        )
        self._copied, self._done = threading.Event(), threading.Event()
        self._copied.set()
        self._done.set()

    def capture(self) -> None:
        self._count += 1
        arena = self._free.get()
        self._copied = copied = threading.Event()
        self._done = done = threading.Event()
        write = self._durable_every is not None and self._count % self._durable_every == 0
        path = self._folder / str(self._count)

        def copy() -> None:
            torch._foreach_copy_(arena.views, self._sources)
            copied.set()
            self._writes.put(keep)

        def keep() -> None:
            if write:
                arena.write(path)
            self._free.put(arena)
            done.set()

        self._copies.put(copy)

    def fence(self) -> None:
        self._copied.wait()

    def finish(self) -> None:
        self._done.wait()

    def close(self) -> None:
        self.finish()
        if self._hook is not None:
            self._hook.remove()
        for jobs, thread in zip((self._copies, self._writes), self._threads, strict=True):
            jobs.put(None)
            thread.join()


class Arena:
    """Page-aligned, prefaulted memory with a view for each source."""

    def __init__(self, sources: list[Tensor]) -> None:
        offsets, size = [], 0
        for tensor in sources:
            offsets.append(size)
            size += -(-tensor.nbytes // 64) * 64
        self._memory = mmap.mmap(
            -1,
            -(-size // PAGE) * PAGE,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE,
        )
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.views = [
            whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for at, tensor in zip(offsets, sources, strict=True)
        ]

    def write(self, path: Path) -> list[bytes]:
        """Digest the chunks, write them by direct I/O and wait for the disk."""
        view = memoryview(self._memory)
        digests = [
            xxhash.xxh3_128_digest(view[at : at + CHUNK_BYTES])
            for at in range(0, len(view), CHUNK_BYTES)
        ]
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        try:
            for at in range(0, len(view), WRITE_BYTES):
                os.pwrite(file, view[at : at + WRITE_BYTES], at)
            os.fsync(file)
        finally:
            os.close(file)
        return digests


def _serve(jobs: queue.Queue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
