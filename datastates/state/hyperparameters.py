"""The hyperparameters of optimizers and learning-rate schedulers: read, compared with a state's,
and chosen from either.

They are plain values by flat names: ``optimizer.lr``, ``optimizer.betas.0``, ``scheduler.T_max``.
The learning rate is the one from which a schedule begins, if there is one. The first parameter
group gives ``optimizer.lr``. Another group that differs from it gives ``optimizer.1.lr``.

The script's choice is made exact by a replay: before a state is restored, the script's new
scheduler takes as many steps as the state's scheduler had taken. The learning rates, and momenta
that a schedule changes, are then as if the training had this schedule from the start.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from datastates.errors import InvalidInput
from datastates.values import Value

from .adapters import has_state, parts
from .loaders import bare_scheduler
from .optimizer import CLASS, HOW, bare, class_of, options_of, set_option
from .tree import join

Facts = dict[str, Value]

_COUNTERS = frozenset(
    {
        "last_epoch",
        "T_cur",
        "T_i",
        "best",
        "num_bad_epochs",
        "cooldown_counter",
        "base_lrs",
        "verbose",
        "mode_worse",
    }
)
"""Attributes of torch's schedulers that are not constants. Rates are in the groups of the
optimizer."""

SCHEDULED = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "momentum",
    "betas",
    "max_momentum",
    "base_momentum",
)
"""The options of a group that schedulers set."""

_NEEDS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""The state that torch's optimizers begin with zeros at their first step, by the option that
enables it."""

_MOST = 8
"""The most elements of a list that become separate values. A longer list becomes one text."""

_UNSEEDED = 67280421310721
"""``torch.initial_seed()`` of a process that did not seed torch.

``torch.seed()`` draws one of 64 bits."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A hyperparameter for which the script and the state have different values. None means that a
    side has no value."""

    key: str
    script: Value
    state: Value

    def __str__(self) -> str:
        """``lr 0.1 -> 0.01``: the option, the state's value, and the script's."""
        _, _, name = self.key.partition(".")
        return f"{name} {shown(self.state)} -> {shown(self.script)}"


def seed() -> int | None:
    """The seed that the script gave to torch in this process; None if it gave none."""
    found = torch.initial_seed()
    return None if found == _UNSEEDED or found > 2**53 else found


