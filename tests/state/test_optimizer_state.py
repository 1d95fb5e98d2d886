"""Optimizer state by names: every stock optimizer goes on bit for bit after a restore into a
fresh one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.encoding import decode_values, encode_values
from datastates.state.report import RestoreReport, own
from datastates.state.restore import restore_into
from datastates.state.skeleton import decode_skeleton
from datastates.state.tree import flatten, unflatten

Make = Callable[[list[nn.Parameter]], Optimizer]

torch.set_num_threads(1)


def stored(objects: dict[str, object], **options: Any) -> dict[str, Any]:
    """The objects' tree as a tier would give it back: through bytes where it has bytes, with
    tensors of its own."""
    flat = flatten(Adapted(objects, **options).tree())
    tensors: list[Tensor] = []
    for leaf in flat.tensors:
        tied = next(
            (
                t
                for other, t in zip(flat.tensors, tensors, strict=False)
                if other.tensor is leaf.tensor
            ),
            None,
        )
        tensors.append(leaf.tensor.detach().clone() if tied is None else tied)
    skeleton = decode_skeleton(flat.skeleton.encoded)
    tree: dict[str, Any] = unflatten(skeleton, decode_values(encode_values(flat.values)), tensors)
    return tree


def bits(tree: Any) -> Any:
    """A tree in a form whose ``==`` compares every bit."""
    if isinstance(tree, Tensor):
        return (
            tree.dtype,
            tuple(tree.shape),
            tree.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist(),
        )
    if isinstance(tree, dict):
        return {key: bits(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return [bits(child) for child in tree]
    return tree


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        # nn.Module.__call__
        return self.last(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    """Losses of the steps; the data of a step is a function of its number."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        device = next(model.parameters()).device
        x, y = (
            torch.randn(8, 3, generator=generator).to(device),
            torch.randn(8, 2, generator=generator).to(device),
        )

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        # torch types closures as returning floats
        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        losses.append(loss.item())
    return losses


FORMS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "Adamax": ("Adamax", {"lr": 0.01}),
    "NAdam": ("NAdam", {"lr": 0.01}),
    "RAdam": ("RAdam", {"lr": 0.01}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Rprop": ("Rprop", {"lr": 0.01}),
    "ASGD": ("ASGD", {"lr": 0.01, "t0": 1}),
    "Adagrad": ("Adagrad", {"lr": 0.05}),
    "Adadelta": ("Adadelta", {"lr": 1.0}),
    "Adafactor": ("Adafactor", {"lr": 0.05}),
}


def makes() -> list[Any]:
    cases = []
    for label, (kind, options) in KINDS.items():
        for form, flags in FORMS.items():
            if form != "fused" or kind in FUSED:
                cases.append(
                    pytest.param(
                        lambda p, k=kind, o=options, f=flags: getattr(torch.optim, k)(p, **o, **f),
                        id=f"{label} {form}",
                    )
                )
    cases.append(pytest.param(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), id="LBFGS"))
    cases.append(
        pytest.param(
            lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
            id="LBFGS wolfe",
        )
    )
    cases.append(
        pytest.param(lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.01), id="Muon")
    )
    cases.append(
        pytest.param(
            lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
            id="AdamW tensor lr",
        )
    )
    return cases


@pytest.mark.parametrize("make", makes())
@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_every_stock_optimizer_goes_on_bit_for_bit(make: Make, is_used: bool) -> None:
    model = net()
    optimizer = make(list(model.parameters()))
    train(model, optimizer, range(4))
    tree = stored({"model": model, "optimizer": optimizer})
    expected = train(model, optimizer, range(4, 7))

    other = net(1)
    fresh = make(list(other.parameters()))
    if is_used:
        train(other, fresh, range(20, 22))
    report = restore_into({"model": other, "optimizer": fresh}, tree)

    assert report
    assert bits(stored({"model": other, "optimizer": fresh})) == bits(tree)
    assert train(other, fresh, range(4, 7)) == expected
    assert bits(stored({"model": other, "optimizer": fresh})) == bits(
        stored({"model": model, "optimizer": optimizer})
    )


