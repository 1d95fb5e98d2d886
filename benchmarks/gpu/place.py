"""The device of a run: CUDA or ROCm, the CPU, or late devices, which test the order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from datastates.state.device_digest import is_ready

from .where import Where

if TYPE_CHECKING:
    from tests.support.late import LateDevices

Placed = TypeVar("Placed", Tensor, nn.Module)


@dataclass(slots=True)
class Place:
    """A device as cases use it.

    It belongs to one process, and touches the device at the first use."""

    where: Where
    _late: LateDevices | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.is_accelerator:
            # threads wait for each other in loops if cores are few and busy
            torch.set_num_threads(1)

    @property
    def is_accelerator(self) -> bool:
        """Whether results here are valid for an accelerator."""
        return self.where.is_accelerator

    @property
    def is_quick(self) -> bool:
        """Whether all sizes are tiny."""
        return self.where.is_quick

    @property
    def device(self) -> torch.device:
        """The device argument for operators."""
        return torch.device("cuda", 0) if self.is_accelerator else torch.device("cpu")

    @property
    def devices(self) -> int:
        """The number of devices of this kind."""
        if self._late is not None:
            return len(self._late.random)
        return torch.cuda.device_count() if self.is_accelerator else 1

    def put(self, found: Placed, index: int = 0) -> Placed:
        """A tensor, or a module in place, on the device, or on another one of its kind."""
        if self._late is not None:
            return self._late.put(found, index)
        return found.to(torch.device("cuda", index) if self.is_accelerator else self.device)

    def draw(self, *shape: int) -> Tensor:
        """Random numbers on the device."""
        return self.put(torch.randn(*shape, device=self.device))

    def finish(self) -> None:
        """Wait until the device is idle."""
        if self.is_accelerator:
            torch.cuda.synchronize()
        elif self._late is not None:
            self._late.schedule.catch_up()

    def keep_busy(self, seconds: float) -> None:
        """Delay the operations that are queued on the device from now on. Without a device, do
        nothing."""
        if self.is_accelerator:
            torch.cuda._sleep(int(seconds * 1.5e9))  # cycles; about 1.5 GHz or more

    @contextmanager
    def short_of_memory(self, left: int) -> Iterator[None]:
        """Allocations on the device fail, except for the first ``left`` small ones."""
        if self._late is not None:
            with self._late.failing(range(left + 1, 1 << 30)):
                yield
            return
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            torch.cuda.memory_reserved(self.device) / total, self.device
        )
        held = list[Tensor]()
        try:
            for size in (1 << 20, 64 << 10, 512):
                with suppress(torch.OutOfMemoryError):
                    while True:
                        held.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            del held[len(held) - left :]
            yield
        finally:
            held.clear()
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def until_it_digests(self) -> None:
        """Wait until the kernels for digests are compiled or unavailable. The time before is not
        measured."""
        until = time.monotonic() + 20
        while not is_ready(torch.empty(0, device=self.device)) and time.monotonic() < until:
            time.sleep(0.05)

    def pinned(self, count: int) -> Tensor:
        """Touched host memory, pinned for an accelerator."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=self.is_accelerator).fill_(1)

    def ways(self) -> Sequence[str]:
        """The operations that can be delayed, by name. One of them detects each error in the order.

        Other devices delay no operation."""
        return ("COPIES", "COMPUTE") if self.where.kind == "late" else ("",)

    @contextmanager
    def running(self, way: str) -> Iterator[None]:
        """On late devices, make them again with this delay, and queue this thread's operators
        there."""
        if self.where.kind != "late":
            yield
            return
        from tests.support.late import LateDevices, Lateness

        self._late = LateDevices(Lateness[way])
        try:
            with self._late.running():
                yield
        finally:
            self._late = None


def timed(place: Place, call: Callable[[], Any]) -> float:
    """The seconds from an idle device until it is idle again."""
    place.finish()
    start = time.perf_counter()
    call()
    place.finish()
    return time.perf_counter() - start
