"""How tensors of several states become one: the methods of a merge, as arithmetic on flat tensors.

Everything is computed in float64 by single additions, multiplications and divisions in the parents' order, and rounded to the
tensor's dtype once, at the end. So the bytes depend neither on the number of threads nor on how a tensor is cut into pieces. A tensor
that is the same in every parent stays as it is.

Model soups, including greedy ones: Wortsman et al. 2022. Exponential moving average: Polyak and Juditsky 1992. Slerp: Shoemake 1985, tensor
by tensor. TIES-merging: Yadav et al. 2023, trimmed tensor by tensor rather than over the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

import msgspec
import torch

from datastates.errors import Corrupt, InvalidInput
from datastates.lineage.states import EdgeKind, Value

__all__ = ["Method", "Recipe", "combine", "plan_recipe", "recipe_of"]

_PIECE = 1 << 20
"""The number of elements that are computed at a time."""

_STRAIGHT = 0.9995
"""From this cosine on, a chord is as good as its arc, and the sine is too small to divide by."""

_SUM_ERROR = 1e-6


class Method(StrEnum):
    """How a merge combines its parents."""

    MEAN = "mean"
    GREEDY = "greedy"
    EMA = "ema"
    SLERP = "slerp"
    TIES = "ties"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method with all its arguments; ``weights`` are those of the parents, the first parent's first. Stored as attributes.

    ``decay`` belongs to ``ema``, ``t`` to ``slerp``; ``density``, ``scale`` and ``base`` (a uid) to ``ties``.
    """

    method: Method
    weights: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    only: tuple[str, ...] | None
    rest: str
    decay: float | None = None
    t: float | None = None
    density: float | None = None
    scale: float | None = None
    base: str | None = None

    @property
    def kind(self) -> EdgeKind:
        """The kind of the edges to further parents: averages are soups."""
        return EdgeKind.MERGE if self.method in (Method.SLERP, Method.TIES) else EdgeKind.SOUP

    def attributes(self) -> dict[str, Value]:
        """The attributes that ``recipe_of`` reads."""
        known: dict[str, Value] = {
            "merge.method": self.method.value,
            "merge.weights": msgspec.json.encode(self.weights).decode(),
            "merge.only": msgspec.json.encode(self.only).decode(),
            "merge.rest": self.rest,
        }
        return known | {f"merge.{name}": value for name in _OPTIONS if (value := getattr(self, name)) is not None}


_OPTIONS = ("decay", "t", "density", "scale", "base")
_OPTIONS_OF: Mapping[Method, frozenset[str]] = {
    Method.MEAN: frozenset({"weights"}),
    Method.GREEDY: frozenset({"evaluate", "better"}),
    Method.EMA: frozenset({"decay"}),
    Method.SLERP: frozenset({"t"}),
    Method.TIES: frozenset({"weights", "density", "scale", "base"}),
}


def plan_recipe(
    method: str,
    count: int,
    *,
    weights: Sequence[float] | None,
    only: str | Sequence[str] | None,
    rest: str,
    options: Mapping[str, object],
) -> Recipe:
    """The recipe for ``count`` states as the user named them, checked; ``ema`` takes them from the oldest to the newest.

    :raises InvalidInput: an argument belongs to another method, or makes no sense; says what would.
    """
    chosen = _method(method)
    _check_options(chosen, {**options, "weights": weights})
    if rest not in ("keep", "drop"):
        raise InvalidInput(f"rest={rest!r}: 'keep' takes what is not merged from the first parent, 'drop' leaves its other objects out")
    if count < 2:
        raise InvalidInput(f"a merge takes two states or more, not {count}")
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    recipe = Recipe(chosen, (), patterns, rest)
    match chosen:
        case Method.EMA:
            return _ema(recipe, count, options)
        case Method.SLERP:
            return _slerp(recipe, count, options)
        case Method.TIES:
            return _ties(recipe, count, weights, options)
    return replace(recipe, weights=_shares(count, weights))


def recipe_of(uid: str, attributes: Mapping[str, Value]) -> Recipe:
    """The recipe with which a merged state was made.

    :raises InvalidInput: the state is not a merge.
    :raises Corrupt: its attributes are impossible.
    """
    if "merge.method" not in attributes:
        raise InvalidInput(f"state {uid} is no merge: it has no attribute merge.method")
    known = {name: attributes[f"merge.{name}"] for name in ("method", "rest", *_OPTIONS) if f"merge.{name}" in attributes}
    try:
        known["weights"] = msgspec.json.decode(str(attributes["merge.weights"]))
        known["only"] = msgspec.json.decode(str(attributes["merge.only"]))
        return msgspec.convert(known, Recipe)
    except (KeyError, msgspec.MsgspecError) as exc:
        raise Corrupt(f"state {uid} says that it is a merge, but not by which recipe ({exc}): restore another state") from exc


def combine(recipe: Recipe, parts: Sequence[torch.Tensor], base: torch.Tensor | None = None) -> torch.Tensor:
    """One flat tensor out of the parents' flat tensors of one real dtype. May be one of ``parts`` itself."""
    first = parts[0]
    others = parts[1:] if base is None else [*parts[1:], base]
    if all(_same_bytes(first, other) for other in others):
        return first
    result = torch.empty_like(first)
    weights = _arc(recipe, parts) if recipe.method is Method.SLERP else recipe.weights
    limits = [_limit(part, base, recipe.density or 1.0) for part in parts] if base is not None else []
    for piece in _pieces(first.numel()):
        wide = [part[piece].to(torch.float64) for part in parts]
        if base is None:
            result[piece] = _sum(wide, weights)
        else:
            result[piece] = _disjoint(wide, base[piece].to(torch.float64), weights, limits, recipe.scale or 0.0)
    return result


