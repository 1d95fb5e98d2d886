"""The kinds of optimizers in scripts: torch's own, classes made from them, and wrappers that never called ``Optimizer.__init__``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from datastates.content.encoding import encoder_of
from datastates.content.spread import is_spread
from datastates.errors import InvalidInput, Unsupported

__all__ = ["CLASS", "INNER", "bare", "check_optimizer_form", "class_of", "has_hooks", "left_out", "with_inner"]

CLASS = "optimizer_class"
"""The name under which an optimizer's tree records the class that made it."""

INNER = "inner"
"""The name under which an optimizer's tree has those of the optimizers that it uses and leaves out of its own state, by attribute."""


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether torch's hooks can be put on it: not on a wrapper that never called ``Optimizer.__init__``."""
    return "_optimizer_step_pre_hooks" in vars(optimizer) and "_optimizer_load_state_dict_pre_hooks" in vars(optimizer)


def with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer, and the optimizers among its attributes."""
    found = [optimizer]
    for each in found:
        yield each
        found += [inner for inner in vars(each).values() if isinstance(inner, Optimizer) and not any(inner is other for other in found)]


def left_out(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers among the attributes of a ``bare`` one whose state is not in its ``state_dict``, as SAM leaves out its base optimizer.

    Only torch's own ``state_dict`` is known to leave them out.
    """
    members = vars(optimizer)
    hooks = (members.get(f"_optimizer_state_dict_{when}_hooks") for when in ("pre", "post"))
    if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in members or any(hooks):
        return {}
    inner = {name: found for name, found in members.items() if isinstance(found, Optimizer)}
    return {name: found for name, found in inner.items() if getattr(found, "state", optimizer.state) is not optimizer.state}


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer that owns the state: a wrapper that only passes on the state of another (Accelerate's, for example) stands for that
    one.
    """
    if not has_hooks(optimizer):
        for inner in with_inner(optimizer):
            if inner is not optimizer and _is_of(inner, optimizer):
                return bare(inner)
    return optimizer


def class_of(optimizer: Optimizer) -> str:
    """The class of the state: torch's class if the optimizer derives from one, else its own name, with the class that it wraps."""
    optimizer = bare(optimizer)
    kind = type(optimizer)
    base = next((each for each in kind.__mro__ if each.__module__.startswith("torch.optim.") and each is not Optimizer), None)
    if base is not None:
        return f"torch.optim.{base.__name__}"
    inner = next((each for each in with_inner(optimizer) if each is not optimizer), None)
    return kind.__name__ if inner is None else f"{kind.__name__} of {class_of(inner)}"


def check_optimizer_form(path: str, optimizer: Optimizer) -> None:
    """Raise unless it can be read like an optimizer, and its state can be stored once it has one.

    Only those are known in advance that libraries in wide use have.

    :raises InvalidInput: it has no parameter groups or no state; says what to track instead.
    :raises Unsupported: its state will hold objects that cannot be stored, or this rank has only a part of its state.
    """
    zero: Any = getattr(sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer"), "ZeroRedundancyOptimizer", None)
    if zero is not None and any(isinstance(each, zero) for each in with_inner(optimizer)):
        raise Unsupported(
            f"{path} is a ZeroRedundancyOptimizer, which is not supported: shard the model with torch.distributed.fsdp.fully_shard, or use"
            " a plain optimizer, such as torch.optim.AdamW"
        )
    groups, name, made_in = getattr(optimizer, "param_groups", None), type(optimizer).__name__, type(optimizer).__module__
    if not isinstance(groups, list) or not isinstance(getattr(optimizer, "state", None), Mapping):
        others = [name for name, found in vars(optimizer).items() if isinstance(found, Optimizer)]
        hint = f"track its .{others[0]}" if others else "track the optimizer that it wraps"
        raise InvalidInput(f"{path} is a {name}, an optimizer without param_groups and state: {hint} instead")
    projector: Any = getattr(sys.modules.get("galore_torch.galore_projector"), "GaLoreProjector", None)
    if made_in.startswith("galore_torch.") and any("rank" in group for group in groups) and encoder_of(projector) is None:
        raise Unsupported(
            f"{path} is a {name}, and its state will hold a GaLoreProjector for each parameter, which has no safe encoding: call"
            " datastates.register_encoder(GaLoreProjector, name, encode, decode) first"
        )
    if made_in.startswith("torchao.") and any(is_spread(each) for group in groups for each in group["params"]):
        raise Unsupported(
            f"{path} is a {name} of DTensors, and its state will hold DTensors of quantized tensors, which are not stored: use an"
            " optimizer of torch.optim with FSDP"
        )


def _is_of(inner: Optimizer, outer: Optimizer) -> bool:
    if outer.state is not inner.state or outer.param_groups is not inner.param_groups:
        return False
    stored: Any = outer.state_dict()
    return isinstance(stored, dict) and stored.keys() == {"state", "param_groups"}
