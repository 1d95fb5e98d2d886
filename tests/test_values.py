"""What a user gives as a value: taken as Python's own plain types, or refused at the call."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from enum import Enum, IntEnum, StrEnum
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch

import datastates
from datastates import Config, Repository, Tracker, values
from datastates.errors import InvalidInput

if TYPE_CHECKING:
    from fractions import Fraction as Unimported


class Text(str):
    """A text that says something else of itself."""

    __slots__ = ()

    def __str__(self) -> str:
        return "else"


class Ratio(float):
    """A float of another type."""

    __slots__ = ()


class Color(Enum):
    RED = "red"
    PAIR = (1, 2)


class Word(StrEnum):
    ONE = "one"


class Count(IntEnum):
    TWO = 2


TAKEN: list[tuple[object, object]] = [
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (np.int64(2), 2),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.array(2), 2),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (torch.tensor(3), 3),
    (torch.tensor([1.5]), 1.5),
    (torch.tensor(True), True),
    (Ratio(1.5), 1.5),
    (Text("text"), "text"),
    (Color.RED, "red"),
    (Word.ONE, "one"),
    (Count.TWO, 2),
    (Path("a") / "b", "a/b"),
    (datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2))), "2026-01-01T10:00:00+00:00"),
    (date(2026, 1, 2), "2026-01-02"),
    (2**64 - 1, 2**64 - 1),
]

REFUSED: list[object] = [
    [1],
    {"a": 1},
    b"bytes",
    1j,
    object(),
    int,
    Color.PAIR,
    datetime(2026, 1, 1),  # without a zone
    2**64,
    -(2**63) - 1,
    10**5000,
    "a NUL \0",
    "half \ud800",
    torch.ones(2),
    torch.empty((), device="meta"),
    torch.tensor(1j),
    np.ones(2),
    np.datetime64("2026-01-01"),
]


@pytest.mark.parametrize(("given", "taken"), TAKEN, ids=repr)
def test_an_attribute_is_recorded_as_the_plain_value_that_it_holds(
    given: object, taken: object
) -> None:
    (found,) = values.attributes({"a": given}).values()
    assert found == taken
    assert type(found) is type(taken)


def test_the_text_of_an_attribute_is_as_long_as_a_message_at_most() -> None:
    longest = "x" * values.MESSAGE_LENGTH
    assert values.attributes({"a": longest}) == {"a": longest}
    with pytest.raises(InvalidInput, match="attribute 'a' has 16385 characters: at most 16384 fit"):
        values.attributes({"a": longest + "x"})


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: type(given).__name__)
def test_what_no_database_holds_is_refused_by_name(given: object) -> None:
    with pytest.raises(InvalidInput, match="attribute 'a' is "):
        values.attributes({"a": given})


@pytest.mark.parametrize(
    "given",
    [
        1,
        True,
        0.5,
        Ratio(0.5),
        np.float16(1),
        torch.ones((), requires_grad=True),
        np.ones(1),
        math.nan,
    ],
)
def test_a_metric_is_a_float(given: Any) -> None:
    assert type(values.number(given, "metric")) is float


@pytest.mark.parametrize(
    "given",
    [None, "0.5", b"1", 1j, [1.0], torch.ones(2), 10**400, object(), np.str_("1"), Color.RED],
    ids=lambda given: type(given).__name__,
)
def test_a_metric_that_is_no_number_is_refused_by_its_key(given: object) -> None:
    with pytest.raises(InvalidInput, match=r"metric 'loss' is .*which is no number"):
        values.metrics({"loss": given})


@pytest.mark.parametrize(
    "given",
    [2, 2.0, np.int64(2), np.float32(2), torch.tensor(2), torch.tensor([2.0]), Count.TWO],
    ids=repr,
)
def test_a_step_is_a_whole_number_whatever_holds_it(given: object) -> None:
    assert values.step(given) == 2
    assert type(values.step(given)) is int


@pytest.mark.parametrize(
    "given",
    [True, 0.5, math.nan, math.inf, None, "2", -1, 2**63, np.bool_(True), torch.ones(2), [2]],
    ids=repr,
)
def test_what_counts_no_steps_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match="step is "):
        values.step(given)


@pytest.mark.parametrize("name", ["", "k" * 256, "\0", "\ud800", 1, None, b"k"], ids=repr)
def test_a_name_that_no_database_holds_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput):
        values.metrics({name: 1.0})


def test_an_object_that_lies_about_itself_is_refused_as_any_other() -> None:
    class Hostile:
        shape = ()

        def item(self) -> object:
            raise RuntimeError

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

        def __float__(self) -> float:
            raise RuntimeError

        def __repr__(self) -> str:
            raise RuntimeError

    for refuse in (
        values.step,
        lambda it: values.number(it, "metric"),
        lambda it: values.plain(it, "attribute"),
    ):
        with pytest.raises(InvalidInput):
            refuse(Hostile())


# In captures


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository that writes only what it is asked to."""
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=64 << 20, durable_interval_s=None)
    ) as opened:
        yield opened


@pytest.fixture
def run(repo: Repository) -> Tracker:
    """A tracker of one tensor."""
    return repo.track(weight=torch.zeros(3))


