"""The own things of one rank, adapted for a rank of a job of another size: random numbers drawn anew, the place in the data divided again.

If a job has as many ranks as captured the state, each gets its own things back. Otherwise all of them get those of rank 0: random numbers
that are derived from rank 0's and from the number of the rank, so that no two ranks draw the same ones; and rank 0's place in the data,
which a ``PermutationSampler`` and the loops know for all ranks together.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from datastates.content.encoding import encode_values, pack
from datastates.errors import InvalidInput

from .adapters import has_state
from .generators import is_generator, python_state
from .loops import LOOPS, Loops, divided_again, divides_its_loader
from .names import join
from .own_buffers import part_of, put_back
from .rng import RngState, numpy_state
from .sampler import PermutationSampler
from .sources import is_ordered_by_epoch

__all__ = ["Redivision"]


@dataclass(slots=True)
class Redivision:
    """A state of ``was`` ranks, for rank ``rank`` of ``size``. ``notes`` say what is not as it was captured."""

    was: int
    rank: int
    size: int
    notes: list[str] = field(default_factory=list)
    _is_counted: bool = False

    @property
    def source(self) -> int:
        """The rank whose own things this rank gets."""
        return self.rank if self.was == self.size else 0

    def reads(self, wants: Callable[[str], bool]) -> Callable[[str], bool]:
        """Which tensors of a state have to be read for what is wanted: of the things that each rank had of its own, only this rank's."""
        mine = self.rank if 1 < self.was == self.size else None
        return lambda path: wants(path) if (rank := part_of(path)) is None else rank == mine

    def __call__(self, tree: Mapping[str, Any], objects: Mapping[str, object], wants: Callable[[str], bool]) -> dict[str, Any]:
        """The stored tree of ``source``, in the form that goes into these objects; the models in it get the buffers of this rank.

        :raises InvalidInput: an object that is asked for knows its place in the data for one rank only.
        """
        self.notes = []
        found = dict(tree)
        put_back(found, self.rank if self.was == self.size else None)
        if self.was == self.size:
            return found
        self._is_counted = LOOPS in objects and wants(LOOPS) and divides_its_loader(found.get(LOOPS))
        return {name: self._of(join("", name), objects[name], child, wants) if name in objects else child for name, child in found.items()}

    def _of(self, path: str, live: object, stored: Any, wants: Callable[[str], bool]) -> Any:
        if isinstance(live, dict) and isinstance(stored, dict):
            return type(stored)(
                {**stored, **{key: self._of(join(path, key), live[key], stored[key], wants) for key in stored.keys() & live}}
            )
        if isinstance(live, list | tuple) and type(live) is type(stored) and len(live) == len(stored):
            return type(live)(self._of(join(path, index), *pair, wants) for index, pair in enumerate(zip(live, stored, strict=True)))
        if not wants(path):
            return stored
        if isinstance(live, RngState) or (is_generator(live) and isinstance(stored, dict)):
            return self._drawn_anew(path, stored)
        if isinstance(live, Loops):
            return divided_again(stored, self.was)
        if isinstance(live, PermutationSampler):
            self.notes.append(f"{path}: what {self.was} ranks had left of the epoch is divided among {self.size}")
        elif self._is_counted and is_ordered_by_epoch(live):
            self.notes.append(f"{path}: what {self.was} ranks had left of the epoch is divided among {self.size}, by run.steps")
            return {}  # a loader that begins anew: the loops skip what all ranks had
        elif _keeps_its_place(live):
            raise InvalidInput(
                f"{path} ({type(live).__name__}) knows the place of one of {self.was} ranks, and what is left cannot be divided among"
                f" {self.size}: run {self.was} ranks, restore only= what else there is, or track a datastates.PermutationSampler instead,"
                " or loop over run.steps(loader) within run.epochs, where a DistributedSampler orders the loader"
            )
        return stored

    def _drawn_anew(self, path: str, stored: Any) -> Any:
        if not self.rank or not isinstance(stored, dict):
            return stored
        self.notes.append(f"{path}: drawn anew for rank {self.rank} of {self.size}, from the random numbers of rank 0 of {self.was}")
        return _derived(stored, self.rank)


def _keeps_its_place(live: object) -> bool:
    return has_state(live) and hasattr(live, "__iter__") and not isinstance(live, torch.nn.Module | torch.Tensor)


def _derived(stored: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A state of generators that is as far from the stored one as another seed is, and always the same for a number."""
    seeds = _Seeds(stored, number)
    if "generator" in stored:
        return {**stored, "state": _derived_state(str(stored["generator"]), stored["state"], seeds)}
    found = dict(stored)
    if "torch" in found:
        found["torch"] = _torch_state(seeds)
    if "python" in found:
        found["python"] = python_state(random.Random(seeds.next()))
    if found.get("numpy", {}).get("bit_generator") == "MT19937":
        found["numpy"] = numpy_state(np.random.RandomState(seeds.words()))
    if "cuda" in found:
        found["cuda"] = [_cuda_state(seeds) for _ in found["cuda"]]
    return found


def _derived_state(kind: str, state: Any, seeds: _Seeds) -> Any:
    if kind == "random.Random":
        return python_state(random.Random(seeds.next()))
    if kind.startswith("torch.Generator"):
        return _torch_state(seeds) if kind.endswith(" cpu") else _cuda_state(seeds)
    algorithm = getattr(np.random, kind.rsplit(" ", 1)[-1])
    return {**state, **algorithm(seeds.words()).state}


def _torch_state(seeds: _Seeds) -> bytes:
    return torch.Generator().manual_seed(seeds.next()).get_state().numpy().tobytes()


def _cuda_state(seeds: _Seeds) -> bytes:
    return struct.pack("<Qq", seeds.next(), 0)  # the seed, and how far it has come


class _Seeds:
    """Seeds derived from a state and a number, one after the other."""

    def __init__(self, stored: Mapping[str, Any], number: int) -> None:
        self._hasher = blake3(encode_values([pack(dict(stored)), number]))
        self._count = 0

    def next(self) -> int:
        """The next seed of 63 bits."""
        self._count += 1
        return int.from_bytes(self._hasher.digest(8, seek=64 * self._count), "little") >> 1

    def words(self) -> list[int]:
        """The next 256 bits."""
        self._count += 1
        return [int(word) for word in np.frombuffer(self._hasher.digest(32, seek=64 * self._count), np.uint32)]
