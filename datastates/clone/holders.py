"""Which source serves which part of a state of several ranks, by how far away each source has the part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datastates.store.passing import NOT_HERE

__all__ = ["Holders", "plan"]

_AT_ONCE = 4
"""The most holders of one part that share its chunks by speed; more would only divide the same links further."""


@dataclass(frozen=True, slots=True)
class Holders:
    """The numbers of the sources of one part: those that serve it, and those to ask when these have failed, the best first."""

    serving: tuple[int, ...]
    spare: tuple[int, ...] = ()


def plan(places: Sequence[bytes], parts: int) -> list[Holders]:
    """For each part, the sources that serve it. ``places``: by source and part, how far away that source has the part; 255 if it does not.

    The nearest sources serve, at most four. Each part begins with the next source, so that the load is even.
    """
    return [_holders(part, [each[part] for each in places]) for part in range(parts)]


def _holders(part: int, far: Sequence[int]) -> Holders:
    turned = [(part + number) % len(far) for number in range(len(far))]
    found = sorted((number for number in turned if far[number] < NOT_HERE), key=far.__getitem__)
    near = [number for number in found if far[number] == far[found[0]]][:_AT_ONCE]
    return Holders(tuple(near), tuple(number for number in found if number not in near))
