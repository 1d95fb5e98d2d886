"""Curves over the web."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import datastates
from datastates import Repository
from datastates.api import curves
from datastates.api.curves import Curves
from datastates.lineage.query import revision
from datastates.lineage.query.curves import Axis, curve
from datastates.lineage.write import refs
from tests.api.conftest import BASE, NAME, Serve, train

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

    from datastates.values import Value


def series(
    client: TestClient, *heads: str, key: list[str] | str = "loss", points: int = 1000, **asked: str
) -> dict[str, Any]:
    answer = client.get(
        f"{BASE}/series", params={"head": heads, "key": key, "points": points, **asked}
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def note(repo: Repository, rev: str, **attributes: Value) -> None:
    with repo.core.database.write() as session:
        refs.annotate(session, repo.state(rev).uid, attributes)


def test_a_line_for_each_head_and_metric(client: TestClient, repo: Repository) -> None:
    found = series(client, "main", "fork", key=["loss", "val/loss"])
    states = repo.log("main")[::-1]
    line, nan_line, fork, _ = found["lines"]

    assert [(one["head"], one["key"]) for one in found["lines"]] == [
        (head, key) for head in ("main", "fork") for key in ("loss", "val/loss")
    ]
    assert line["values"] == [state.metrics["loss"] for state in states]
    assert line["steps"] == [state.step for state in states]
    assert line["uids"] == [state.uid for state in states]
    assert (line["state"], line["total"]) == (repo.state("main").uid, 8)
    assert nan_line["steps"] == [1, 3, 5, 7]
    assert nan_line["values"][1] is None
    assert fork["uids"][:3] == line["uids"][:3]
    assert fork["uids"][3:] != line["uids"][3:6]


def test_forks_are_marked(client: TestClient, repo: Repository) -> None:
    found = series(client, "main", "fork", "warm", "lone")
    assert found["forks"] == [
        {"state": repo.state("warm").uid, "step": 3, "heads": ["main", "fork"]}
    ]


def test_a_metric_that_nobody_has_is_an_empty_line(client: TestClient) -> None:
    (line,) = series(client, "main", key="nope")["lines"]
    assert (line["steps"], line["values"], line["total"]) == ([], [], 0)


def test_long_lines_are_thinned(client: TestClient, repo: Repository) -> None:
    train(repo, "main", 40)
    (line,) = series(client, "main", points=16)["lines"]
    assert line["total"] == 48
    assert len(line["steps"]) <= 16
    assert line["steps"] == sorted(line["steps"])
    assert (line["steps"][0], line["steps"][-1]) == (1, 48)


def test_a_branch_that_grows_is_read_from_where_it_stood(
    client: TestClient, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(*given: Any, **named: Any) -> Any:
        made = curve(*given, **named)
        asked.append(
            len(made.ids)
            - (
                0
                if named["base"] is None
                else sum(id_ <= named["above"] for id_ in named["base"].ids)
            )
        )
        return made

    monkeypatch.setattr(curves, "curve", counted)
    series(client, "main")
    series(client, "main")
    train(repo, "main", 2)
    (line,) = series(client, "main")["lines"]
    series(client, "fork")
    assert line["uids"] == [state.uid for state in repo.log("main")[::-1]]
    assert asked == [8, 2, 3]


def test_steps_rise_even_where_a_path_counts_anew(repo: Repository) -> None:
    with repo.track(branch="main", rng=False, strict=False, value=1) as run:
        run.capture(step=2, metrics={"loss": 9.0})
    with repo.core.reading() as session:
        (line,) = (
            Curves()
            .series(session, ["main"], [revision.resolve_id(session, "main")], ["loss"], 100)
            .lines
        )
    assert line.steps == (1, 2, 2, 3, 4, 5, 6, 7, 8)
    assert line.values[2] == 9.0


def test_few_points_are_kept_in_memory(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "_POINTS", 12)
    kept = Curves()
    with repo.core.reading() as session:
        for head in ("main", "fork", "lone", "main~3"):
            (line,) = kept.series(
                session, [head], [revision.resolve_id(session, head)], ["loss"], 100
            ).lines
            assert line.total == len(repo.log(head))
    assert sum(len(one.ids) for one in kept._kept.values()) <= 12


def test_points_have_a_time_or_an_epoch_where_they_are_asked_for(
    client: TestClient, repo: Repository
) -> None:
    with repo.track(branch="epochs", rng=False, strict=False, value=1) as run:
        for step in range(1, 5):
            run.capture(
                step=step,
                metrics={"loss": 1 / step} | ({"epoch": step / 4} if step > 2 else {}),
                attributes={"epoch": 7 * step},
            )
    states = repo.log("epochs")[::-1]

    (line,) = series(client, "epochs", x="time")["lines"]
    assert line["xs"] == [state.created_at.timestamp() for state in states]
    assert line["began"] == states[0].created_at.timestamp()
    assert (
        series(client, "fork", x="time")["lines"][0]["began"]
        == repo.state("fork~2").created_at.timestamp()
    ), "its own first state"
    (line,) = series(client, "epochs", x="epoch")["lines"]
    assert line["xs"] == [7, 14, 0.75, 1.0], "a metric says it before an attribute does"
    assert series(client, "main", x="epoch")["lines"][0]["xs"] == [None] * 8
    assert series(client, "main")["lines"][0]["xs"] == []


def test_the_epoch_of_a_state_that_was_noted_later_is_told(
    client: TestClient, repo: Repository
) -> None:
    query = {"head": "main", "key": "loss", "x": "epoch"}
    before = client.get(f"{BASE}/series", params=query)
    note(repo, "main", epoch=3)
    again = client.get(
        f"{BASE}/series", params=query, headers={"If-None-Match": before.headers["etag"]}
    )
    assert again.status_code == 200
    assert again.json()["lines"][0]["xs"][-1] == 3


def test_lines_say_their_group(client: TestClient, repo: Repository) -> None:
    def groups(group: str) -> list[Any]:
        return [
            line["group"] for line in series(client, "main", "fork", "main~1", group=group)["lines"]
        ]

    assert groups("attr.branch") == ["main", "fork", "main"]
    assert groups("attr.rate") == [0.1, 0.3, 0.1]
    assert groups("config.nope") == groups("study") == [None] * 3
    query = {"head": "main", "key": "loss", "group": "attr.seed"}
    etag = client.get(f"{BASE}/series", params=query).headers["etag"]
    note(repo, "main", seed=3)
    assert (
        client.get(f"{BASE}/series", params=query, headers={"If-None-Match": etag}).status_code
        == 200
    ), "attributes change"


def test_means_are_those_of_equal_stretches_and_fall_on_states(
    client: TestClient, repo: Repository
) -> None:
    train(repo, "main", 40)
    states = repo.log("main")[::-1]
    losses = [state.metrics["loss"] for state in states]
    (line,) = series(client, "main", points=12, shape="means")["lines"]
    assert line["total"] == 48
    assert line["values"] == pytest.approx(
        [sum(losses[first : first + 4]) / 4 for first in range(0, 48, 4)]
    )
    assert line["uids"] == [state.uid for state in states[3::4]]
    assert line["steps"] == [state.step for state in states[3::4]]
    (short,) = series(client, "main", points=48, shape="means")["lines"]
    assert short["values"] == losses, "what fits is not averaged"


def test_means_of_a_long_path_are_those_of_its_states(
    client: TestClient, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(repo, "main", 150)
    (short,) = series(client, "main", points=10, shape="means")["lines"]
    monkeypatch.setattr(curves, "_LONG", 1)
    states = repo.log("main")[::-1]
    with repo.core.reading() as session:
        ids = [revision.resolve_id(session, "main")]
        (line,) = (
            Curves()
            .series(
                session, ["main"], ids, ["loss"], 1000, shape=curves.Shape.MEANS, axis=Axis.TIME
            )
            .lines
        )
    losses = [state.metrics["loss"] for state in states]
    assert (line.total, short["total"]) == (158, 158)
    ends = [[state.uid for state in states].index(uid) for uid in line.uids]
    assert ends[:2] == [63, 127]
    assert line.values[0] == pytest.approx(sum(losses[:64]) / 64)
    assert line.values[1] == pytest.approx(sum(losses[64:128]) / 64)
    assert list(line.values[2:]) == losses[128:]
    assert list(line.xs) == [states[end].created_at.timestamp() for end in ends]


def test_where_paths_part_is_told_without_any_line(client: TestClient, repo: Repository) -> None:
    found = client.get(f"{BASE}/series", params={"head": ["main", "fork"]}).json()
    assert found["lines"] == []
    assert [fork["state"] for fork in found["forks"]] == [repo.state("warm").uid]


def test_who_has_the_curves_gets_304_until_a_head_moves(
    client: TestClient, repo: Repository
) -> None:
    query = {"head": "main", "key": "loss"}
    etag = client.get(f"{BASE}/series", params=query).headers["etag"]
    again = client.get(f"{BASE}/series", params=query, headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    train(repo, "main", 1)
    assert (
        client.get(f"{BASE}/series", params=query, headers={"If-None-Match": etag}).status_code
        == 200
    )


def test_curves_of_a_lineage_that_was_made_anew_are_sent(
    client: TestClient, serve: Serve, tmp_path: Path
) -> None:
    query = {"head": "main@step:2", "key": "loss"}
    etag = client.get(f"{BASE}/series", params=query).headers["etag"]
    with datastates.open(tmp_path / "anew", memory_bytes=64 << 20) as anew:
        train(anew, "main", 2, seed=1)
        answer = serve({NAME: anew}).get(
            f"{BASE}/series", params=query, headers={"If-None-Match": etag}
        )

        assert answer.status_code == 200
        assert answer.json()["lines"][0]["uids"] == [state.uid for state in anew.log("main")[::-1]]


def test_too_much_is_refused(client: TestClient) -> None:
    many: dict[str, Any] = {
        "head": [f"main~{number}" for number in range(8)],
        "key": [f"k{number}" for number in range(8)],
        "points": 10_000,
    }
    answer = client.get(f"{BASE}/series", params=many)
    assert answer.status_code == 400
    assert "at most 3125 points fit" in answer.json()["detail"]
    wrongs: list[dict[str, Any]] = [
        {"key": "loss"}, {"head": "main", "key": "loss", "points": 1}, {"head": ["a"] * 129, "key": "loss"},
        {"head": "main", "key": "loss", "x": "age"}, {"head": "main", "key": "loss", "shape": "star"}, {"head": "main", "group": "colour"},
    ]  # fmt: skip
    for wrong in wrongs:
        assert client.get(f"{BASE}/series", params=wrong).status_code == 400
    assert (
        client.get(f"{BASE}/series", params={"head": "nobody", "key": "loss"}).json()["kind"]
        == "not-found"
    )
