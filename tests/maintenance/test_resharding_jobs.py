"""Real jobs: what ranks captured in one layout, others restore together in another, and train
on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from datastates.collective import CollectiveCall, TorchGroup
from datastates.engine.plan import compile_plan
from datastates.errors import NotFound
from datastates.maintenance.loading import restore_from
from datastates.state.adapters import Adapted
from datastates.state.data_position import Redivision
from datastates.state.geometry import is_spread, local_of
from datastates.state.per_rank import holdings_of
from datastates.state.tree import flatten
from datastates.storage.parallel_read import open_shared
from datastates.storage.reading import PartsReader, read_tree
from datastates.storage.tier import Reader
from tests.engine.build import tensors_in
from tests.engine.parts import InMemory, part_of
from tests.state.test_placements_jobs import Net, made_fsdp, made_tensor_parallel
from tests.support.effort import IS_THOROUGH, SEED
from tests.support.jobs import Say, run

HERE = "tests.maintenance.test_resharding_jobs"
Objects = dict[str, Any]


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net())


LAYOUTS: dict[str, Callable[[int], nn.Module]] = {
    "ddp": lambda size: replicated(),
    "fsdp": lambda size: made_fsdp((size,), ("dp",))[0],
    "hsdp": lambda size: made_fsdp((2, size // 2), ("replicas", "shards"))[0],
    "tensor parallel": lambda size: made_tensor_parallel(is_sharded=False)[0],
    "tensor parallel and fsdp": lambda size: made_tensor_parallel(is_sharded=True)[0],
}
OF_ANY_SIZE = ("ddp", "fsdp")


def made(layout: str, size: int) -> Objects:
    model = LAYOUTS[layout](size)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=False),
    }


def train(objects: Objects, seed: int) -> None:
    torch.manual_seed(seed)
    objects["model"](torch.randn(4, 3, 8, 8)).square().mean().backward()
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def capture(folder: Path, layout: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    objects = made(layout, size)
    for seed in range(2):
        train(objects, seed)
    adapted = Adapted(objects)
    flat = flatten(adapted.tree(is_shared=True))
    apart = {id(tensor) for tensor in adapted.buffers()}
    plan = compile_plan(
        flat, fenced={id(tensor) for tensor in adapted.fenced()}, apart=apart, rank=rank, size=size
    )
    torch.save(part_of(flat, plan, rank, size).as_bytes(), folder / f"{layout}.{size}.{rank}")


def part(folder: Path, source: str, was: int, number: int) -> Reader:
    return InMemory.from_bytes(torch.load(folder / f"{source}.{was}.{number}"))


def opened(folder: Path, source: str, was: int, is_alone: bool, number: int) -> tuple[Reader, int]:
    """A part as this rank reaches it: all, or only that of its own number (and those beyond the
    last rank's)."""
    if is_alone and number % dist.get_world_size() != dist.get_rank():
        raise NotFound("with another rank")
    return part(folder, source, was, number), 0


def restore(
    folder: Path,
    source: str,
    was: int,
    target: str,
    group: TorchGroup,
    *,
    is_alone: bool,
    is_used: bool,
) -> None:
    torch.manual_seed(7)
    objects = made(target, group.size)
    if is_used:
        train(objects, 11)
    meeting, own = CollectiveCall(group, "restore"), Redivision(was, group.rank, group.size)
    with (
        meeting.synchronized(),
        open_shared(
            meeting, "u", was, partial(opened, folder, source, was, is_alone), rank=own.source
        ) as reader,
    ):
        assert restore_from(reader, objects, own=own, meeting=meeting)
    with PartsReader([part(folder, source, was, number) for number in range(was)]) as whole:
        check(objects, tensors_in(read_tree(whole)))
    train(objects, 12)


def check(objects: Objects, expected: dict[str, torch.Tensor]) -> None:
    """Everything that this rank holds is what the state has there."""
    found = {
        leaf.path: leaf.tensor for leaf in flatten(Adapted(objects).tree(is_shared=True)).tensors
    }
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for path, tensor in found.items():
        local = local_of(tensor)
        if local is None:
            continue
        if not is_spread(tensor):
            assert torch.equal(local, expected[path]), path
            continue
        for held in holdings_of(tensor, dist.get_world_size()):
            if dist.get_rank() in held.owners and 0 not in held.local_shape:
                here = tuple(
                    slice(at, at + side)
                    for at, side in zip(
                        held.place or [0] * local.dim(), held.local_shape, strict=True
                    )
                )
                there = tuple(
                    slice(at, at + side)
                    for at, side in zip(held.offset, held.local_shape, strict=True)
                )
                assert torch.equal(local[here], expected[path][there]), path


def work(folder: str, captures: list[str], restores: str, say: Say) -> None:
    for layout in captures:
        capture(Path(folder), layout)
    dist.barrier()
    with TorchGroup() as group:
        for number, (source, was, target) in enumerate(json.loads(restores)):
            restore(
                Path(folder),
                source,
                was,
                target,
                group,
                is_alone=bool(number % 2),
                is_used=number % 3 == 0,
            )
            say(source, was, target)


def cases(source: str, was: int, targets: Sequence[str]) -> str:
    """Into which layouts it is restored: all in a thorough run, else two, and others after each
    commit."""
    chosen = (
        targets if IS_THOROUGH else [targets[(SEED + number) % len(targets)] for number in range(2)]
    )
    return json.dumps([(source, was, target) for target in chosen])


@pytest.mark.parametrize("source", LAYOUTS)
def test_what_any_job_captured_any_other_goes_on_with(tmp_path: Path, source: str) -> None:
    for size in (4, 3, 2) if IS_THOROUGH else (4,):
        restores = cases(source, 4, list(LAYOUTS) if size == 4 else OF_ANY_SIZE)
        captures = [source] if size == 4 else []
        said = run(
            size,
            f"{HERE}:work",
            folder=str(tmp_path),
            captures=captures,
            restores=restores,
            timeout_s=100,
        )
        assert [len(lines) for lines in said] == [len(json.loads(restores))] * size
    plain: Objects = {"model": Net()}
    plain["optimizer"] = torch.optim.AdamW(plain["model"].parameters(), amsgrad=True, foreach=False)
    with PartsReader([part(tmp_path, source, 4, number) for number in range(4)]) as reader:
        assert restore_from(reader, plain)
        expected = tensors_in(read_tree(reader))
    check(plain, expected)
    train(plain, 3)


@pytest.mark.skipif(not IS_THOROUGH, reason="a few minutes: DATASTATES_THOROUGH=1")
def test_fewer_ranks_captured_and_more_go_on(tmp_path: Path) -> None:
    run(
        2,
        f"{HERE}:work",
        folder=str(tmp_path),
        captures=list(OF_ANY_SIZE),
        restores="[]",
        timeout_s=200,
    )
    restores = json.dumps([(source, 2, target) for source in OF_ANY_SIZE for target in LAYOUTS])
    said = run(
        4, f"{HERE}:work", folder=str(tmp_path), captures=[], restores=restores, timeout_s=200
    )
    assert [len(lines) for lines in said] == [len(OF_ANY_SIZE) * len(LAYOUTS)] * 4
