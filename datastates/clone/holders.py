"""Who serves which part of a state of several ranks, by how far away each part is from whoever could."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datastates.transport.protocol import NOT_HERE

__all__ = ["Holders", "plan"]

_AT_ONCE = 4
"""So many holders of one part share its chunks by speed; more would only divide the same links further."""


@dataclass(frozen=True, slots=True)
class Holders:
    """The numbers of the sources of one part: those that serve it, and those to be asked when these have failed, the best first."""

    serving: tuple[int, ...]
    spare: tuple[int, ...] = ()


def plan(places: Sequence[bytes], parts: int) -> list[Holders]:
    """By part, who serves it. ``places``: by source and part, how far away the part is there, 255 where it is not.

    The nearest serve, at most four, of which part after part begins with the next one: so the load is even.
    """
    return [_holders(part, [each[part] for each in places]) for part in range(parts)]


def _holders(part: int, far: Sequence[int]) -> Holders:
    turned = [(part + number) % len(far) for number in range(len(far))]
    found = sorted((number for number in turned if far[number] < NOT_HERE), key=far.__getitem__)
    near = [number for number in found if far[number] == far[found[0]]][:_AT_ONCE]
    return Holders(tuple(near), tuple(number for number in found if number not in near))
