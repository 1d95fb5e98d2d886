"""What torch's own tests ask of the state dicts of spread models, asked of our states: each case is
what one of four ranks does.

docs/frameworks/sharded.md says which of torch's tests each stands for, and which were left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import datastates
from datastates import Repository, Tracker
from datastates.errors import InvalidInput, Unsupported
from datastates.ranks import SoloGroup, TorchGroup
from datastates.storage.reading import specs_of
from tests.support.jobs import Say

SIZE = 4


class Mlp(nn.Module):
    """Two layers, and one beside them that four ranks share unevenly; some hold no row of it
    when it is narrow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.beside = nn.Linear(width, width + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x).relu()) + self.beside(x)[:, 1:]
        return found


def mlps(width: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Mlp(width), Mlp(width))


def sharded(model: nn.Sequential, *shape: int, **options: Any) -> nn.Module:
    """By FSDP2, over a mesh of one dimension, or of two of which the first has replicas."""
    mesh = init_device_mesh(
        "cpu", shape or (SIZE,), mesh_dim_names=("replicas", "shards")[-max(1, len(shape)) :]
    )
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def tensor_parallel(model: nn.Sequential, data: tuple[int, ...] = ()) -> nn.Module:
    """Over all ranks; or over the rest of a mesh whose first dimensions are FSDP2's."""
    names = ("replicas", "shards")[-len(data) :] if data else ()
    rest = SIZE
    for side in data:
        rest //= side
    mesh = init_device_mesh("cpu", (*data, rest), mesh_dim_names=(*names, "tensors"))
    plan = {
        f"{number}.{name}": way()
        for number in range(2)
        for name, way in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    parallelize_module(model, mesh["tensors"], plan)  # type: ignore[arg-type]  # styles
    if data:
        for layer in model:
            fully_shard(layer, mesh=mesh[names])
        fully_shard(model, mesh=mesh[names])
    return model


def by_columns(parameter: nn.Parameter) -> Shard:
    """Columns where all ranks get as many, which FSDP2 asks for; rows elsewhere."""
    return Shard(int(parameter.dim() == 2 and parameter.shape[1] % SIZE == 0))


WAYS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp": sharded,
    "fsdp kept whole": lambda model: sharded(model, reshard_after_forward=False),
    "fsdp by columns": lambda model: sharded(model, shard_placement_fn=by_columns),
    "hsdp": lambda model: sharded(model, 2, 2),
    "tp": tensor_parallel,
    "fsdp and tp": lambda model: tensor_parallel(model, (2,)),
    "hsdp and tp": lambda model: tensor_parallel(model, (1, 2)),
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, as a tensor that changes with nothing."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Parameters, and what an optimizer keeps for each, as whole tensors."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        found[name] = whole(parameter)
        for key, value in (optimizer.state[parameter] if optimizer is not None else {}).items():
            found[f"{name}/{key}"] = whole(value)
    return found


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 4) -> None:
    torch.manual_seed(7)
    optimizer.zero_grad()
    model(torch.randn(3, width)).square().sum().backward()
    optimizer.step()


@contextmanager
def tracked(repo: Repository, branch: str, **objects: Any) -> Iterator[Tracker]:
    with repo.track(branch=branch, rng=False, **objects) as tracker:
        yield tracker


