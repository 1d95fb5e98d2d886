"""The state of an optimizer of which each rank keeps a part: torch's ``ZeroRedundancyOptimizer``.

It gives every parameter to one rank, which alone keeps the state of that parameter; all ranks know which rank got which. In this rank's
tree, the state of another rank is tensors without bytes, in the form that the same optimizer gives to a parameter of that shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from datastates.content.spread import give, owners_of, stand_in
from datastates.errors import Unsupported

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["ZeroState"]


class ZeroState:
    """One such optimizer. It notes at each step which parameters had a gradient: these have a state from then on, on whichever rank."""

    __slots__ = ("__weakref__", "_handle", "_optimizer", "_others", "_stepped")

    def __init__(self, optimizer: Any) -> None:
        everyone = torch.distributed.get_world_size()
        if optimizer.world_size != everyone:
            raise Unsupported(
                f"a ZeroRedundancyOptimizer over {optimizer.world_size} of {everyone} ranks: the others do not know who was given what; "
                "give it the process group of all ranks"
            )
        self._optimizer = optimizer
        self._stepped: set[int] = set()
        self._others: dict[int, tuple[torch.Tensor, dict[str, object] | None]] = {}
        this = weakref.ref(self)
        self._handle = optimizer.register_step_pre_hook(lambda *_: _note(this))

    def entries(self) -> Mapping[torch.Tensor, dict[str, object]]:
        """The state of each parameter that has one, on this rank or another, in the order of the parameters."""
        optimizer = self._optimizer
        owner_of, mine = optimizer._param_to_rank, optimizer.optim.state
        found: dict[torch.Tensor, dict[str, object]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owner_of[parameter] == optimizer.rank:
                    if parameter in mine:
                        found[parameter] = _given(mine[parameter], optimizer.rank)
                elif self._has_state(parameter) and (entry := self._of_another(parameter, group, owner_of[parameter])) is not None:
                    found[parameter] = entry
        return found

    def note_step(self) -> None:
        """Note that a step begins."""
        groups = self._optimizer.param_groups
        if len(self._stepped) < sum(len(group["params"]) for group in groups):
            self._stepped.update(id(each) for group in groups for each in group["params"] if each.grad is not None)

    def _has_state(self, parameter: torch.Tensor) -> bool:
        """Whether the rank that owns the parameter keeps a state for it: one was made in a step, or loaded."""
        loaded = self._optimizer.state
        if self._stepped or loaded:
            return id(parameter) in self._stepped or parameter in loaded
        return parameter.requires_grad and bool(self._optimizer.optim.state)  # tracked after its first step: the others have stepped, too

    def _of_another(self, parameter: torch.Tensor, group: Mapping[str, Any], rank: int) -> dict[str, object] | None:
        known = self._others.get(id(parameter))
        if known is None or known[0] is not parameter:
            like = _rehearsed(self._optimizer, parameter, group)
            known = self._others[id(parameter)] = parameter, None if like is None else _standing_in(like, rank)
        return known[1]


def _note(state: weakref.ref[ZeroState]) -> None:
    found = state()
    if found is not None:
        found.note_step()


def _given(entry: dict[str, object], rank: int) -> dict[str, object]:
    """The entry of a parameter of this rank, with its tensors marked as this rank's alone."""
    for value in entry.values():
        if isinstance(value, torch.Tensor) and owners_of(value) is None:
            give(value, [rank])
    return dict(entry)


def _standing_in(entry: Mapping[str, object], rank: int) -> dict[str, object]:
    return {key: stand_in(value, [rank]) if isinstance(value, torch.Tensor) else value for key, value in entry.items()}


def _rehearsed(optimizer: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, object] | None:
    """What the optimizer keeps for such a parameter after a step; None: nothing."""
    try:
        return _stepped(optimizer, torch.empty_like(parameter, device="meta"), group)
    except (RuntimeError, NotImplementedError):  # it looks at numbers
        return _stepped(optimizer, torch.zeros_like(parameter), group)


def _stepped(optimizer: Any, likeness: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, object] | None:
    tried = torch.nn.Parameter(likeness)
    tried.grad = torch.zeros_like(tried)
    options = {key: value for key, value in group.items() if key != "params"}
    made: Optimizer = type(optimizer.optim)([{**options, "params": [tried]}], **optimizer._optim_defaults)
    made.step()
    return made.state.get(tried)
