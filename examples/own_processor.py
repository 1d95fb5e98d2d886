"""A custom processor that looks for NaN and infinity in every state, in the background.

python examples/own_processor.py [FOLDER]
"""

from __future__ import annotations

import sys

import torch

import datastates


class FiniteCheck(datastates.Processor):
    """Raises for a state whose model holds NaN or infinity. The error is in the handle of the
    capture, and the training continues."""

    name = "finite-check"

    def process(self, captured: datastates.CapturedState) -> None:
        """Runs on the thread of the processors, with copies of the tensors."""
        for key, tensor in captured.tree("model").get("model", {}).items():
            # a training may track no model
            if not tensor.isfinite().all():
                raise ValueError(f"{key} is not finite")


if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    config = datastates.Config(processors=[FiniteCheck()])
    with (
        datastates.open(sys.argv[1] if len(sys.argv) > 1 else "runs", config=config) as repo,
        repo.track(model=model) as run,
    ):
        captures = [run.capture()]
        model.weight.data[0, 2] = torch.nan
        captures.append(run.capture())
    for capture in captures:
        sys.stdout.write(f"step {capture.step}: {capture.error or 'finite'}\n")