def test_sparse_adam_goes_on_bit_for_bit() -> None:
    def step(table: nn.Embedding, optimizer: Optimizer, number: int) -> None:
        optimizer.zero_grad()
        table(torch.tensor([number % 7, 3])).square().sum().backward()
        optimizer.step()

    def make() -> tuple[nn.Embedding, Optimizer]:
        table = nn.Embedding(7, 2, sparse=True)
        return table, torch.optim.SparseAdam(table.parameters(), lr=0.1)

    table, optimizer = make()
    for number in range(4):
        step(table, optimizer, number)
    tree = stored({"model": table, "optimizer": optimizer})
    other, fresh = make()
    restore_into({"model": other, "optimizer": fresh}, tree)
    for number in range(4, 7):
        step(table, optimizer, number)
        step(other, fresh, number)
    assert torch.equal(table.weight, other.weight)


def test_a_fresh_adamw_gets_all_of_its_state() -> None:
    """A plain load by torch.distributed.checkpoint into a fresh AdamW restores 0 of 148 states."""
    layers = [nn.Linear(4, 4) for _ in range(74)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    tree = stored({"model": model, "optimizer": optimizer})

    other = nn.Sequential(*[nn.Linear(4, 4) for _ in range(74)])
    fresh = torch.optim.AdamW(other.parameters())
    report = restore_into({"model": other, "optimizer": fresh}, tree)

    assert len(fresh.state) == 148
    assert sum(path.startswith("optimizer/state/") for path in report.restored) == 3 * 148
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert bits(fresh.state[mine]) == bits(optimizer.state[theirs])


def test_state_keeps_its_own_dtype_and_place() -> None:
    """Torch's load_state_dict casts state to the dtype of the parameter."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(parameter, 1 / 3, dtype=torch.float32),
            "exp_avg_sq": torch.full_like(parameter, 1 / 7, dtype=torch.float32),
        }
    tree = stored({"model": model, "optimizer": optimizer})
    other = nn.Linear(3, 2).bfloat16()
    fresh = torch.optim.AdamW(other.parameters())
    restore_into({"model": other, "optimizer": fresh}, tree)
    entry = fresh.state[other.weight]
    assert (entry["exp_avg"].dtype, entry["step"].dtype, entry["step"].device.type) == (
        torch.float32,
        torch.float32,
        "cpu",
    )
    assert entry["exp_avg"][0, 0].item() == torch.tensor(1 / 3).item()


def test_existing_state_is_overwritten_in_place_and_never_shares_memory_with_the_tree() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    tree = stored({"model": model, "optimizer": optimizer})
    before = {id(value) for entry in optimizer.state.values() for value in entry.values()}
    train(model, optimizer, range(2, 4))
    restore_into({"model": model, "optimizer": optimizer}, tree)
    assert {id(value) for entry in optimizer.state.values() for value in entry.values()} == before

    fresh = torch.optim.Adam(model.parameters(), lr=0.01)
    restore_into({"model": model, "optimizer": fresh}, tree)
    kept = deepcopy(tree)
    train(model, fresh, range(4, 6))
    assert bits(tree) == bits(kept)


def test_a_state_from_before_the_first_step_empties_a_used_optimizer() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tree = stored({"model": model, "optimizer": optimizer})
    expected = train(model, optimizer, range(2))
    restore_into({"model": model, "optimizer": optimizer}, tree)
    assert not optimizer.state
    assert train(model, optimizer, range(2)) == expected


def test_parameters_are_matched_by_name_whatever_their_order_and_groups_by_what_they_hold() -> None:
    model = net()
    named = dict(model.named_parameters())
    first = [named["first.weight"], named["first.bias"]]
    rest = [p for name, p in named.items() if not name.startswith("first")]
    optimizer = torch.optim.AdamW([{"params": first, "lr": 0.1}, {"params": rest, "lr": 0.01}])
    train(model, optimizer, range(3))
    tree = stored({"model": model, "optimizer": optimizer})
    expected = train(model, optimizer, range(3, 6))

    other = net(1)
    named = dict(other.named_parameters())
    rest = [p for name, p in named.items() if not name.startswith("first")]
    groups: list[dict[str, Any]] = [
        {"params": rest[::-1], "lr": 1.0},
        {"params": [named["first.bias"], named["first.weight"]], "lr": 2.0},
    ]
    fresh = torch.optim.AdamW(groups)
    restore_into({"model": other, "optimizer": fresh}, tree)
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.1]
    assert train(other, fresh, range(3, 6)) == expected


def test_another_division_into_groups_is_refused_and_named() -> None:
    model = net()
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": parameters[:2], "lr": 0.5},
        {"params": parameters[2:]},
    ]
    split = torch.optim.SGD(groups, lr=0.1)
    tree = stored({"model": model, "optimizer": split})
    fresh = torch.optim.SGD(model.parameters(), lr=0.3)
    with pytest.raises(InvalidInput, match="add_param_group"):
        restore_into({"model": model, "optimizer": fresh}, tree)
    assert fresh.param_groups[0]["lr"] == 0.3
    report = restore_into({"model": model, "optimizer": fresh}, tree, strict=False)
    assert not report
    assert fresh.param_groups[0]["lr"] == 0.1


def test_parameters_that_only_one_side_has_are_missing_or_unexpected() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    tree = stored({"model": model, "optimizer": optimizer})
    fewer = torch.optim.Adam(model.first.parameters(), lr=0.5)
    with pytest.raises(InvalidInput, match=r"not in the objects:\n    optimizer/state/norm.weight"):
        restore_into({"model": model, "optimizer": fewer}, tree)
    assert not fewer.state
    report = restore_into({"model": model, "optimizer": fewer}, tree, strict=False)
    assert len(fewer.state) == 2
    assert "optimizer/state/last.bias" in report.unexpected

    tree = stored({"model": model, "optimizer": torch.optim.Adam(model.first.parameters())})
    report = restore_into({"model": model, "optimizer": optimizer}, tree, strict=False)
    assert "optimizer/state/last.bias" in report.missing
    assert len(optimizer.state) == 4


def test_state_of_another_shape_is_refused_even_without_the_module() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    tree = stored({"model": model, "optimizer": optimizer})
    wider = Net(width=6)
    fresh = torch.optim.Adam(wider.parameters(), lr=0.01)
    with pytest.raises(
        InvalidInput, match=r"optimizer/state/first.weight/exp_avg: the state has float32 \(5, 3\)"
    ):
        restore_into({"optimizer": fresh}, tree)
    assert not fresh.state


def test_an_optimizer_without_its_module_is_matched_by_order() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    tree = stored({"model": model, "optimizer": optimizer})
    fresh = torch.optim.Adam(net(1).parameters(), lr=0.5)
    report = restore_into({"optimizer": fresh}, tree)
    assert report.skipped == ("model",)
    assert len(fresh.state) == 6
    assert Adapted({"optimizer": fresh}).names_of(fresh)[0][1] == "group0.param1"
    with pytest.raises(InvalidInput, match="without names: restore it together with its module"):
        restore_into({"optimizer": torch.optim.Adam(net(1).first.parameters())}, tree)


def test_an_lbfgs_in_another_order_is_refused() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    train(model, optimizer, range(1))
    tree = stored({"model": model, "optimizer": optimizer})
    fresh = torch.optim.LBFGS(list(model.parameters())[::-1], max_iter=2)
    with pytest.raises(InvalidInput, match="another order of them"):
        restore_into({"model": model, "optimizer": fresh}, tree)


def test_how_a_step_is_computed_stays_the_choice_of_this_process() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    train(model, optimizer, range(2))
    tree = stored({"model": model, "optimizer": optimizer})
    fresh = torch.optim.Adam(model.parameters(), lr=0.5, foreach=True)
    restore_into({"model": model, "optimizer": fresh}, tree)
    group = fresh.param_groups[0]
    assert (group["lr"], group["foreach"], group["fused"]) == (0.01, True, None)


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor() -> None:
    model = net()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    tree = stored({"model": model, "optimizer": optimizer})
    rate.fill_(0.1)
    restore_into({"model": model, "optimizer": optimizer}, tree)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_one_optimizer_over_two_modules_names_parameters_by_module() -> None:
    gen, disc = nn.Linear(2, 2), nn.Linear(2, 1)
    both = torch.optim.SGD([*gen.parameters(), *disc.parameters()], lr=0.1, momentum=0.9)
    for parameter in (*gen.parameters(), *disc.parameters()):
        parameter.grad = torch.ones_like(parameter)
    both.step()
    tree = stored({"gen": gen, "disc": disc, "optimizer": both})
    assert list(tree["optimizer"]["state"]) == [
        "gen.weight",
        "gen.bias",
        "disc.weight",
        "disc.bias",
    ]
    alone = stored({"disc": disc, "optimizer": torch.optim.SGD(disc.parameters())})
    assert alone["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]


def test_parameters_tracked_by_themselves_are_named_by_their_path() -> None:
    latent = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([latent])
    latent.grad = torch.ones(3)
    optimizer.step()
    tree = stored({"latents": [latent], "optimizer": optimizer})
    assert list(tree["optimizer"]["state"]) == ["latents/0"]
    other = torch.ones(3, requires_grad=True)
    fresh = torch.optim.Adam([other])
    restore_into({"latents": [other], "optimizer": fresh}, tree)
    assert torch.equal(other, latent)
    assert bits(fresh.state[other]) == bits(optimizer.state[latent])


class Counting(torch.optim.SGD):
    """An optimizer with a format of its own."""

    rounds = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds = state_dict.pop("rounds")
        super().load_state_dict(state_dict)


def test_an_optimizer_with_its_own_format_is_restored_by_it() -> None:
    model = net()
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.rounds = 7
    train(model, optimizer, range(2))
    tree = stored({"model": model, "optimizer": optimizer})
    assert "first.weight" in tree["optimizer"]["state"]
    expected = train(model, optimizer, range(2, 4))
    other = net(1)
    fresh = Counting(list(other.parameters())[::-1], lr=0.1, momentum=0.9)
    restore_into({"model": other, "optimizer": fresh}, tree)
    assert fresh.rounds == 7
    assert train(other, fresh, range(2, 4)) == expected
    with pytest.raises(InvalidInput, match="takes its state as a whole"):
        restore_into({"model": other, "optimizer": fresh}, tree, only="optimizer/state/*")


def test_only_the_state_or_only_the_options_are_restored_when_asked() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    tree = stored({"model": model, "optimizer": optimizer})
    fresh = torch.optim.Adam(model.parameters(), lr=0.5)
    restore_into({"model": model, "optimizer": fresh}, tree, only="optimizer/state/first.*")
    assert (len(fresh.state), fresh.param_groups[0]["lr"]) == (2, 0.5)
    report: RestoreReport = restore_into(
        {"model": model, "optimizer": fresh}, tree, only="optimizer/param_groups/*/lr"
    )
    assert report.restored == ("optimizer/param_groups/0/lr",)
    assert fresh.param_groups[0]["lr"] == 0.01


def test_a_key_that_the_state_lacks_is_gone_from_a_used_optimizer() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    tree = stored({"model": model, "optimizer": optimizer})
    used = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    train(model, used, range(2))
    restore_into({"model": model, "optimizer": used}, tree)
    assert bits(stored({"model": model, "optimizer": used})) == bits(tree)


@pytest.mark.parametrize(("is_capturable", "expected"), [(False, "cpu"), (True, "meta")])
def test_counters_stay_on_the_cpu_unless_the_whole_step_runs_on_the_device(
    is_capturable: bool, expected: str
) -> None:
    """The meta device stands for any that is not the CPU."""
    model = net()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    tree = stored({"optimizer": optimizer})
    on_device = [torch.empty_like(parameter, device="meta") for parameter in model.parameters()]
    fresh = torch.optim.NAdam(on_device, capturable=is_capturable)
    restore_into({"optimizer": fresh}, tree)
    entry = next(iter(fresh.state.values()))
    devices = {key: value.device.type for key, value in entry.items()}
    assert devices == {
        "step": expected,
        "mu_product": expected,
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", makes())
@pytest.mark.parametrize("flags", [{}, {"capturable": True}], ids=["", "capturable"])
def test_every_stock_optimizer_goes_on_bit_for_bit_on_a_gpu(
    make: Make, flags: dict[str, bool]
) -> None:
    def build(seed: int) -> tuple[nn.Module, Optimizer]:
        model = net(seed).cuda()
        optimizer = make(list(model.parameters()))
        for group in optimizer.param_groups:
            group.update({key: value for key, value in flags.items() if key in group})
        return model, optimizer

    if flags and "capturable" not in build(0)[1].defaults:
        pytest.skip("no capturable form")
    model, optimizer = build(0)
    try:
        train(model, optimizer, range(4))
    except RuntimeError as exc:
        if "fused" not in str(exc):
            raise
        # Adagrad's fused form is for CPUs only in torch 2.11
        pytest.skip(f"torch alone refuses it: {exc}")
    tree = stored({"model": model, "optimizer": optimizer})
    tree = own(tree, torch.device("cpu"))  # as from a file
    expected = train(model, optimizer, range(4, 7))
    other, fresh = build(1)
    restore_into({"model": other, "optimizer": fresh}, tree)
    places = [
        {key: value.device.type for key, value in o.state[p].items() if isinstance(value, Tensor)}
        for o, m in ((optimizer, model), (fresh, other))
        for p in m.parameters()
    ]
    assert places[: len(places) // 2] == places[len(places) // 2 :]
    assert train(other, fresh, range(4, 7)) == expected
