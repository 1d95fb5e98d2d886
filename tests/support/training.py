"""The trainings that tests end in the middle: each says one line for each fact before it goes
on."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import datastates
from datastates import Config, Tracker
from datastates.testing import crash_at

Say = Callable[..., object]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of 70,000 parameters, of which one tensor is large enough to be copied behind the
    fence."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(16, 128),
        nn.ReLU(),
        nn.Linear(128, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 4),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose state, with that of AdamW, has 18 tensors and 3.9 kB: many such states share
    a pack."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 4)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on random data."""
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every byte of the weights and of the moments."""
    found = hashlib.blake2b(digest_size=8)
    for name, value in model.named_parameters():
        found.update(name.encode() + value.detach().numpy().tobytes())
        state = optimizer.state[value]
        for moment in (
            state.get("momentum_buffer"),
            *(state[key] for key in ("exp_avg", "exp_avg_sq") if key in state),
        ):
            found.update(b"-" if moment is None else moment.numpy().tobytes())
    return found.hexdigest()


def begin(
    repo: datastates.Repository, branch: str, say: Say, **options: Any
) -> tuple[Tracker, nn.Module, torch.optim.Optimizer]:
    """Track a new model on a branch; says ``begin <uid or -> <digest>``."""
    model, optimizer = make()
    run = repo.track(model=model, optimizer=optimizer, branch=branch, **options)
    say(
        "begin", branch, run.resumed_from.uid if run.resumed_from else "-", digest(model, optimizer)
    )
    return run, model, optimizer


def capture(
    run: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer, say: Say
) -> datastates.Capture:
    """One step and its capture; says ``captured <uid> <digest>``."""
    loss = update(model, optimizer)
    live = digest(model, optimizer)
    taken = run.capture(metrics={"loss": loss})
    say("captured", taken.uid, live)
    return taken


def train(folder: str, seed: int, say: Say, step: str | None = None, after: int = 0) -> None:
    """Train for long on two branches: capture, persist, tag and branch at random, and end at
    ``step`` if one is named."""
    choose = random.Random(seed)
    config = Config(
        memory_bytes=48 << 20,
        durable_every=5,
        durable_interval_s=None,
        on_step=crash_at(step, after=after) if step is not None else None,
    )
    repo = datastates.open(folder, config=config)
    lines = [begin(repo, branch, say) for branch in ("main", "side")]
    for number in range(100_000):
        line = choose.choice(lines)
        taken = capture(*line, say)
        what = choose.random()
        if what < 0.3:
            live = digest(*line[1:])
            uid = taken.wait("durable").uid
            say("durable", uid, live)
        elif what < 0.4:
            say("tag", f"tag-{seed}-{number}", repo.tag(f"tag-{seed}-{number}", line[0].head).state)
        elif what < 0.5:
            say(
                "branch",
                f"branch-{seed}-{number}",
                repo.branch(f"branch-{seed}-{number}", line[0].head).state,
            )


def train_and_end(folder: str, how: str, say: Say) -> None:
    """Train without a ``with`` until somebody ends it, or by ``how``; only the exit makes
    anything durable."""
    repo = datastates.open(folder, config=Config(memory_bytes=64 << 20, durable_interval_s=None))
    run, model, optimizer = begin(repo, "main", say)
    for number in range(100_000):
        taken = capture(run, model, optimizer, say)
        if number == 3:
            say("tag", "early", repo.tag("early", taken.wait().uid).state)
        if number == 4:
            say("branch", "aside", repo.branch("aside", run.head).state)
        if number == 9 and how == "sys.exit":
            sys.exit(3)
        if number == 9 and how == "exception":
            raise ValueError("the training's own mistake")
        if number == 9 and how == "end":
            return
