"""A state into models and optimizers that lie over the ranks of a mesh, whatever it was captured
from: each rank gets its boxes."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from datastates.errors import InvalidInput, Unsupported
from datastates.maintenance.loading import restore_from
from datastates.state.adapters import Adapted
from datastates.state.geometry import local_of
from datastates.state.per_rank import boxes_here
from datastates.state.restore import restore_into
from datastates.state.tree import flatten
from datastates.storage.local import LocalTier
from datastates.storage.reading import open_parts
from datastates.storage.tier import Reader
from tests.engine.build import tensors_in
from tests.support.fake_ranks import as_rank
from tests.support.sharding import opened, sharded, shares_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 22)
        self.down = nn.Linear(22, 5, bias=False)
        self.kernel = nn.Parameter(torch.randn(3, 4, 2, 2))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.relu(self.up(x)))
        return found


def trained(steps: int = 2, net: Net | None = None) -> dict[str, Any]:
    """Plain objects, with state in the optimizer if it took a step."""
    net = net or Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, amsgrad=True)
    for _ in range(steps):
        optimizer.zero_grad()
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return {"net": net, "optimizer": optimizer}


def fsdp(net: Net, mesh: DeviceMesh) -> None:
    dims = mesh.mesh_dim_names or ()
    fully_shard(net.up, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert len(dims) in (1, 2)


def tensor_parallel(net: Net, mesh: DeviceMesh) -> None:
    parallelize_module(
        net,
        mesh["inner"] if mesh.ndim == 2 else mesh,
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )


def both(net: Net, mesh: DeviceMesh) -> None:
    tensor_parallel(net, mesh)
    fully_shard(net.up, mesh=mesh["outer"])
    fully_shard(net, mesh=mesh["outer"])


LayOut = Callable[[Net, "DeviceMesh"], None]
LAYOUTS: list[tuple[str, LayOut, tuple[int, ...]]] = [
    ("fsdp", fsdp, (3,)),
    ("hsdp", fsdp, (2, 2)),
    ("tp", tensor_parallel, (2,)),
    ("fsdp and tp", both, (2, 2)),
]


@pytest.fixture(scope="module")
def source() -> dict[str, Any]:
    torch.manual_seed(1)
    objects = trained(0)
    # not what FSDP has
    objects["net"].kernel = nn.Parameter(
        torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last)
    )
    return trained(2, objects["net"])


@pytest.fixture(scope="module")
def tree(source: dict[str, Any]) -> dict[str, Any]:
    return Adapted(source).tree()


@pytest.fixture(scope="module")
def parts(tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Reader]:
    """What opens the state that three ranks captured."""
    folder = tmp_path_factory.mktemp("packs")
    made = sharded(secrets.token_hex(12), tree, shares_of(tree, 3), 3, step=2)
    uid = made[0].manifest.origin.uid
    for rank, part in enumerate(made):
        LocalTier(folder, rank=rank).put(part)
    tier = LocalTier(folder)
    return lambda: open_parts(lambda rank: tier.open_part(uid, rank), 3, uid)


def assert_restored(objects: dict[str, Any], tree: dict[str, Any]) -> int:
    """Every tensor is bit by bit the stored one, or this rank's boxes of it; how many are
    DTensors."""
    wanted = {leaf.path: leaf.tensor for leaf in flatten(tree).tensors}
    found = tensors_in(Adapted(objects).tree())
    assert found.keys() == wanted.keys()
    count = 0
    for path, tensor in found.items():
        if not isinstance(tensor, DTensor):
            assert torch.equal(tensor, wanted[path]), path
            continue
        count += 1
        for box in boxes_here(tensor):
            place = tuple(
                slice(at, at + size)
                for at, size in zip(box.place or box.offset, box.local_shape, strict=True)
            )
            there = tuple(
                slice(at, at + size) for at, size in zip(box.offset, box.local_shape, strict=True)
            )
            assert torch.equal(tensor._local_tensor[place], wanted[path][there]), path
        assert tensor._local_tensor.numel() == sum(
            prod(box.local_shape) for box in boxes_here(tensor)
        ), path
    return count


def local(tensor: torch.Tensor) -> torch.Tensor:
    found = local_of(tensor)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("lay_out", "mesh"), [each[1:] for each in LAYOUTS], ids=[each[0] for each in LAYOUTS]
)
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "used"])
def test_each_rank_gets_its_boxes_of_a_state_that_other_ranks_captured(
    lay_out: LayOut,
    mesh: tuple[int, ...],
    steps: int,
    tree: dict[str, Any],
    parts: Callable[[], Reader],
) -> None:
    for rank in range(prod(mesh)):
        with as_rank(rank, mesh) as device_mesh:
            net = Net()
            lay_out(net, device_mesh)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, amsgrad=True)
            for _ in range(steps):
                for parameter in net.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            objects = {"net": net, "optimizer": optimizer}
            with parts() as reader:
                report = restore_from(reader, objects)
            assert report
            assert assert_restored(objects, tree) >= 8
            assert optimizer.param_groups[0]["lr"] == 0.1
            state = optimizer.state[net.up.weight]
            assert isinstance(state["exp_avg"], DTensor)
            assert not isinstance(state["step"], DTensor)
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()  # what was made is what the optimizer would have made


def test_a_whole_tree_is_cut_as_well(tree: dict[str, Any]) -> None:
    for rank in range(3):
        with as_rank(rank, (3,)) as mesh:
            net = Net()
            fsdp(net, mesh)
            objects = {"net": net, "optimizer": torch.optim.AdamW(net.parameters(), amsgrad=True)}
            assert restore_into(objects, tree)
            assert assert_restored(objects, tree) >= 8


@pytest.mark.parametrize("has_one", [True, False])
def test_gradients_lie_as_their_parameters_do(source: dict[str, Any], has_one: bool) -> None:
    gradient = source["net"].up.weight.grad
    state = {"gradients": {"net": {"up.weight": gradient}}, "net": dict(source["net"].state_dict())}
    with as_rank(1, (3,)) as mesh, opened(state) as reader:
        net = Net()
        fsdp(net, mesh)
        for parameter in net.parameters() if has_one else ():
            parameter.grad = torch.ones_like(parameter)
        restore_from(reader, {"net": net})
        found = net.up.weight.grad
        assert isinstance(found, DTensor)
        assert torch.equal(found.to_local(), gradient.chunk(3)[1])
        assert net.down.weight.grad is None


def test_each_rank_reads_its_own_chunks_only() -> None:
    # of 16 and 8 MiB
    tree = {
        "wide": torch.randn(1 << 12, 1 << 10),
        "other": torch.randn(1 << 10, 1 << 11),
    }
    for placement, chunks in ((Shard(0), {2, 3, 5}), (Shard(1), {0, 1, 2, 3, 4, 5})):
        with as_rank(1, (2,)) as mesh, opened(tree) as reader:
            live = {
                name: distribute_tensor(torch.zeros_like(tensor), mesh, [placement])
                for name, tensor in tree.items()
            }
            restore_from(reader, live)
            assert reader.read == Counter(chunks)
            for name, tensor in live.items():
                assert torch.equal(tensor.to_local(), tree[name].chunk(2, placement.dim)[1])


def test_what_does_not_fit_changes_nothing(
    tree: dict[str, Any], parts: Callable[[], Reader]
) -> None:
    with as_rank(0, (2,)) as mesh:
        net = Net()
        net.up = nn.Linear(12, 23)
        fsdp(net, mesh)
        before = local(net.down.weight).clone()
        with (
            parts() as reader,
            pytest.raises(InvalidInput, match=r"net/up.weight: the state has float32 \(22, 12\)"),
        ):
            restore_from(reader, {"net": net})
        assert torch.equal(local(net.down.weight), before)
        with parts() as reader:
            report = restore_from(reader, {"net": net}, strict=False)
        assert {each.path for each in report.mismatched} == {"net/up.weight", "net/up.bias"}
        assert torch.equal(local(net.down.weight), tree["net"]["down.weight"].chunk(2)[0])


def test_a_tensor_of_which_nobody_has_the_values_is_refused() -> None:
    with as_rank(0, (2,)) as mesh, opened({"w": torch.ones(4)}) as reader:
        live = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
        with pytest.raises(Unsupported, match="Partial"):
            restore_from(reader, {"w": live})


def test_one_stored_tensor_goes_to_several_that_lie_otherwise() -> None:
    both = torch.arange(12.0)
    with as_rank(1, (2,)) as mesh, opened({"box": {"one": both, "two": both}}) as reader:
        one, two = distribute_tensor(torch.zeros(12), mesh, [Shard(0)]), torch.zeros(12)
        restore_from(reader, {"box": {"one": one, "two": two}})
        assert torch.equal(one.to_local(), torch.arange(6.0, 12.0))
        assert torch.equal(two, torch.arange(12.0))


@pytest.mark.parametrize(
    "kind", ["SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD"]
)
def test_a_fresh_optimizer_gets_what_it_would_have_made_itself(kind: str) -> None:
    """What torch's own optimizers keep for a DTensor; Adafactor and Rprop do not step with one."""
    options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}

    def stepped(net: nn.Linear, steps: int) -> Any:
        optimizer = getattr(torch.optim, kind)(net.parameters(), **options)
        for _ in range(steps):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return optimizer

    net = nn.Linear(6, 8)
    tree = Adapted({"net": net, "optimizer": stepped(net, 1)}).tree()
    with as_rank(1, (2,)) as mesh, opened(tree) as reader:
        kinds = []
        for steps in (0, 1):
            live = nn.Linear(6, 8)
            fully_shard(live, mesh=mesh)
            optimizer = stepped(live, steps)
            if not steps:
                assert restore_from(reader, {"net": live, "optimizer": optimizer})
            state = optimizer.state[live.weight]
            kinds.append(
                {
                    key: (type(value), getattr(value, "placements", None))
                    for key, value in state.items()
                }
            )
    assert kinds[0] == kinds[1]
