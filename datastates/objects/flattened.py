"""Models of torch's ``FullyShardedDataParallel``, FSDP's first version, and their optimizers: by name, as DTensors of whole parameters.

FSDP lays the parameters of a unit end to end, and each rank keeps a stretch of that. Torch's hooks on state dicts turn such a stretch into
tensors by name. The hooks gather a unit's parameters, so every function here is collective among the ranks of the model,
copies what it returns, and belongs to the training thread. Nothing of FSDP is imported unless somebody has imported it.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from datastates.content.spread import is_spread
from datastates.errors import Unsupported

from .names import canonical_name
from .report import own, write_tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "check_flattened",
    "is_flattened",
    "load_flattened_optimizer",
    "parameters_of",
    "state_of_model",
    "state_of_optimizer",
    "write_model",
]

Tree = Mapping[str, Any]

_EXTRA = "_extra_state"

_meshes: dict[int, tuple[object, Any]] = {}
"""The mesh that stands for a process group, by the group's id; the group is kept, so that its id is not reused."""


def is_flattened(module: nn.Module) -> bool:
    """Whether the module is, or contains, a ``FullyShardedDataParallel``."""
    kind = _kind()
    return kind is not None and any(isinstance(part, kind) for part in module.modules())


def check_flattened(path: str, module: nn.Module) -> None:
    """Refuse models for which torch has no state by names.

    :raises Unsupported: units that are sharded lie beside units that are not, or replicas of shards have no mesh that describes them.
    """
    kinds = {_strategy(unit) for unit in _units(module)}
    if "NO_SHARD" in kinds and len(kinds) > 1:
        raise Unsupported(
            f"{path} is a FullyShardedDataParallel of which some parts are NO_SHARD: use one strategy, or torch's fully_shard"
        )
    if any(kind.lstrip("_").startswith("HYBRID") for kind in kinds) and any(unit._device_mesh is None for unit in _units(module)):
        raise Unsupported(
            f"{path} is a FullyShardedDataParallel with a hybrid strategy, and which ranks hold the same is not known: pass it a"
            " device_mesh of two dimensions, or use torch's fully_shard"
        )


def state_of_model(module: nn.Module) -> OrderedDict[str, Any]:
    """The module's state dict: parameters as DTensors of their whole shape, buffers and everything else as they are."""
    with _settings(module), torch.no_grad():
        state: OrderedDict[str, Any] = module.state_dict(keep_vars=True)  # type: ignore[assignment]  # it is one, and says dict
        trained = {name for parameter, names in _names(module).items() if parameter.requires_grad for name in names}
        for name, value in state.items():
            found = state[name] = _as_dtensor(value)
            if is_spread(found):
                found.requires_grad_(name in trained)
    return state


