"""Generators that a script made for itself are tracked like anything else: in place, bit for
bit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates
from datastates import Config
from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.encoding import decode_values, encode_values
from datastates.state.restore import restore_into
from datastates.state.tree import flatten, unflatten

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)

Make = Callable[[int], Any]
GENERATORS: dict[str, tuple[Make, Callable[[Any], list[float]]]] = {
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda g: torch.randn(40, generator=g).tolist(),
    ),
    "python": (random.Random, lambda g: [g.gauss(0, 1) for _ in range(7)]),
    "numpy": (
        np.random.default_rng,
        lambda g: [*g.integers(0, 9, 3, dtype=np.uint32).tolist(), *g.random(5).tolist()],
    ),
    "numpy philox": (
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda g: g.random(5).tolist(),
    ),
    "numpy sfc64": (
        lambda seed: np.random.Generator(np.random.SFC64(seed)),
        lambda g: g.random(5).tolist(),
    ),
    "numpy mt19937": (
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda g: g.random(5).tolist(),
    ),
    "numpy legacy": (np.random.RandomState, lambda g: [float(g.randn()) for _ in range(7)]),
    "numpy legacy pcg64": (
        lambda seed: np.random.RandomState(np.random.PCG64(seed)),
        lambda g: [float(g.randn()) for _ in range(7)],
    ),
    "numpy bits": (np.random.PCG64, lambda g: g.random_raw(5).tolist()),
}


def through_a_tree(tree: object) -> Any:
    """As a state keeps it."""
    flat = flatten(tree)
    return unflatten(
        flat.skeleton,
        decode_values(encode_values(flat.values)),
        [leaf.tensor for leaf in flat.tensors],
    )


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_draws_again_what_it_drew(kind: str, tmp_path: Path) -> None:
    make, draw = GENERATORS[kind]
    mine, held = make(3), make(4)
    nested = {"list": [held], "deque": deque([make(5)]), "tuple": (make(6), 1)}
    with datastates.open(tmp_path, config=QUIET) as repo:
        with repo.track(mine=mine, nested=nested) as run:
            draw(mine)
            draw(held)
            run.capture().wait()
            expected = draw(mine), draw(held), draw(nested["deque"][0])
            run.capture()
        fresh = make(8)
        again: dict[str, Any] = {
            "list": [make(9)],
            "deque": deque([make(10)]),
            "tuple": (make(11), 0),
        }
        parts = again["list"][0], again["deque"][0], again["tuple"][0]
        repo.track(mine=fresh, nested=again, branch="again", start="main~1")
        assert (draw(fresh), draw(parts[0]), draw(parts[1])) == expected
        assert again["list"][0] is parts[0]
        assert again["deque"][0] is parts[1]
        assert again["tuple"] == (parts[2], 1)


def test_a_state_of_a_generator_is_not_drawn_from_and_not_shared() -> None:
    for make, draw in GENERATORS.values():
        generator = make(3)
        tree = through_a_tree(Adapted({"it": generator}).tree())
        assert draw(generator) == draw(make(3))
        other = make(9)
        for _ in range(2):
            restore_into({"it": other}, tree)
            assert draw(other) == draw(make(3))


def test_generators_are_set_after_everything_that_may_draw_from_them() -> None:
    generator = torch.Generator().manual_seed(1)

    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {"drawn": int(torch.randint(9, (), generator=generator))}

        def load_state_dict(self, state: object) -> None:
            torch.rand(5, generator=generator)

    objects = {"generator": generator, "drawing": Drawing()}
    tree = Adapted(objects).tree()
    expected = torch.rand(3, generator=generator).tolist()
    restore_into(objects, tree)
    assert torch.rand(3, generator=generator).tolist() == expected


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (
            np.random.default_rng(1),
            r"it: the state has torch.Generator on cpu, the object numpy.random.Generator of PCG64",
        ),
        (random.Random(1), "the object random.Random"),
        ({"a": 1}, "the object dict"),
    ],
)
def test_a_generator_of_another_kind_is_refused(live: Any, message: str) -> None:
    tree: dict[str, Any] = Adapted({"it": torch.Generator()}).tree()
    if isinstance(live, dict):
        live, tree = torch.Generator(), {"it": live}
        message = "the state has dict, the object torch.Generator on cpu"
    with pytest.raises(InvalidInput, match=message):
        restore_into({"it": live}, tree)
    assert not restore_into({"it": live}, tree, strict=False)


def test_an_algorithm_of_another_name_is_refused() -> None:
    tree = Adapted({"it": np.random.default_rng(1)}).tree()
    with pytest.raises(
        InvalidInput,
        match=(
            r"the state has numpy.random.Generator of PCG64, the object numpy.random.Generator of"
            r" Philox"
        ),
    ):
        restore_into({"it": np.random.Generator(np.random.Philox(1))}, tree)


def test_a_generator_takes_its_state_as_a_whole() -> None:
    generator = random.Random(3)
    tree = Adapted({"it": generator, "other": [1]}).tree()
    generator.random()
    with pytest.raises(InvalidInput, match="it takes its state as a whole"):
        restore_into({"it": generator, "other": [2]}, tree, only="it/state/gauss")
    before = generator.getstate()
    assert (
        "it/generator"
        not in restore_into({"it": generator, "other": [2]}, tree, only="other").restored
    )
    assert generator.getstate() == before


def test_draws_of_the_operating_system_cannot_be_repeated(tmp_path: Path) -> None:
    with (
        datastates.open(tmp_path, config=QUIET) as repo,
        pytest.raises(InvalidInput, match=r"it is of type random\.SystemRandom"),
    ):
        repo.track(it=random.SystemRandom())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_generator_of_a_device_draws_again_what_it_drew() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    tree = through_a_tree(Adapted({"it": generator}).tree())
    expected = torch.rand(5, device="cuda", generator=generator).tolist()
    restore_into({"it": generator}, tree)
    assert torch.rand(5, device="cuda", generator=generator).tolist() == expected
    with pytest.raises(
        InvalidInput, match=r"torch\.Generator on cuda, the object torch\.Generator on cpu"
    ):
        restore_into({"it": torch.Generator()}, tree)