class ScriptOptions:
    """The tracked optimizers and schedulers as the script made them. Create it before a state is
    restored into them.

    ``values`` are their hyperparameters. For each restore, call ``compare``; then, to use the
    script's values, ``choose`` before the state is restored and ``put`` after it. ``differences``
    are those that ``compare`` found. All methods belong to the training thread.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        found = [(path, bare_scheduler(each)) for path, each in parts(objects)]
        self._optimizers = {path: bare(each) for path, each in found if isinstance(each, Optimizer)}
        self._schedulers = {path: each for path, each in found if _is_scheduler(each)}
        self._groups = {path: _groups_of(each) for path, each in self._optimizers.items()}
        self._members = {path: _members_of(each) for path, each in self._schedulers.items()}
        self._begin = {path: _place(vars(each)) for path, each in self._schedulers.items()}
        self.values = self.now()
        self._forget()

    def _forget(self) -> None:
        self._tree: object = None
        self._recorded: Mapping[str, Value] = {}
        self._is_wanted: Callable[[str], bool] = lambda path: True
        self.differences: list[Difference] = []
        self._changed: dict[str, set[str]] = {}
        self._replayed: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._optimizers or self._schedulers)

    def now(self) -> Facts:
        found: Facts = {}
        for path, optimizer in self._optimizers.items():
            found |= _of_groups(path, optimizer, optimizer.param_groups)
        for path, scheduler in self._schedulers.items():
            with suppress(Exception):  # one of the user's may be ready only later
                found |= _of_scheduler(path, scheduler.state_dict())
        return found

    def reads(self, path: str) -> bool:
        """Whether ``compare`` needs the tensor of a state at ``path``."""
        return "/param_groups/" in path or any(
            path.startswith(f"{name}/") for name in self._schedulers
        )

    def compare(
        self, tree: object, recorded: Mapping[str, Value], is_wanted: Callable[[str], bool]
    ) -> list[Difference]:
        """The script's changes since the state: values that differ from the state, and from the
        record of the begin of its training.

        The result leaves out options that a schedule or the script itself changed since its
        training began. ``tree`` is the state's, ``recorded`` its configuration.
        ``is_wanted`` returns for a path whether the restore takes it from the state.
        """
        self._forget()
        self._tree, self._recorded, self._is_wanted = tree, recorded, is_wanted
        for path, live in (*self._optimizers.items(), *self._schedulers.items()):
            stored = self._stored(path, live)
            for key in (
                {} if stored is None else dict.fromkeys((*self._of(path, self.values), *stored))
            ):
                script, state = self.values.get(key), (stored or {}).get(key)
                then = recorded.get(key, state)
                if not is_alike(script, state) and not is_alike(script, then):
                    self.differences.append(Difference(key, script, then))
        self.differences += self._functions()
        return self.differences

    def check_classes(self) -> None:
        """Check that the state of each scheduler is of the same class, as far as its constants
        show.

        :raises InvalidInput: it is not.
        """
        known = [
            each for path, each in self._optimizers.items() if self._stored(path, each) is not None
        ]
        # A restore refuses an optimizer of another class, with its scheduler.
        for path, live in (
            (path, each)
            for path, each in self._schedulers.items()
            if any(_steered(each) is one for one in known)
        ):
            depth = path.count("/") + 1
            names, others = (
                {key.split(".")[depth] for key in each}
                for each in (self._stored(path, live) or {}, self._of(path, self.values))
            )
            if names - others and others - names:
                raise InvalidInput(
                    f"{path} is a {type(live).__name__}, and the state is of a scheduler with"
                    f" {', '.join(sorted(names - others))}: make that one, or pass"
                    " hyperparameters='script' to continue with yours"
                )

    def in_use(self, *, is_chosen: bool) -> Facts:
        """The hyperparameters after the restore. ``is_chosen``: the script's were put where they
        differ."""
        found = dict(self.values)
        for path, live in (*self._optimizers.items(), *self._schedulers.items()):
            stored = self._stored(path, live)
            if stored is not None:
                for key in self._of(path, self.values):
                    found.pop(key, None)
                found |= {key: self._recorded.get(key, value) for key, value in stored.items()}
        for each in self.differences if is_chosen else ():
            found.pop(each.key, None)
            if each.key in self.values:
                found[each.key] = self.values[each.key]
        return found

    def choose(self) -> list[str]:
        """Prepare to use the script's values. Returns what cannot be exact, a line each.

        Schedulers are replayed here and then reset, so that a failed restore leaves them as they
        were.

        :raises InvalidInput: a schedule ends before the step at which the state was taken.
        """
        lines: list[str] = []
        for path, optimizer in self._optimizers.items():
            changed = self._changed[path] = {_option(key) for key in self._keys(path)}
            for name, scheduler in self._schedulers.items():
                constants, stored = self._keys(name), _at(self._tree, name)
                if (
                    _steered(scheduler) is not optimizer
                    or not isinstance(stored, Mapping)
                    or not self._is_wanted(name)
                ):
                    continue
                if constants or changed & {*SCHEDULED}:
                    self._changed[name] = {key.split(".")[0] for key in constants}
                    lines += self._replay(name, path, stored)
        return lines

    @property
    def replayed(self) -> list[str]:
        """The paths of the schedulers that ``put`` sets whole, so that no restore needs to."""
        return list(self._replayed)

    def put(self) -> None:
        """Set the values that were chosen, now that the state is restored."""
        for path, optimizer in self._optimizers.items():
            changed = self._changed.get(path, set())
            for live, made in zip(optimizer.param_groups, self._groups[path], strict=False):
                for name in changed & made.keys():
                    set_option(live, name, made[name])
                if "lr" in changed and "initial_lr" in live:
                    (
                        set_option(live, "initial_lr", made["initial_lr"])
                        if "initial_lr" in made
                        else live.pop("initial_lr")
                    )
            for option in changed & _NEEDS.keys():
                for parameter, entry in optimizer.state.items():
                    if isinstance(entry, dict) and entry.keys() & {"exp_avg_sq", "square_avg"}:
                        entry.setdefault(_NEEDS[option], torch.zeros_like(parameter))
            for name, scheduler in self._schedulers.items():
                if _steered(scheduler) is optimizer and name in self._changed:
                    self._put_schedule(name, path)

    def _put_schedule(self, name: str, path: str) -> None:
        scheduler, groups = self._schedulers[name], self._optimizers[path].param_groups
        if name in self._replayed:
            replayed, members = self._replayed[name]
            _put_members(scheduler, members)
            for live, made in zip(groups, replayed, strict=False):
                for option in (each for each in SCHEDULED if each in made):
                    set_option(live, option, made[option])
            return
        made = self._members[name][""]
        vars(scheduler).update(
            {key: value for key, value in made.items() if key in self._changed[name]}
        )
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.load_state_dict({})
            base = self._recorded.get(f"{_dotted(path)}.lr")
            for live, rate, kept in zip(
                groups,
                [each["lr"] for each in self._groups[path]],
                scheduler._last_lr,
                strict=False,
            ):
                if "lr" in self._changed[path] and isinstance(base, int | float) and base:
                    set_option(live, "lr", rate * (float(kept) / base))

    def _replay(self, name: str, path: str, stored: Mapping[str, Any]) -> list[str]:
        """Take the state's number of steps with the script's scheduler.

        Returns what differs, a line each."""
        scheduler, optimizer, end = self._schedulers[name], self._optimizers[path], _place(stored)
        if (
            not isinstance(scheduler, LRScheduler)
            or isinstance(scheduler, ReduceLROnPlateau)
            or end is None
        ):
            return []
        if self._begin[name]:
            return [
                f"{name} had taken steps before it was tracked, so its new constants apply from its"
                " next step on: make a new scheduler"
            ]
        try:
            self._reset(name, path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer takes no step here
                for _ in range(math.floor(end)):
                    scheduler.step()
                if end != math.floor(end):  # CosineAnnealingWarmRestarts.step(epoch + i / batches)
                    scheduler.step(end)  # type: ignore[arg-type]  # that class takes a fraction
            self._replayed[name] = _groups_of(optimizer), _members_of(scheduler)
        except Exception as exc:
            raise InvalidInput(
                f"{name} ends before the state, which was taken after {end:g} steps of its schedule"
                f" ({exc}): make the schedule longer, or pass hyperparameters='state'"
            ) from exc
        finally:
            self._reset(name, path)
        rate = float(self._replayed[name][0][0]["lr"])
        groups: Any = _at(self._tree, f"{path}/param_groups")
        before = float(groups[0]["lr"]) if groups else rate
        if math.isclose(rate, before, rel_tol=1e-9, abs_tol=1e-15):
            return []
        return [
            f"lr is {rate:.6g}, as after {end:g} steps of the script's schedule, and was"
            f" {before:.6g}: the weights differ from those of a training with the script's schedule"
            " from the start"
        ]

    def _reset(self, name: str, path: str) -> None:
        """Put a scheduler and its optimizer's options back to how the script made them."""
        _put_members(self._schedulers[name], self._members[name])
        for live, made in zip(
            self._optimizers[path].param_groups, self._groups[path], strict=False
        ):
            for option, value in made.items():
                set_option(live, option, value)

    def _functions(self) -> Iterator[Difference]:
        """The differences of schedules by functions, which no state has. The rate at the state's
        step shows them."""
        for path, live in self._schedulers.items():
            stored = _at(self._tree, path)
            if (
                not isinstance(stored, Mapping)
                or not hasattr(live, "lr_lambdas")
                or not self._is_wanted(path)
            ):
                continue
            if (
                not stored.get("_last_lr")
                or len(live.lr_lambdas) != len(stored["_last_lr"])
                or any(stored["lr_lambdas"])
            ):
                # a difference by their number, or by what the state has of objects that are called
                continue
            end, base, last = (
                int(stored["last_epoch"]),
                _number(stored["base_lrs"][0]),
                _number(stored["_last_lr"][0]),
            )
            steps, rate = [end] if isinstance(live, LambdaLR) else range(1, end + 1), last
            with suppress(Exception):
                # the function may reach no further than the script's own steps
                rate = base * math.prod(live.lr_lambdas[0](step) for step in steps)
            if not math.isclose(rate, last, rel_tol=1e-9, abs_tol=1e-15):
                yield Difference(f"{_dotted(path)}.lr_lambdas", f"lr {rate:.6g}", f"lr {last:.6g}")

    def _of(self, path: str, values: Facts) -> Facts:
        return {key: value for key, value in values.items() if key.startswith(f"{_dotted(path)}.")}

    def _keys(self, path: str) -> list[str]:
        prefix = f"{_dotted(path)}."
        return [
            each.key.removeprefix(prefix)
            for each in self.differences
            if each.key.startswith(prefix)
        ]

    def _stored(self, path: str, live: Any) -> Facts | None:
        """The hyperparameters that a restore takes from the state for an object; None if it
        takes none."""
        stored = _at(self._tree, path)
        if not isinstance(stored, Mapping):
            return None
        if not isinstance(live, Optimizer):
            return _of_scheduler(path, stored) if self._is_wanted(path) else None
        groups = stored.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
            return None
        if stored.get(CLASS, class_of(live)) != class_of(live) or not self._is_wanted(
            join(path, "param_groups")
        ):
            return None
        # a training that is resumed gets further groups back
        return _of_groups(path, live, groups[: len(self._groups[path])])


