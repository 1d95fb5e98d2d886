"""What it costs to fork variants from a state in memory, and what they take on disk.

    python benchmarks/fork.py [--quick] [--variants 16] [--rounds N] [--folder DIR]

Forking makes a branch and puts the state into live objects, every byte checked. The peers save once
and load for each variant, checking nothing; the floor copies the tensors from memory that is there.
All are measured in turn, round after round, in one run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import machine, out, short, spread, table
from gpt import MEDIUM, TINY, Trainer
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import datastates
from datastates.config import Config
from datastates.demo.model import GPT, Shape

SHM = Path("/dev/shm")
MIB = 1 << 20


@dataclass(slots=True)
class Times:
    """In seconds: until the state could be forked from, and each fork after it."""

    taken: list[float] = field(default_factory=list)
    forks: list[float] = field(default_factory=list)


def forking(shape: Shape, variants: int, rounds: int, folder: Path) -> tuple[dict[str, Times], int]:
    """Every method in turn; the first round warms up and is not counted."""
    trainer = Trainer.make(shape)
    tensors = _tensors(trainer.model, trainer.optimizer)
    size = sum(tensor.nbytes for tensor in tensors)
    config = Config(memory_bytes=4 * size + (256 << 20), durable_interval_s=None)
    found: dict[str, Times] = {}
    with (
        datastates.open(folder / "runs", config=config) as repo,
        repo.track(**trainer.objects) as run,
    ):
        methods: dict[str, Callable[[int], tuple[float, list[float]]]] = {
            "floor: _foreach_copy_": lambda _: _floor(tensors, variants),
            "datastates, from memory": lambda index: _ours(repo, run, trainer, variants, index),
            "torch.save + load, shared memory": lambda _: _torch(
                trainer, SHM / f"fork-{os.getpid()}.pt", variants, is_mapped=False
            ),
            "torch.save + load(mmap), shared memory": lambda _: _torch(
                trainer, SHM / f"fork-{os.getpid()}.pt", variants, is_mapped=True
            ),
            "torch.save + load, disk": lambda _: _torch(
                trainer, folder / "fork.pt", variants, is_mapped=False
            ),
        }
        for index in range(rounds + 1):
            for name, method in methods.items():
                taken, forks = method(index)
                if index > 0:
                    times = found.setdefault(name, Times())
                    times.taken.append(taken)
                    times.forks.append(sum(forks))
    return found, size


def _ours(
    repo: datastates.Repository,
    run: datastates.Tracker,
    trainer: Trainer,
    variants: int,
    index: int,
) -> tuple[float, list[float]]:
    began = time.perf_counter()
    start = run.capture().wait()
    taken = time.perf_counter() - began
    forks: list[float] = []
    for number in range(variants):
        with (
            _timed(forks),
            repo.track(branch=f"fork-{index}/{number}", start=start.uid, **trainer.objects),
        ):
            pass
    return taken, forks


def _torch(
    trainer: Trainer, path: Path, variants: int, *, is_mapped: bool
) -> tuple[float, list[float]]:
    began = time.perf_counter()
    with path.open("wb") as file:
        torch.save({name: found.state_dict() for name, found in trainer.objects.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    taken = time.perf_counter() - began
    forks: list[float] = []
    for _ in range(variants):
        with _timed(forks):
            loaded = torch.load(path, mmap=is_mapped, weights_only=True)
            for name, found in trainer.objects.items():
                found.load_state_dict(loaded[name])
    path.unlink()
    return taken, forks


def _floor(tensors: list[torch.Tensor], variants: int) -> tuple[float, list[float]]:
    forks: list[float] = []
    with torch.no_grad():
        began = time.perf_counter()
        copies = [tensor.clone() for tensor in tensors]
        taken = time.perf_counter() - began
        for _ in range(variants):
            with _timed(forks):
                torch._foreach_copy_(tensors, copies)
    return taken, forks


@contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into.append(time.perf_counter() - began)


def _tensors(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    state = [
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    return [*(parameter.detach() for parameter in model.parameters()), *state]


# What variants take on disk


def storing(
    shape: Shape, variants: int, folder: Path, *, has_moments: bool
) -> tuple[int, int, float]:
    """Bytes of all variants and their start on disk, bytes of as many full copies, and the part
    that is frozen."""
    torch.manual_seed(0)
    model = GPT(shape)
    frozen = _freeze(model, 0.8)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Optimizer = AdamW(trained, lr=1e-4) if has_moments else SGD(trained, lr=1e-3)
    context = min(shape.context, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randint(0, shape.vocabulary, (1, context + 1))).backward()
        optimizer.step()

    step()
    config = Config(
        memory_bytes=6 * sum(each.nbytes for each in model.parameters()) + (256 << 20),
        durable_interval_s=None,
    )
    with datastates.open(folder, config=config) as repo:
        with repo.track(model=model, optimizer=optimizer) as run:
            run.capture()
        repo.tag("warm", "main")
        for number in range(variants):
            with repo.track(
                branch=f"variant-{number}", start="warm", model=model, optimizer=optimizer
            ) as run:
                torch.manual_seed(number)
                step()
                run.capture()
    stored = sum(path.stat().st_size for path in (folder / "packs").iterdir() if path.is_file())
    copy = folder / "copy.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, copy)
    return stored, (variants + 1) * copy.stat().st_size, frozen


def _freeze(model: nn.Module, part: float) -> float:
    """Freeze parameters, the largest first, until ``part`` of the bytes would be exceeded; what
    was reached."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    left = int(part * total)
    for parameter in sorted(model.parameters(), key=lambda each: -each.nbytes):
        if parameter.nbytes <= left:
            parameter.requires_grad_(False)
            left -= parameter.nbytes
    return part - left / total


def main(arguments: argparse.Namespace) -> None:
    """Both parts, and the two tables."""
    torch.set_num_threads(1)
    shape, variants = (TINY if arguments.quick else MEDIUM), arguments.variants
    folder = Path(tempfile.mkdtemp(prefix="fork-", dir=arguments.folder))
    try:
        out(f"{machine()}\n")
        found, size = forking(shape, variants, arguments.rounds, folder)
        ours = found["datastates, from memory"].forks
        out(
            f"{variants} forks of a state of {size / MIB:.0f} MiB; ms, median [min .. max] of"
            f" {arguments.rounds}\n"
        )
        rows = [
            [
                name,
                spread(times.taken, 1e3),
                spread(times.forks, 1e3),
                short(statistics.median(times.forks) * 1e3 / variants),
                spread([time / our for time, our in zip(times.forks, ours, strict=True)]),
            ]
            for name, times in found.items()
        ]
        out(
            table(
                ["method", "state taken", f"{variants} forks", "each", "forks / ours, same round"],
                rows,
            )
        )
        rows = []
        for name, has_moments in (
            ("SGD, no state", False),
            ("AdamW, two moments of what is trained", True),
        ):
            stored, full, frozen = storing(
                shape, variants, folder / name.split(",")[0], has_moments=has_moments
            )
            rows.append(
                [
                    name,
                    f"{frozen:.1%}",
                    f"{stored / MIB:.1f}",
                    f"{full / MIB:.1f}",
                    f"{stored / full:.1%}",
                ]
            )
        out(f"\n{variants} variants and their start on disk, each after one step\n")
        out(
            table(
                ["optimizer", "frozen", "datastates MiB", "full copies (torch.save) MiB", "part"],
                rows,
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether all of it runs")
    parser.add_argument("--variants", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk that is to be measured"
    )
    main(parser.parse_args())
