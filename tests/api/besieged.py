"""The training of ``test_connections``: is given few descriptors, serves over HTTP, and captures to
disk for as long as it is asked to.

python besieged.py FOLDER

Says its address; then, for each line of its standard input, the most descriptors that were open
while it made 20 states durable.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

import torch

import datastates

STATES = 20


def main(folder: str) -> None:
    """As said above."""
    torch.set_num_threads(1)
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(folder, memory_bytes=32 << 20) as repo,
        repo.track(tracked=tracked, rng=False) as run,
        repo.serve("http://127.0.0.1:0") as server,
    ):
        print(server.url, flush=True)  # noqa: T201  # that is what it is for
        most = [0]
        threading.Thread(target=_watch, args=(most,), daemon=True).start()
        for _ in sys.stdin:
            most[0] = 0
            for _ in range(STATES):
                tracked["weight"].add_(1)
                run.capture().wait("durable", timeout_s=60)
            print(most[0], flush=True)  # noqa: T201  # as above


def _watch(most: list[int]) -> None:
    while True:
        with suppress(OSError):
            most[0] = max(most[0], len(os.listdir("/proc/self/fd")))


if __name__ == "__main__":
    main(sys.argv[1])
