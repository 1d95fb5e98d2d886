"""Digests of chunks, computed on the device that has their tensors, equal to ``chunk_digest`` bit
for bit.

Triton's kernels (``kernels``) compute them if Triton is installed and supports the device, and
torch's operators elsewhere. Those are some thousands of operators for the longest chunk, for any
number of chunks.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from datastates.system.devices import devices

from .xxh3 import INITIAL, INNER, LANES, LAST, SCRAMBLE, Blocks, Part, brought

_logger = logging.getLogger(__name__)

_LOW = (1 << 32) - 1
_SHIFTED = (1 << 17) - 1
_PRIME = 0x9E3779B1


class Digester:
    """Digests chunks on one device. Each chunk is a length and its parts in order. Safe from any
    thread, one at a time.

    ``can_digest`` holds for each. The tensors are read in place whenever ``lanes`` is called. They
    are kept as long as this object.
    """

    def __init__(self, chunks: Sequence[tuple[int, Sequence[Part]]]) -> None:
        self._blocks = Blocks(chunks)
        self.lengths, self.like = self._blocks.lengths, self._blocks.like
        self._constants: dict[str, torch.Tensor] = {}
        self._launch: Any = None
        self._places: list[int] = []

    @property
    def launches(self) -> int:
        """The approximate number of operators that ``lanes`` queues."""
        return (
            8
            if has_kernels(self._blocks.like)
            else 6 * max(self._blocks.counts) + 10 * len(self._blocks.runs)
        )

    def lanes(self) -> torch.Tensor:
        """The lanes for the chunks' bytes: (chunks, 8), ``int64``, on the device, once what this
        queues on the current stream has run.

        ``digests_of`` takes them, with ``lengths``. Copies nothing to the host, and waits for
        nothing.
        """
        blocks = self._blocks
        found: torch.Tensor
        with torch.no_grad():
            edges = blocks.gathered(is_all=not has_kernels(blocks.like))
            if has_kernels(blocks.like):
                places = [run.data.data_ptr() for run in blocks.runs] + [
                    last.data_ptr() for last, _ in blocks.lasts.values()
                ]
                if self._launch is None or places != self._places:
                    # a storage that was resized has moved
                    from .kernels import Launch  # Triton, which may not be installed

                    self._launch, self._places = Launch(blocks), places
                device = devices().of(blocks.like)
                with devices().on(devices().current(device)):
                    # Triton launches on the device that is selected
                    found = self._launch(edges)
            else:
                in_order = self._constant("in order", np.argsort(blocks.order))
                found = self._by_operators(edges)[in_order]
        return found

    def _by_operators(self, edges: torch.Tensor) -> torch.Tensor:
        blocks, secret = self._blocks, self._constant("inner", INNER)
        sums = edges.new_empty(len(blocks.counts), max(blocks.counts), LANES[1])
        for run in blocks.runs:
            found = _added(run.data.view(torch.int64).view(-1, *LANES), secret).sum(1)
            sums[run.chunk, run.block : run.block + len(found)] = found
        if blocks.rests:
            found = _added(edges[: len(blocks.rests)], secret).sum(1)
            for row, (chunk, block) in enumerate(blocks.rests):
                sums[chunk, block] = found[row]
        return self._ended(self._chained(sums), edges[len(blocks.rests) :])

    def _chained(self, sums: torch.Tensor) -> torch.Tensor:
        scramble = self._constant("scramble", SCRAMBLE)
        lanes = self._constant("initial", INITIAL).repeat(len(sums), 1)
        for left, each in zip(_left(self._blocks.counts), sums.unbind(1), strict=True):
            going, added = (lanes, each) if left == len(lanes) else (lanes[:left], each[:left])
            going += added
            going ^= (going >> 47) & _SHIFTED
            going ^= scramble
            going *= _PRIME
        return lanes

    def _ended(self, lanes: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        added = _added(last, self._constant("last", LAST))
        if min(self._blocks.stripes) < 15:
            stripes = np.array(self._blocks.stripes)[:, None] > np.arange(16)
            stripes[:, 15] = True
            added *= self._constant("stripes", stripes[:, :, None].astype(np.int64))
        return lanes + added.sum(1)

    def _constant(self, name: str, words: npt.NDArray[Any]) -> torch.Tensor:
        found = self._constants.get(name)
        if found is None:
            found = self._constants[name] = brought(words, self._blocks.like)
        return found


def _left(counts: Sequence[int]) -> Iterator[int]:
    """For each block number, how many chunks have that block before their last; the longest
    chunks come first."""
    left = len(counts)
    for block in range(counts[0]):
        while counts[left - 1] <= block:
            left -= 1
        yield left


def _added(blocks: torch.Tensor, secret: torch.Tensor) -> torch.Tensor:
    """What each stripe adds to the lanes: (blocks, 16, 8). Overflow is dropped, signed or not."""
    low = blocks ^ secret
    high = low >> 32
    high &= _LOW
    low &= _LOW
    low *= high
    low += blocks.unflatten(-1, (4, 2)).flip(-1).flatten(-2)
    return low


def is_ready(tensor: torch.Tensor) -> bool:
    """Whether ``lanes`` can be queued at once on the device of a tensor.

    The first call compiles the kernels on a separate thread, which takes a second or two. If that
    fails, the error is logged, and this device never becomes ready.
    """
    if not has_kernels(tensor):
        return True
    device = devices().of(tensor)
    with _preparing:
        is_first = device not in _prepared
        found = _prepared.setdefault(device, False)
    if is_first:
        threading.Thread(
            target=_prepare, args=(device,), name="datastates-compile", daemon=True
        ).start()
    return found


_prepared: dict[torch.device, bool] = {}
_preparing = threading.Lock()


def _prepare(device: torch.device) -> None:
    """Digest something that needs all variants of the kernels."""
    try:
        stream = devices().stream(device)
        with devices().on(stream):
            data = torch.zeros(12 << 10, dtype=torch.uint8, device=device)
            Digester(
                [
                    (12_000, [(0, data[:5000]), (5 << 10, data[5 << 10 : 12_000])]),
                    (9000, [(0, data[:9000])]),
                ]
            ).lanes()
        devices().mark(stream).synchronize()
    except Exception as exc:
        # Triton may find no compiler, or a version of the driver that it does not support
        _logger.warning(
            "nothing can be digested on %s (%r): the host digests everything", device, exc
        )
    else:
        _prepared[device] = True


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels for the device of a tensor digest whole chunks faster than the host."""
    return tensor.device.type in ("cuda", "xpu") and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
