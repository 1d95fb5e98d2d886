"""The configuration of a training as plain values by flat names, whatever kind of object a script
keeps it in.

    {"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}}    optimizer.lr = 0.1, optimizer.betas.0 = 0.9,
    optimizer.betas.1 = 0.99

Mappings (OmegaConf's too), argparse and other namespaces, dataclasses, named tuples, objects of
attrs, pydantic and msgspec are nested, and so are lists and tuples, by their indices. A member of
an Enum becomes its value, a path its text, a number of NumPy or of a tensor that number. A dtype, a
device, a class, a function or a module becomes its name. Secrets are masked. Anything else has no
meaning that a search could compare, and is refused by name.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import OURS
from datastates.system import logs
from datastates.values import Value

_ALIASES = {
    **{
        name: name
        for name in ("lr", "weight_decay", "betas", "momentum", "T_max", "seed", "batch_size")
    },
    **{"learning_rate": "lr", "wd": "weight_decay"},
}
"""The names in a configuration that mean a hyperparameter: alone, below one of ``_SECTIONS``, or
below the name of a tracked object."""

_SECTIONS = frozenset(
    {
        "optimizer",
        "optim",
        "opt",
        "scheduler",
        "sched",
        "lr_scheduler",
        "loader",
        "dataloader",
        "train",
        "training",
        "trainer",
    }
    | {"hparams", "hyperparameters", "config", "args"}
)

_MOST = 2_000
"""The most values that a configuration may have: it is read with every list of states."""

_DEEPEST = 32
_NAMED = {"torch": ("dtype", "device", "layout", "memory_format"), "numpy": ("dtype",)}


def configuration(given: object) -> dict[str, Value]:
    """The argument of ``track(config=…)``, flattened; empty for None.

    :raises InvalidInput: a value cannot be recorded; names it and what to give instead.
    """
    if given is None:
        return {}
    parts = _parts(given)
    if parts is None or isinstance(parts, list):
        raise InvalidInput(
            f"config is {values.shown(given)}: give a mapping, a namespace or a dataclass. To"
            " track an object of that name, pass objects={'config': …}"
        )
    found: dict[str, Value] = {}
    for key, value in _flat("", parts, ()):
        if key in found:
            raise InvalidInput(
                f"config says {key} twice, nested and by a name with a dot: rename one of them"
            )
        if len(found) == _MOST:
            raise InvalidInput(
                f"config has over {_MOST:,} values, {key} among them: record the file that it comes"
                " from by name"
            )
        found[key] = value
    return logs.named(found)


def with_used(
    given: Mapping[str, Value], used: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """The configuration to record: what the user gave, and the values that the training uses. A
    used value of None is not known.

    If the user gave another value than the one in use, the name has the value in use, and
    ``given.NAME`` has the user's. Returns also a line for each of these.
    """
    found: dict[str, Value] = {
        key: value for key, value in used.items() if value is not None and value is not False
    }
    lines = []
    for key, value in given.items():
        values_in_use = _in_use(key, value, used)
        if value is None and values_in_use:
            continue  # an option that was left open: the value in use is recorded
        if not values_in_use or any(_equals(value, each) for each in values_in_use):
            found[key] = value
            continue
        found[f"given.{key}"] = value
        if values_in_use[0] is None:
            lines.append(f"config {key}={value!r} is not in use, and is recorded as given.{key}")
        else:
            found[key] = values_in_use[0]
            lines.append(
                f"config {key}={value!r} is not in use: {found[key]!r} is, and is recorded as"
                f" {key}; yours is recorded as given.{key}"
            )
    return found, lines


def _in_use(key: str, value: Value, used: Mapping[str, Value]) -> list[Value]:
    """The values that the training uses for what a name of the configuration means; none if it
    means nothing that is known."""
    *above, leaf = key.split(".")
    if key in used:
        return [used[key]]
    suffix = f".{leaf}" if leaf.isdigit() and above else ""
    name = _ALIASES.get(above.pop() if suffix else leaf)
    tracked = {each.partition(".")[0] for each in used}
    if (
        name is None
        or isinstance(value, str | bool)
        or value is None
        or any(each not in _SECTIONS | tracked for each in above)
    ):
        return []
    ends = [f".{each}{suffix}" for each in (name, "max_lr" if name == "lr" else name)]
    found = [each for other, each in used.items() if any(f".{other}".endswith(end) for end in ends)]
    is_whole = (
        name == "batch_size"
        and isinstance(value, int)
        and any(isinstance(each, int) and value % each == 0 for each in found)
    )
    return [value] if is_whole else found  # of all processes, or of all that are accumulated


def _equals(one: Value, other: Value) -> bool:
    return one == other or (one != one and other != other)


def _flat(
    path: str, parts: Mapping[Any, Any] | list[Any], above: tuple[int, ...]
) -> Iterator[tuple[str, Value]]:
    if len(above) > _DEEPEST:
        raise InvalidInput(
            f"config is nested over {_DEEPEST} deep at {path[:80]}: record the file that it comes"
            " from by name"
        )
    for key, value in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        here = _joined(path, key)
        inner = None if _is_one(value) else _parts(value, here)
        if inner is None:
            yield here, _plain(value, here)
        elif id(value) in above:
            raise InvalidInput(f"config holds itself at {here}: leave that out")
        else:
            yield from _flat(here, inner, (*above, id(value)))


def _joined(path: str, key: object) -> str:
    name = values.plain(key, f"a name in config{'.' * bool(path)}{path}")
    if name is None or name == "":
        raise InvalidInput(
            f"config{'.' * bool(path)}{path} has the name {key!r}: give each value a name"
        )
    found = values.key(f"{path}.{name}" if path else str(name), f"the name {name!r} in config")
    if found.startswith(OURS):
        raise InvalidInput(
            f"config has {found!r}: names that begin with {OURS!r} are ours, rename it"
        )
    return found


def _parts(value: object, path: str = "") -> Mapping[Any, Any] | list[Any] | None:
    """The contents of a container, by name or in a list; None if it is no container."""
    try:
        if isinstance(value, Mapping):
            return dict(value.items())
        if isinstance(value, Namespace | SimpleNamespace):
            return {**vars(value)}
        if isinstance(value, type):
            return None
        if dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        for names in (
            "_fields",
            "__struct_fields__",
            "__attrs_attrs__",
        ):
            # of named tuples, msgspec, attrs
            if isinstance(fields := getattr(type(value), names, None), tuple):
                return {
                    name: getattr(value, name)
                    for field in fields
                    if (name := getattr(field, "name", field))
                }
        if isinstance(getattr(type(value), "model_fields", None), Mapping):  # of pydantic
            # it was just found
            return {name: getattr(value, name) for name in type(value).model_fields}  # type: ignore[attr-defined]
        if isinstance(value, Sequence) and not isinstance(
            value, str | bytes | bytearray | memoryview
        ):
            return list(value)
        if isinstance(value, set | frozenset):
            return sorted(value, key=repr)
    except InvalidInput:
        raise
    except Exception as exc:  # a mapping of the user's; OmegaConf's missing values
        raise InvalidInput(
            f"config{'.' * bool(path)}{path} cannot be read ({type(exc).__name__}: {exc}): fill it"
            " in, or leave it out"
        ) from exc
    return None


def _is_one(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _plain(value: object, path: str) -> Value:
    named = _name_of(value)
    if named is not None:
        return named
    try:
        return values.plain(value, f"config.{path}")
    except InvalidInput as exc:
        said = str(exc).removesuffix(": store a text, a number, True, False or None")
        raise InvalidInput(
            f"{said}: give a text, a number, True, False or None, such as its name, or leave it out"
        ) from exc


def _name_of(value: object) -> str | None:
    """The name of an object that is recorded by its name; None for any other."""
    kind = type(value)
    if kind.__name__ in _NAMED.get(kind.__module__.split(".")[0], ()) or (
        kind.__module__.startswith("numpy.dtypes")
    ):
        return str(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, complex):
        return repr(value)
    return None
