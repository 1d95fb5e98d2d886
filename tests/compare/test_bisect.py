"""The first state at which something turned bad: as few restores as halving allows, whatever was
skipped or broken off."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Conflict, NotFound, Repository, State
from datastates.compare.blame import Bisection, Verdict, bisect_by
from datastates.errors import InvalidInput
from datastates.maintenance.retention_pass import evict
from tests.support.effort import effort, seeds

COUNT = effort(1000, 130)
MOST = math.ceil(math.log2(COUNT)) + 1
"""Eleven for a thousand states."""


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", memory_bytes=128 << 20) as opened:
        yield opened


def trained(repo: Repository, count: int, *, poisoned: int, metric: str = "loss") -> list[State]:
    """States of a training in which the batch of step ``poisoned`` makes the weight huge, and it
    stays so; they share bytes in memory."""
    weight = torch.zeros(2)
    with repo.track(rng=False, weight=weight) as run:
        made = []
        for step in range(1, count + 1):
            weight += 1000.0 * (step == poisoned)
            made.append(run.capture(metrics={metric: float(weight[0])}).wait())
    return made


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """Durable states, a thousand in a thorough run; the weight of each is its step."""
    weight = torch.zeros(2)
    with datastates.open(tmp_path_factory.mktemp("thousand"), memory_bytes=64 << 20) as repo:
        with repo.track(rng=False, weight=weight, durable_every=1) as run:
            for _ in range(COUNT):
                weight += 1
                run.capture()
        yield repo


@pytest.mark.parametrize("poisoned", [2, COUNT // 2, COUNT * 617 // 1000, COUNT])
def test_a_poisoned_batch_is_found_with_one_restore_more_than_halving_takes(
    thousand: Repository, poisoned: int
) -> None:
    asked: list[int] = []
    told: list[tuple[int, int]] = []

    def is_bad(tree: Any) -> bool:
        asked.append(int(tree["weight"][0]))
        return asked[-1] >= poisoned

    found = thousand.bisect(
        f"main~{COUNT - 1}",
        "main",
        is_bad,
        on_progress=lambda done, total: told.append((done, total)),
    )

    assert (found.good.step, found.first) == (
        poisoned - 1,
        thousand.state(f"main~{COUNT - poisoned}"),
    )
    assert {poisoned - 1, poisoned} <= set(asked), "both sides of the turn were tried"
    assert len(asked) == found.restores <= MOST
    assert told[-1][0] == found.restores
    assert all(total <= MOST for _, total in told)


@pytest.fixture
def line(repo: Repository) -> list[State]:
    return trained(repo, 23, poisoned=20)


def at(line: list[State], state: State | None) -> int | None:
    """Its place on the line."""
    return next(
        (
            number
            for number, other in enumerate(line)
            if state is not None and other.uid == state.uid
        ),
        None,
    )


def judged(
    repo: Repository, line: list[State], turn: int, skipped: set[int], **more: Any
) -> Bisection:
    """Bisected by a judge that knows where it turns, and skips some."""
    place = {state.uid: number for number, state in enumerate(line)}

    def judge(state: State) -> Verdict:
        number = place[state.uid]
        return (
            Verdict.SKIPPED
            if number in skipped
            else Verdict.BAD
            if number >= turn
            else Verdict.GOOD
        )

    return bisect_by(repo.core, line[0], line[-1], judge, **more)


def test_wherever_it_turns_it_is_found_within_the_bound(
    repo: Repository, line: list[State]
) -> None:
    for count in range(2, len(line) + 1):
        for turn in range(1, count):
            found = judged(repo, line[:count], turn, set())
            assert at(line, found.first) == turn
            assert found.restores <= math.ceil(math.log2(count)) + 1


@pytest.mark.parametrize("seed", seeds(20))
def test_what_could_not_be_tried_makes_a_range_that_holds_the_first(
    repo: Repository, line: list[State], seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(10):
        turn = chance.randrange(1, len(line))
        skipped = {
            number for number in range(1, len(line) - 1) if chance.random() < chance.random()
        }
        found = judged(repo, line, turn, skipped)
        good = [state.uid for state in line].index(found.good.uid)
        numbers = [at(line, state) for state in found.candidates]
        assert numbers == list(range(good + 1, good + 1 + len(numbers)))
        assert numbers[-1] == at(line, found.bad)
        assert turn in numbers
        assert set(numbers[:-1]) <= skipped, "whatever could be tried was"
        assert good not in skipped


def test_states_whose_bytes_are_gone_are_not_tried(repo: Repository) -> None:
    tree = {"w": torch.zeros(2)}
    with repo.track(rng=False, tree=tree) as run:
        made = []
        for _ in range(9):
            tree["w"] += 1
            made.append(run.capture().wait("durable"))
    for gone in (3, 4):
        evict(repo.core, made[gone].uid, is_forced=True)

    def is_bad(tree: Any) -> bool:
        return bool(tree["tree"]["w"][0] >= 5)

    found = repo.bisect(made[0], made[-1], is_bad)
    assert (found.first, [state.step for state in found.candidates]) == (None, [4, 5, 6])
    assert (found.good.step, found.bad.step) == (3, 6)


class Stopped(Exception):
    """Somebody pressed Ctrl-C."""


def test_a_bisection_that_was_broken_off_goes_on(
    repo: Repository, line: list[State], tmp_path: Path
) -> None:
    notes = tmp_path / "verdicts.json"
    asked: list[str] = []

    def asking(allowed: int) -> Callable[[State], Verdict]:
        def judge(state: State) -> Verdict:
            if len(asked) == allowed:
                raise Stopped
            asked.append(state.uid)
            return Verdict.BAD if state.step >= 14 else Verdict.GOOD

        return judge

    for allowed in range(1, 5):
        with pytest.raises(Stopped):
            bisect_by(repo.core, line[0], line[-1], asking(allowed), verdicts=notes)
    found = bisect_by(repo.core, line[0], line[-1], asking(99), verdicts=notes)

    assert at(line, found.first) == 13
    assert len(asked) == len(set(asked)) == len(found.tried) <= 6
    with pytest.raises(Conflict, match="another bisection"):
        bisect_by(repo.core, line[1], line[-1], asking(99), verdicts=notes)
    notes.write_text("{")
    with pytest.raises(InvalidInput, match="holds no verdicts"):
        bisect_by(repo.core, line[0], line[-1], asking(99), verdicts=notes)


@pytest.mark.parametrize(("turn", "word"), [(0, "not good"), (99, "not bad")])
def test_ends_that_are_not_as_they_were_said_to_be_are_found_out(
    repo: Repository, line: list[State], turn: int, word: str
) -> None:
    with pytest.raises(InvalidInput, match=word):
        judged(repo, line, turn, set())


def test_a_path_may_lead_through_a_further_parent(repo: Repository) -> None:
    model = torch.nn.Linear(2, 2)
    with repo.track(rng=False, model=model) as run:
        run.capture().wait()
    with repo.track(rng=False, model=model, branch="side", start="main") as side:
        begun = side.capture().wait()
        with torch.no_grad():
            model.weight.fill_(100.0)
        spoilt = side.capture().wait()
    repo.merge(["main", "side"], into="soup")

    found = repo.bisect(begun, "soup", lambda tree: bool(tree["model"]["weight"].max() > 20))

    assert found.bad.uid == spoilt.uid
    assert found.first is not None


def test_by_a_metric_nothing_is_restored_and_states_without_bytes_count(repo: Repository) -> None:
    made = trained(repo, 9, poisoned=5)
    with repo.track(rng=False, branch="fork", start="main", weight=torch.zeros(2)) as run:
        run.capture()
        nan = run.capture(metrics={"loss": math.nan}).wait()

    assert repo.bisect(made[0], "main", "loss > 500").bad.uid == made[4].uid
    assert repo.bisect(made[0], "main", "metrics.loss >= 1000").restores == 0
    found = repo.bisect(made[5], "fork", "loss > 9999")
    assert (found.bad.uid, [state.step for state in found.candidates]) == (nan.uid, [10, 11])
    assert repo.bisect(made[5], "fork", "loss = nan").bad.uid == nan.uid


@pytest.mark.parametrize(
    ("good", "bad", "asked", "error", "said"),
    [
        ("main", "main~3", "loss > 1", InvalidInput, "the other way round"),
        ("main", "main", "loss > 1", InvalidInput, "both"),
        ("main~8", "main", "nothing > 1", NotFound, "has loss"),
        ("main~8", "main", "loss > 99999", InvalidInput, "holds of no state"),
        ("main~8", "main", "loss > -1", InvalidInput, "already"),
        ("main~8", "main", "loss", InvalidInput, "no condition"),
        ("main~8", "main", "loss > much", InvalidInput, "no condition"),
    ],
)
def test_what_makes_no_sense_is_refused(
    repo: Repository, good: str, bad: str, asked: str, error: type[Exception], said: str
) -> None:
    trained(repo, 9, poisoned=5)
    with pytest.raises(error, match=said):
        repo.bisect(good, bad, asked)


def test_a_predicate_that_says_no_truth_is_refused(repo: Repository) -> None:
    made = trained(repo, 4, poisoned=3)
    with pytest.raises(InvalidInput, match="give True or False"):
        repo.bisect(made[0], made[-1], lambda tree: float(tree["weight"][0]))
