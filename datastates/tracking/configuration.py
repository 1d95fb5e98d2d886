"""The configuration of a training as plain values by flat names, whatever kind of object a script keeps it in.

    {"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}}    optimizer.lr = 0.1, optimizer.betas.0 = 0.9, optimizer.betas.1 = 0.99

Mappings (OmegaConf's too), argparse and other namespaces, dataclasses, named tuples, objects of attrs, pydantic and msgspec are
nested, and so are lists and tuples, by their indices. A member of an Enum becomes its value, a path its text, a number of NumPy or of a
tensor that number. A dtype, a device, a class, a function or a module becomes its name. Secrets are masked. Anything else has no meaning
that a search could compare, and is refused by name.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import OURS, Value
from datastates.system import masking

__all__ = ["configuration"]

_MOST = 2_000
"""The most values that a configuration may have: it is read with every list of states."""

_DEEPEST = 32
_NAMED = {"torch": ("dtype", "device", "layout", "memory_format"), "numpy": ("dtype",)}


def configuration(given: object) -> dict[str, Value]:
    """The argument of ``track(config=…)``, flattened; empty for None.

    :raises InvalidInput: a value that cannot be recorded; names it, and says what would do.
    """
    if given is None:
        return {}
    parts = _parts(given)
    if parts is None or isinstance(parts, list):
        raise InvalidInput(
            f"config is {values.shown(given)}: give a mapping, a namespace or a dataclass; an object that is to be tracked by that name"
            " goes into objects={'config': …}"
        )
    found: dict[str, Value] = {}
    for key, value in _flat("", parts, ()):
        if key in found:
            raise InvalidInput(f"config says {key} twice, nested and by a name with a dot: rename one of them")
        if len(found) == _MOST:
            raise InvalidInput(f"config has over {_MOST:,} values, {key} among them: record the file that it comes from by name")
        found[key] = value
    return masking.named(found)


def _flat(path: str, parts: Mapping[Any, Any] | list[Any], above: tuple[int, ...]) -> Iterator[tuple[str, Value]]:
    if len(above) > _DEEPEST:
        raise InvalidInput(f"config is nested over {_DEEPEST} deep at {path[:80]}: record the file that it comes from by name")
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
        raise InvalidInput(f"config{'.' * bool(path)}{path} has the name {key!r}: give each value a name")
    found = values.key(f"{path}.{name}" if path else str(name), f"the name {name!r} in config")
    if found.startswith(OURS):
        raise InvalidInput(f"config has {found!r}: names that begin with {OURS!r} are ours, rename it")
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
        for names in ("_fields", "__struct_fields__", "__attrs_attrs__"):  # of named tuples, msgspec, attrs
            if isinstance(fields := getattr(type(value), names, None), tuple):
                return {name: getattr(value, name) for field in fields if (name := getattr(field, "name", field))}
        if isinstance(getattr(type(value), "model_fields", None), Mapping):  # of pydantic
            return {name: getattr(value, name) for name in type(value).model_fields}  # type: ignore[attr-defined]  # it was just found
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
            return list(value)
        if isinstance(value, set | frozenset):
            return sorted(value, key=repr)
    except InvalidInput:
        raise
    except Exception as exc:  # a mapping of the user's; OmegaConf's missing values
        raise InvalidInput(
            f"config{'.' * bool(path)}{path} cannot be read ({type(exc).__name__}: {exc}): fill it in, or leave it out"
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
        raise InvalidInput(f"{said}: give a text, a number, True, False or None, such as its name, or leave it out") from exc


def _name_of(value: object) -> str | None:
    """The name of an object that is recorded by its name; None for any other."""
    kind = type(value)
    if kind.__name__ in _NAMED.get(kind.__module__.split(".")[0], ()) or (kind.__module__.startswith("numpy.dtypes")):
        return str(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, complex):
        return repr(value)
    return None