def parameters_of(module: nn.Module, optimizer: Optimizer) -> list[list[str]] | None:
    """The names of the parameters of each group of an optimizer of this flattened module; None if all its parameters are of other modules.

    :raises Unsupported: it has parameters of this module and of others.
    """
    names = _names(module)
    rows = [[names.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    if not any(map(any, rows)):
        return None
    if not all(map(all, rows)):
        raise Unsupported("an optimizer has parameters of a FullyShardedDataParallel and others: give each an optimizer of its own")
    return [[name for found in row for name in found or ()] for row in rows]


def state_of_optimizer(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """``state`` and ``param_groups`` by the names of parameters; tensors of a parameter's shape are DTensors."""
    with _settings(module):
        found: dict[str, Any] = _kind().optim_state_dict(module, optimizer)
    state = {name: {key: _as_dtensor(value) for key, value in entry.items()} for name, entry in found["state"].items()}
    return {"state": state, "param_groups": found["param_groups"]}


def write_model(module: nn.Module, values: Tree) -> None:
    """Overwrite what the module holds, by canonical name, each with a whole tensor or a DTensor; units are gathered one by one."""
    kept = {canonical_name(module, name): found for name, found in (*module.named_buffers(), *module.named_parameters())}
    for name, part in module.named_modules():
        extra = canonical_name(module, f"{name}.{_EXTRA}" if name else _EXTRA)
        if extra in values:
            part.set_extra_state(own(values[extra]))
    for name, value in values.items():
        live = kept.get(name)
        if live is None or not isinstance(value, torch.Tensor) or live.shape != value.shape:
            continue
        if is_spread(live) or not is_spread(value):  # else a flattened one's, which all ranks gather below
            write_tensor(live, value)
    for unit in _units(module):
        with _kind().summon_full_params(unit, recurse=False, writeback=True), torch.no_grad():
            for name, parameter in _parameters_within(module, unit):
                if name in values:
                    parameter.copy_(_whole(values[name]))


def load_flattened_optimizer(module: nn.Module, optimizer: Optimizer, names: Sequence[Sequence[str]], stored: Tree) -> None:
    """Put a stored tree by names, of whole tensors or DTensors, into the optimizer."""
    by_names = {frozenset(group["params"]): group for group in stored["param_groups"]}
    groups = [{**by_names[frozenset(row)], "params": list(row)} for row in names]
    state = {name: {key: _given(value) for key, value in entry.items()} for name, entry in stored["state"].items()}
    with _settings(module):
        found = _kind().optim_state_dict_to_load(module, optimizer, {"state": state, "param_groups": groups})
    optimizer.load_state_dict(found)


def _names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns

    return _get_param_to_fqns(module)


def _kind() -> Any:
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)


def _units(module: nn.Module) -> list[Any]:
    kind = _kind()
    return [part for part in module.modules() if isinstance(part, kind)]


def _strategy(unit: Any) -> str:
    name: str = unit.sharding_strategy.name
    return name


@contextmanager
def _settings(module: nn.Module) -> Iterator[None]:
    """Have torch save and load the state of this module by name until the end of the block: sharded, or whole if nothing is sharded."""
    from torch.distributed import fsdp

    is_whole = all(_strategy(unit) == "NO_SHARD" for unit in _units(module))
    options: tuple[Any, ...] = (
        (fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig())
        if is_whole
        else (fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig())
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch would have DCP's functions called, which step a fresh optimizer
        with _kind().state_dict_type(module, *options):
            yield


def _parameters_within(module: nn.Module, unit: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a gathered unit, without those of units inside it, by their name in the module."""
    start = next(name for name, part in module.named_modules() if part is unit)
    others = [name for name, part in unit.named_modules() if part is not unit and isinstance(part, _kind())]
    for name, part in unit.named_modules():
        if any(name == other or name.startswith(f"{other}.") for other in others):
            continue
        for each, parameter in part.named_parameters(recurse=False):
            yield canonical_name(module, ".".join(filter(None, (start, name, each)))), parameter


def _as_dtensor(value: Any) -> Any:
    """A ``ShardedTensor``, which torch cuts by rows as ``Shard(0)`` does, as a DTensor of the same memory; anything else as it is."""
    kind = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor"), "ShardedTensor", None)
    if kind is None or not isinstance(value, kind):
        return value
    from torch.distributed.tensor import DTensor, Shard

    shape, mine = value.size(), value.local_shards()
    local = mine[0].tensor.detach() if mine else torch.empty((0, *shape[1:]), dtype=value.dtype)
    mesh = _mesh_of(value._process_group, local.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _mesh_of(group: Any, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if id(group) not in _meshes:
        _meshes[id(group)] = group, DeviceMesh.from_group(group, device)
    return _meshes[id(group)][1]


def _given(value: Any) -> Any:
    """A value in the form that torch takes: it cuts large tensors into copies, and keeps numbers as they are."""
    return _whole(value) if isinstance(value, torch.Tensor) and value.dim() else own(value)


def _whole(value: Any) -> Any:
    return value.full_tensor() if is_spread(value) else value
