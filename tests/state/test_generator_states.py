"""What would make a generator read memory that is not its own, or draw for ever, is refused
before any generator is set."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from datastates.errors import InvalidInput
from datastates.state.generators import RngState, load_generator, state_of

TORCH_LEFT, TORCH_NEXT, TORCH_WORDS = 8, 16, slice(24, 24 + 624 * 8)


def poked(data: bytes, form: str, offset: int, number: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, offset, number)
    return bytes(changed)


def drawn() -> list[object]:
    return [random.getstate(), *(torch.get_rng_state().tolist()), str(np.random.get_state())]


GLOBAL: dict[str, Callable[[dict[str, Any]], None]] = {
    "position beyond": lambda state: state["numpy"].update(position=100_000),
    "position before": lambda state: state["numpy"].update(position=-100_000),
    "no words": lambda state: state["numpy"].update(state=bytes(624 * 4)),
    "few words": lambda state: state["numpy"].update(state=bytes([1]) * 400),
    "another algorithm": lambda state: state["numpy"].update(bit_generator="Philox"),
    "half a gauss": lambda state: state["numpy"].update(has_gauss=7),
    "torch next": lambda state: state.update(torch=poked(state["torch"], "<q", TORCH_NEXT, 624)),
    "torch both": lambda state: state.update(
        torch=poked(poked(state["torch"], "<q", TORCH_NEXT, 624), "<i", TORCH_LEFT, 624)
    ),
    "torch before": lambda state: state.update(torch=poked(state["torch"], "<q", TORCH_NEXT, -1)),
    "torch cut": lambda state: state.update(torch=state["torch"][:-1]),
    "torch zeros": lambda state: state.update(
        torch=state["torch"][:24] + bytes(624 * 8) + state["torch"][24 + 624 * 8 :]
    ),
    "python position": (
        lambda state: state["python"].update(
            words=poked(state["python"]["words"], "<I", 624 * 4, 625)
        )
    ),
    "python zeros": (
        lambda state: state["python"].update(words=bytes(624 * 4) + struct.pack("<I", 3))
    ),
    "python gauss": lambda state: state["python"].update(gauss="a"),
    "python version": lambda state: state["python"].update(version=2),
}


@pytest.mark.parametrize("change", GLOBAL)
def test_a_forged_state_of_the_global_generators_changes_none(change: str) -> None:
    # a generator that was not used yet has no word to go on from
    (
        torch.manual_seed(0),
        torch.rand(3),
        np.random.rand(),
    )
    state = RngState().state_dict()
    GLOBAL[change](state)
    torch.rand(5), random.random(), np.random.rand()
    before = drawn()
    with pytest.raises(InvalidInput):
        RngState().load_state_dict(state)
    assert drawn() == before


@pytest.mark.parametrize(
    ("make", "path", "wrong"),
    [
        (lambda: np.random.Generator(np.random.MT19937(1)), ("state", "pos"), 100_000),
        (lambda: np.random.Generator(np.random.MT19937(1)), ("state", "pos"), -1),
        (
            lambda: np.random.Generator(np.random.MT19937(1)),
            ("state", "key"),
            np.zeros(624, np.uint32),
        ),
        (
            lambda: np.random.Generator(np.random.MT19937(1)),
            ("state", "key"),
            np.ones(100, np.uint32),
        ),
        (lambda: np.random.RandomState(1), ("state", "pos"), 625),
        (lambda: np.random.RandomState(1), ("state",), [1, 2]),
        (lambda: np.random.Philox(1), ("buffer_pos",), -1000),
        (lambda: np.random.Philox(1), ("buffer_pos",), 5),
        (lambda: np.random.Philox(1), ("buffer",), np.zeros(2, np.uint64)),
        (lambda: np.random.default_rng(1), ("has_uint32",), 2),
        (lambda: np.random.default_rng(1), ("bit_generator",), "MT19937"),
        (lambda: np.random.SFC64(1), ("state", "state"), np.zeros(3, np.uint64)),
        (lambda: torch.Generator().manual_seed(1), (), b"short"),
        (lambda: random.Random(1), ("words",), b"short"),
    ],
)
def test_a_forged_state_of_a_generator_is_refused(
    make: Callable[[], Any], path: tuple[str, ...], wrong: object
) -> None:
    generator = make()
    stored = {"state": wrong}
    if path:
        stored = state_of(generator)
        inner: Any = stored["state"]
        for name in path[:-1]:
            inner[name] = dict(inner[name])
            inner = inner[name]
        inner[path[-1]] = wrong
    before = repr(state_of(generator))
    with pytest.raises(InvalidInput):
        load_generator(generator, stored)
    assert repr(state_of(generator)) == before


@pytest.mark.parametrize("count", [0, 1, 2, 600, 623, 624, 625, 1248])
def test_a_state_of_torch_is_one_wherever_it_stands_among_its_words(count: int) -> None:
    mine, other = torch.Generator().manual_seed(3), torch.Generator()
    torch.empty(count, dtype=torch.int32).random_(generator=mine)
    load_generator(other, state_of(mine))
    assert torch.rand(2000, generator=mine).tolist() == torch.rand(2000, generator=other).tolist()
