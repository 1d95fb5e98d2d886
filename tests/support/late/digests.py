"""What Triton's kernels are on a GPU, on late devices: the lanes of chunks by one operator,
which is queued as any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import torch

from datastates.state.device_digest import Digester
from datastates.state.xxh3 import (
    BLOCK_BYTES,
    INITIAL,
    INNER,
    LANES,
    LAST,
    SCRAMBLE,
    STRIPE_BYTES,
    blocks_before_last,
    stripes_of_last,
)

_PRIME = np.uint64(0x9E3779B1)
_HALF, _LOW, _SHIFT = np.uint64(32), np.uint64((1 << 32) - 1), np.uint64(47)


def _lanes(chunk: torch.Tensor) -> torch.Tensor:
    data = chunk.numpy()
    count, stripes = blocks_before_last(data.size), stripes_of_last(data.size)
    sums = _added(data[: count * BLOCK_BYTES].view(np.uint64).reshape(-1, *LANES), INNER).sum(
        1, dtype=np.uint64
    )
    lanes = INITIAL.copy()
    for each in sums:
        lanes += each
        lanes = (lanes ^ (lanes >> _SHIFT) ^ SCRAMBLE) * _PRIME
    begin = count * BLOCK_BYTES
    last = [
        data[begin : begin + stripes * STRIPE_BYTES].reshape(-1, STRIPE_BYTES),
        data[-STRIPE_BYTES:].reshape(1, -1),
    ]
    words = np.ascontiguousarray(np.concatenate(last)).view(np.uint64)
    lanes += _added(words, np.concatenate([LAST[:stripes], LAST[15:]])).sum(0, dtype=np.uint64)
    return torch.from_numpy(lanes.view(np.int64).reshape(1, 8).copy())


_library = torch.library.Library("datastates_tests", "DEF")  # lives as long as the process
_library.define("lanes(Tensor chunk) -> Tensor")
_library.impl("lanes", _lanes, "CPU")
_library.impl("lanes", lambda chunk: chunk.new_empty((1, 8), dtype=torch.int64), "Meta")


def _added(words: Any, secret: Any) -> Any:
    key = words ^ secret
    beside = words.reshape(*words.shape[:-1], 4, 2)[..., ::-1].reshape(words.shape)
    return (key & _LOW) * (key >> _HALF) + beside


@contextmanager
def digesting_at_once() -> Iterator[None]:
    """Chunks that lie in one piece are digested so, in one launch."""

    def lanes(digester: Digester) -> torch.Tensor:
        found: torch.Tensor = torch.ops.datastates_tests.lanes(digester.whole)  # type: ignore[attr-defined]
        return found

    def remembering(digester: Digester, chunks: Any) -> None:
        made(digester, chunks)
        digester.whole = chunks[0][1][0][1]  # type: ignore[attr-defined]

    made = Digester.__init__
    with (
        patch.object(Digester, "__init__", remembering),
        patch.object(Digester, "lanes", lanes),
        patch.object(Digester, "launches", PropertyMock(return_value=1)),
    ):
        yield
