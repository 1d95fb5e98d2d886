"""Values that a user gives, turned into the exact plain values that a database and a manifest hold,
or refused with what would do instead.

Each function takes the value and ``what`` it is, for the message: ``metric 'loss'``. The result has
one of Python's own types: NumPy's numbers and tensors or arrays of one element become the number
that they hold, and subclasses of ``str``, ``int`` and ``float`` become their base type. Neither
torch nor NumPy is imported for that.
"""

from __future__ import annotations

import builtins
import os
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from enum import Enum, EnumType
from functools import cache, partial, wraps
from inspect import signature
from pathlib import PurePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    SupportsFloat,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from .errors import InvalidInput

KEY_LENGTH = 255
"""The most characters that the name of a metric or an attribute may have."""

Value = str | int | float | bool | None
"""What an attribute may hold."""

MESSAGE_LENGTH = 16 << 10
"""The most characters that the message of a state or of a tag, or the text of an attribute, may
have."""

NAMES = 10_000
"""The most metrics, and the most attributes, that a state may have."""

RANKS = 1 << 20
"""The most ranks that a state can have parts of."""

Check = Callable[[object, str], Any]
"""A function that takes a value and what it is, and returns it in the form to be used, or
raises."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
Plain = str | int | float | bool | None
_EXACT = frozenset({str, int, float, bool, type(None)})
_STEPS = 2**63
_BYTES = 2**62
_PART_BYTES = 255
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_Choice = TypeVar("_Choice", bound=Enum)


def attribute(value: object, name: str) -> object:
    """An attribute of an object that a user gave; None if it has none, if reading it fails, or
    if the object is a class."""
    try:
        return None if isinstance(value, type) else getattr(value, name, None)
    except Exception:
        # a property may raise anything; an object without the attribute is later refused by name
        return None


def metrics(given: object, what: str = "metrics") -> dict[str, float]:
    """Metrics by name; None means no metrics.

    :raises InvalidInput: a name or a value cannot be stored; names it.
    """
    return {
        name: number(value, f"metric {name!r}")
        for name, value in _named(given, what, "{'loss': 0.5}")
    }


def attributes(given: object, what: str = "attributes") -> dict[str, Plain]:
    """Attributes by name; None means no attributes.

    :raises InvalidInput: a name or a value cannot be stored; names it.
    """
    found = {
        name: plain(value, f"attribute {name!r}")
        for name, value in _named(given, what, "{'seed': 1}")
    }
    for name, value in found.items():
        if isinstance(value, str):
            text(value, f"attribute {name!r}", at_most=MESSAGE_LENGTH)
    return found


def plain(value: object, what: str) -> Plain:
    """A text, a number, True, False or None.

    A member of an Enum becomes its value, a path its text, a date its ISO form (a time with a zone
    in UTC, so that texts sort as times do).

    :raises InvalidInput: it is none of these, or does not fit a database: NUL, half a character,
        more than 64 bits.
    """
    found = value if type(value) in _EXACT else _plain(value, what)
    if isinstance(found, str):
        return text(found, what)
    if isinstance(found, bool) or found is None:
        return found
    if isinstance(found, int):
        if not -(2**63) <= found < 2**64:
            raise InvalidInput(
                f"{what} is {shown(found)}, which has more than 64 bits: record it as text"
            )
        return int.__int__(found)
    if isinstance(found, float):
        return float.__float__(found)
    raise InvalidInput(f"{what} is {shown(value)}: store a text, a number, True, False or None")


def number(value: object, what: str) -> float:
    """A number; NaN and infinity are numbers too.

    :raises InvalidInput: it is not one.
    """
    if type(value) is float:
        return value
    found = _held(value)
    try:
        if not isinstance(found, str | bytes | bytearray) and (
            hasattr(type(found), "__float__") or hasattr(type(found), "__index__")
        ):
            return float.__float__(float(found))  # type: ignore[arg-type]  # it has __float__
    except Exception as exc:  # its __float__ may raise anything
        raise InvalidInput(
            f"{what} is {shown(value)}, which is no number ({type(exc).__name__}: {exc}): give one,"
            " or leave it out"
        ) from exc
    raise InvalidInput(f"{what} is {shown(value)}, which is no number: give one, or leave it out")


def integer(value: object, what: str, *, least: int | None = None, most: int | None = None) -> int:
    """A whole number; ``2.0`` counts as one, ``True`` does not.

    :raises InvalidInput: it is not one, or out of bounds.
    """
    found = _held(value)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int):
        raise InvalidInput(f"{what} is {shown(value)}: give a whole number")
    found = int.__int__(found)
    if (least is not None and found < least) or (most is not None and found > most):
        bounds = (
            f"at least {least}"
            if most is None
            else f"at most {most}"
            if least is None
            else f"from {least} to {most}"
        )
        raise InvalidInput(f"{what} is {shown(found)}: it must be {bounds}")
    return found


def step(value: object, what: str = "step") -> int:
    """A count of steps.

    :raises InvalidInput: it is no whole number, is negative or does not fit 64 bits.
    """
    return integer(value, what, least=0, most=_STEPS - 1)


def size(value: object, what: str, *, least: int = 0) -> int:
    """A number of bytes, also from a text such as ``"8G"`` or ``"1.5GiB"`` (powers of 1024).

    :raises InvalidInput: it is not one.
    """
    return integer(
        _bytes_of(value) if isinstance(value, str) else value, what, least=least, most=_BYTES
    )


def seconds(value: object, what: str) -> float:
    """A time span; infinity is one.

    :raises InvalidInput: it is no number, or below 0.
    """
    if isinstance(value, bool):
        raise InvalidInput(f"{what} is {value}: give a number of seconds")
    found = number(value, what)
    if not found >= 0:
        raise InvalidInput(f"{what} is {shown(value)}: it must be 0 or more seconds")
    return found


def flag(value: object, what: str) -> bool:
    """True or False, also NumPy's.

    :raises InvalidInput: it is neither.
    """
    found = _held(value)
    if not isinstance(found, bool):
        raise InvalidInput(f"{what} is {shown(value)}: give True or False")
    return found


def choice(value: object, kind: type[_Choice], what: str) -> _Choice:
    """A member of a StrEnum, or its text.

    :raises InvalidInput: it is not one; lists them.
    """
    try:
        return kind(str.__str__(value) if isinstance(value, str) else None)
    except ValueError:
        raise InvalidInput(
            f"{what} is {shown(value)}: choose {' or '.join(repr(each.value) for each in kind)}"
        ) from None


def text(value: object, what: str, *, at_most: int | None = None) -> str:
    """A text that both databases can store.

    :raises InvalidInput: it is no text, holds a NUL or half a character, or is too long.
    """
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is {shown(value)}: give a text")
    found = str.__str__(value)
    if "\x00" in found or (
        not found.isascii() and any("\ud800" <= letter <= "\udfff" for letter in found)
    ):
        raise InvalidInput(
            f"{what} is {shown(found)}, which cannot be stored: it holds a NUL or half a character"
        )
    if at_most is not None and len(found) > at_most:
        raise InvalidInput(f"{what} has {len(found)} characters: at most {at_most} fit")
    return found


def message(value: object, what: str = "message") -> str:
    """The message of a state or of a tag.

    :raises InvalidInput: it is no text that can be stored, or has more than ``MESSAGE_LENGTH``
        characters.
    """
    return text(value, what, at_most=MESSAGE_LENGTH)


def storable(found: str) -> str:
    """A text from the system, such as a command-line argument, in a form that can be stored:
    bytes that are no characters are escaped."""
    return found.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()


def key(name: object, what: str) -> str:
    """The name of a metric or an attribute.

    :raises InvalidInput: it is no text, or does not have 1 to ``KEY_LENGTH`` characters.
    """
    found = text(name, what)
    if not 0 < len(found) <= KEY_LENGTH:
        raise InvalidInput(
            f"{shown(found)} cannot name a metric or an attribute: give it 1 to {KEY_LENGTH}"
            " characters"
        )
    return found


def path(value: object, what: str) -> str:
    """The path of a file or a folder, or a URL, as text.

    :raises InvalidInput: it is not one.
    """
    try:
        found = os.fspath(value)  # type: ignore[call-overload]  # what is no path raises
    except TypeError:
        raise InvalidInput(f"{what} is {shown(value)}: give a path") from None
    try:
        found = os.fsdecode(os.fsencode(found))
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} is {shown(found)}, which no file can be called") from None
    if (
        not found
        or "\x00" in found
        or any(len(part) > _PART_BYTES for part in os.fsencode(found).split(os.sep.encode()))
    ):
        raise InvalidInput(
            f"{what} is {shown(found)}: a path is not empty, holds no NUL, and no part of it has"
            f" over {_PART_BYTES} bytes"
        )
    return found


def string(value: object, what: str) -> str:
    """A text of any characters.

    :raises InvalidInput: it is no text.
    """
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is {shown(value)}: give a text")
    return str.__str__(value)


def count(value: object, what: str) -> int:
    """A whole number from 0.

    :raises InvalidInput: it is not one.
    """
    return integer(value, what, least=0, most=_BYTES)


def positive(value: object, what: str) -> int:
    """A whole number from 1.

    :raises InvalidInput: it is not one.
    """
    return integer(value, what, least=1, most=_BYTES)


def iterable(value: object, what: str) -> object:
    """An iterable; nothing is read from it yet.

    :raises InvalidInput: it is not one.
    """
    has_items = any(
        name in vars(kind) for kind in type(value).__mro__ for name in ("__iter__", "__getitem__")
    )
    if not has_items or _shape(value) == ():
        raise InvalidInput(f"{what} is {shown(value)}: give what a loop can go over")
    return value


def token(value: object, what: str) -> str | bytes:
    """A secret, as text or as bytes.

    :raises InvalidInput: it is neither; the message does not show the value.
    """
    if not isinstance(value, str | bytes):
        raise InvalidInput(f"{what} is a {type(value).__name__}: give a text or bytes")
    return text(value, what) if isinstance(value, str) and not value.isprintable() else value


def callback(value: object, what: str) -> object:
    """Something that can be called.

    :raises InvalidInput: it cannot be.
    """
    if not callable(value):
        raise InvalidInput(f"{what} is {shown(value)}: give a function")
    return value


def named(value: object, what: str) -> dict[str, object]:
    """A dict of objects by name.

    :raises InvalidInput: it is no dict, or a name is no text.
    """
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidInput(
            f"{what} is {shown(value)}: give a dict with a name for each, such as {{'model':"
            " model}"
        )
    return dict(value)


def several(check: Check) -> Check:
    """A check of a list whose elements ``check`` accepts."""

    def check_each(value: object, what: str) -> object:
        if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
            raise InvalidInput(f"{what} is {shown(value)}: give a list")
        try:
            items = list(value)
        except Exception as exc:  # its __iter__ may raise anything
            raise InvalidInput(
                f"{what} is {shown(value)}, which is no list ({type(exc).__name__}: {exc})"
            ) from exc
        return [check(item, f"an item of {what}") for item in items]

    return check_each


def optional(check: Check) -> Check:
    """A check that accepts None, and what ``check`` accepts."""
    return lambda value, what: None if value is None else check(value, what)


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator that checks each argument of a function by its annotation before each call; the
    function gets what the checks return.

    ``Annotated[…, check]`` is checked by ``check``. These are checked as they are: ``str``,
    ``int``, ``float``, ``bool``, enums, classes, ``Literal``, ``Callable``, ``Sequence``, and
    ``Mapping`` by name, each also with ``| None``. Arguments of any other type, or of a type that
    is imported for type checkers only, are passed on unchecked.
    """
    names = tuple(signature(function).parameters)

    @cache  # at the first call: annotations may name what is defined further down
    def checks() -> dict[str, Check]:
        scope = ChainMap(function.__globals__, vars(builtins), defaultdict(_Unimported))
        found = {
            name: _check_of(eval(text, {}, scope))
            for name, text in function.__annotations__.items()
            if name in names
        }
        return {name: check for name, check in found.items() if check is not None}

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        known = checks()
        head = [
            known[name](value, name) if name in known else value
            for name, value in zip(names, args, strict=False)
        ]
        rest = {
            name: known[name](value, name) if name in known else value
            for name, value in kwargs.items()
        }
        # what the checks return is what it takes
        return function(*head, *args[len(head) :], **rest)  # type: ignore[arg-type]

    return call


