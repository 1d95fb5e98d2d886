"""The training of ``test_restart``: captures until its standard input is closed, then says how many
states it captured.

python trainer.py FOLDER
"""

from __future__ import annotations

import sys
import threading

import torch

import datastates

PACE_S = 0.01


def main(folder: str) -> None:
    """Train a small model on ``main``."""
    torch.set_num_threads(1)
    ended = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    count = 0
    with (
        datastates.open(folder, memory_bytes=32 << 20) as repo,
        repo.track(model=model, optimizer=optimizer, durable_interval_s=None) as run,
    ):
        while not ended.wait(PACE_S):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            run.capture(metrics={"loss": float(loss.detach())})
            count += 1
            if count == 1:
                repo.flush()
                sys.stdout.write("begun\n")
                sys.stdout.flush()
    sys.stdout.write(f"{count}\n")


if __name__ == "__main__":
    main(sys.argv[1])
