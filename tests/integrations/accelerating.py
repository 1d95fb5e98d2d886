"""A script as Accelerate's users write it, with one line of ours, in every way that they run it;
a process that somebody ends."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, Dataset

import datastates
from datastates import Config
from datastates.integrations.accelerate import track

Say = Callable[..., object]
EPOCHS = 2
ITEMS, SIZE = 27, 4
"""Seven batches an epoch, the last of three: with three to an update, an epoch ends with an
update of one."""


def forget() -> None:
    """Accelerate keeps what it was set to for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@dataclass(frozen=True)
class Kind:
    """How a training is run; ``loading`` are options of Accelerate's loaders."""

    accumulate: int = 1
    precision: str = "no"
    noise: bool = True
    loading: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "plain": Kind(),
    "accumulation": Kind(accumulate=3),
    "bf16": Kind(precision="bf16"),
    "all": Kind(accumulate=3, precision="bf16", loading={"use_seedable_sampler": True}),
    "stateful": Kind(accumulate=3, noise=False, loading={"use_stateful_dataloader": True}),
    "dispatched": Kind(loading={"dispatch_batches": True}),
}


class Items(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Where ``is_noisy``, items as augmentation makes them: another at each reading."""

    def __init__(self, *, is_noisy: bool) -> None:
        self.is_noisy = is_noisy

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        item = torch.sin(torch.arange(8) * (index + 1.0))
        return item + 0.1 * torch.randn(8) if self.is_noisy else item, torch.tensor(
            [index % 3 - 1.0]
        )


def train(
    folder: str,
    branch: str,
    kind: str,
    workers: int,
    seed: int,
    say: Say,
    epochs: int = EPOCHS,
    awaited: int = 0,
    **options: Any,
) -> None:
    """Train as a script does, from where the branch stands; says after each batch its place and its
    loss, then the weights.

    A process that goes on has another seed than the one that began. The state of step ``awaited``
    is waited for until it is durable.
    """
    torch.set_num_threads(1)
    config = Config(memory_bytes=64 << 20, durable_every=1, durable_interval_s=None)
    repo = datastates.open(folder, config=config)
    torch.manual_seed(
        (seed if any(ref.name == branch for ref in repo.refs()) else 11)
        + int(os.environ.get("RANK", 0))
    )
    how = KINDS[kind]
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=how.accumulate,
        mixed_precision=how.precision,
        dataloader_config=DataLoaderConfiguration(**how.loading),
    )
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.pop("lr", 1e-2))
    loader = DataLoader(
        Items(is_noisy=how.noise), batch_size=SIZE, shuffle=True, num_workers=workers
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with repo, track(accelerator, repo, branch=branch, **options) as run:
        for _ in run.epochs(epochs):
            for inputs, wanted in run.steps(loader):
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), wanted)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.num_processes == 1 or accelerator.sync_gradients:
                    taken = run.capture(metrics={"loss": loss})
                    if run.step == awaited:
                        taken.wait("durable")
                say(f"{run.epoch}:{run.step}:{run.micro_step}", float(loss.detach()).hex())
    weights = hashlib.blake2b(
        b"".join(each.numpy().tobytes() for each in model.state_dict().values()), digest_size=12
    )
    say("weights", weights.hexdigest())
