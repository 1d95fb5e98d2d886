"""Restoring into a live model and AdamW: from memory and from the page cache, verified and not,
compared with memcpy, torch.load and safetensors.

    python benchmarks/restore.py [--part warm|bound|one|cold] [--state small|large] [--rounds 7]
    [--quick] [--json FILE]

Every method fills the same objects, whose memory was touched before, with the same bytes. They take
turns, round after round. Speeds are compared within a round. After each turn the objects are
compared with what was saved. The floor is ``copy_`` from other tensors in memory. A verified method
compares every byte with its digest before it writes the first one.

``bound`` does only the necessary work of a verified restore. From memory, it digests each chunk,
and then copies all of them. From a file in the page cache, it reads and digests twice. It uses one
thread and two threads.

``cold`` drops the files from the page cache before each turn, and prints how many bytes came from
the disk. The host of a virtual disk may have another cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from common import machine, out, short, spread, table
from gpt import LARGE, TINY, Trainer
from safetensors.torch import load_file, save_file
from torch import nn

import datastates
from datastates import Config, Repository
from datastates.demo.model import Shape

SMALL = Shape(layers=6, heads=6, width=312, context=256, vocabulary=5_000)
"""8.7M parameters; with AdamW 104 MB."""

CHUNK = 4 << 20

STATES = {"small": SMALL, "large": LARGE}

FLOOR = "floor: memcpy (copy_)"
MAPPED = "torch.load(mmap=True) + copy_"
GOALS = {
    "datastates, memory, verified": (FLOOR, 0.65),
    "datastates, page cache, verified": (FLOOR, 0.65),
    "datastates, memory, unverified": (MAPPED, 0.9),
    "datastates, page cache, unverified": (MAPPED, 0.9),
}

Way = Callable[[], None]


def tensors_of(objects: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a model and its optimizer by name, as live tensors."""
    found = {
        f"model/{name}": tensor.detach() for name, tensor in objects["model"].named_parameters()
    }
    for number, state in enumerate(objects["optimizer"].state.values()):
        found |= {f"optimizer/{number}/{key}": value for key, value in state.items()}
    return found


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def copy_into(live: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """Overwrite tensors in place, one by one."""
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(stored[name])


@dataclass(slots=True)
class Bench:
    """The objects that are restored into, their expected values, and files with these values in a
    folder."""

    folder: Path
    objects: dict[str, Any]
    live: dict[str, torch.Tensor]
    saved: dict[str, torch.Tensor]
    repos: dict[str, Repository]

    @property
    def packs(self) -> list[Path]:
        """The files that hold the state's bytes, from datastates and from other libraries."""
        return [
            *self.folder.glob("repo/packs/*.safetensors"),
            self.folder / "state.pt",
            self.folder / "state.safetensors",
        ]

    def ours(self, where: str) -> Way:
        """Restore the newest state of one of the repositories."""
        return lambda: self._restore(self.repos[where])

    def _restore(self, repo: Repository) -> None:
        repo.restore("main", objects=self.objects)

    def torch_load(self, *, mmap: bool) -> Way:
        """torch.load, and a copy into the live tensors."""
        return lambda: copy_into(
            self.live, torch.load(self.folder / "state.pt", mmap=mmap, weights_only=True)
        )

    def load_state_dicts(self) -> None:
        """The usual way of a script without datastates."""
        state = torch.load(self.folder / "state_dicts.pt", weights_only=True)
        self.objects["model"].load_state_dict(state["model"])
        self.objects["optimizer"].load_state_dict(state["optimizer"])

    def safetensors(self) -> None:
        """safetensors, and a copy into the live tensors."""
        copy_into(self.live, load_file(self.folder / "state.safetensors"))

    def turn(self, way: Way, *, drop: bool = False) -> float:
        """The seconds of one restore into objects with other values. Afterwards they hold the right
        bytes."""
        # a load_state_dict of torch's optimizer replaces its tensors
        self.live = tensors_of(self.objects)
        with torch.no_grad():
            for tensor in self.live.values():
                tensor.fill_(0)
        if drop:
            self.forget()
        start = time.perf_counter()
        way()
        seconds = time.perf_counter() - start
        found = tensors_of(self.objects)
        wrong = [
            name for name, tensor in self.saved.items() if not torch.equal(tensor, found[name])
        ]
        if wrong:
            raise SystemExit(f"{wrong[0]} is not what was saved")
        return seconds

    def forget(self) -> None:
        """Have the kernel drop the files from the page cache."""
        for path in self.packs:
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@contextmanager
def bench(shape: Shape, *, in_memory: bool = True) -> Iterator[Bench]:
    """A state, saved in every format."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="bench-restore-", dir=os.environ.get("BENCH_DIR")))
        stack.callback(shutil.rmtree, folder)
        objects = Trainer.make(shape).objects
        for parameter in objects["model"].parameters():
            parameter.grad = None
        live = tensors_of(objects)
        saved = {name: tensor.clone() for name, tensor in live.items()}
        torch.save(saved, folder / "state.pt")
        torch.save(
            {name: each.state_dict() for name, each in objects.items()}, folder / "state_dicts.pt"
        )
        save_file(saved, folder / "state.safetensors")
        memory, repos = 2 * size_of(saved) + (64 << 20), {}
        with (
            _opened(folder / "repo", memory, verify=True) as repo,
            repo.track(rng=False, **objects) as run,
        ):
            run.capture().wait("durable")
        for verify, word in ((True, "verified"), (False, "unverified")):
            repos[f"page cache, {word}"] = stack.enter_context(
                _opened(folder / "repo", memory, verify=verify)
            )
            if in_memory:
                held = repos[f"memory, {word}"] = stack.enter_context(
                    _opened(folder / word, memory, verify=verify)
                )
                run = stack.enter_context(held.track(rng=False, resume=False, **objects))
                run.capture().wait()
        yield Bench(folder, objects, live, saved, repos)


def _opened(path: Path, memory_bytes: int, *, verify: bool) -> Repository:
    return datastates.open(
        path, config=Config(memory_bytes=memory_bytes, durable_interval_s=None, verify=verify)
    )


def measure(
    ways: dict[str, Way], one: Bench, rounds: int, *, drop: bool = False
) -> dict[str, list[float]]:
    """The seconds of each method, in turn, after a round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name, way in ways.items():
            seconds = one.turn(way, drop=drop)
            if index:
                found[name].append(seconds)
    return found


def ratios(found: dict[str, list[float]], name: str, other: str) -> list[float]:
    """The speed of a method relative to another one in the same round: 2 is twice as fast."""
    return [theirs / ours for ours, theirs in zip(found[name], found[other], strict=True)]


def show(title: str, found: dict[str, list[float]], size: int, beside: tuple[str, ...]) -> None:
    """Milliseconds, gigabytes a second, and the ratios."""
    rows = []
    for name, seconds in found.items():
        speed = short(size / statistics.median(seconds) / 1e9)
        rows.append(
            [
                name,
                spread(seconds, 1e3),
                speed,
                *(spread(ratios(found, name, other)) for other in beside),
            ]
        )
    out(
        f"\n## {title}: {size / 1e6:.0f} MB; median [min .. max] of"
        f" {len(next(iter(found.values())))}\n"
    )
    out(table(["way", "ms", "GB/s", *(f"speed / {other}" for other in beside)], rows))


def warm(name: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """From memory and from the page cache."""
    with bench(shape) as one:
        ways: dict[str, Way] = {
            FLOOR: lambda: copy_into(one.live, one.saved),
            **{f"datastates, {where}": one.ours(where) for where in sorted(one.repos)},
            MAPPED: one.torch_load(mmap=True),
            "torch.load + copy_": one.torch_load(mmap=False),
            "torch.load + load_state_dict": one.load_state_dicts,
            "safetensors + copy_": one.safetensors,
        }
        found = measure(ways, one, rounds)
        show(
            f"{name}, {len(one.saved)} tensors, files in the page cache",
            found,
            size_of(one.saved),
            (FLOOR, MAPPED),
        )
    for way, (other, least) in GOALS.items() if shape is not TINY else ():
        middle = statistics.median(ratios(found, way, other))
        out(
            f"{'met   ' if middle >= least else 'MISSED'} {way}: {middle:.2f}x {other}, wanted"
            f" {least}x"
        )
    return found


def bound(name: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """Two passes over the bytes, without objects, names and states."""
    with bench(shape, in_memory=False) as one:
        source = max(
            (path for path in one.packs if "repo" in path.parts),
            key=lambda path: path.stat().st_size,
        )
        size = size_of(one.saved) // CHUNK * CHUNK
        there, here = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        fd = os.open(source, os.O_RDONLY)
        ways: dict[str, Way] = {
            FLOOR: partial(copy_into, {"": torch.from_numpy(here)}, {"": torch.from_numpy(there)})
        }
        for threads in (1, 2):
            passes = (partial(_digest, there), partial(_copy, there, here))
            ways[f"bare, memory, {threads} threads"] = partial(_in_passes, passes, size, threads)
            passes = (partial(_read_into, fd, None), partial(_read_into, fd, here))
            ways[f"bare, page cache, {threads} threads"] = partial(
                _in_passes, passes, size, threads
            )
        found: dict[str, list[float]] = {way: [] for way in ways}
        for index in range(rounds + 1):
            for way, run in ways.items():
                start = time.perf_counter()
                run()
                if index:
                    found[way].append(time.perf_counter() - start)
        os.close(fd)
        show(
            f"{name}: the bytes alone, digested before the first is written", found, size, (FLOOR,)
        )
        return found


def _in_passes(passes: Sequence[Callable[[int], None]], size: int, threads: int) -> None:
    for each in passes:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(each, range(0, size, CHUNK)))


def _digest(data: np.ndarray[Any, Any], at: int) -> None:
    xxhash.xxh3_128_digest(data.data[at : at + CHUNK])


def _copy(data: np.ndarray[Any, Any], into: np.ndarray[Any, Any], at: int) -> None:
    np.copyto(into[at : at + CHUNK], data[at : at + CHUNK])


_room = threading.local()


def _read_into(fd: int, into: np.ndarray[Any, Any] | None, at: int) -> None:
    if into is None and not hasattr(_room, "memory"):
        _room.memory = np.empty(CHUNK, np.uint8)
    view = (_room.memory if into is None else into[at : at + CHUNK]).data
    os.preadv(fd, [view], at)
    xxhash.xxh3_128_digest(view)


def one_tensor(name: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """One tensor of a state: the bytes that are read for it."""
    rows, found = [], {}
    with bench(shape, in_memory=False) as one:
        model: nn.Module = one.objects["model"]
        names = sorted(
            dict(model.named_parameters()), key=lambda each: model.get_parameter(each).nbytes
        )
        for which in (names[0], names[len(names) // 2], names[-1]):
            for where, repo in one.repos.items():
                seconds, read = [], 0
                for _ in range(rounds):
                    before, start = _io("rchar"), time.perf_counter()
                    repo.restore("main", model=model, only=f"model/{which}")
                    seconds.append(time.perf_counter() - start)
                    read = _io("rchar") - before
                found[f"{which}, {where}"] = {"read": read, "seconds": seconds}
                rows.append(
                    [
                        which,
                        where,
                        short(model.get_parameter(which).nbytes / 1e6),
                        short(read / 1e6),
                        spread(seconds, 1e3),
                    ]
                )
        out(f"\n## One tensor of {name}, a state of {size_of(one.saved) / 1e6:.0f} MB\n")
    out(table(["tensor", "from", "its MB", "MB read, manifest and header too", "ms"], rows))
    return found


def cold(name: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """With files that are not in the page cache."""
    with bench(shape, in_memory=False) as one:
        packs = [path for path in one.packs if "repo" in path.parts]
        room = bytearray(max(path.stat().st_size for path in packs))
        came: dict[str, list[int]] = {}
        ways: dict[str, Way] = {
            **{
                f"floor: {threads} threads read the pack": _filling(
                    partial(_read, packs, room, threads), one
                )
                for threads in (1, 2, 4)
            },
            **{
                f"datastates, cold, {word}": one.ours(f"page cache, {word}")
                for word in ("verified", "unverified")
            },
            MAPPED: one.torch_load(mmap=True),
            "torch.load + copy_": one.torch_load(mmap=False),
            "safetensors + copy_": one.safetensors,
        }
        floors = [way for way in ways if way.startswith("floor")]
        counted = {way: _counting(run, came.setdefault(way, [])) for way, run in ways.items()}
        found = measure(counted, one, rounds, drop=True)
        best = min(floors, key=lambda floor: statistics.median(found[floor]))
        show(
            f"{name}, files forgotten by the kernel before each turn",
            found,
            size_of(one.saved),
            (best,),
        )
        out(
            "from the disk, MB: "
            + ", ".join(f"{way} {statistics.median(read) / 1e6:.0f}" for way, read in came.items())
        )
    return found


def _filling(read: Way, one: Bench) -> Way:
    """For the floor, only reading is measured. The copy after it makes the objects right, and costs
    little compared with a disk."""

    def run() -> None:
        read()
        copy_into(one.live, one.saved)

    return run


def _counting(way: Way, came: list[int]) -> Way:
    def run() -> None:
        before = _io("read_bytes")
        way()
        came.append(_io("read_bytes") - before)

    return run


def _read(paths: list[Path], room: bytearray, threads: int, piece: int = 4 << 20) -> None:
    view = memoryview(room)
    for path in paths:
        fd, size = os.open(path, os.O_RDONLY), path.stat().st_size
        with ThreadPoolExecutor(threads) as pool:
            list(
                pool.map(
                    lambda at, fd=fd, size=size: os.preadv(
                        fd, [view[at : min(at + piece, size)]], at
                    ),
                    range(0, size, piece),
                )
            )
        os.close(fd)


def _io(key: str) -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines[key])


PARTS: dict[str, Callable[[str, Shape, int], dict[str, Any]]] = {
    "warm": warm,
    "bound": bound,
    "one": one_tensor,
    "cold": cold,
}


def main() -> None:
    """Measure the selected parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=[*PARTS], action="append")
    parser.add_argument("--state", choices=[*STATES], action="append")
    parser.add_argument("--quick", action="store_true", help="a tiny state: does it run?")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--rounds", type=int, help="how often each way is measured (7)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers' own
    out(f"{machine()}; torch on one thread")
    states = (
        {"tiny": TINY}
        if options.quick
        else {name: STATES[name] for name in options.state or STATES}
    )
    rounds = options.rounds or (1 if options.quick else 7)
    results = {
        f"{part}, {name}": PARTS[part](f"GPT + AdamW ({name})", shape, rounds)
        for part in options.part or PARTS
        for name, shape in states.items()
        if part in ("warm", "bound") or options.quick or name == "large" or options.state
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
