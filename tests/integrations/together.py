"""Scripts of Accelerate, transformers and Lightning as one of several processes under
DistributedDataParallel, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.support.jobs import rendezvous

Say = Callable[..., object]
RANKS = 2


def train(framework: str, rank: int, port: int, folder: str, say: Say, **options: Any) -> None:
    """Be this rank of a training; says its own losses."""
    os.environ.update(rendezvous(rank, RANKS, port))
    trainings: dict[str, Callable[..., None]] = {
        "accelerate": _accelerate,
        "transformers": _transformers,
        "lightning": _lightning,
    }
    trainings[framework](folder, say, **options)
    if dist.is_initialized():
        dist.destroy_process_group()


def _accelerate(folder: str, say: Say, *, is_tracked: bool = True, **options: Any) -> None:
    from . import accelerating

    branch = "main" if is_tracked else "never"
    accelerating.train(folder, branch, say=say, seed=90, **options)


def _transformers(folder: str, say: Say, *, epochs: int, **options: Any) -> None:
    from . import trainers

    trainers.train(folder, say=say, num_train_epochs=epochs, ddp_backend="gloo", **options)


def _lightning(
    folder: str, say: Say, *, epochs: int, is_tracked: bool = True, **options: Any
) -> None:
    from . import lightning_jobs

    job: dict[str, Any] = {
        "max_epochs": epochs,
        "devices": RANKS,
        "strategy": "ddp",
        "limit_train_batches": 3,  # a fourth would be of one item
        **options,
    }
    lightning_jobs.train(folder, say=say, ours=is_tracked, **job)
