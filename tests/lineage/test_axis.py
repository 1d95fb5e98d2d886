"""What curves are drawn over beside steps, and what they are averaged by."""

from __future__ import annotations

import math
import secrets
from datetime import UTC, datetime, timedelta

import pytest

from datastates.errors import InvalidInput
from datastates.lineage import Database, NewState, StateFacts
from datastates.lineage.lookup import id_of
from datastates.lineage.query.curves import Axis, along, means
from datastates.lineage.views.branches import groups_of, runs_of
from datastates.lineage.write import record
from datastates.values import Value

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def grow(
    database: Database,
    values: list[float],
    *,
    metrics: dict[str, float] | None = None,
    attributes: dict[str, Value] | None = None,
) -> list[int]:
    """A branch with these losses, one state a second; the row ids of its states."""
    uids: list[str] = []
    with database.write() as session:
        for step, value in enumerate(values):
            facts = StateFacts(
                secrets.token_hex(12),
                uids[-1] if uids else None,
                "main",
                None,
                step,
                metrics={"loss": value, **(metrics or {})},
                attributes=attributes or {},
                created_at=BEGAN + timedelta(seconds=step),
            )
            record.record(
                session, NewState(facts, secrets.token_hex(32), tier="memory", node="test")
            )
            uids.append(facts.uid)
        return [id_of(session, uid) for uid in uids]


def test_a_point_has_the_time_at_which_its_state_was_captured(database: Database) -> None:
    ids = grow(database, [1.0, 2.0, 3.0])
    with database.read() as session:
        assert along(session, ids[::-1], Axis.TIME) == [
            BEGAN.timestamp() + second for second in (2, 1, 0)
        ]
        assert along(session, ids, Axis.STEP) == []


@pytest.mark.parametrize(
    ("metrics", "attributes", "expected"),
    [
        ({"epoch": 2.5}, {"epoch": 9}, 2.5),
        ({}, {"epoch": 9}, 9.0),
        ({}, {"epoch": "ninth"}, None),
        ({}, {}, None),
    ],
)
def test_a_metric_says_the_epoch_before_an_attribute_does(
    database: Database,
    metrics: dict[str, float],
    attributes: dict[str, Value],
    expected: float | None,
) -> None:
    ids = grow(database, [1.0], metrics=metrics, attributes=attributes)
    with database.read() as session:
        assert along(session, ids, Axis.EPOCH) == [expected]


def test_means_are_those_of_all_states_and_skip_gaps(database: Database) -> None:
    values = [math.nan if step % 50 == 7 else float(step) for step in range(200)]
    ids = grow(database, values)
    with database.read() as session:
        found = means(session, ids[-1], "loss")
    finite = [value for value in values if math.isfinite(value)]
    assert sum(found.counts) == len(finite)
    assert sum(found.sums) == pytest.approx(sum(finite))
    assert found.count == 200
    assert found.ids[:3].tolist() == [ids[63], ids[127], ids[191]]
    assert found.sums[0] == pytest.approx(
        sum(value for value in values[:64] if math.isfinite(value))
    )


def test_states_are_grouped_by_an_attribute_and_no_other_word(database: Database) -> None:
    ids = grow(database, [1.0], attributes={"study": "wide", "seed": 3})
    with database.read() as session:
        made_by = runs_of(session, ids)
        assert made_by == {ids[0]: None}
        assert groups_of(session, "study", made_by) == {ids[0]: "wide"}
        assert groups_of(session, "attr.seed", made_by) == {ids[0]: 3.0}
        assert groups_of(session, "config.lr", made_by) == {}
        with pytest.raises(InvalidInput, match="name 'study'"):
            groups_of(session, "colour", made_by)