def placements_and_meshes_change(repo: Repository) -> None:
    """A DTensor captured under any placement of any mesh is restored under any other: even and
    uneven, of one mesh dimension and two."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    places = (Replicate(), Shard(0), Shard(1))
    ways: list[tuple[Any, tuple[Placement, ...]]] = [(flat, (place,)) for place in places]
    ways += [(square, pair) for pair in product(places, places)]
    for shape in ((4, 4), (5, 3)):
        full = torch.arange(float(shape[0] * shape[1])).reshape(shape)
        before = {
            str(number): distribute_tensor(full, mesh, where)
            for number, (mesh, where) in enumerate(ways)
        }
        with tracked(repo, f"placements-{shape[0]}", objects={"tensors": before}) as tracker:
            state = tracker.capture().wait("durable")
            for mesh, where in ways:
                after = {
                    name: distribute_tensor(torch.zeros(shape), mesh, where) for name in before
                }
                assert repo.restore(state, tensors=after, group=tracker.group)
                assert all(torch.equal(whole(tensor), full) for tensor in after.values()), where
                assert all(
                    tensor.placements == where and tensor.device_mesh == mesh
                    for tensor in after.values()
                )


def models_change_the_way_they_are_spread(repo: Repository) -> None:
    """Captured in one way and restored in another, parameters and the optimizer's state are the
    same whole tensors; training goes on."""
    names = list(WAYS)
    for number, name in enumerate(names):
        model = WAYS[name](mlps())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, optimizer)
        with tracked(repo, f"way-{number}", model=model, optimizer=optimizer) as tracker:
            state = tracker.capture().wait("durable")
            expected = gathered(model, optimizer)
            step(model, optimizer)
            assert not alike(gathered(model, optimizer), expected)
            tracker.restore(state)
            assert alike(gathered(model, optimizer), expected), name
            for other in (names[(number + 1) % len(names)], names[(number + 4) % len(names)]):
                fresh = WAYS[other](mlps(seed=1))
                fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
                assert repo.restore(
                    state, model=fresh, optimizer=fresh_optimizer, group=tracker.group
                )
                assert alike(gathered(fresh, fresh_optimizer), expected), (name, other)
                assert fresh_optimizer.param_groups[0]["lr"] == 0.1
                step(fresh, fresh_optimizer)


def narrow_layers_before_and_after_a_forward_pass(repo: Repository) -> None:
    """Of 2, 3 or 5 rows some of four ranks hold none.

    Between forward and backward whole parameters stand where shards were."""
    for width in (2, 3, 5):
        model = sharded(mlps(width), reshard_after_forward=False)
        with tracked(repo, f"narrow-{width}", model=model) as tracker:
            first = tracker.capture().wait("durable")
            expected = gathered(model)
            model(torch.randn(2, width))
            second = tracker.capture().wait("durable")
            assert first.digest != second.digest  # it has a parent
            for state in (first, second):
                fresh = sharded(mlps(width, seed=1))
                assert repo.restore(state, model=fresh, group=tracker.group)
                assert alike(gathered(fresh), expected)


class Extra(nn.Module):
    """DTensors as parameters, with state beside them."""

    def __init__(self, full: torch.Tensor, count: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (SIZE,))
        self.split = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
        self.kept = nn.Parameter(distribute_tensor(full + 1, mesh, [Replicate()]))
        self.count, self.told = count, torch.full((2,), float(count))
        self.register_buffer("stays", torch.full((3,), float(count)))
        self.register_buffer("goes", torch.full((3,), float(count)), persistent=False)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "told": self.told}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count, self.told = state["count"], state["told"]


def extra_state_and_buffers(repo: Repository) -> None:
    """What a module keeps beside parameters comes back, and a buffer that is not persistent
    stays as it is; compiled or not."""
    model = Extra(torch.arange(6.0), 1)
    with tracked(repo, "extra", model=model) as tracker:
        state = tracker.capture().wait("durable")
        for wrap in (lambda module: module, torch.compile):
            fresh: Any = Extra(torch.zeros(6), 10)
            assert repo.restore(state, model=wrap(fresh), group=tracker.group)
            assert alike(gathered(fresh), gathered(model))
            assert (fresh.count, fresh.told.tolist()) == (1, [1.0, 1.0])
            assert (fresh.stays.tolist(), fresh.goes.tolist()) == ([1.0] * 3, [10.0] * 3)


def keys_that_are_missing_or_too_many(repo: Repository) -> None:
    """A state that does not fit is refused on all ranks, by name, and changes nothing; without
    ``strict`` the report says what did not."""
    model = sharded(mlps())
    with tracked(repo, "keys", model=model) as tracker:
        state = tracker.capture().wait("durable")
        more = mlps(seed=1)
        more.append(nn.Linear(4, 4))
        fewer = nn.Sequential(mlps(seed=1)[0])
        for other, name in ((sharded(more), "2.weight"), (sharded(fewer), "1.up.weight")):
            before = gathered(other)
            with pytest.raises(InvalidInput, match=name):
                repo.restore(state, model=other, group=tracker.group)
            assert alike(gathered(other), before)
            report = repo.restore(state, model=other, strict=False, group=tracker.group)
            assert not report
            found = gathered(other)
            assert all(
                torch.equal(found[path], tensor)
                for path, tensor in gathered(model).items()
                if path in found
            )
            assert any(name in path for path in (*report.missing, *report.unexpected))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.decoder = nn.Linear(6, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.decoder(self.embedding(x))
        return found


def tied_weights(repo: Repository) -> None:
    """A parameter of two names is one tensor in the state, and one again where it is restored."""
    torch.manual_seed(0)
    model, fresh = Tied(), Tied()
    fully_shard(model)
    fully_shard(fresh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    with tracked(repo, "tied", model=model, optimizer=optimizer) as tracker:
        state = tracker.capture().wait("durable")
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        assert repo.restore(state, model=fresh, optimizer=fresh_optimizer, group=tracker.group)
        assert alike(gathered(fresh, fresh_optimizer), gathered(model, optimizer))
        assert fresh.decoder.weight is fresh.embedding.weight


def names_without_wrappers(repo: Repository) -> None:
    """Activation checkpointing, replicas and compilation put their names before a module's: a
    state has none of them."""
    wrapped = mlps()
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, Mlp))
    model = nn.parallel.DistributedDataParallel(wrapped)
    with tracked(repo, "names", model=model) as tracker:
        state = tracker.capture().wait("durable")
        assert sorted(repo.load(state)["model"]) == sorted(mlps().state_dict())
        fresh = mlps(seed=1)
        assert repo.restore(state, model=fresh, group=tracker.group)
        assert alike(gathered(fresh), gathered(mlps()))


def options_groups_and_holes_of_optimizers(repo: Repository) -> None:
    """``initial_lr`` of a schedule, a group without parameters, a parameter that was frozen after
    it had a state, one that never had a gradient, and an optimizer that keeps nothing.
    """

    def made(seed: int) -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
        model: Any = sharded(mlps(seed=seed))
        first, second = model[0], model[1]
        groups = [{"params": [*first.parameters()], "lr": 0.1}, {"params": [], "lr": 0.2}]
        return model, {
            "grouped": torch.optim.AdamW(groups),
            "bare": torch.optim.SGD(second.parameters(), lr=0.3),
        }

    model, optimizers = made(0)
    torch.optim.lr_scheduler.LambdaLR(optimizers["grouped"], lambda epoch: 0.9**epoch)
    model[0].up.bias.requires_grad_(False)  # type: ignore[index]  # never has a gradient
    model(torch.randn(3, 4)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad()
    model[0].up.weight.requires_grad_(False)  # type: ignore[index]  # frozen, and had a state
    with tracked(repo, "options", model=model, **optimizers) as tracker:
        state = tracker.capture().wait("durable")
        fresh, others = made(1)
        assert repo.restore(state, objects={"model": fresh, **others}, group=tracker.group)
        assert alike(gathered(fresh, others["grouped"]), gathered(model, optimizers["grouped"]))
        assert [group["initial_lr"] for group in others["grouped"].param_groups] == [0.1, 0.2]
        assert model[0].up.bias not in others["grouped"].state  # type: ignore[index]  # a module
        assert not others["bare"].state


def meta_models_are_filled_once_they_have_memory(repo: Repository) -> None:
    """A model that was made on ``meta`` has nothing to restore into: that is said; once it has
    memory, it gets everything."""
    model = sharded(mlps())
    with tracked(repo, "meta", model=model) as tracker:
        state = tracker.capture().wait("durable")
        with torch.device("meta"):
            fresh = sharded(mlps())
        with pytest.raises(InvalidInput, match="meta"):
            repo.restore(state, model=fresh, group=tracker.group)
        fresh.to_empty(device="cpu")
        assert repo.restore(state, model=fresh, group=tracker.group)
        assert alike(gathered(fresh), gathered(model))


def meshes_of_some_ranks(repo: Repository) -> None:
    """Two meshes side by side: the ranks of one hold nothing of what lies on the other, and the
    part of each says so."""
    rank, full = dist.get_rank(), torch.arange(30.0).reshape(6, 5)
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    before = {
        f"on {number}": distribute_tensor(full + number, mesh, [Shard(0)])
        for number, mesh in enumerate(meshes)
    }
    with tracked(repo, "sides", objects={"tensors": before}) as tracker:
        state = tracker.capture().wait("durable")
        with repo.core.tiers.open_part(state, rank, verify=True)[0] as reader:
            stored = {spec.path: len(spec.shards) for spec in specs_of(reader)}
        assert [stored[f"tensors/on {number}"] for number in range(2)] == [
            int(rank // 2 == number) for number in range(2)
        ]
        sides = {
            f"on {number}": distribute_tensor(torch.zeros(6, 5), mesh, [Shard(1)])
            for number, mesh in enumerate(reversed(meshes))
        }
        assert repo.restore(state, tensors=sides, group=tracker.group)
        for number, mesh in enumerate(reversed(meshes)):
            local = sides[f"on {number}"].to_local()
            if mesh.get_coordinate() is not None:
                assert torch.equal(local, (full + number).chunk(2, 1)[mesh.get_local_rank()])
        assert all(
            torch.equal(repo.load(state)["tensors"][f"on {number}"], full + number)
            for number in range(2)
        )


def stages_of_a_pipeline(repo: Repository) -> None:
    """Each pair of ranks has a stage of its own, tracks it with a group and on a branch of its
    own, and goes on from there, or alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    stage = mesh.get_local_rank("stages")
    group = TorchGroup(mesh.get_group("shards"))

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed + stage)
        model = nn.Sequential(nn.Linear(4, 5 + stage), *[nn.Linear(5 + stage, 4)] * stage)
        fully_shard(model, mesh=mesh["shards"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made(0)
    step(model, optimizer)
    with pytest.raises(
        InvalidInput, match=r"stages of a pipeline.*a group and a branch of their own"
    ):
        repo.track(branch="stages", model=model)
    expected = gathered(model, optimizer)
    with tracked(repo, f"stage-{stage}", model=model, optimizer=optimizer, group=group) as tracker:
        state = tracker.capture().wait("durable")
        step(model, optimizer)
        tracker.restore(state)
        assert alike(gathered(model, optimizer), expected)
    fresh, fresh_optimizer = made(5)
    with tracked(
        repo, f"stage-{stage}", model=fresh, optimizer=fresh_optimizer, group=group
    ) as tracker:
        assert (tracker.resumed_from, tracker.group.size) == (state, 2)
        assert alike(gathered(fresh, fresh_optimizer), expected)
        with pytest.raises(Unsupported, match=r"held by rank|lies with the ranks"):
            repo.track(
                branch=f"alone-{dist.get_rank()}", model=fresh, group=SoloGroup(), rng=False
            ).capture()
    plain = dict(repo.load(state)["model"])
    assert plain.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.items())


def buffers_of_each_rank(repo: Repository) -> None:
    """Statistics that each rank keeps of its own batches come back as its own; a process alone
    gets those of rank 0."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        return nn.parallel.DistributedDataParallel(plain)

    rank, model = dist.get_rank(), made()
    with tracked(repo, "buffers", model=model) as tracker:
        for number in range(2):
            torch.manual_seed(100 * rank + number)
            model(torch.randn(3 + rank, 4)).sum().backward()
        state = tracker.capture().wait("durable")
        expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
        said = [
            torch.frombuffer(bytearray(each), dtype=torch.float32)
            for each in tracker.group.exchange(expected["module.1.running_mean"].numpy().tobytes())
        ]
        assert not torch.equal(said[0], said[1])
        fresh = made()
        assert repo.restore(state, model=fresh, group=tracker.group)
        assert all(torch.equal(buffer, expected[name]) for name, buffer in fresh.named_buffers())
        alone: Any = made().module
        assert repo.restore(state, model=alone)
        assert torch.equal(alone[1].running_mean, said[0])
        assert torch.equal(repo.load(state)["model"]["1.running_mean"], said[0])


CASES: dict[str, Callable[[Repository], None]] = {
    case.__name__: case
    for case in (
        placements_and_meshes_change,
        models_change_the_way_they_are_spread,
        narrow_layers_before_and_after_a_forward_pass,
        extra_state_and_buffers,
        keys_that_are_missing_or_too_many,
        tied_weights,
        names_without_wrappers,
        options_groups_and_holes_of_optimizers,
        meta_models_are_filled_once_they_have_memory,
        meshes_of_some_ranks,
        stages_of_a_pipeline,
        buffers_of_each_rank,
    )
}


def ask(folder: str, names: list[str], say: Say) -> None:
    """Go through these cases; all ranks do."""
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        for name in names:
            CASES[name](repo)
            say(name)
