"""Accelerators for tests, of plain tensors of this process: ``datastates.system.devices`` is
asked for them instead of real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from datastates.system.devices import Devices, Memory, swapped

from .dispatch import Hazard, Home, Operators, poison
from .shared import Shared, make_shared, open_shared
from .streams import Event, Lateness, Op, Schedule, Stream

Placed = TypeVar("Placed", bound=torch.Tensor | nn.Module)


class _Local(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, Stream] = {}
        self.selected = 0
        self.depth = 0
        self.graph: Graph | None = None


class Graph:
    """What a thread queued on a device while it was ``recorded``.

    It holds the memory that was given out meanwhile."""

    def __init__(self, late: LateDevices, device: torch.device) -> None:
        self.device, self.ops = device, list[Op]()
        self._late = late

    def replay(self) -> None:
        """Queue all of it on this thread's stream: no version is bumped, and no hook runs."""
        for op in self.ops:
            self._late.queue(Op(self._late.current_for(self.device), op.name, op.run))


class LateDevices(Devices):
    """Two devices, ``cuda:0`` and ``cuda:1``, which do everything as late as ``lateness`` says.

        late = LateDevices(Lateness.COPIES)
        with late.running():
            model = late.put(model)
            ...
            late.schedule.catch_up()

    Their tensors are plain ones, which say that they are on the CPU: only
    ``datastates.system.devices`` knows better. ``reached`` are the devices that somebody's call
    reached; a process has a context on each of them. ``memories`` is what each has, as torch would
    tell it, and ``most_bytes`` the most that one tensor may take. ``allocations`` is how many there
    were in blocks of ``failing``.
    """

    def __init__(self, lateness: Lateness, seed: int = 0, count: int = 2) -> None:
        self.schedule = Schedule(lateness, seed)
        self.reached: set[int] = set()
        self.registered: dict[int, int] = {}
        self.most_registered = 1 << 30
        self.memories = Memory(total=8 << 30, reach=8 << 30, peak=0, failures=0)
        self.most_bytes = 1 << 40
        self.allocations = 0
        self._failing: range | None = None
        self._counting = threading.Lock()
        self.random = [torch.Generator().manual_seed(index) for index in range(count)]
        self._homes: dict[int, Home] = {}
        self._pinned: list[torch.Tensor] = []
        self._local = _Local()
        self._default = {
            place: self.schedule.stream(place, is_side=False)
            for place in (torch.device("cuda", index) for index in range(count))
        }

    # --- what tests do ----------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """These are the accelerators of this process, and this thread's operators go to them."""
        with swapped(self), self.active():
            yield

    @contextmanager
    def active(self) -> Iterator[None]:
        """This thread's operators on device tensors are queued."""
        self._local.depth += 1
        try:
            if self._local.depth > 1:
                yield
                return
            with Operators(self):
                yield
        finally:
            self._local.depth -= 1

    @contextmanager
    def recorded(self, index: int = 0) -> Iterator[Graph]:
        """What this thread queues on a device does not happen, and becomes a graph."""
        graph = self._local.graph = Graph(self, torch.device("cuda", index))
        try:
            yield graph
        finally:
            self._local.graph = None

    @contextmanager
    def failing(self, allocations: range) -> Iterator[None]:
        """Memory runs out: these allocations fail, counted from 1 over all such blocks."""
        self._failing = allocations
        try:
            yield
        finally:
            self._failing = None

    def put(self, found: Placed, index: int = 0) -> Placed:
        """A tensor, or what a module has, is on a device from now on."""
        tensors = (
            [found] if isinstance(found, torch.Tensor) else [*found.parameters(), *found.buffers()]
        )
        for tensor in tensors:
            self.adopt(tensor, self._default[torch.device("cuda", index)])
        return found

    # --- what the operators ask -------------------------------------------------------------------

    def queue(self, op: Op) -> Op:
        """Queue an op, or record it."""
        graph = self._local.graph
        if graph is None or graph.device != op.stream.device:
            return self.schedule.put(op)
        if op.run is None:
            raise Hazard(
                f"{op.name!r} on a stream that is recorded: a graph neither waits for what is"
                " outside of it nor is waited for"
            )
        graph.ops.append(op)
        return op

    def hold_for(self, op: Op) -> None:
        """Wait on the host until an op is done."""
        if self._local.graph is not None:
            raise Hazard(
                f"the host waits for {op.name!r} while a graph is recorded, in which nothing"
                " happens"
            )
        self.schedule.wait(op)

    def finish(self, stream: Stream) -> None:
        """Wait on the host until a stream has done everything."""
        self.hold_for(self.queue(Op(stream, "everything")))

    def adopt(self, made: object, stream: Stream) -> object:
        """Memory that the device gave out for a stream."""
        if isinstance(made, torch.Tensor):
            storage = _dense(made).untyped_storage()
            if storage.nbytes() > self.most_bytes or self._fails(storage.nbytes()):
                raise torch.OutOfMemoryError(f"tried to allocate {storage.nbytes()} bytes")
            self.reached.add(stream.device.index)
            self._homes[storage._cdata] = Home(StorageWeakRef(storage), stream)
        return made

    def _fails(self, length: int) -> bool:
        if self._failing is None or not length:
            return False
        with self._counting:
            self.allocations += 1
            return self.allocations in self._failing

    def home(self, tensor: torch.Tensor) -> Home | None:
        """What is known of a tensor's memory; None: it is the host's."""
        if tensor.is_meta or tensor.layout not in (torch.strided, torch.sparse_coo):
            return None
        found = self._homes.get(_dense(tensor).untyped_storage()._cdata)
        return None if found is None or found.storage.expired() else found

    @property
    def selected(self) -> int:
        """The device on which this thread launches what torch's operators do not choose one for."""
        return self._local.selected

    def current_for(self, device: torch.device) -> Stream:
        """This thread's stream on a device."""
        return self._local.streams.get(device) or self._default[device]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether copies from and to this host memory go on by themselves.

        :raises RuntimeError: it lies in two registrations.
        """
        first = tensor.data_ptr()
        last = first + max(1, tensor.nbytes) - 1
        holders = [self._holder(address) for address in (first, last)]
        if holders[0] != holders[1]:
            raise RuntimeError(
                f"invalid argument: {tensor.nbytes} bytes lie in two registrations, or in one and"
                " beside it"
            )
        return holders[0] is not None

    def _holder(self, address: int) -> int | None:
        for start, length in [
            *self.registered.items(),
            *((each.data_ptr(), each.nbytes) for each in self._pinned),
        ]:
            if start <= address < start + length:
                return start
        return None

    # --- datastates.system.devices.Devices --------------------------------------------------------

    kind = "cuda"

    def of(self, tensor: torch.Tensor) -> torch.device:
        home = self.home(tensor)
        return tensor.device if home is None else home.stream.device

    def is_on(self, tensor: torch.Tensor) -> bool:
        return self.home(tensor) is not None

    def current(self, device: torch.device) -> Stream:
        return self.current_for(device)

    def stream(self, device: torch.device) -> Stream:
        self.reached.add(device.index)
        return self.schedule.stream(device, is_side=True)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.reached.add(stream.device.index)
        before, selected = self._local.streams.get(stream.device), self._local.selected
        self._local.streams[stream.device], self._local.selected = stream, stream.device.index
        try:
            with self.active():
                yield
        finally:
            self._local.selected = selected
            if before is None:
                del self._local.streams[stream.device]
            else:
                self._local.streams[stream.device] = before

    def mark(self, stream: Any) -> Event:
        self.reached.add(stream.device.index)
        return Event(self.queue(Op(stream, "event")))

    def wait(self, stream: Any, mark: Any) -> None:
        self.queue(Op(stream, "wait", needs=[mark.op]))

    def is_recording(self, device: torch.device) -> bool:
        return self._local.graph is not None and self._local.graph.device == device

    def memory(self, device: torch.device) -> Memory:
        self.reached.add(device.index)
        return self.memories

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = poison(torch.empty(tuple(shape), dtype=dtype))
        self._pinned.append(made)
        return made

    def register(self, device: torch.device, address: int, length: int) -> None:
        self.reached.add(device.index)
        if len(self.registered) >= self.most_registered:
            raise RuntimeError("out of memory that may be locked")
        assert all(
            address + length <= start or start + size <= address
            for start, size in self.registered.items()
        )
        self.registered[address] = length

    def unregister(self, device: torch.device, address: int) -> None:
        self.reached.add(device.index)
        del self.registered[address]

    def in_use(self) -> Sequence[torch.device]:
        return [torch.device("cuda", index) for index in sorted(self.reached)]

    def share(self, device: torch.device, length: int) -> Shared:
        self.reached.add(device.index)
        shared = make_shared(device.index, length)
        self.adopt(shared.tensor, self._default[device])
        return shared

    def open_shared(self, handle: bytes) -> Shared:
        index, shared = open_shared(handle)
        if index not in self.reached:
            shared.close()
            raise RuntimeError(f"this process does not use device {index}")
        self.adopt(shared.tensor, self._default[torch.device("cuda", index)])
        return shared

    def generators(self) -> Mapping[int, torch.Tensor]:
        return {index: self.random[index].get_state() for index in sorted(self.reached)}

    def set_generators(self, states: Mapping[int, torch.Tensor]) -> int:
        for index, state in states.items():
            if index < len(self.random):
                self.random[index].set_state(state)
        return len(self.random)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse tensor."""
    if tensor.layout is torch.strided:
        return tensor
    with _disable_current_modes():
        return tensor._values()