class _Unimported:
    """A type, or a module of types, that is imported for type checkers only."""

    def __getattr__(self, name: str) -> _Unimported:
        return self

    def __or__(self, other: Any) -> Any:
        return object | other

    __ror__ = __or__


def _check_of(kind: Any) -> Check | None:
    """The check of an argument of this type; None if it may be anything."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return cast("Check", inner[1])
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each is not NoneType]
        if len(kinds) == 2 and kinds[1] is str and isinstance(kinds[0], EnumType):
            del kinds[1]  # its text, which the check of an enum takes as well
        check = _check_of(kinds[0]) if len(kinds) == 1 else None
        return check if check is None or NoneType not in inner else optional(check)
    if origin is Literal:
        return partial(_literal, choices=inner)
    if origin in (Sequence, Collection):
        return several(_check_of(inner[0]) or (lambda item, _: item))
    if origin in _CHECKS or kind in _CHECKS:
        return _CHECKS[origin or kind]
    if not isinstance(kind, type) or kind in (object, Any) or getattr(kind, "_is_protocol", False):
        return None
    return partial(_member if issubclass(kind, Enum) else _instance, kind=kind)


def patterns(value: object, what: str = "only") -> list[str] | None:
    """One name or pattern, or several; None means all.

    :raises InvalidInput: it is none of these.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return [str.__str__(value)]
    try:
        return [string(item, what) for item in several(lambda item, _: item)(value, what)]
    except InvalidInput:
        raise InvalidInput(
            f"{what} is {shown(value)}: give a name or a pattern such as 'model/*', or a list of"
            " them"
        ) from None