# What is refused


def _method(method: str) -> Method:
    try:
        return Method(method)
    except ValueError:
        raise InvalidInput(f"method={method!r}: merge by one of {', '.join(Method)}") from None


def _check_options(method: Method, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value is not None and name not in _OPTIONS_OF[method]:
            takers = [each.value for each in Method if name in _OPTIONS_OF[each]]
            raise InvalidInput(f"{name}= is for method {' and '.join(takers) or 'none'}, not for {method}: leave it out")


def _shares(count: int, weights: Sequence[float] | None) -> tuple[float, ...]:
    if weights is None:
        return (1.0 / count,) * count
    given = _weights(count, weights)
    total = math.fsum(given)
    if abs(total - 1) > _SUM_ERROR:
        hint = f": for these proportions give {[round(each / total, 6) for each in given]}" if total > 0 else ""
        raise InvalidInput(f"the weights of a mean sum to {total:g}, not to 1{hint}")
    return given


def _weights(count: int, weights: Sequence[float]) -> tuple[float, ...]:
    given = tuple(float(each) for each in weights)
    if len(given) != count:
        raise InvalidInput(f"{len(given)} weights for {count} states: give one for each")
    for index, each in enumerate(given):
        if not math.isfinite(each) or each < 0:
            raise InvalidInput(f"weights[{index}] is {each}: a weight is a number from 0 on")
    return given


def _number(options: Mapping[str, object], name: str, default: float | None, *, above: float | None = None, least: float = 0.0) -> float:
    value = options.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float):
        raise InvalidInput(f"{name} is {value!r}: give a number")
    if not value <= (1.0 if name != "scale" else math.inf) or not (value >= least if above is None else value > above) or math.isinf(value):
        wanted = {"decay": "from 0 to below 1", "t": "from 0 (the first state) to 1 (the second)", "density": "above 0, at most 1"}
        raise InvalidInput(f"{name} is {value}: it must be {wanted.get(name, 'a number from 0 on')}")
    return float(value)


def _ema(recipe: Recipe, count: int, options: Mapping[str, object]) -> Recipe:
    if options.get("decay") is None:
        raise InvalidInput("method='ema' needs decay=, how much of the average each newer state leaves, such as 0.9")
    decay = _number(options, "decay", None)
    if decay >= 1:
        raise InvalidInput(f"decay is {decay}: it must be from 0 to below 1")
    weights = [(1 - decay) * decay**age for age in range(count - 1)] + [decay ** (count - 1)]
    return replace(recipe, weights=tuple(weights), decay=decay)


def _slerp(recipe: Recipe, count: int, options: Mapping[str, object]) -> Recipe:
    if count != 2:
        raise InvalidInput(f"method='slerp' lies between two states, and {count} were named")
    t = _number(options, "t", 0.5)
    return replace(recipe, weights=(1.0 - t, t), t=t)


def _ties(recipe: Recipe, count: int, weights: Sequence[float] | None, options: Mapping[str, object]) -> Recipe:
    given = (1.0,) * count if weights is None else _weights(count, weights)
    if not any(given):
        raise InvalidInput("every weight is 0: give at least one state a say")
    return replace(recipe, weights=given, density=_number(options, "density", 0.2, above=0.0), scale=_number(options, "scale", 1.0))


# The arithmetic


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, _PIECE):
        yield slice(start, min(start + _PIECE, count))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bytes: a NaN equals itself, and -0 does not equal 0."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _sum(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted sum, never by one call for product and sum: that may or may not round in between."""
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total += part * weight
    return total


def _arc(recipe: Recipe, parts: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The shares of two tensors on the great circle between their directions."""
    one, other = parts
    dot = square = other_square = 0.0
    for piece in _pieces(one.numel()):
        a, b = one[piece].to(torch.float64).numpy(), other[piece].to(torch.float64).numpy()
        dot, square, other_square = dot + float((a * b).sum()), square + float((a * a).sum()), other_square + float((b * b).sum())
    t = recipe.t or 0.0
    length = math.sqrt(square) * math.sqrt(other_square)
    cosine = dot / length if length > 0 else 1.0
    if not abs(cosine) < _STRAIGHT:
        return 1.0 - t, t
    angle = math.acos(cosine)
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def _limit(part: torch.Tensor, base: torch.Tensor, density: float) -> float:
    """The magnitude from which on a change is kept, so that ``density`` of them are kept; equal ones stay together."""
    size = part.numel()
    kept = math.ceil(density * size)
    if kept >= size:
        return 0.0
    change = (part.to(torch.float64) - base.to(torch.float64)).abs_()  # `to` may return the parent's own memory: never in place
    return float(change.kthvalue(size - kept + 1).values)


def _disjoint(
    parts: Sequence[torch.Tensor], base: torch.Tensor, weights: Sequence[float], limits: Sequence[float], scale: float
) -> torch.Tensor:
    """The mean of the kept changes with the winning sign; where they cancel, or there are none, the base stays.

    A NaN in any part stays NaN: it must not pass for a change that was trimmed.
    """
    changes = [part - base for part in parts]
    changes = [torch.where(change.abs() < limit, 0.0, change) for change, limit in zip(changes, limits, strict=True)]
    votes = _sum(changes, weights)
    elected = votes.sign()
    total, share = torch.zeros_like(base), torch.zeros_like(base)
    for change, weight in zip(changes, weights, strict=True):
        agrees = (change.sign() == elected) & (change != 0)
        total += torch.where(agrees, change * weight, 0.0)
        share += torch.where(agrees, weight, 0.0)
    merged = base + torch.where(share > 0, total / share, 0.0) * scale
    return torch.where(votes.isnan(), math.nan, merged)
