"""What is tracked becomes a plain tree of the live tensors, under names that wrappers do not
change."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.generators import RngState
from datastates.state.restore import restore_into
from datastates.state.tree import flatten

torch.set_num_threads(1)


class Inner(nn.Module):
    """A user's own submodule that is called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._orig_mod(self.module(x))
        return out


NAMES = [f"module.{name}" for name in ("weight", "bias")]
NAMES += [
    f"_orig_mod.{name}"
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
]


def compiled(model: nn.Module) -> nn.Module:
    # a module gives a module
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "data parallel": nn.DataParallel,
    "compiled data parallel": lambda model: compiled(nn.DataParallel(model)),
}


def names(tree: Any) -> list[str]:
    return list(tree["model"])


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_leave_no_trace_in_names_and_a_users_own_module_keeps_its_name(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    model = Inner()
    tree: Any = Adapted({"model": wrap(model)}).tree()
    assert names(tree) == NAMES
    assert all(
        tree["model"][name] is leaf for name, leaf in model.state_dict(keep_vars=True).items()
    )
    assert tree["model"]._metadata == {"_orig_mod": {"version": 2}}


def test_wrappers_inside_leave_no_trace_either() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), Inner(), nn.Sequential(nn.Linear(2, 2)))
    wrapped = nn.Sequential(
        plain[0], checkpoint_wrapper(compiled(plain[1])), checkpoint_wrapper(plain[2])
    )
    assert names(Adapted({"model": wrapped}).tree()) == names(Adapted({"model": plain}).tree())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    tree: Any = Adapted({"model": wrapped, "optimizer": optimizer}).tree()
    assert tree["optimizer"]["param_groups"][0]["params"][-2:] == ["2.0.weight", "2.0.bias"]


def test_an_averaged_model_is_a_model_of_its_own() -> None:
    assert names(Adapted({"model": AveragedModel(nn.Linear(2, 2))}).tree()) == [
        "n_averaged",
        "module.weight",
        "module.bias",
    ]


def test_the_tree_follows_the_model_as_it_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    adapted = Adapted({"model": model})
    assert names(adapted.tree()) == ["0.weight", "0.bias"]
    model.append(nn.Linear(2, 1, bias=False))
    assert names(adapted.tree()) == ["0.weight", "0.bias", "1.weight"]
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    tree: Any = adapted.tree()
    assert tree["model"]["0.weight"] is model[0].weight


def test_optimizer_state_stands_under_names_and_is_the_live_tensors() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    adapted = Adapted({"model": compiled(model), "optimizer": optimizer})
    empty: Any = adapted.tree()
    assert empty["optimizer"]["state"] == {}
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tree: Any = adapted.tree()
    assert (
        tree["optimizer"]["state"]["weight"]["exp_avg"] is optimizer.state[model.weight]["exp_avg"]
    )
    assert tree["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert tree["optimizer"]["param_groups"][0]["lr"] == 0.5
    tree["optimizer"]["param_groups"][0]["lr"] = 7
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_tied_parameter_has_the_first_of_its_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree: Any = Adapted({"model": model, "optimizer": optimizer}).tree()
    assert tree["model"]["head.weight"] is tree["model"]["embed.weight"]
    assert tree["optimizer"]["param_groups"][0]["params"] == ["embed.weight"]


def test_names_that_the_optimizer_was_given_count_where_nothing_tracked_knows_better() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    tree: Any = Adapted({"optimizer": optimizer}).tree()
    assert tree["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    tree = Adapted({"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}).tree()
    assert tree["optimizer"]["param_groups"][0]["params"] == ["group0.param0", "group0.param1"]


def test_any_nesting_of_what_can_be_tracked_is_walked() -> None:
    gen, disc = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(gen.parameters()), torch.optim.SGD(disc.parameters())]
    objects: dict[str, object] = {
        "models": {"gen": gen, "disc": disc},
        "optimizers": optimizers,
        "schedulers": tuple(torch.optim.lr_scheduler.StepLR(o, 3) for o in optimizers),
        "ema": OrderedDict(weight=torch.zeros(2)),
        "counts": defaultdict(int, a=1),
        "epoch": 3,
    }
    adapted = Adapted(objects)
    tree: Any = adapted.tree()
    assert tree["models"]["gen"]["weight"] is gen.weight
    assert tree["optimizers"][1]["param_groups"][0]["params"] == ["weight", "bias"]
    assert tree["schedulers"][0]["step_size"] == 3
    assert type(tree["ema"]) is OrderedDict
    assert tree["counts"] == {"a": 1}
    assert type(tree["counts"]) is defaultdict
    assert tree["epoch"] == 3
    assert adapted.optimizers == optimizers
    assert adapted.modules == [gen, disc]
    assert flatten(tree).tensors


def test_modules_include_what_wrappers_wrap() -> None:
    model = nn.Linear(1, 1)
    wrapped = compiled(nn.DataParallel(model))
    assert Adapted({"model": wrapped}).modules == [wrapped, wrapped._orig_mod, model]


def test_the_generators_are_read_after_everything_that_may_draw_from_them() -> None:
    class Drawing:
        def state_dict(self) -> dict[str, float]:
            return {"drawn": float(torch.rand(()))}

        def load_state_dict(self, state: object) -> None: ...

    tree: Any = Adapted({"rng": RngState(), "drawing": Drawing()}).tree()
    assert list(tree) == ["rng", "drawing"]
    assert tree["rng"]["torch"] == torch.get_rng_state().numpy().tobytes()


