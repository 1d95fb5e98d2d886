"""Chunks from stdin digested by Triton's kernels, in its interpreter: ``TRITON_INTERPRET=1
python -m tests.state.interpreted``."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import datastates.state.device_digest as digester
from datastates.system.devices import devices
from tests.state.test_digester import check


def main() -> None:
    """Check each list of chunks."""
    # for a type checker it is a function for good
    setattr(digester, "has_kernels", lambda _: True)  # noqa: B010
    # likewise; the host has no streams to select
    setattr(type(devices()), "on", lambda *_: nullcontext())  # noqa: B010
    for chunks in json.load(sys.stdin):
        check(chunks)
        print("ok")  # noqa: T201  # the test reads it


if __name__ == "__main__":
    main()
