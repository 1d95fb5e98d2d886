"""The scripts of ``docs/guide/reinforcement-learning.md`` are killed twice: each loss and return
equals that of a training that was not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import datastates
from tests.support.effort import SEED
from tests.support.killed import drawn, run, warnings
from tests.test_documents import ROOT, blocks

ENVIRONMENT, PPO, DQN = blocks(ROOT / "docs" / "guide" / "reinforcement-learning.md")
AT_ONCE = """
import datastates, functools, numpy, random, torch
torch.set_num_threads(1)
random.seed(0)
numpy.random.seed(0)
capture = datastates.Tracker.capture
datastates.Tracker.capture = lambda *args, **options: capture(*args, **options).wait("durable")
print = functools.partial(print, flush=True)
"""
"""Each state is durable before the script goes on, each line is read at once, and all random
numbers are seeded."""


def within_rollouts(script: str) -> str:
    """The script, with captures in the middle of its rollouts."""
    note = "# A capture is exact here, too: run.capture(step=run.step)"
    assert note in script
    return script.replace(
        note, 'if t % 6 == 2: print("at", update, t, score.tolist()); run.capture(step=run.step)'
    )


SCRIPTS = {
    "ppo": ("step ", PPO),
    "ppo, within rollouts": ("at ", within_rollouts(PPO)),
    "dqn": ("step ", DQN),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_guide_that_is_killed_twice_repeats_every_loss_and_return(
    name: str, tmp_path: Path
) -> None:
    begins, code = SCRIPTS[name]
    script = AT_ONCE + ENVIRONMENT + code
    whole, err = run(tmp_path / "whole", script)
    assert warnings(err) == []
    kills = drawn([line for line in whole if line.startswith(begins)], f"{name} {SEED}")
    said: list[str] = []
    for kill in (*kills, None):
        lines, err = run(tmp_path / "killed", script, kill_at=kill)
        assert warnings(err) == []
        assert not said or whole[0] not in lines, "it resumes"
        said += lines
    assert set(said) == set(whole)
    kept = []
    for folder in ("whole", "killed"):
        with datastates.open(tmp_path / folder / name[:3]) as repo:
            kept.append([(state.step, state.digest, state.metrics) for state in repo.log("main")])
    assert kept[0] == kept[1]


def members() -> Any:
    """The class ``Members`` of the guide."""
    names: dict[str, Any] = {}
    exec(ENVIRONMENT, names)
    return names["Members"]


class CartPole:
    """The attributes of Gymnasium's ``CartPole``, whose generator is made by ``reset`` and read
    by a property."""

    action_space: Any

    def __init__(self) -> None:
        self._np_random: np.random.Generator | None = None
        self.state: object = None
        self.steps_beyond_terminated: int | None = None

    @property
    def np_random(self) -> np.random.Generator:
        assert self._np_random is not None
        return self._np_random

    def reset(self, seed: int) -> None:
        self._np_random = np.random.default_rng(seed)
        self.state = tuple(self.np_random.uniform(-1, 1, 4))  # an array from the first step on
        self.action_space = SimpleNamespace(np_random=np.random.default_rng(seed))

    def step(self) -> None:
        self.state = (
            np.asarray(self.state)
            + self.np_random.normal(size=4)
            + self.action_space.np_random.integers(2)
        )
        self.steps_beyond_terminated = (self.steps_beyond_terminated or 0) + 1


class TimeLimit:
    """Those of its wrapper."""

    def __init__(self, env: CartPole) -> None:
        self.unwrapped, self._elapsed_steps = env, 0

    def step(self) -> None:
        self.unwrapped.step()
        self._elapsed_steps += 1


def test_an_environment_like_those_of_gymnasium_is_restored_with_its_wrapper(
    tmp_path: Path,
) -> None:
    wrap, ends = members(), []
    for counts in ([10], [4, 3, 3]):
        for count in counts:
            env = TimeLimit(CartPole())
            env.unwrapped.reset(seed=1)
            cart = wrap(env.unwrapped, "np_random", "state", "steps_beyond_terminated")
            with (
                datastates.open(tmp_path / str(len(counts))) as repo,
                repo.track(
                    cart=cart,
                    limit=wrap(env, "_elapsed_steps"),
                    actions=env.unwrapped.action_space.np_random,
                ) as tracker,
            ):
                for _ in range(count):
                    env.step()
                    tracker.capture()
        ends.append(
            (
                np.asarray(env.unwrapped.state).tolist(),
                env.unwrapped.steps_beyond_terminated,
                env._elapsed_steps,
            )
        )
    assert ends[0] == ends[1]
    assert ends[0][1:] == (10, 10)


def test_an_attribute_that_an_environment_lacks_is_named_by_the_first_capture(
    tmp_path: Path,
) -> None:
    with datastates.open(tmp_path / "runs") as repo:
        tracker = repo.track(env=members()(CartPole(), "elapsed"))
        with pytest.raises(AttributeError, match="elapsed"):
            tracker.capture()