def revision(value: object, what: str = "the revision") -> str:
    """A revision as text: a text stays as it is, a state becomes its uid.

    :raises InvalidInput: it is neither. None means that there is no state yet, and has its
        own message.
    """
    if value is None:
        raise InvalidInput("there is no state to name yet: capture one first")
    found = value if isinstance(value, str) else attribute(value, "uid")
    if not isinstance(found, str):
        raise InvalidInput(f"{what} is {shown(value)}: give a text such as 'main~3', or a state")
    return str.__str__(found)


def revisions(value: object, what: str = "the revisions") -> list[str]:
    """One revision, or several.

    :raises InvalidInput: it is neither; names what is wrong.
    """
    is_one = isinstance(value, str) or attribute(value, "uid") is not None
    return (
        [revision(value, what)]
        if is_one
        else [str(each) for each in several(revision)(value, what)]
    )


Text = Annotated[str, text]
"""A text that both databases can store. A ``str`` may hold any characters."""

Key = Annotated[str, key]
Message = Annotated[str, message]
Count = Annotated[int, count]
Positive = Annotated[int, positive]
Seconds = Annotated[float, seconds]
FilePath = Annotated[str | os.PathLike[str], path]
Token = Annotated[str | bytes, token]
Patterns = Annotated[str | Sequence[str], patterns]
Metrics = Annotated[Mapping[str, SupportsFloat], metrics]
Attributes = Annotated[Mapping[str, Value], attributes]

