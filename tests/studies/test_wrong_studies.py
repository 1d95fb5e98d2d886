"""What trains or reads a study, given what it is not made for: refused at the call by our own
errors, and nothing half done."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import datastates
from datastates import DatastatesError, Repository, studies
from datastates.errors import InvalidInput
from datastates.studies import Job, Plan, SerialExecutor, Variant, records
from tests.test_wrong_types import QUIET, WRONG, Hostile

SUBSETS = {"a": (0, 1), "b": (2, 3)}
PLAN = Plan((Variant("only", train=("a",), validation=("b",)), Variant("last", "only")), SUBSETS)


def train(job: Job) -> None:
    """What takes no time."""
    model = nn.Linear(1, 1)
    job.track(model=model, strict=False)
    for _ in job.epochs():
        job.report(loss=0.5)


def loss(model: nn.Module, indices: Tensor) -> Tensor:
    """Of each sample."""
    return torch.arange(4, dtype=torch.float32)[indices]


@dataclass(frozen=True)
class Case:
    """A call that is right, of a study that is done."""

    call: Callable[..., object]
    arguments: dict[str, Any]

    def is_right(self, name: str, value: object) -> bool:
        """A function may do what it likes, and what a metric is called is known once it was
        reported."""
        functions = ("train", "executor", "stop", "loss", "on_progress")
        return callable(value) if name in functions else name == "metric" and isinstance(value, str)


CASES: dict[str, Callable[[Repository], Case]] = {
    "explore": lambda repo: Case(
        studies.explore,
        {
            **{
                "repo": repo,
                "start": "main",
                "plan": PLAN,
                "train": train,
                "executor": SerialExecutor(),
                "study": "s",
                "stop": None,
            },
            **{"config": {"lr": 0.5}, "retries": 0, "threads": 1, "share": None, "progress": False},
        },
    ),
    "outliers": lambda repo: Case(
        studies.outliers,
        {
            **{
                "repo": repo,
                "branches": ["main"],
                "model": nn.Linear(1, 1),
                "loss": loss,
                "count": 4,
                "study": "s",
                "plan": PLAN,
            },
            **{
                "subsets": SUBSETS,
                "states": 2,
                "noise_rate": 0.5,
                "name": "model",
                "batch": 2,
                "steps_per_epoch": 1,
                "on_progress": None,
            },
        },
    ),
    "prefix_epochs": lambda repo: Case(studies.prefix_epochs, {"repo": repo, "rev": "main"}),
    "read_study": lambda repo: Case(
        studies.read_study,
        {
            "repository": repo,
            "study": "s",
            "plan": PLAN,
            "config": {"lr": 0.5},
            "errors": {},
            "reused": ["only"],
        },
    ),
    "storage": lambda repo: Case(studies.storage, {"repo": repo, "study": "s"}),
    "work_done": lambda repo: Case(studies.work_done, {"repo": repo, "study": "s"}),
}
"""A right call for each; each of its arguments is replaced in turn."""


class _Begun(Exception):
    """A study would begin now."""


def _begin(*_: object) -> None:
    raise _Begun


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A study ``s``, which is done."""
    torch.set_num_threads(1)
    logging.getLogger("datastates").setLevel(logging.CRITICAL)
    with datastates.open(tmp_path_factory.mktemp("wrong") / "runs", config=QUIET) as repo:
        with repo.track(model=nn.Linear(1, 1)) as run:
            run.capture().wait("durable")
        case = CASES["explore"](repo)
        case.call(**case.arguments)
        yield repo
    logging.getLogger("datastates").setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", CASES)
def test_a_right_call_is_taken(repo: Repository, name: str) -> None:
    case = CASES[name](repo)
    before = repo.refs()
    case.call(**case.arguments)
    assert repo.refs() == before, "nothing was left to do"


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_refused_by_an_error_of_ours_and_nothing_is_begun(
    repo: Repository, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study of another name is begun where all that is given is right: that is far enough."""
    failures, serial = [], itertools.count()
    if name == "explore":
        monkeypatch.setattr(records, "tag_start", _begin)
    for parameter in CASES[name](repo).arguments:
        for value in WRONG:
            case = CASES[name](repo)
            if case.is_right(parameter, value):
                continue
            new = {"study": f"new-{next(serial)}"} if name == "explore" else {}
            before = repo.refs()
            try:
                case.call(**{**case.arguments, **new, parameter: value})
            except DatastatesError:
                problem = "" if repo.refs() == before else "it had begun"
            except _Begun:
                problem = ""
            except Exception as exc:
                problem = f"{type(exc).__name__}: {str(exc)[:150]}"
            else:
                problem = ""
            if problem:
                failures.append(
                    f"{parameter}={'a hostile object' if isinstance(value, Hostile) else repr(value)[:60]}:"
                    f" {problem}"
                )
    assert not failures, "\n".join([f"{len(failures)} of {name}:", *failures])


def test_a_recipe_that_makes_no_executor_begins_no_study(repo: Repository) -> None:
    case = CASES["explore"](repo)
    before = repo.refs()
    with pytest.raises(InvalidInput, match="made 0: let it return"):
        case.call(**{**case.arguments, "study": "unmade", "executor": int})
    with pytest.raises(ZeroDivisionError):
        case.call(**{**case.arguments, "study": "unmade", "executor": lambda: 1 / 0})
    assert repo.refs() == before


def test_what_outliers_cannot_use_is_refused_before_anything_is_read(repo: Repository) -> None:
    case = CASES["outliers"](repo)

    def never(model: nn.Module, indices: Tensor) -> Tensor:
        raise AssertionError

    for wrong in ({"noise_rate": 2}, {"subsets": {"a": [4]}}, {"name": 3}):
        with pytest.raises(InvalidInput):
            case.call(**{**case.arguments, "loss": never, **wrong})
