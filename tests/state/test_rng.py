"""Every generator of random numbers comes back."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from datastates.state.generators import RngState
from datastates.state.tree import flatten, unflatten


def draw() -> list[float]:
    values = [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]
    return [*values, float(torch.rand(())), float(torch.randn(()))]


def through_a_tree(state: dict[str, object]) -> dict[str, object]:
    flat = flatten(state)
    assert not flat.tensors
    tree: dict[str, object] = unflatten(flat.skeleton, flat.values, [])
    return tree


@pytest.mark.parametrize("before", range(3))
def test_draws_repeat_after_a_restore(before: int) -> None:
    """Also where a Gaussian is held back: they are drawn in pairs."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    for _ in range(before):
        draw()
    state = through_a_tree(RngState().state_dict())
    expected = [draw() for _ in range(5)]
    RngState().load_state_dict(state)
    assert [draw() for _ in range(5)] == expected


def test_another_numpy_bit_generator_is_kept_too() -> None:
    numpy_random: Any = np.random  # its stubs leave these two functions out
    old = numpy_random.get_bit_generator()
    try:
        numpy_random.set_bit_generator(np.random.PCG64(4))
        state = through_a_tree(RngState().state_dict())
        expected = np.random.rand(5).tolist()
        RngState().load_state_dict(state)
        assert np.random.rand(5).tolist() == expected
    finally:
        numpy_random.set_bit_generator(old)


def test_a_state_shares_no_memory_with_the_generators() -> None:
    state = RngState().state_dict()
    before = repr(state)
    draw()
    assert repr(state) == before


def test_generators_that_a_state_does_not_mention_stay() -> None:
    state = RngState().state_dict()
    del state["python"]
    random.seed(8)
    expected = random.random()
    random.seed(8)
    RngState().load_state_dict(state)
    assert random.random() == expected


def test_states_of_cuda_devices_that_are_not_here_are_left_out_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = torch.cuda.device_count()
    state = {**RngState().state_dict(), "cuda": [bytes(16)] * (here + 2)}
    if here:
        state["cuda"] = [
            torch.cuda.get_rng_state(device).numpy().tobytes() for device in range(here)
        ] + [bytes(16)] * 2
    rng = RngState()
    with caplog.at_level(logging.WARNING, logger="datastates"):
        rng.load_state_dict(state)
    assert rng.note is not None
    assert f"{here + 2} CUDA devices and {here} are here" in rng.note
    assert rng.note in caplog.text
    rng.load_state_dict(RngState().state_dict())
    assert rng.note is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_repeat_after_a_restore() -> None:
    torch.rand(1, device="cuda")
    state = through_a_tree(RngState().state_dict())
    expected = torch.rand(5, device="cuda").tolist()
    RngState().load_state_dict(state)
    assert torch.rand(5, device="cuda").tolist() == expected


def test_numpy_is_not_imported_for_the_sake_of_its_generator() -> None:
    code = """if True:
        import sys
        from datastates.state.generators import RngState
        had = "numpy.random" in sys.modules
        state = RngState().state_dict()
        assert ("numpy.random" in sys.modules) == had
        assert ("numpy" in state) == had
    """
    subprocess.run([sys.executable, "-c", code], check=True)
