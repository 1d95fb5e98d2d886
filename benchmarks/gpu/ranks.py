"""Two ranks on one device, and a device that runs out of memory.

- Two ranks need one device of any kind. Each rank is a process.
- FSDP2 needs one device on which gloo reduces gradients. Late devices are left out, because gloo
  reads memory that a late device fills later.
- A device that runs out of memory needs a GPU or a late device. On a GPU all memory is taken, except
  for a number of small blocks.
- Two devices in one process are a case of the part "correctness".
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor, nn

import datastates
from datastates.collective import TorchGroup
from datastates.config import Config
from datastates.state.geometry import local_of
from datastates.state.manifest import CHUNK_BYTES

from .case import Case, Found, Skip
from .place import Place
from .where import Where

SIZE, STEPS = 2, 3
LEFT = 6
"""As many numbers of small blocks of memory that are left are tried, from none on."""

TOKEN = "a token of this benchmark"

Made = tuple[nn.Module, torch.optim.Optimizer]


def cases(place: Place) -> Sequence[Case]:
    """The cases of this part."""
    return [
        Case("two ranks on one device", partial(in_ranks, made="replicated"), limit_s=60),
        Case("two ranks on one device, FSDP2", partial(in_ranks, made="sharded"), limit_s=60),
        Case("out of memory in a capture", partial(short, tried=captured), limit_s=60),
        Case("out of memory in a restore", partial(short, tried=restored), limit_s=40),
        Case("out of memory in a clone", partial(short, tried=cloned), limit_s=40),
    ]


# --- Two ranks ---


def in_ranks(place: Place, made: str) -> Found:
    """Two processes train together on one device, and check what they captured and restored."""
    if made == "sharded" and place.where.kind == "late":
        raise Skip("gloo reads memory that a late device fills later")
    # only a new process may use the device
    context = multiprocessing.get_context("spawn" if place.is_accelerator else "fork")
    with tempfile.TemporaryDirectory(prefix="datastates-gpu-") as folder:
        ranks = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe(duplex=False)
            # both have it
            child = context.Process(  # type: ignore[attr-defined]
                target=_be_rank, args=(place.where, rank, Path(folder), made, theirs)
            )
            child.start()
            theirs.close()
            ranks.append((ours, child))
        try:
            said = [ours.recv() for ours, _ in ranks]
        finally:
            for ours, child in ranks:
                ours.close()
                child.join(5)
                child.kill()
    for each in said:
        if isinstance(each, Exception):
            raise each
    return {"ranks": SIZE, "states": STEPS, "tensors": said[0]}


def _be_rank(where: Where, rank: int, folder: Path, made: str, wire: Connection) -> None:
    """One rank. It sends how many tensors it compared, or what it raised."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=SIZE
        )
        place = Place(where)
        found = max(train(place, way, folder / f"runs-{way}", made) for way in place.ways())
    except Exception as exc:
        wire.send(type(exc)(str(exc)) if isinstance(exc, Skip) else RuntimeError(repr(exc)))
    else:
        wire.send(found)
    wire.close()


class Net(nn.Module):
    """Weights that all ranks have, and a sum of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(300, 301), nn.Linear(301, 7)
        self.sum: Tensor
        self.register_buffer("sum", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.sum += 1 + torch.distributed.get_rank()
        found: Tensor = self.down(self.up(x).relu())
        return found


def replicated(place: Place) -> Made:
    """All ranks make the same steps."""
    model = place.put(Net())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def sharded(place: Place) -> Made:
    """Each rank has a shard of each weight.

    :raises Skip: torch does not shard on this device.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if place.is_accelerator:
        torch.cuda.set_device(place.device)
    model = Net()
    place.put(model)
    try:
        mesh = init_device_mesh(place.device.type, (SIZE,))
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(place.draw(4, 300)).square().mean().backward()
    except (RuntimeError, ValueError, NotImplementedError) as exc:
        raise Skip(f"torch alone refuses it: {(str(exc).splitlines() or [''])[0][:160]}") from exc
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


MADE: dict[str, Callable[[Place], Made]] = {"replicated": replicated, "sharded": sharded}


def train(place: Place, way: str, folder: Path, made: str) -> int:
    """Capture some steps with the other rank, and restore each state. Returns the number of
    compared tensors.

    :raises AssertionError: a rank restored other values.
    """
    rank = torch.distributed.get_rank()
    config = Config(memory_bytes=64 << 20, durable_interval_s=None)
    with (
        place.running(way),
        TorchGroup() as group,
        datastates.open(folder, config=config) as repo,
    ):
        torch.manual_seed(0)
        model, optimizer = MADE[made](place)
        with repo.track(rng=False, group=group, model=model, optimizer=optimizer) as run:
            expected, captures = [], list[datastates.Capture]()
            for number in range(STEPS):
                optimizer.zero_grad()
                x = torch.randn(4, 300, generator=torch.Generator().manual_seed(number))
                model(place.put(x)).square().mean().backward()
                optimizer.step()
                expected.append([each.clone() for each in locals_of(model, optimizer)])
                captures.append(run.capture())
            place.finish()
            for capture in captures:
                capture.wait("durable", timeout_s=30)
            for capture, values in zip(captures, expected, strict=True):
                for each in locals_of(model, optimizer):
                    each.zero_()
                run.restore(capture.uid)
                place.finish()
                now = locals_of(model, optimizer)
                wrong = sum(not a.equal(b) for a, b in zip(now, values, strict=True))
                if wrong:
                    raise AssertionError(
                        f"rank {rank} restored {wrong} of {len(values)} tensors otherwise"
                    )
    return len(expected[0])