def shown(value: Value) -> str:
    """A value for people."""
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def is_alike(one: Value, other: Value) -> bool:
    """Whether two values are the same option. A missing option is one that is switched off."""
    one, other = (False if each is None else each for each in (one, other))
    if isinstance(one, float) and isinstance(other, float):
        # a rate may be a tensor of 32 bits
        return math.isclose(one, other, rel_tol=1e-7) or (one != one and other != other)
    return one == other


def _is_scheduler(found: Any) -> bool:
    if (
        isinstance(found, Optimizer | nn.Module)
        or not has_state(found)
        or not callable(getattr(found, "step", None))
    ):
        return False
    return _steered(found) is not None


def _steered(scheduler: Any) -> Optimizer | None:
    """The optimizer that a scheduler has among its attributes."""
    found = next(
        (
            each
            for each in getattr(scheduler, "__dict__", {}).values()
            if isinstance(each, Optimizer)
        ),
        None,
    )
    return None if found is None else bare(found)


def _option(key: str) -> str:
    """The option of ``betas.0``, or of ``1.betas.0`` for another group."""
    first, _, rest = key.partition(".")
    return rest.partition(".")[0] if first.isdigit() else first


def _dotted(path: str) -> str:
    return path.replace("/", ".")


def _at(tree: object, path: str) -> object:
    found: Any = tree
    for key in path.split("/"):
        try:
            found = (
                found[int(key)]
                if isinstance(found, list | tuple)
                else found[key.replace("%2F", "/")]
            )
        except (LookupError, TypeError, ValueError):
            return None
    return found


