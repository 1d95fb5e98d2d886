"""The trainings that ``test_resume`` stops and takes up again: each says the loss of every batch
exactly, then its weights.

``start`` trains without a stop and captures everywhere; ``resume`` goes on from one of its states,
in another process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

# it has no stubs
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config, PermutationSampler, Tracker

Say = Callable[..., object]
Step = Callable[[torch.Tensor], float]
FURTHER = 20


class Items(Dataset[torch.Tensor]):
    """103 inputs that depend on their index alone."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(64) * (index + 1) * 0.1)


@dataclass
class Job:
    """What is tracked, where batches come from, and what is done with one."""

    objects: dict[str, Any]
    batches: Any
    step: Step
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def _plain_loader() -> Any:
    return StatefulDataLoader(Items(), batch_size=8, shuffle=True)


def _stepper(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
) -> Step:
    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def mlp() -> Job:
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    loader = _plain_loader()
    step = _stepper(
        model,
        optimizer,
        lambda batch: F.mse_loss(model(batch + 0.01 * torch.randn_like(batch)), batch),
    )
    return Job({"model": model, "optimizer": optimizer, "loader": loader}, loader, step)


def _cnn(*, is_fused: bool) -> Job:
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(1152, 64),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=not is_fused, fused=is_fused)
    loader = _plain_loader()
    step = _stepper(
        model, optimizer, lambda batch: F.mse_loss(model(batch.view(-1, 1, 8, 8)), batch)
    )
    return Job({"model": model, "optimizer": optimizer, "loader": loader}, loader, step)


def cnn_foreach() -> Job:
    return _cnn(is_fused=False)


def cnn_fused() -> Job:
    return _cnn(is_fused=True)


class Gpt(nn.Module):
    """A small transformer that predicts the next symbol; input and output embedding are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 96)
        self.block = nn.TransformerEncoderLayer(96, 4, 192, dropout=0.1, batch_first=True)
        self.head = nn.Linear(96, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits: torch.Tensor = self.head(self.block(self.embed(ids), src_mask=mask, is_causal=True))
        return logits


def gpt() -> Job:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=500)
    loader = _plain_loader()
    objects = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "micro": 0,
    }
    job = Job(objects, loader, lambda _: 0.0, accumulate=2, options={"gradients": True})

    def step(batch: torch.Tensor) -> float:
        ids = ((batch + 1) * 127).long()[:, :24]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return float(loss.detach())

    job.step = step
    return job


def autocast() -> Job:
    model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Dropout(0.1), nn.Linear(300, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    loader = _plain_loader()

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(batch), batch.bfloat16())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach()) * scaler.get_scale()

    return Job(
        {"model": model, "optimizer": optimizer, "scaler": scaler, "loader": loader}, loader, step
    )


def half() -> Job:
    """In fp16, with a scale so large that steps are skipped, and one that grows soon."""
    model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Dropout(0.1), nn.Linear(300, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    loader = _plain_loader()

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(batch), batch.half())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach()) + scaler.get_scale()

    return Job(
        {"model": model, "optimizer": optimizer, "scaler": scaler, "loader": loader}, loader, step
    )


def workers() -> Job:
    job = mlp()
    job.batches = job.objects["loader"] = StatefulDataLoader(
        Items(), batch_size=8, shuffle=True, num_workers=2
    )
    return job


class NoisyItems(Items):
    """With random numbers that are drawn where the data is read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 0.1 * torch.randn(64)


def untracked() -> Job:
    job = mlp()
    del job.objects["loader"]
    job.batches = DataLoader(NoisyItems(), batch_size=8, shuffle=True)
    return job


def untracked_workers() -> Job:
    job = untracked()
    job.batches = DataLoader(NoisyItems(), batch_size=8, shuffle=True, num_workers=2)
    return job


def sampler_workers() -> Job:
    job = sampler()
    job.batches = DataLoader(
        NoisyItems(), batch_size=8, sampler=job.objects["sampler"], num_workers=2
    )
    return job


def sampler() -> Job:
    job = mlp()
    order = job.objects["sampler"] = PermutationSampler(103, seed=3)
    del job.objects["loader"]
    job.batches = DataLoader(Items(), batch_size=8, sampler=order)
    return job


def _epochs(job: Job, run: Tracker) -> Iterator[torch.Tensor]:
    while True:
        yield from run.steps(job.batches, accumulate=job.accumulate)


def _update(job: Job, run: Tracker) -> None:
    """With accumulation the update is the loop's."""
    if job.accumulate > 1 and run.micro_step == 0:
        for name in ("optimizer", "scheduler"):
            job.objects[name].step()
        job.objects["optimizer"].zero_grad()


def _weights(job: Job) -> str:
    found = hashlib.blake2b(digest_size=12)
    for value in job.objects["model"].state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def start(folder: str, kind: str, batches: int, say: Say) -> None:
    """Train on ``batches`` batches; says after each: uid, loss, weights."""
    torch.manual_seed(11)
    job: Job = globals()[kind]()
    config = Config(memory_bytes=256 << 20, durable_every=1, durable_interval_s=None)
    with (
        datastates.open(folder, config=config) as repo,
        repo.track(**job.objects, **job.options) as run,
    ):
        for count, batch in enumerate(_epochs(job, run), 1):
            loss = job.step(batch)
            _update(job, run)
            say(run.capture().uid, loss.hex(), _weights(job))
            if count == batches:
                break


def resume(folder: str, kind: str, uids: list[str], further: int, say: Say) -> None:
    """From each state a branch of its own, on ``further`` batches; says the same after each."""
    for uid in uids:
        torch.manual_seed(99)  # not what the first process had
        torch.randn(7)
        job: Job = globals()[kind]()
        config = Config(memory_bytes=64 << 20, durable_interval_s=None)
        with (
            datastates.open(folder, config=config) as repo,
            repo.track(**job.objects, **job.options, branch=f"from-{uid}", start=uid) as run,
        ):
            for count, batch in enumerate(_epochs(job, run), 1):
                loss = job.step(batch)
                _update(job, run)
                say(uid, loss.hex(), _weights(job))
                if count == further:
                    break