def locals_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What this rank holds of each tensor."""
    states = (optimizer.state[parameter].values() for parameter in model.parameters())
    tensors = [*model.parameters(), *model.buffers(), *(each for state in states for each in state)]
    found = (local_of(each.detach()) for each in tensors)
    return [each for each in found if each is not None]


# --- A device without memory ---


def short(place: Place, tried: Callable[[Place, int], int]) -> Found:
    """Try it with no memory left, then with one block, and so on."""
    if not place.is_accelerator and place.where.kind != "late":
        raise Skip("a CPU has no separate memory that could run out")
    skipped = 0
    for way in place.ways():
        for left in range(2 if place.is_quick else LEFT):
            with place.running(way):
                skipped += tried(place, left)
    return {"skipped": skipped}


def _opened(folder: str) -> datastates.Repository:
    config = Config(memory_bytes=16 * CHUNK_BYTES, durable_interval_s=None, device_bytes=64 << 20)
    return datastates.open(folder, config=config)


def _tensors(place: Place) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"w{number}": place.draw(1 << 20) for number in range(3)}


def _differing(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, each in expected.items() if not each.cpu().equal(tensors[name].cpu())]


def captured(place: Place, left: int) -> int:
    """Captures before, during and after the shortage. Returns how many were skipped."""
    tensors = _tensors(place)
    with (
        tempfile.TemporaryDirectory(prefix="datastates-gpu-") as folder,
        _opened(folder) as repo,
        repo.track(rng=False, state=tensors) as run,
    ):
        expected, captures = [], list[datastates.Capture]()
        for number in range(4):
            for each in tensors.values():
                each.mul_(0.5).add_(1)
            expected.append({name: each.clone() for name, each in tensors.items()})
            loss = tensors["w0"].sum()
            if number == 2:
                with place.short_of_memory(left):
                    captures.append(run.capture(metrics={"loss": loss}))
                    run.fence()
            else:
                captures.append(run.capture(metrics={"loss": loss}))
                run.fence()
        place.finish()
        wrong = [
            path
            for capture, values in zip(captures, expected, strict=True)
            if not capture.is_skipped
            for path in _differing(repo.load(capture.wait(timeout_s=20).uid)["state"], values)
        ]
    if wrong:
        raise AssertionError(f"{len(wrong)} tensors are wrong, {wrong[0]} among them")
    if any(capture.is_skipped for capture in captures if capture is not captures[2]):
        raise AssertionError("a capture with memory was skipped")
    return captures[2].is_skipped


@contextmanager
def _captured_once(
    place: Place, tensors: dict[str, Tensor]
) -> Iterator[tuple[datastates.Repository, datastates.Tracker]]:
    """A training whose tensors were captured, and are durable."""
    with (
        tempfile.TemporaryDirectory(prefix="datastates-gpu-") as folder,
        _opened(folder) as repo,
        repo.track(rng=False, state=tensors) as run,
    ):
        capture = run.capture()
        run.fence()
        place.finish()
        capture.wait("durable", timeout_s=20)
        yield repo, run


def restored(place: Place, left: int) -> int:
    """A restore during the shortage, and one after it."""
    tensors = _tensors(place)
    expected = {name: each.clone() for name, each in tensors.items()}
    with _captured_once(place, tensors) as (_, run):
        return _again(place, left, tensors, expected, partial(run.restore, "main"))


def cloned(place: Place, left: int) -> int:
    """A clone during the shortage, and one after it."""
    tensors, into = _tensors(place), _tensors(place)
    expected = {name: each.clone() for name, each in tensors.items()}
    with (
        _captured_once(place, tensors) as (repo, _),
        repo.serve(token=TOKEN) as server,
        datastates.connect(server.url, token=TOKEN) as peer,
    ):
        clone = partial(peer.clone, "main", objects={"state": into}, atomic=False)
        return _again(place, left, into, expected, clone)


def _again(
    place: Place,
    left: int,
    tensors: dict[str, Tensor],
    expected: dict[str, Tensor],
    fill: Callable[[], object],
) -> int:
    for is_short in (True, False):
        for each in tensors.values():
            each.zero_()
        if is_short:
            with place.short_of_memory(left):
                fill()
        else:
            fill()
        place.finish()
        wrong = _differing(tensors, expected)
        if wrong:
            raise AssertionError(f"{len(wrong)} tensors are wrong, {wrong[0]} among them")
    return 0