def test_frozen_is_also_what_an_optimizer_keeps_of_a_parameter_that_was_frozen_after_some_steps() -> (
    None
):
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    adapted = Adapted({"model": model, "optimizer": optimizer})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert adapted.frozen() == []
    model[0].weight.requires_grad_(False)
    kept = optimizer.state[model[0].weight]
    assert [id(t) for t in adapted.frozen()] == [id(model[0].weight), *map(id, kept.values())]


def test_fenced_are_the_parameters_and_the_state_of_optimizers_and_nothing_else() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.LBFGS(model[0].parameters(), max_iter=3)
    adapted = Adapted({"model": model, "optimizer": optimizer})
    assert [id(t) for t in adapted.fenced()] == [id(t) for t in model[0].parameters()]
    assert [id(t) for t in adapted.frozen()] == [id(model[2].weight)]

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.arange(8.0).view(4, 2)).square().sum()
        loss.backward()
        return float(loss.item())

    optimizer.step(closure)
    fenced = {id(tensor) for tensor in adapted.fenced()}
    state = optimizer.state[model[0].weight]
    assert {id(state["d"]), id(state["prev_flat_grad"]), *map(id, state["old_dirs"])} <= fenced
    assert not fenced & {id(tensor) for tensor in model[1].buffers()}


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_optimizers_that_step_in_backward_are_found_on_the_parameters() -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    model = nn.Linear(2, 1)
    _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
    adapted = Adapted({"model": compiled(model)})
    model(torch.ones(1, 2)).sum().backward()
    assert len(adapted.optimizers) == 2
    tree: Any = adapted.tree()
    (entry,) = tree["in_backward"]["model"]["weight"]
    # set by torch
    optimizers: Any = model.weight._in_backward_optimizers  # type: ignore[attr-defined]
    assert entry["state"]["weight"]["exp_avg"] is optimizers[0].state[model.weight]["exp_avg"]
    explicit = Adapted({"model": model, "mine": [*optimizers, *model.bias._in_backward_optimizers]})  # type: ignore[attr-defined]
    assert "in_backward" not in explicit.tree()


def test_gradients_stand_beside_when_asked_for() -> None:
    model = nn.Linear(2, 1)
    adapted = Adapted({"model": compiled(model)}, gradients=True)
    assert adapted.tree()["gradients"] == {"model": {}}
    model(torch.ones(1, 2)).sum().backward()
    tree: Any = adapted.tree()
    assert tree["gradients"]["model"]["weight"] is model.weight.grad
    with pytest.raises(InvalidInput, match="'gradients' is taken"):
        Adapted({"gradients": 1}, gradients=True)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        # a list will do
        (DataLoader([1, 2]), r"loader/a is a DataLoader.*run.steps.*StatefulDataLoader"),  # type: ignore[arg-type]
        (lambda: None, r"loader/a is '.*<lambda>', a function, which has no state"),
        (iter([1]), r"loader/a is a list_iterator, whose position cannot be read"),
        ((i for i in range(3)), r"loader/a is a generator, whose position cannot be read"),
        (nn.Linear, r"loader/a is 'Linear', a type"),
        (warnings, r"loader/a is 'module', a module"),
    ],
)
def test_what_cannot_be_tracked_is_refused_by_name(found: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Adapted({"loader": {"a": found}})


def test_a_state_dict_without_a_way_back_is_refused() -> None:
    class OneWay:
        def state_dict(self) -> dict[str, int]:
            return {}

    with pytest.raises(InvalidInput, match="without load_state_dict"):
        Adapted({"it": OneWay()})


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_is_refused_until_it_was_called() -> None:
    model = nn.LazyLinear(2)
    adapted = Adapted({"model": model})
    with pytest.raises(InvalidInput, match="model/weight of a lazy module has no shape yet"):
        adapted.tree()
    model(torch.ones(1, 3))
    assert names(adapted.tree()) == ["weight", "bias"]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "make",
    [torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(2, 2))],
    ids=["script", "trace"],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_compiled_script_is_a_model_like_the_one_it_was_made_of(
    make: Callable[[nn.Module], nn.Module], is_inside: bool
) -> None:
    plain = [nn.Sequential(Inner(), nn.Linear(2, 2)) for _ in range(2)]
    script = make(plain[0].eval())
    there: nn.Module = nn.Sequential(script) if is_inside else script
    here: nn.Module = nn.Sequential(plain[1]) if is_inside else plain[1]
    optimizer, its_optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (there, here)
    )
    there(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    adapted = Adapted({"model": there, "optimizer": optimizer})
    first, tree = adapted.tree(), adapted.tree()
    # a dict
    assert list(first["model"]) == names(tree) == names(Adapted({"model": here}).tree())  # type: ignore[call-overload]
    assert restore_into({"model": here, "optimizer": its_optimizer}, tree)
    assert all(map(torch.equal, here.state_dict().values(), there.state_dict().values()))
    assert restore_into(
        {"model": there, "optimizer": optimizer},
        Adapted({"model": here, "optimizer": its_optimizer}).tree(),
    )