def _of_groups(path: str, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Facts:
    """The options with which an optimizer is constructed; other values in its groups are
    counters of the optimizer."""
    names = (
        {*inspect.signature(type(optimizer)).parameters, *SCHEDULED, "weight_decay", "eps"}
        - HOW
        - {"params", "initial_lr", "min_lr"}
    )
    found: Facts = {}
    for index, group in enumerate(groups):
        for name in sorted(names & group.keys()):
            value = group.get("initial_lr", group["lr"]) if name == "lr" else group[name]
            for key, plain in _plain(name, value):
                if index == 0:
                    found[f"{_dotted(path)}.{key}"] = plain
                elif not is_alike(found.get(f"{_dotted(path)}.{key}"), plain):
                    found[f"{_dotted(path)}.{index}.{key}"] = plain
    return found


def _of_scheduler(path: str, state: Mapping[str, Any]) -> Facts:
    return {f"{_dotted(path)}.{key}": value for key, value in _constants(state)}


def _constants(state: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    for name, value in state.items():
        if name == "_schedulers" and isinstance(value, list):
            yield from (
                (f"{i}.{key}", plain)
                for i, each in enumerate(value)
                for key, plain in _constants(each)
            )
        elif name == "lr_lambdas" and isinstance(value, list):
            yield name, len(value)
            members = (
                (f"{name}.{i}.{key}", part)
                for i, each in enumerate(value)
                if isinstance(each, dict)
                for key, part in each.items()
            )
            yield from (pair for key, part in members for pair in _plain(key, part))
        elif name == "_schedule_phases" and "total_steps" in state:
            # of OneCycleLR; the phases of a longer one end later
            yield from _plain(
                "pct_start",
                [round((phase["end_step"] + 1) / state["total_steps"], 9) for phase in value[:-1]],
            )
        elif name in ("_milestones", "_anneal_func_type") or not (
            name in _COUNTERS or name.startswith("_")
        ):
            yield from _plain(name.lstrip("_"), value)


def _plain(key: str, value: Any) -> Iterator[tuple[str, Value]]:
    value = _number(value)
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, bool | int | float | str):
        yield key, value
    elif isinstance(value, list | tuple) and all(
        isinstance(_number(each), bool | int | float | str) for each in value
    ):
        if len(value) > _MOST:
            yield key, str([*map(_number, value)])[:500]
        else:
            yield from ((f"{key}.{i}", _number(each)) for i, each in enumerate(value))


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if isinstance(value, np.generic) else value


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: _own(value) for name, value in options_of(group).items()}
        for group in optimizer.param_groups
    ]


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if type(value) in (list, dict, Counter) else value


def _members_of(scheduler: Any) -> dict[str, Any]:
    """The attributes of a scheduler and of the schedulers in it, by their paths."""
    found = {"": {name: _own(value) for name, value in vars(scheduler).items()}}
    for index, each in enumerate(getattr(scheduler, "_schedulers", ())):
        found |= {f"{index}/{key}": members for key, members in _members_of(each).items()}
    return found


def _put_members(scheduler: Any, members: Mapping[str, Any]) -> None:
    for where, values in members.items():
        part = scheduler
        for index in filter(None, where.split("/")):
            part = part._schedulers[int(index)]
        vars(part).clear()
        vars(part).update({name: _own(value) for name, value in values.items()})


def _place(state: Mapping[str, Any]) -> float | None:
    """How many steps a scheduler has taken; a fraction within an epoch."""
    if "last_epoch" in state:
        return float(state["last_epoch"]) + float(state.get("T_cur", 0)) % 1
    inner = state.get("_schedulers")
    return (
        _place(inner[0] if isinstance(inner[0], Mapping) else vars(inner[0]))
        if isinstance(inner, list) and inner
        else None
    )
