"""What a tracker remembers of the last capture never hides a change of what is tracked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from datastates.state.adapters import Adapted
from datastates.state.tree import Flat, flatten

Mutation = Callable[[Any, Optimizer], object]

OTHER = torch.ones(3)


def make() -> tuple[nn.Sequential, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.PReLU(), nn.Identity()),
        nn.Linear(4, 2),
    )
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def flat_of(adapted: Adapted, previous: Flat | None = None) -> Flat:
    return flatten(adapted.tree(), previous, adapted.lasting)


def rename(model: Any, optimizer: Optimizer) -> None:
    model[0].weighting = model[0].weight
    del model[0].weight


def move_to_the_next(model: Any, optimizer: Optimizer) -> None:
    parameter = model[2][0].weight
    model[2][1].register_parameter("weight", parameter)
    del model[2][0].weight


def add_state_hook(model: Any, optimizer: Optimizer) -> None:
    def drop_last(
        module: nn.Module, state: dict[str, object], prefix: str, metadata: object
    ) -> None:
        del state["3.bias"]

    model._register_state_dict_hook(drop_last)


def patch_state_dict(model: Any, optimizer: Optimizer) -> None:
    model.state_dict = lambda **options: OrderedDict(other=OTHER)  # as some wrappers do


def patch_saving(model: Any, optimizer: Optimizer) -> None:
    def save(state: dict[str, object], prefix: str, keep_vars: bool) -> None:
        state[prefix + "other"] = OTHER

    model[3]._save_to_state_dict = save


def reload_optimizer(model: Any, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def hide_buffer(model: Any, optimizer: Optimizer) -> None:
    model[1].register_buffer("running_mean", model[1].running_mean, persistent=False)


def replace_entry(model: Any, optimizer: Optimizer) -> None:
    optimizer.state[model[0].weight]["exp_avg"] = torch.full((4, 4), 7.0)


def drop_entry(model: Any, optimizer: Optimizer) -> None:
    del optimizer.state[model[0].weight]["exp_avg_sq"]


def number_in_entry(model: Any, optimizer: Optimizer) -> None:
    optimizer.state[model[0].weight]["rounds"] = 3


def another_list_of_parameters(model: Any, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    group["params"] = list(reversed(group["params"]))


MUTATIONS: dict[str, Mutation] = {
    "nothing": lambda model, optimizer: None,
    "a parameter is another object": lambda model, optimizer: setattr(
        model[0], "weight", nn.Parameter(torch.ones(4, 4))
    ),
    "a parameter has another name": rename,
    "a parameter moved to the next module": move_to_the_next,
    "a buffer was added": lambda model, optimizer: model[0].register_buffer("seen", torch.zeros(3)),
    "a buffer is not stored any more": hide_buffer,
    "a module was added": lambda model, optimizer: model.append(nn.Linear(2, 2)),
    "a module was replaced": lambda model, optimizer: model.__setitem__(3, nn.Linear(4, 2)),
    "a module was taken out": lambda model, optimizer: model.pop(3),
    "two modules changed places": lambda model, optimizer: model._modules.update(
        {"0": model[3], "3": model[0]}
    ),
    "a hook changes what is stored": add_state_hook,
    "the model has a state_dict of its own": patch_state_dict,
    "a part saves itself in another way": patch_saving,
    "the optimizer was loaded": reload_optimizer,
    "a group was added": lambda model, optimizer: optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))], "lr": 0.5}
    ),
    "the learning rate is another": (
        lambda model, optimizer: optimizer.param_groups[0].update(lr=0.25)
    ),
    "the parameters come in another order": another_list_of_parameters,
    "a tensor of the state is another object": replace_entry,
    "a tensor of the state is gone": drop_entry,
    "the state has a number": number_in_entry,
    "a parameter has no state any more": lambda model, optimizer: optimizer.state.pop(
        model[0].weight
    ),
}


@pytest.mark.parametrize("change", MUTATIONS)
def test_a_change_between_captures_is_seen(change: str) -> None:
    model, optimizer = make()
    objects = {"model": model, "optimizer": optimizer}
    adapted = Adapted(objects)
    before = flat_of(adapted)
    again = flat_of(adapted, before)
    assert again.skeleton is before.skeleton
    assert again.tensors is before.tensors

    MUTATIONS[change](model, optimizer)
    now, anew = flat_of(adapted, again), flat_of(Adapted(objects))

    assert now.skeleton.nodes == anew.skeleton.nodes
    assert now.values == anew.values
    assert [(leaf.path, id(leaf.tensor)) for leaf in now.tensors] == [
        (leaf.path, id(leaf.tensor)) for leaf in anew.tensors
    ]
    assert flat_of(adapted, now).values == anew.values


def test_numbers_of_an_optimizer_are_read_every_time() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    adapted = Adapted({"model": model, "optimizer": optimizer})
    flat = None
    for count in range(1, 4):
        optimizer.step(lambda: model(torch.ones(1, 2)).sum())
        flat = flat_of(adapted, flat)
        assert count in flat.values


def sparse(places: list[int]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([places]), torch.ones(len(places)), (4,), check_invariants=True
    )


def test_a_sparse_buffer_that_grew_is_not_remembered() -> None:
    model: Any = nn.Module()
    model.register_buffer("seen", sparse([0]))
    adapted = Adapted({"model": model})
    before = flat_of(adapted)
    with torch.no_grad():
        model.seen.add_(sparse([1, 2]))

    now, anew = flat_of(adapted, before), flat_of(Adapted({"model": model}))

    assert [leaf.tensor.tolist() for leaf in now.tensors] == [
        leaf.tensor.tolist() for leaf in anew.tensors
    ]


def test_names_follow_a_module_whose_names_changed() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    adapted = Adapted({"model": model, "optimizer": optimizer})
    before = flat_of(adapted)
    model.scale = model.weight
    del model.weight

    paths = [leaf.path for leaf in flat_of(adapted, before).tensors]

    assert "optimizer/state/scale/momentum_buffer" in paths
    assert "optimizer/state/weight/momentum_buffer" not in paths


def test_what_a_part_saves_by_a_method_of_its_own_is_asked_for_every_time() -> None:
    counts = iter(range(9))
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model[0]._save_to_state_dict = lambda state, prefix, keep_vars: state.update(
        {prefix + "count": next(counts)}
    )
    adapted = Adapted({"model": model})
    assert [adapted.tree()["model"] for _ in range(3)] == [{"0.count": count} for count in range(3)]


def test_a_class_that_saves_in_another_way_from_now_on_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = make()
    adapted = Adapted({"model": model})
    adapted.tree()

    def save(self: nn.Module, state: dict[str, object], prefix: str, keep_vars: bool) -> None:
        state[prefix + "other"] = OTHER

    monkeypatch.setattr(nn.PReLU, "_save_to_state_dict", save)
    assert "2.0.other" in adapted.tree()["model"]  # type: ignore[operator]  # a dict
