"""Chunks from stdin digested by Triton's kernels, four at once, in its interpreter:
``TRITON_INTERPRET=1 python -m tests.state.interpreted``. Prints the launches of each list."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import datastates.state.device_digest as digester
from datastates.state import kernels
from datastates.system.devices import devices
from tests.state.test_digester import check


class Counted:
    """A kernel, and how often it was launched."""

    def __init__(self, name: str) -> None:
        self.kernel, self.launches = getattr(kernels, name), 0
        setattr(kernels, name, self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


def main() -> None:
    """Check each list of chunks."""
    kernels._GROUP = 4
    launched = [Counted("sums"), Counted("chain")]
    # for a type checker it is a function for good
    setattr(digester, "has_kernels", lambda _: True)  # noqa: B010
    # likewise; the host has no streams to select
    setattr(type(devices()), "on", lambda *_: nullcontext())  # noqa: B010
    for chunks in json.load(sys.stdin):
        before = sum(each.launches for each in launched)
        check(chunks)  # digests them twice
        # the test reads it
        print((sum(each.launches for each in launched) - before) // 2)  # noqa: T201


if __name__ == "__main__":
    main()
