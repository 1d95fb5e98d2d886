"""Copies from host memory to live tensors on devices: after everything that their owner queued, and before what the owner queues next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from datastates.system.devices import Mark, Stream, devices

__all__ = ["Unloading"]


class Unloading:
    """A stream for each device on which something lands. Made and joined on the thread that owns the tensors, which must stay alive.

    Do not change memory that a copy reads until a mark that was made after the copy is reached.
    """

    def __init__(self, homes: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, Stream] = {}
        for device in dict.fromkeys(devices().of(home) for home in homes if devices().is_on(home)):
            side = self._streams[device] = devices().stream(device)
            devices().wait(side, devices().mark(devices().current(device)))

    def stream(self, device: torch.device) -> Stream:
        """The stream of a device on which something lands; valid before ``join``."""
        return self._streams[device]

    def put(self, homes: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Begin to copy; on any thread. The host waits if ``sources`` are not pinned."""
        for device in dict.fromkeys(map(devices().of, homes)):
            pairs = [pair for pair in zip(homes, sources, strict=True) if devices().of(pair[0]) == device]
            with devices().on(self._streams[device]), torch.no_grad():
                torch._foreach_copy_([home for home, _ in pairs], [source for _, source in pairs], non_blocking=True)

    def marks(self, homes: Iterable[torch.Tensor]) -> Sequence[Mark]:
        """The points behind the copies into these tensors so far."""
        return [devices().mark(self._streams[device]) for device in dict.fromkeys(map(devices().of, homes))]

    def join(self) -> None:
        """Make every copy visible to the owner of the tensors; idempotent."""
        while self._streams:
            device, side = self._streams.popitem()
            mark = devices().mark(side)
            devices().wait(devices().current(device), mark)
            mark.synchronize()  # the host waits once for each clone: the source of the copies is given away after this
