"""A tree goes back into live objects: all of it, a chosen part, or nothing at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel

from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.generators import RngState
from datastates.state.restore import restore_into
from tests.state.test_optimizer_state import bits, net, stored, train

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)  # a user's own name
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.module(x))
        return out


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = nn.Sequential(Block(), nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 2))
    made(torch.randn(4, 3))
    return made


def compiled(found: nn.Module) -> nn.Module:
    # a module gives a module
    return torch.compile(found, backend="eager")  # type: ignore[return-value]


def checkpointed(found: nn.Module) -> nn.Module:
    found.add_module("1", checkpoint_wrapper(found.get_submodule("1")))
    return found


@pytest.fixture(scope="module")
def _process_group() -> Iterator[None]:
    # public, and left out of torch's __all__
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda found: found,
    "compiled": compiled,
    "data parallel": nn.DataParallel,
    "distributed": DistributedDataParallel,
    "compiled distributed": lambda found: compiled(DistributedDataParallel(found)),
    "checkpointed": checkpointed,
}


@pytest.mark.usefixtures("_process_group")
@pytest.mark.filterwarnings("ignore:.*Backend of process group")
@pytest.mark.parametrize("source", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("target", WRAPPERS.values(), ids=WRAPPERS)
def test_a_state_of_any_wrapper_restores_into_any_other(
    source: Callable[..., nn.Module], target: Callable[..., nn.Module]
) -> None:
    there, here = source(model()), target(model(1))
    optimizer, fresh = torch.optim.AdamW(there.parameters()), torch.optim.AdamW(here.parameters())
    x = torch.randn(4, 3)
    there(x).sum().backward()
    optimizer.step()
    tree = stored({"model": there, "optimizer": optimizer})
    identities = list(map(id, here.parameters()))
    assert restore_into({"model": here, "optimizer": fresh}, tree)
    assert list(map(id, here.parameters())) == identities
    assert bits(stored({"model": here, "optimizer": fresh})) == bits(tree)
    assert torch.equal(here.eval()(x), there.eval()(x))


# --- what is refused, before anything is changed --------------------------------------------------


def everything(seed: int) -> dict[str, Any]:
    made = net(seed)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1 + seed)
    train(made, optimizer, range(seed + 1))
    scheduler = LinearLR(optimizer, total_iters=7 + seed)
    ema = {name: leaf.detach().clone() for name, leaf in made.named_parameters()}
    return {
        "model": made,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "ema": ema,
        "best": [1.0 + seed],
        "rng": RngState(),
    }


def test_everything_comes_back() -> None:
    tree = stored(everything(1))
    objects = everything(2)
    held = [id(tensor) for tensor in objects["ema"].values()]
    report = restore_into(objects, tree)
    assert report
    assert bits(stored(objects)) == bits(tree)
    assert [id(tensor) for tensor in objects["ema"].values()] == held
    assert len(set(report.restored)) == len(report.restored)
    assert str(report).startswith("restored ")


def break_shape(tree: dict[str, Any]) -> None:
    tree["model"]["last.weight"] = torch.zeros(9, 9)


def break_dtype(tree: dict[str, Any]) -> None:
    tree["model"]["last.bias"] = tree["model"]["last.bias"].double()


def break_kind(tree: dict[str, Any]) -> None:
    tree["model"]["last.bias"] = "nothing like a tensor"


def break_name(tree: dict[str, Any]) -> None:
    tree["model"]["lasst.weight"] = tree["model"].pop("last.weight")


def break_optimizer(tree: dict[str, Any]) -> None:
    tree["optimizer"]["state"]["last.weight"]["exp_avg"] = torch.zeros(3)


def break_optimizer_form(tree: dict[str, Any]) -> None:
    tree["optimizer"] = {"no": "optimizer"}


def break_module(tree: dict[str, Any]) -> None:
    tree["model"] = [1, 2]


def break_list(tree: dict[str, Any]) -> None:
    tree["best"] = {"a": 1}


def drop_object(tree: dict[str, Any]) -> None:
    del tree["scheduler"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            break_shape,
            r"model/last.weight: the state has float32 \(9, 9\), the object float32 \(2, 5\)",
        ),
        (break_dtype, r"model/last.bias: the state has float64 \(2,\), the object float32"),
        (break_kind, r"model/last.bias: the state has 'nothing like a tensor'"),
        (
            break_name,
            (
                r"not in the state:\n    model/last.weight \(close: model/lasst.weight\)\n  not in"
                r" the objects:\n    model/lasst.weight"
            ),
        ),
        (break_optimizer, r"optimizer/state/last.weight/exp_avg: the state has float32 \(3,\)"),
        (break_optimizer_form, r"optimizer: the state has dict, the object AdamW"),
        (break_module, r"model: the state has list, the object Net"),
        (break_list, r"best: the state has dict, the object list"),
        (drop_object, r"not in the state:\n    scheduler"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_changed(
    damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    tree = stored(everything(1))
    damage(tree)
    objects = everything(2)
    before = bits(stored(objects))
    with pytest.raises(InvalidInput, match=message):
        restore_into(objects, tree)
    assert bits(stored(objects)) == before


def test_without_strict_what_fits_is_restored_and_the_rest_reported() -> None:
    tree = stored(everything(1))
    for damage in (break_shape, break_dtype, break_optimizer, drop_object):
        damage(tree)
    objects = everything(2)
    old = objects["model"].last.weight.clone()
    report = restore_into(objects, tree, strict=False)
    assert not report
    assert [item.path for item in report.mismatched] == [
        "model/last.weight",
        "optimizer/state/last.weight",
    ]
    assert [item.path for item in report.converted] == ["model/last.bias"]
    assert report.missing == ("scheduler",)
    assert torch.equal(objects["model"].last.weight, old)
    assert torch.equal(objects["model"].last.bias.double(), tree["model"]["last.bias"])
    assert torch.equal(objects["model"].first.weight, tree["model"]["first.weight"])
    assert "mismatched:\n    model/last.weight" in str(report)
    assert report.summary().endswith("1 missing, 2 mismatched, 1 converted")


def test_a_float_state_is_converted_into_a_half_model_only_without_strict() -> None:
    tree = stored({"model": model()})
    half: Any = model(1).half()
    with pytest.raises(InvalidInput, match="float16"):
        restore_into({"model": half}, tree)
    report = restore_into({"model": half}, tree, strict=False)
    assert report
    assert len(report.converted) == len(
        [p for p in half.state_dict().values() if p.dtype == torch.float16]
    )
    assert torch.equal(half[2].weight, model()[2].weight.half())


def test_long_lists_are_cut() -> None:
    tree = stored({"model": nn.Sequential(*[nn.Linear(1, 1) for _ in range(20)])})
    with pytest.raises(InvalidInput, match="… and 32 more"):
        restore_into({"model": nn.Sequential(nn.Linear(1, 1))}, tree)


def test_an_object_that_fails_is_named_with_what_was_changed_before() -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    made = nn.Linear(1, 1)
    scheduler = LinearLR(torch.optim.SGD(made.parameters()))
    tree = stored({"scheduler": scheduler, "it": Stubborn(), "model": nn.Linear(1, 1)})
    before = bits(stored({"model": made}))
    with pytest.raises(
        InvalidInput,
        match=(
            r"it did not take its state \(KeyError: 'b'\): it and scheduler may be changed, the"
            r" rest is not"
        ),
    ):
        restore_into({"scheduler": scheduler, "it": Stubborn(), "model": made}, tree)
    assert bits(stored({"model": made})) == before


# --- modules --------------------------------------------------------------------------------------


def tied(seed: int) -> Any:
    torch.manual_seed(seed)
    made = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    made["head"].weight = made["embed"].weight
    return made


def test_tied_weights_stay_tied() -> None:
    tree = stored({"model": tied(0)})
    assert tree["model"]["embed.weight"] is tree["model"]["head.weight"]
    here = tied(1)
    restore_into({"model": here}, tree)
    assert here["head"].weight is here["embed"].weight
    assert torch.equal(here["embed"].weight, tree["model"]["embed.weight"])
    tree["model"]["head.weight"] = tree["model"]["head.weight"].clone()
    assert restore_into({"model": tied(2)}, tree)
    del tree["model"]["head.weight"]
    assert restore_into({"model": tied(2)}, tree)


def test_a_tied_model_refuses_a_state_whose_weights_differ() -> None:
    free = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    here = tied(1)
    before = bits(stored({"model": here}))
    with pytest.raises(
        InvalidInput,
        match=r"model/head.weight: the state has another value than model/embed.weight",
    ):
        restore_into({"model": here}, stored({"model": free}))
    assert bits(stored({"model": here})) == before
    assert restore_into({"model": free}, stored({"model": here}))


class Versioned(nn.Module):
    """Extra state, a version, hooks, a buffer that repeats one number."""

    _version = 3

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note, self.seen = note, []  # type: ignore[var-annotated]  # of whatever the hook gets
        self.register_buffer("table", torch.zeros(1).expand(4))
        # torch has no types for it
        self.register_load_state_dict_pre_hook(
            lambda *args: self.seen.append(args[3].get("version"))
        )  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note, "tensor": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]
        self.tensor = state["tensor"]


def test_extra_state_versions_hooks_and_repeating_buffers_work_as_in_load_state_dict() -> None:
    there = nn.Sequential(Versioned("there"), nn.Linear(1, 1))
    buffer: Any = there[0].table
    buffer[:1].fill_(7)
    tree = stored({"model": there})
    tree["model"]["0.table"] = torch.full((4,), 7.0)
    here = nn.Sequential(Versioned("here"), nn.Linear(1, 1))
    restore_into({"model": compiled(here)}, tree)
    restored: Any = here[0]
    assert restored.note == "there"
    assert restored.seen == [3]
    assert restored.table.tolist() == [7.0] * 4
    assert restored.table.stride() == (0,)
    restored.tensor.zero_()
    assert tree["model"]["0._extra_state"]["tensor"].tolist() == [1, 1]


def test_plain_version_1_modules_are_told_their_version() -> None:
    seen: list[Any] = []
    here = nn.Linear(1, 1)
    tree = stored({"model": here})
    here.register_load_state_dict_pre_hook(lambda *args: seen.append(args[3]))
    restore_into({"model": here}, tree)
    assert seen == [{"version": 1}]


def test_averaged_models_and_frozen_parameters_come_back() -> None:
    there = AveragedModel(model())
    there.update_parameters(model(5))
    tree = stored({"ema": there})
    here = AveragedModel(model(1))
    here.requires_grad_(False)
    restore_into({"ema": here}, tree)
    assert here.n_averaged == 1
    assert bits(stored({"ema": here})) == bits(tree)
    assert not any(parameter.requires_grad for parameter in here.parameters())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_target_and_a_meta_target_are_refused() -> None:
    tree = stored({"model": nn.Linear(3, 2)})
    with pytest.raises(InvalidInput, match="lazy module has no shape yet"):
        restore_into({"model": nn.LazyLinear(2)}, tree, strict=False)
    with pytest.raises(InvalidInput, match=r"the object float32 \(2, 3\) on meta"):
        restore_into({"model": nn.Linear(3, 2, device="meta")}, tree)


def test_gradients_come_back_and_those_that_were_none_too() -> None:
    there, here = model(), model(1)
    there[2](torch.ones(1, 3)).sum().backward()
    tree = stored({"model": there}, gradients=True)
    here(torch.ones(4, 3)).sum().backward()
    held = here[2].weight.grad
    report = restore_into({"model": here}, tree)
    assert here[2].weight.grad is held
    assert torch.equal(here[2].weight.grad, there[2].weight.grad)
    assert here[0].module.weight.grad is None
    assert "gradients/model/2.weight" in report.restored
    here.zero_grad()
    restore_into({"model": here}, tree)
    here[2].weight.grad.zero_()
    assert torch.equal(tree["gradients"]["model"]["2.weight"], torch.ones(2, 3))
    here.zero_grad()
    restore_into({"model": here}, tree, only="model")
    assert here[2].weight.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_optimizers_that_step_in_backward_come_back() -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    def make(seed: int) -> nn.Module:
        made: nn.Module = model(seed)
        _apply_optimizer_in_backward(torch.optim.Adam, made.parameters(), {"lr": 0.1})
        return made

    def losses(made: nn.Module) -> list[float]:
        out = []
        for step in range(3):
            loss = (
                made(torch.randn(4, 3, generator=torch.Generator().manual_seed(step)))
                .square()
                .sum()
            )
            loss.backward()
            out.append(loss.item())
        return out

    there, here = make(0), make(1)
    losses(there)
    tree = stored({"model": there})
    restore_into({"model": compiled(here)}, tree)
    assert losses(here) == losses(there)


# --- everything else ------------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "lambda": lambda o: LambdaLR(o, lambda epoch: 0.9**epoch),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, total_iters=3), CosineAnnealingLR(o, 10)], [3]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_go_on(make: Callable[[Any], Any]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        made = net(1)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.9)
        return made, optimizer, make(optimizer)

    def rates(
        made: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range
    ) -> list[float]:
        out = []
        for step in steps:
            train(made, optimizer, range(step, step + 1))
            scheduler.step()
            out.append(optimizer.param_groups[0]["lr"])
        return out

    made, optimizer, scheduler = build()
    rates(made, optimizer, scheduler, range(5))
    tree = stored({"model": made, "optimizer": optimizer, "scheduler": scheduler})
    fresh = build()
    restore_into(dict(zip(("model", "optimizer", "scheduler"), fresh, strict=True)), tree)
    assert rates(*fresh, range(5, 9)) == rates(made, optimizer, scheduler, range(5, 9))


def test_plateau_schedulers_and_gradient_scalers_come_back() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.5)
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0, 3.0):
        plateau.step(loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    tree = stored({"plateau": plateau, "scaler": scaler})
    others: dict[str, Any] = {
        "plateau": ReduceLROnPlateau(optimizer, patience=0),
        "scaler": torch.amp.GradScaler("cpu"),
    }
    restore_into(others, tree)
    assert others["scaler"].get_scale() == 64.0
    assert others["plateau"].state_dict() == plateau.state_dict()


def test_what_an_object_keeps_shares_no_memory_with_the_tree() -> None:
    class Keeping:
        state: dict[str, Any]

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    keeping = Keeping()
    keeping.state = {}
    tree = {"it": {"a": torch.ones(2), "b": [torch.ones(2)]}}
    restore_into({"it": keeping}, tree)
    keeping.state["a"].zero_()
    keeping.state["b"][0].zero_()
    assert bits(tree) == bits({"it": {"a": torch.ones(2), "b": [torch.ones(2)]}})


def test_plain_containers_become_what_the_state_has() -> None:
    tensor, array = torch.zeros(3), np.zeros(2)
    live: dict[str, Any] = {
        "kept": tensor,
        "grown": torch.zeros(1),
        "array": array,
        "gone": 1,
        "in": {"deep": [tensor.clone(), 2]},
    }
    live_list = [1, [2]]
    tree: dict[str, Any] = {
        "box": {
            "kept": torch.ones(3),
            "grown": torch.ones(5),
            "array": np.ones(2),
            "new": (1, torch.ones(1)),
            "in": {"deep": [torch.ones(3), 3]},
        },
        "list": [5, [6, 7], 8],
    }
    inner = live["in"]["deep"]
    report = restore_into({"box": live, "list": live_list}, tree)
    assert bits(live) == bits({**tree["box"], "array": live["array"]})
    assert live["kept"] is tensor
    assert live["array"] is array
    assert array.tolist() == [1, 1]
    assert live["in"]["deep"] is inner
    assert live_list == [5, [6, 7], 8]
    assert "box/new/1" in report.restored
    live["grown"].zero_()
    live["new"][1].zero_()
    assert bits(tree["box"]["grown"]) == bits(torch.ones(5))
    assert bits(tree["box"]["new"][1]) == bits(torch.ones(1))


def test_plain_values_are_handed_to_the_caller() -> None:
    tensor = torch.zeros(2)
    objects = {"epoch": 0, "name": "a", "pair": (tensor, 1), "same": 5, "none": None}
    tree = {"epoch": 3, "name": "b", "pair": (torch.ones(2), 2), "same": 5, "none": 1.5}
    report = restore_into(objects, tree)
    assert dict(report.values, pair=None) == {**tree, "pair": None}
    pair: Any = report.values["pair"]
    assert pair[0] is tensor
    assert pair[1] == 2
    assert tensor.tolist() == [1, 1]
    assert restore_into(objects, tree, only="epoch").values == {"epoch": 3}


def test_a_tensor_that_is_tracked_by_itself_must_fit() -> None:
    live = torch.zeros(2)
    assert restore_into({"it": live}, {"it": torch.ones(2)})
    assert live.tolist() == [1, 1]
    with pytest.raises(
        InvalidInput, match=r"it: the state has float32 \(3,\), the object float32 \(2,\)"
    ):
        restore_into({"it": live}, {"it": torch.ones(3)})


def test_what_holds_a_state_of_its_own_is_never_replaced() -> None:
    made = nn.Linear(1, 1)
    live: dict[str, Any] = {"models": [made], "m": {"a": made}, "t": (made,)}
    damages: list[dict[str, Any]] = [
        {"models": []},
        {"models": 3},
        {"m": {}},
        {"m": 1},
        {"t": ()},
        {"m": {"a": None}},
    ]
    for damaged in damages:
        tree = {**stored(live), **damaged}
        with pytest.raises(InvalidInput, match="nothing was changed"):
            restore_into(live, tree)
        assert not restore_into(live, tree, strict=False)
        assert live["models"] == [made]
        assert live["m"] == {"a": made}
        assert live["t"] == (made,)


def test_a_tensor_that_takes_the_place_of_another_is_trained_as_that_is_if_it_can_be() -> None:
    live = {
        "grown": nn.Parameter(torch.zeros(2)),
        "rounded": torch.zeros(2, requires_grad=True),
        "frozen": torch.zeros(2),
    }
    tree = {
        "grown": torch.ones(3),
        "rounded": torch.ones(2, dtype=torch.int64),
        "frozen": torch.ones(3),
    }
    assert restore_into({"it": live}, {"it": tree})
    assert all(map(torch.equal, live.values(), tree.values()))
    assert isinstance(live["grown"], nn.Parameter)
    assert [each.requires_grad for each in live.values()] == [True, False, False]


leaves: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
)
leaves = leaves | st.builds(
    lambda n, v: torch.full((n,), v), st.integers(0, 3), st.floats(-9, 9, width=32)
)
trees = st.recursive(
    leaves,
    lambda child: (
        st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=3), child, max_size=3)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(max_size=3), trees, max_size=3),
    st.dictionaries(st.text(max_size=3), trees, max_size=3),
)
def test_any_plain_container_becomes_any_other(live: dict[str, Any], tree: dict[str, Any]) -> None:
    before = bits(tree)
    assert restore_into({"it": live}, {"it": tree})
    assert bits(live) == before
    assert bits(tree) == before


def test_a_state_restores_into_a_live_tree_of_its_own_module_without_sharing() -> None:
    made = model()
    tree = OrderedDict(Adapted({"model": made}).tree())
    assert restore_into({"model": made}, tree)
