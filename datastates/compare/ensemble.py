"""Predictions from several states: one module, many sets of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.func import functional_call

from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.maintenance.core import Core
from datastates.maintenance.loading import load
from datastates.state.model import ModelState
from datastates.state.report import describe
from datastates.state.tree import join

_SHOWN = 6


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """The predictions of the members: ``outputs[i]`` is member ``i``'s output."""

    outputs: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """The mean over the members, in the outputs' dtype."""
        return self.outputs.mean(0)

    @property
    def spread(self) -> torch.Tensor:
        """The standard deviation over the members (the population's: 0 for one member)."""
        return self.outputs.std(0, correction=0)


class Ensemble:
    """The weights and buffers of some states, and one module that computes with each of them in
    turn. Made by ``Repository.ensemble``.

    The module's own weights are not touched, and no second module is made. Each member was loaded
    once. Tensors that are the same in several members, such as a frozen backbone, are held once.
    ``bytes_held`` is the memory of all members together. Predictions are made in evaluation mode
    and without gradients. Afterwards each part of the module returns to its earlier mode.

    One thread at a time may use it, because it uses the module while it makes a prediction.
    """

    def __init__(
        self,
        states: Sequence[State],
        module: nn.Module,
        weights: Sequence[dict[str, torch.Tensor]],
        pick: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        self.members = tuple(states)
        """The states, in the order in which they were named."""
        self._module, self._weights, self._pick = module, tuple(weights), pick
        self._buffers = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))

    @property
    def bytes_held(self) -> int:
        """The bytes of all members' tensors together, each distinct one counted once."""
        return sum(
            {
                id(tensor): tensor.nbytes
                for weights in self._weights
                for tensor in weights.values()
            }.values()
        )

    def __len__(self) -> int:
        return len(self.members)

    def __call__(self, *args: Any, **kwargs: Any) -> Prediction:
        """Every member's output for one input, which the module gets unchanged.

        :raises InvalidInput: the module's output is not a tensor. ``pick=`` must name the part of
            it that is the prediction.
        """
        return Prediction(torch.stack(list(self.each(*args, **kwargs))))

    def each(self, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        """The members' outputs one after the other, if only one of them should be in memory at a
        time."""
        for weights in self._weights:
            with _evaluating(self._module), torch.no_grad():
                # A module may write to its buffers even so, and members may share them: each call
                # gets copies.
                own = {
                    name: tensor.clone() if name in self._buffers else tensor
                    for name, tensor in weights.items()
                }
                output = functional_call(self._module, own, args, kwargs)
                output = output if self._pick is None else self._pick(output)
            if not isinstance(output, torch.Tensor):
                raise InvalidInput(
                    f"{type(self._module).__name__} gives a {type(output).__name__}: choose a"
                    " tensor of it with pick=, such as pick=lambda output: output.logits"
                )
            yield output

    def __repr__(self) -> str:
        return (
            f"<Ensemble of {len(self.members)} {type(self._module).__name__}, {self.bytes_held}"
            " bytes>"
        )


def load_ensemble(
    core: Core,
    revs: Sequence[str | State],
    module: nn.Module,
    *,
    only: str,
    pick: Callable[[Any], torch.Tensor] | None,
) -> Ensemble:
    """See ``Repository.ensemble``."""
    if isinstance(revs, str) or not revs:
        raise InvalidInput(f"an ensemble takes a list of states, not {revs!r}")
    if not isinstance(module, nn.Module):
        raise InvalidInput(
            f"the skeleton of an ensemble is a torch.nn.Module, not a {type(module).__name__}"
        )
    states = [core.state(rev) for rev in revs]
    wanted = _wanted(only, module)
    held: dict[str, list[torch.Tensor]] = {}
    weights = []
    for state in states:
        stored = _load(core, state, only)
        _check_fit(state, only, wanted, stored)
        chosen = {
            each.raw: _placed(stored[name], each.live, held.setdefault(each.raw, []))
            for name, each in wanted.items()
            if not each.tied
        }
        weights.append(chosen)
    return Ensemble(states, module, weights, pick)


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A tensor of the module, its own name, and the canonical name of the earlier one to which
    it is tied."""

    live: torch.Tensor
    raw: str
    tied: str | None


def _wanted(only: str, module: nn.Module) -> dict[str, _Wanted]:
    """The tensors that a state must have, by canonical name."""
    model = ModelState(only, module)
    tree = model.tree()
    raw_names = model.raw_names()
    owned = {
        name
        for named in (module.named_parameters, module.named_buffers)
        for name, _ in named(remove_duplicate=False)
    }
    first: dict[int, str] = {}
    wanted: dict[str, _Wanted] = {}
    for name, live in tree.items():
        if isinstance(live, torch.Tensor) and raw_names[name] in owned:
            tied = first.setdefault(id(live), name)
            wanted[name] = _Wanted(live, raw_names[name], None if tied == name else tied)
    return wanted


def _load(core: Core, state: State, only: str) -> dict[str, Any]:
    try:
        tree: Any = load(core, state, only=only)
    except InvalidInput as exc:
        raise InvalidInput(f"state {state.uid} has no module {only!r}: {exc}") from exc
    for part in [join("", only)] if only in tree else only.split("/"):
        tree = (
            next((child for key, child in tree.items() if join("", key) == part), None)
            if isinstance(tree, dict)
            else None
        )
    if not isinstance(tree, dict):
        raise InvalidInput(
            f"state {state.uid} has no module {only!r}: name with only= what it was tracked as"
        )
    return tree


def _check_fit(state: State, only: str, wanted: dict[str, _Wanted], stored: dict[str, Any]) -> None:
    lines = [f"not in the state: {join(only, name)}" for name in wanted if name not in stored]
    lines += [
        f"not in the module: {join(only, name)}"
        for name, value in stored.items()
        if name not in wanted and _is_tensor(value)
    ]
    for name, each in ((name, each) for name, each in wanted.items() if name in stored):
        found = stored[name]
        if not _is_tensor(found) or (found.shape, found.dtype) != (
            each.live.shape,
            each.live.dtype,
        ):
            lines.append(
                f"{join(only, name)}: the state has {describe(found)}, the module"
                f" {describe(each.live)}"
            )
        elif each.tied in stored and not _same_bytes(found, stored[each.tied]):
            lines.append(
                f"{join(only, name)}: the module has it tied to {join(only, each.tied)}, the state"
                " has another value"
            )
    if lines:
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise InvalidInput(
            "\n  ".join([f"state {state.uid} does not fit the module:", *lines[:_SHOWN], *more])
        )


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _placed(stored: torch.Tensor, live: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
    """The tensor on the module's device; an earlier member's tensor if that has the same bytes."""
    tensor = stored.to(live.device)
    for other in held:
        if _same_bytes(tensor, other):
            return other
    held.append(tensor)
    return tensor


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bytes: a NaN equals itself, and -0 does not equal 0."""
    return one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put every part into evaluation mode, and restore its mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, is_training in modes:
            part.training = is_training
