"""The names that a lineage knows, and what is said of others."""

from __future__ import annotations

import pytest

from datastates.errors import SyntaxProblem
from datastates.lineage import Database, Run
from datastates.lineage.query.fields import check_names, field_of, resolve_names, written
from datastates.lineage.query.grammar import Field, Kind, parse_query
from datastates.lineage.query.pages import find
from datastates.lineage.schema import from_us
from datastates.lineage.write import runs
from tests.lineage.conftest import Grow

RUN = Run(
    "a" * 24,
    "node7",
    "ann",
    42,
    ("train.py",),
    None,
    None,
    {"lr": 0.1, "optimizer.beta": 0.9, "api_token": "***"},
    {},
    from_us(0),
)


@pytest.fixture
def filled(database: Database, grow: Grow) -> Database:
    """Two hundred states with three metrics and two attributes, of a run with settings."""
    with database.write() as session:
        runs.start(session, RUN)
    grow(
        branch="main",
        count=200,
        run=RUN.uid,
        metrics={"loss": 0.5, "val_loss": 0.4},
        attributes={"seed": 3},
    )
    grow(branch="other", metrics={"grad norm": 1.0}, attributes={"kind": "base"})
    return database


def test_names_are_listed_by_kind_and_alphabet(filled: Database) -> None:
    listed = {
        "metrics": ('metrics."grad norm"', "metrics.loss", "metrics.val_loss"),
        "config": ("config.lr", "config.optimizer.beta"),  # and no secrets
        "attr": ("attr.kind", "attr.seed"),
    }
    for kind, names in listed.items():
        with filled.read() as session, pytest.raises(SyntaxProblem) as problem:
            check_names(session, f"{kind}.xyz = 1")
        assert problem.value.expected == names


def test_a_lineage_without_states_knows_no_names_and_refuses_none(database: Database) -> None:
    with database.read() as session:
        check_names(session, "metrics.loss < 1 and attr.seed = 3 order by metrics.val_loss")


@pytest.mark.parametrize(
    "text",
    [
        (
            "metrics.loss < 1 and not attr.seed in (3, 4) or config.lr > 0 order by"
            " metrics.val_loss desc, attr.kind limit 3"
        ),
        'metrics."grad norm" = 1',
        "config.optimizer.beta > 0",
        "metrics.absent exists and not exists attr.absent",  # which ask whether it is there
        "step > 3 and branch = absent and tag ~ x",
    ],
)
def test_known_names_pass(filled: Database, text: str) -> None:
    with filled.read() as session:
        check_names(session, text)


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("metrics.val_los < 1", "there is no metric 'val_los', did you mean metrics.val_loss?", 1),
        (
            "step > 3 and metrics.Loss < 1",
            "there is no metric 'Loss', did you mean metrics.loss?",
            14,
        ),
        ("order by attr.sed", "there is no attribute 'sed', did you mean attr.seed?", 10),
        ("metrics.seed = 3", "there is no metric 'seed', did you mean attr.seed?", 1),
        ("attr.lr = 3", "there is no attribute 'lr', did you mean config.lr?", 1),
        ("config.learning = 3", "there is no setting 'learning'", 1),
        ("not (metrics.zzz in (1, 2))", "there is no metric 'zzz'", 6),
    ],
)
def test_unknown_names_are_told_with_close_ones(
    filled: Database, text: str, message: str, column: int
) -> None:
    with filled.read() as session, pytest.raises(SyntaxProblem) as caught:
        check_names(session, text)

    assert str(caught.value).startswith(f"{message} at column {column}\n")
    assert (caught.value.text, caught.value.column) == (text, column)
    kind = text[column - 1 :].partition(".")[0]
    assert caught.value.expected
    assert all(one.startswith(kind) for one in caught.value.expected), "what there is of the kind"


def test_a_lineage_without_attributes_says_that_there_are_none(
    database: Database, grow: Grow
) -> None:
    grow(branch="main", metrics={"loss": 1.0})
    with (
        database.read() as session,
        pytest.raises(SyntaxProblem, match="no attribute 'seed': no state has any"),
    ):
        check_names(session, "attr.seed = 3")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("val_loss < 1 order by loss", "metrics.val_loss < 1 order by metrics.loss"),
        ("not (lr > 0 or seed in (3, 4))", "not (config.lr > 0 or attr.seed in (3, 4))"),
        ("optimizer.beta exists and step > 1", "config.optimizer.beta exists and step > 1"),
        ("loss is nan and kind = base", "metrics.loss is nan and attr.kind = base"),
    ],
)
def test_bare_names_are_metrics_then_settings_then_attributes(
    filled: Database, text: str, same: str
) -> None:
    with filled.read() as session:
        check_names(session, text)
        found = [state.uid for state in find(session, text).states]
        assert found == [state.uid for state in find(session, same).states]
        assert resolve_names(session, parse_query(text), text) == parse_query(same)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step > 3 and val_los < 1", "there is no field 'val_los', did you mean val_loss"),
        ("stepp = 3", "there is no field 'stepp', did you mean step"),
        ("api_token = x", "there is no field 'api_token'"),
        ("loss = low", "'loss' is a metric, and is compared with numbers"),
        ("loss ~ x", "'loss' is a metric"),
        ("loss in (1, true)", "'loss' is a metric"),
    ],
)
def test_bare_names_that_fit_nothing_are_refused(filled: Database, text: str, message: str) -> None:
    with filled.read() as session, pytest.raises(SyntaxProblem, match=message):
        check_names(session, text)


def test_columns_are_named_as_in_a_query_or_by_bare_names(filled: Database) -> None:
    with filled.read() as session:
        assert (
            field_of(session, "loss")
            == field_of(session, "metrics.loss")
            == Field("metrics", Kind.METRIC, "loss")
        )
        assert field_of(session, "grad norm") == field_of(session, 'metrics."grad norm"')
        assert field_of(session, "seed").name == "attr"
        assert field_of(session, "lr").name == "config"
        assert field_of(session, "step") == Field("step", Kind.INTEGER)
        assert written(field_of(session, "grad norm")) == 'metrics."grad norm"'
        with pytest.raises(
            SyntaxProblem, match=r"there is no metric 'los', did you mean metrics\.loss"
        ):
            field_of(session, "los")
        with pytest.raises(
            SyntaxProblem, match=r"there is no attribute 'sed', did you mean attr\.seed"
        ):
            field_of(session, "attr.sed")