@pytest.mark.parametrize("step", [2.0, np.int64(2), torch.tensor(2)], ids=repr)
def test_a_step_of_any_number_is_captured_written_and_found(
    repo: Repository, run: Tracker, step: Any
) -> None:
    for _ in range(3):
        state = run.capture(step=step).wait("durable")
        assert repo.load(state.uid)["weight"].tolist() == [0, 0, 0]
    assert len(repo.find("step = 2")) == 3
    assert [state.step for state in repo.log()] == [2, 2, 2]


@pytest.mark.parametrize(
    "value",
    [np.mean([1, 2]), np.float32(1.5), Ratio(1.5), torch.tensor(1.5)],
    ids=lambda value: type(value).__name__,
)
def test_an_attribute_of_any_number_becomes_durable(tmp_path: Path, value: Any) -> None:
    with datastates.open(tmp_path / "runs") as repo, repo.track(weight=torch.zeros(3)) as run:
        run.capture(attributes={"acc": value})
    with datastates.open(tmp_path / "runs") as repo:
        (state,) = repo.find("attr.acc = 1.5")
        assert state.status == "durable"
        assert repo.verify(state.uid).attributes == {"acc": 1.5}


@pytest.mark.parametrize(
    "given",
    [
        {"step": 0.5},
        {"step": True},
        {"metrics": {"loss": "low"}},
        {"metrics": {"k" * 256: 1.0}},
        {"metrics": [0.5]},
        {"attributes": {"a": [1]}},
        {"attributes": {"a": "\0"}},
        {"message": b"bytes"},
        {"message": "\ud800"},
    ],
    ids=str,
)
def test_a_capture_that_refuses_an_argument_has_done_nothing(
    repo: Repository, run: Tracker, given: Any
) -> None:
    run.capture()
    with pytest.raises(InvalidInput):
        run.capture(**given)
    assert run.step == 1
    assert run.capture().wait("durable").step == 2
    assert [state.step for state in repo.log()] == [2, 1]


def test_a_step_that_was_set_by_hand_is_checked_too(run: Tracker) -> None:
    run.step = 0.5  # type: ignore[assignment]  # a mistake
    with pytest.raises(InvalidInput, match=r"run\.step is 0\.5"):
        run.capture()
    run.step = 4.0  # type: ignore[assignment]  # as other frameworks count
    assert run.capture().wait().step == 5


def test_a_metric_with_a_gradient_is_taken_without_a_warning(
    run: Tracker, recwarn: pytest.WarningsRecorder
) -> None:
    loss = torch.ones(1, requires_grad=True).mean()
    assert run.capture(metrics={"loss": loss}).wait().metrics == {"loss": 1.0}
    assert not recwarn.list


def test_a_capture_that_raises_for_an_earlier_one_has_counted_its_step(
    repo: Repository, run: Tracker
) -> None:
    first, second = run.capture().wait(), run.capture().wait()
    repo.move("main", first, expected=second)
    with pytest.raises(datastates.Conflict):  # somebody moved the branch
        run.capture().wait()
    with pytest.raises(datastates.Conflict):
        run.capture()
    assert run.step == 4


@values.checked
def tell(
    what: str,
    times: values.Positive = 1,
    *,
    word: Word | str | None = None,
    where: Literal["here", "there"] = "here",
    lines: Sequence[values.Count] = (),
    at: Path | None = None,
    then: Callable[[str], str] | None = None,
    by: Mapping[str, object] | None = None,
    of: Unimported | None = None,
    size: int | str = 0,
    **more: object,
) -> object:
    """What it was given."""
    return (what, times, word, where, lines, at, then, by, of, size, more)


RIGHT = ("so", 2, Word.ONE, "there", [1, 2], Path("x"), str.upper, {"a": 1}, 3, "2G", {"more": 4})


def test_arguments_are_checked_by_their_annotations() -> None:
    names = ("word", "where", "lines", "at", "then", "by", "of", "size")
    given = dict(zip(names, ("one", *RIGHT[3:]), strict=False))
    assert tell(Text("so"), times=np.int64(2), more=4, **given) == RIGHT  # type: ignore[arg-type]
    found = tell("so", 2.0, lines=range(2), by=None)  # type: ignore[arg-type]  # a whole number
    assert found == ("so", 2, None, "here", [0, 1], None, None, None, None, 0, {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"what": 3}, "what is 3: give a text"),
        ({"times": 0}, "times is 0: it must be"),
        ({"times": None}, "times is None: give a whole number"),
        ({"word": "two"}, "word is 'two': choose 'one'"),
        ({"where": "away"}, "where is 'away': choose 'here' or 'there'"),
        ({"where": None}, "where is None: choose"),
        ({"lines": [1, "x"]}, "an item of lines is 'x': give a whole number"),
        ({"lines": "x"}, "lines is 'x': give a list"),
        ({"at": "x"}, "at is 'x': give a Path"),
        ({"then": 3}, "then is 3: give a function"),
        ({"by": {1: 2}}, "by is a dict: give a dict with a name for each"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(said)}"):
        tell(**{"what": "so", **given})


def test_help_shows_the_arguments_of_a_checked_function() -> None:
    assert str(signature(tell)).startswith("(what: 'str', times: 'values.Positive' = 1, *, word:")
