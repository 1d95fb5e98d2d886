"""How tensors of several states become one: the methods of a merge, as arithmetic on flat tensors.

Everything is computed in float64 by single additions and multiplications in the parents' order, and rounded to the tensor's dtype once,
at the end. So the bytes depend neither on the number of threads nor on how a tensor is cut into pieces. A tensor that is the same in
every parent stays as it is.

Model soups: Wortsman et al. 2022. Exponential moving average: Polyak and Juditsky 1992.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
import torch

from datastates.errors import Corrupt, InvalidInput
from datastates.lineage.states import Value

__all__ = ["Method", "Recipe", "combine", "plan_recipe", "recipe_of"]

_PIECE = 1 << 20
"""The number of elements that are computed at a time."""

_SUM_ERROR = 1e-6


class Method(StrEnum):
    """How a merge combines its parents."""

    MEAN = "mean"
    EMA = "ema"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method with all its arguments, stored as attributes. ``weights`` are those of the parents, the first parent's first.

    ``decay`` belongs to ``ema``.
    """

    method: Method
    weights: Annotated[tuple[float, ...], msgspec.Meta(min_length=2)]
    only: tuple[str, ...] | None
    rest: str
    decay: float | None = None

    def attributes(self) -> dict[str, Value]:
        """The attributes that ``recipe_of`` reads."""
        known: dict[str, Value] = {
            "merge.method": self.method.value,
            "merge.weights": msgspec.json.encode(self.weights).decode(),
            "merge.only": msgspec.json.encode(self.only).decode(),
            "merge.rest": self.rest,
        }
        return known if self.decay is None else known | {"merge.decay": self.decay}


def plan_recipe(
    method: str,
    count: int,
    *,
    weights: Sequence[float] | None,
    only: str | Sequence[str] | None,
    rest: str,
    decay: float | None,
) -> Recipe:
    """The recipe for ``count`` states as the user named them, checked; ``ema`` takes them from the oldest to the newest.

    :raises InvalidInput: an argument belongs to another method, or makes no sense; says what would.
    """
    chosen = _method(method)
    if rest not in ("keep", "drop"):
        raise InvalidInput(f"rest={rest!r}: 'keep' takes what is not merged from the first parent, 'drop' leaves its other objects out")
    if count < 2:
        raise InvalidInput(f"a merge takes two states or more, not {count}")
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    if chosen is Method.EMA:
        if weights is not None:
            raise InvalidInput("weights= is for method mean, not for ema: leave it out")
        decay = _decay(decay)
        return Recipe(chosen, _ages(count, decay), patterns, rest, decay)
    if decay is not None:
        raise InvalidInput("decay= is for method ema, not for mean: leave it out")
    return Recipe(chosen, _shares(count, weights), patterns, rest)


def recipe_of(uid: str, attributes: Mapping[str, Value]) -> Recipe:
    """The recipe with which a merged state was made.

    :raises InvalidInput: the state is not a merge.
    :raises Corrupt: its attributes are impossible.
    """
    if "merge.method" not in attributes:
        raise InvalidInput(f"state {uid} is no merge: it has no attribute merge.method")
    known = {name: attributes[f"merge.{name}"] for name in ("method", "rest", "decay") if f"merge.{name}" in attributes}
    try:
        known["weights"] = msgspec.json.decode(str(attributes["merge.weights"]))
        known["only"] = msgspec.json.decode(str(attributes["merge.only"]))
        return msgspec.convert(known, Recipe)
    except (KeyError, msgspec.MsgspecError) as exc:
        raise Corrupt(f"state {uid} says that it is a merge, but not by which recipe ({exc}): restore another state") from exc


def combine(recipe: Recipe, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor out of the parents' flat tensors of one real dtype. May be one of ``parts`` itself."""
    first = parts[0]
    if all(_same_bytes(first, other) for other in parts[1:]):
        return first
    result = torch.empty_like(first)
    for piece in _pieces(first.numel()):
        result[piece] = _sum([part[piece].to(torch.float64) for part in parts], recipe.weights)
    return result


# What is refused


def _method(method: str) -> Method:
    try:
        return Method(method)
    except ValueError:
        raise InvalidInput(f"method={method!r}: merge by one of {', '.join(Method)}") from None


def _shares(count: int, weights: Sequence[float] | None) -> tuple[float, ...]:
    if weights is None:
        return (1.0 / count,) * count
    given = tuple(float(each) for each in weights)
    if len(given) != count:
        raise InvalidInput(f"{len(given)} weights for {count} states: give one for each")
    for index, each in enumerate(given):
        if not math.isfinite(each) or each < 0:
            raise InvalidInput(f"weights[{index}] is {each}: a weight is a number from 0 on")
    total = math.fsum(given)
    if abs(total - 1) > _SUM_ERROR:
        hint = f": for these proportions give {[round(each / total, 6) for each in given]}" if total > 0 else ""
        raise InvalidInput(f"the weights of a mean sum to {total:g}, not to 1{hint}")
    return given


def _decay(decay: float | None) -> float:
    if decay is None:
        raise InvalidInput("method='ema' needs decay=, how much of the average each newer state leaves, such as 0.9")
    if not 0 <= decay < 1:
        raise InvalidInput(f"decay is {decay}: it must be from 0 to below 1")
    return decay


def _ages(count: int, decay: float) -> tuple[float, ...]:
    """The weights of a moving average, the newest state's first."""
    return (*((1 - decay) * decay**age for age in range(count - 1)), decay ** (count - 1))


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
