"""What a variant's configuration sets in restored optimizers: its learning rate wins over the one that was restored.

``train`` builds optimizers by the variant's configuration; then the state from which the variant forks brings the parent's options back.
The options that the variant sets are put back to the values with which they were built. A setting means an option

- that has its name, or the last part of its name (``optimizer.lr``), or of which its name is a common one (``wd``);
- or else, an option that was built with exactly its value, and came back with another.

A learning rate moves the scheduler too: it keeps its place in its schedule, and goes on with the rates with which it was built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from datastates.errors import InvalidInput, Unsupported
from datastates.lineage.states import Value
from datastates.objects.adapters import has_state, parts
from datastates.objects.optimizer_restore import set_option
from datastates.objects.optimizer_state import options_of
from datastates.objects.optimizers import bare
from datastates.objects.prepared import bare_scheduler
from datastates.objects.schedules import Schedule

__all__ = ["Applied", "Built"]

_COMMON = {
    "lr": ("learning_rate", "learningrate", "base_lr", "rate", "eta"),
    "weight_decay": ("wd", "decay", "weightdecay", "l2"),
    "betas": ("beta", "beta1", "beta2", "b1", "b2", "beta_1", "beta_2"),
    "eps": ("epsilon",),
    "momentum": ("mom",),
}
_MEANT = {name: option for option, names in _COMMON.items() for name in names}


@dataclass(frozen=True, slots=True)
class Applied:
    """What was set, one line for each option; and the settings that reached no option, which may mean something else to ``train``."""

    options: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = ", ".join(self.options) or "nothing of an optimizer"
        return said + (f"; no optimizer was built with its {', '.join(self.others)}" if self.others else "")


class Built:
    """The optimizers and schedulers among some objects, as they were built; made before the objects are restored."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        found = [bare_scheduler(each) for _, each in parts(objects)]
        self._groups = {id(opt): (opt, _options(opt)) for opt in (bare(each) for each in found if isinstance(each, Optimizer))}
        ours = [each for each in found if self._is_schedule(each)]
        self._schedules = [Schedule(each) for each in ours]

    def put_back(self, config: Mapping[str, Value]) -> Applied:
        """Put back the options that a configuration sets, now that the objects are restored.

        :raises InvalidInput: a scheduler cannot follow; nothing was changed.
        """
        known = {name for _, groups in self._groups.values() for group in groups for name in group}
        meant = {key: self._meant(key, value, known) for key, value in config.items()}
        wins = set[str]().union(*meant.values())
        moves = self._moves() if "lr" in wins else []
        before = {key: _options(optimizer) for key, (optimizer, _) in self._groups.items()}
        for optimizer, groups in self._groups.values():
            for live, fresh in zip(optimizer.param_groups, groups, strict=False):
                _put(live, fresh, wins)
        for live, rate, settle in moves:
            set_option(live, "lr", rate)
            settle()
        lines = [line for key, (opt, _) in self._groups.items() for line in _lines(before[key], _options(opt), wins)]
        others = [key for key, names in meant.items() if key != "seed" and not self._reached(config[key], names, before)]
        return Applied(tuple(dict.fromkeys(lines)), tuple(others))

    def _reached(self, value: Value, names: set[str], before: Mapping[int, Sequence[Mapping[str, Any]]]) -> bool:
        """Whether an optimizer was built with a setting: with its value, or at least with another value than came back."""
        pairs = [(old, fresh) for key, (_, groups) in self._groups.items() for old, fresh in zip(before[key], groups, strict=False)]
        built = [(fresh[name], old.get(name)) for old, fresh in pairs for name in _with_initial(names) & fresh.keys()]
        return any(_is(fresh, value) or not _is(fresh, old) for fresh, old in built)

    def _meant(self, key: str, value: Value, known: set[str]) -> set[str]:
        """The options that a setting means."""
        leaf = key.rpartition(".")[2]
        name = leaf if leaf in known else _MEANT.get(leaf.lower(), leaf.lower())
        if name in known:
            return {name}
        if isinstance(value, bool | str) or value in (None, 0, 1):
            return set()
        pairs = [pair for opt, groups in self._groups.values() for pair in zip(opt.param_groups, groups, strict=False)]
        found = {name for live, fresh in pairs for name, built in fresh.items() if _is(built, value) and not _is(live.get(name), built)}
        return {"lr" if name == "initial_lr" else name for name in found}

    def _moves(self) -> list[tuple[dict[str, Any], Any, Any]]:
        """Each group whose rate a restored scheduler sets: the group, its rate at the schedule's place, and what moves the scheduler."""
        found: list[tuple[dict[str, Any], Any, Any]] = []
        for schedule in self._schedules:
            optimizer, groups = self._groups[id(bare(schedule.optimizer))]
            built = [group.get("initial_lr", group["lr"]) for group in groups]
            before = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
            if not schedule.is_restored:
                continue
            restored = [_own(group["lr"]) for group in optimizer.param_groups]
            if all(map(_is, built, before)):
                found += [(live, rate, _nothing) for live, rate in zip(optimizer.param_groups, restored, strict=True)]
                continue
            try:
                rates, settle = schedule.rates(built, restored)
            except Unsupported as exc:
                raise InvalidInput(
                    f"the variant sets the learning rate, and {exc}: leave the scheduler out of what is restored"
                    " (job.track(…, only=[…]) with the names of all else), so that it begins anew with that rate"
                ) from exc
            found += [(live, rate, settle) for live, rate in zip(optimizer.param_groups, rates, strict=True)]
        return found

    def _is_schedule(self, found: object) -> bool:
        """Whether it steers one of the optimizers."""
        if isinstance(found, Optimizer | nn.Module) or not has_state(found):
            return False
        optimizer = getattr(found, "optimizer", None)
        return isinstance(optimizer, Optimizer) and id(bare(optimizer)) in self._groups


def _nothing() -> None:
    """The scheduler has the variant's rate already."""


def _with_initial(names: set[str]) -> set[str]:
    return names | {"initial_lr"} if "lr" in names else names


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: _own(value) for name, value in options_of(group).items()} for group in optimizer.param_groups]


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put(live: dict[str, Any], fresh: Mapping[str, Any], wins: set[str]) -> None:
    """Put the options of a group back; the rate from which schedules begin is put back with the rate."""
    for name in wins & fresh.keys():
        set_option(live, name, fresh[name])
    if "lr" in wins & fresh.keys() and "initial_lr" in live:
        set_option(live, "initial_lr", fresh.get("initial_lr", fresh["lr"]))


def _lines(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], wins: set[str]) -> Iterator[str]:
    """The lines that say what was changed in the groups of an optimizer."""
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        where = f" of group {index}" if len(after) > 1 else ""
        for name in sorted(wins & new.keys()):
            if not _is(old.get(name), new[name]):
                yield f"{name}{where} {_shown(old.get(name))} -> {_shown(new[name])}"


def _is(one: object, other: object) -> bool:
    """Whether two options are the same; a tensor of one element equals its number."""
    one, other = _number(one), _number(other)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _number(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _shown(value: object) -> str:
    value = _number(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
