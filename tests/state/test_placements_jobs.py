"""A real job of four ranks, for every way that torch spreads a model: what each rank works out
that all hold is what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from datastates.engine.plan import CopyPlan, compile_plan, copies_of, differences
from datastates.state.adapters import Adapted
from datastates.state.geometry import bytes_of, is_spread, local_of
from datastates.state.per_rank import holdings_of
from datastates.state.tree import Flat, flatten
from datastates.storage.reading import PartsReader, read_tree
from tests.engine.build import leaves_of
from tests.engine.parts import InMemory, part_of
from tests.support.effort import part
from tests.support.jobs import Say, run

HERE = "tests.state.test_placements_jobs"
SIZE = 4


class Net(nn.Module):
    """Uneven everywhere: 4 ranks share 7, 10 and 3 rows; tied, with a buffer that each replica
    changes, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7, bias=False)
        self.embedding = nn.Embedding(3, 7)
        self.head = nn.Linear(7, 3)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolve(x)).mean((2, 3))
        x = self.down(self.up(x).relu())
        found: torch.Tensor = self.head(x)
        return found


Made = tuple[nn.Module, torch.optim.Optimizer]


def made_ddp() -> Made:
    # torch forgot it
    model = nn.parallel.DistributedDataParallel(
        nn.Module.to(Net(), memory_format=torch.channels_last)  # type: ignore[call-overload]
    )
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def made_fsdp(shape: tuple[int, ...], names: tuple[str, ...]) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), Net()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters())


def made_tensor_parallel(*, is_sharded: bool) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if is_sharded:
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)


WAYS: dict[str, Callable[[], Made]] = {
    "ddp": made_ddp,
    "fsdp": lambda: made_fsdp((4,), ("dp",)),
    "hsdp": lambda: made_fsdp((2, 2), ("replicas", "shards")),
    "tensor parallel": lambda: made_tensor_parallel(is_sharded=False),
    "tensor parallel and fsdp": lambda: made_tensor_parallel(is_sharded=True),
}


def trained(make: Callable[[], Made], *, seed_by_rank: bool) -> Made:
    """A model after two steps, equal on all ranks where they hold the same."""
    torch.manual_seed(0)
    model, optimizer = make()
    for step in range(2):
        torch.manual_seed(100 + step + (dist.get_rank() if seed_by_rank else 0))
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_of(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if is_spread(tensor) else tensor
    return whole


def captured(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Adapted, Flat, CopyPlan]:
    adapted = Adapted({"model": model, "optimizer": optimizer})
    flat = flatten(adapted.tree(is_shared=True))
    fenced, apart = (
        {id(tensor) for tensor in found} for found in (adapted.fenced(), adapted.buffers())
    )
    return (
        adapted,
        flat,
        compile_plan(flat, fenced=fenced, apart=apart, rank=dist.get_rank(), size=SIZE),
    )


def check_holdings(flat: Flat) -> None:
    """What this rank believes to hold is in its memory, where it says."""
    for leaf in flat.tensors:
        local = local_of(leaf.tensor)
        mine = [held for held in holdings_of(leaf.tensor, SIZE) if dist.get_rank() in held.owners]
        whole = whole_of(leaf.tensor.detach())
        assert sum(torch.Size(held.local_shape).numel() for held in mine) == (
            0 if local is None else local.numel()
        ), leaf.path
        for held in mine:
            assert local is not None
            here = local[
                tuple(
                    slice(at, at + side)
                    for at, side in zip(
                        held.place or [0] * local.dim(), held.local_shape, strict=True
                    )
                )
            ]
            there = whole[
                tuple(
                    slice(at, at + side)
                    for at, side in zip(held.offset, held.local_shape, strict=True)
                )
            ]
            assert torch.equal(here.detach(), there), leaf.path


def bytes_alone(flat: Flat, apart: set[int]) -> int:
    """This rank's share of what it holds with some ranks, and no other does: nobody can store
    less, however uneven the shards are."""
    held = [
        (each, id(leaf.tensor) in apart)
        for leaf in flat.tensors
        for each in holdings_of(leaf.tensor, SIZE)
    ]
    lines = [
        (set(each.owners[:1] if is_apart else each.owners), each.length) for each, is_apart in held
    ]
    return max(
        sum(length for owners, length in lines if owners <= some) // len(some)
        for some, _ in lines
        if dist.get_rank() in some
    )


def expected_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """The whole state, gathered by torch."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    found: dict[str, Any] = {
        f"model/{name}": tensor
        for name, tensor in get_model_state_dict(model, options=options).items()
    }
    state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    # tensors
    found.update(
        {
            f"optimizer/state/{name}/{key}": value
            for name, entry in state.items()  # type: ignore[union-attr]
            for key, value in entry.items()  # type: ignore[union-attr]
        }
    )
    return found


def whole_state(folder: Path, name: str) -> PartsReader:
    return PartsReader(
        [InMemory.from_bytes(torch.load(folder / f"{name}.{rank}")) for rank in range(SIZE)]
    )


def hold_what_they_say(folder: str, ways: list[str], say: Say) -> None:
    """Each way in turn: trained, captured, its part written where the test reads it, and the
    whole gathered by torch on rank 0."""
    rank = dist.get_rank()
    for name in ways:
        model, optimizer = trained(WAYS[name], seed_by_rank=name == "ddp")
        adapted, flat, plan = captured(model, optimizer)
        check_holdings(flat)
        apart = {id(tensor) for tensor in adapted.buffers()}
        copies: list[Any] = [None] * SIZE
        dist.all_gather_object(copies, copies_of(flat.tensors, rank, SIZE, apart=apart))
        assert differences(copies) == [], (name, differences(copies))
        again = flatten(adapted.tree(is_shared=True), flat)
        assert plan.refresh(again), name
        assert plan.refresh(flatten(adapted.tree(is_shared=True), again)), name
        torch.save(part_of(flat, plan, rank, SIZE).as_bytes(), Path(folder) / f"{name}.{rank}")
        expected = {
            path: tensor.detach().clone()
            for path, tensor in expected_of(model, optimizer).items()
            if isinstance(tensor, torch.Tensor)
        }
        if rank == 0:
            torch.save(expected, Path(folder) / f"{name}.whole")
        assert plan.shares is not None
        say(
            name, sum(map(bytes_of, plan.specs)), bytes_alone(flat, apart), plan.shares.digest.hex()
        )


def test_every_rank_knows_what_all_hold_and_their_parts_are_the_whole_state(tmp_path: Path) -> None:
    ways = part(WAYS)
    said = run(SIZE, f"{HERE}:hold_what_they_say", folder=str(tmp_path), ways=ways, timeout_s=100)
    for number, name in enumerate(ways):
        lines = [lines[number].rsplit(" ", 3) for lines in said]
        stored = [int(count) for _, count, _, _ in lines]
        assert len({digest for *_, digest in lines}) == 1, name
        expected = torch.load(tmp_path / f"{name}.whole")
        with whole_state(tmp_path, name) as reader:
            found = dict(leaves_of(read_tree(reader, wants=lambda _: True)))
        for path, tensor in expected.items():
            # a tensor
            assert torch.equal(found[f"/{path}"], tensor), (name, path)  # type: ignore[arg-type]
        alone = [int(count) for _, _, count, _ in lines]
        assert all(
            count <= 1.1 * max(sum(stored) / SIZE, least)
            for count, least in zip(stored, alone, strict=True)
        ), (name, stored, alone)