_CHECKS: dict[object, Check] = {
    str: string,
    bool: flag,
    int: integer,
    float: number,
    Callable: callback,
    Mapping: named,
    Iterable: iterable,
}


def shown(value: object) -> str:
    """A short form of a value for a message, made without calling the value's own ``repr``."""
    if type(value) is int and value.bit_length() > 200:
        return f"an int of {value.bit_length()} bits"
    if type(value) in _EXACT or type(value) in (bytes, complex):
        said = repr(value)
        return said if len(said) <= 80 else f"{said[:60]}… ({len(said)} characters)"
    if issubclass(type(value), type):
        return f"the class {type.__dict__['__name__'].__get__(value)}"
    name = type(value).__name__
    if isinstance(value, dict) and value and all(type(each) is str for each in value):
        return f"a {name} of {', '.join(sorted(value))[:80]}"
    shape = _shape(value)
    if shape is not None:
        held = _held(value)
        return f"a {name} of shape {shape}" if held is value else f"{shown(held)} ({name})"
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def _member(value: object, what: str, *, kind: type[Enum]) -> Enum:
    return choice(value, kind, what)


def _literal(value: object, what: str, *, choices: tuple[object, ...]) -> object:
    found = str.__str__(value) if isinstance(value, str) else None
    if found not in choices:
        raise InvalidInput(f"{what} is {shown(value)}: choose {' or '.join(map(repr, choices))}")
    return found


def _instance(value: object, what: str, *, kind: type) -> object:
    if not isinstance(value, kind):
        raise InvalidInput(f"{what} is {shown(value)}: give a {kind.__name__}")
    return value


def _bytes_of(text: str) -> int:
    stripped = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = stripped[-1:] if stripped[-1:] in "KMGT" else ""
    try:
        return int(float(stripped.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError) as exc:
        raise InvalidInput(
            f"{shown(text)} is not a size: write bytes, or a number with K, M, G or T"
        ) from exc


def _named(given: object, what: str, example: str) -> list[tuple[str, object]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{what} are {shown(given)}: give a dict, such as {example}")
    if len(given) > NAMES:
        raise InvalidInput(
            f"there are {len(given)} {what}: a state has at most {NAMES}; track the rest as a"
            " tensor or an array"
        )
    return [(key(name, f"a name in {what}"), value) for name, value in given.items()]


def _plain(value: object, what: str) -> object:
    """Convert a value that is not exactly of a plain type to one that is, if possible."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidInput(
                f"{what} is a time without a zone: give it one, as datetime.now(UTC) does"
            )
        return value.astimezone(UTC).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    return _held(value)


def _held(value: object) -> object:
    """The number that an array or a tensor of one element, or a number of NumPy holds; anything
    else as it is."""
    if type(value) in _EXACT:
        return value
    shape = _shape(value)
    if shape is None or any(size != 1 for size in shape):
        return value
    try:
        # an object with a shape and an item() is an array
        found: object = value.item()  # type: ignore[attr-defined]
        # NumPy's longdouble holds itself
        return float(value) if type(found) is type(value) else found  # type: ignore[arg-type]
    except Exception:
        # its item() may raise anything; a value that holds no number is later refused by name
        return value


def _shape(value: object) -> tuple[int, ...] | None:
    """The shape of an array, a tensor or a NumPy number; None of anything else."""
    shape = attribute(value, "shape")
    is_array = isinstance(shape, tuple) and callable(attribute(value, "item"))
    return (
        tuple(shape)
        if is_array and isinstance(shape, tuple) and all(isinstance(size, int) for size in shape)
        else None
    )
