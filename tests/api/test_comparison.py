"""States beside each other, branches by settings and metrics, and histograms, over the web."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from datastates import Repository
from datastates.api.payload import ConcurrencyLimit
from datastates.api.routes import reading as routes
from datastates.maintenance.retention_pass import evict
from tests.api.conftest import BASE
from tests.api.endless import Endless

if TYPE_CHECKING:
    import pytest
    from fastapi.testclient import TestClient


def get(client: TestClient, path: str, /, **query: Any) -> Any:
    answer = client.get(f"{BASE}/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def problem(client: TestClient, path: str, /, **query: Any) -> Any:
    answer = client.get(f"{BASE}/{path}", params=query)
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.json()


def test_states_stand_beside_each_other_with_where_each_can_be_restored(
    client: TestClient, repo: Repository
) -> None:
    evict(repo.core, repo.state("main~1").uid)
    found = get(client, "comparison", rev=["main~1", "fork", "lone"])
    assert [each["rev"] for each in found["states"]] == ["main~1", "fork", "lone"]
    assert [each["branch"] for each in found["states"]] == ["main", "fork", "lone"]
    gone, fork, _ = found["states"]
    assert (gone["state"]["status"], gone["places"], gone["nearest"]["uid"]) == (
        "evicted",
        [],
        repo.state("main~2").uid,
    )
    assert fork["nearest"]["uid"] == fork["state"]["uid"] == repo.state("fork").uid
    assert fork["places"][0].startswith("local on ")
    (rate,) = (row for row in found["attributes"] if row["key"] == "rate")
    assert (rate["values"], rate["differs"]) == ([0.1, 0.3, 0.1], True)


def test_too_many_and_too_few_are_refused_before_any_is_looked_for(client: TestClient) -> None:
    said = problem(client, "comparison", rev=["nothing"] * 33)
    assert (said["status"], said["kind"]) == (400, "invalid-input")
    assert "at most 32" in said["detail"]
    assert problem(client, "comparison", rev=["main"])["status"] == 400
    assert problem(client, "comparison", rev=["main", "mian"])["kind"] == "not-found"
    assert problem(client, "comparison")["status"] == 400


def test_who_has_a_comparison_gets_304(client: TestClient) -> None:
    query = {"rev": ["main", "fork"]}
    etag = client.get(f"{BASE}/comparison", params=query).headers["etag"]
    assert (
        client.get(f"{BASE}/comparison", params=query, headers={"If-None-Match": etag}).status_code
        == 304
    )


def test_branches_are_told_by_settings_and_metrics(client: TestClient, repo: Repository) -> None:
    found = get(client, "parallels", q="step > 2")
    assert [each["branch"] for each in found["branches"]] == ["fork", "main", "soup"]
    assert (found["total"], found["matching"]) == (4, 3)
    loss = next(axis for axis in found["axes"] if axis["key"] == "metrics.loss")
    best = min(state.metrics["loss"] for state in repo.log("main"))
    assert loss["values"][1] == best
    assert loss["direction"] == "min"
    last = next(
        axis
        for axis in get(client, "parallels", taken="last", name="main")["axes"]
        if axis["key"] == "metrics.loss"
    )
    assert last["values"] == [repo.state("main").metrics["loss"]]
    assert problem(client, "parallels", q="step >")["column"] == 7
    assert problem(client, "parallels", limit=1001)["parameter"] == "limit"


def test_a_histogram_is_that_of_numpy_on_what_is_restored(
    client: TestClient, repo: Repository
) -> None:
    found = get(
        client,
        "histogram",
        rev=["warm", "main"],
        path="optimizer/state/0.weight/exp_avg_sq",
        bins=12,
    )
    tensors = [
        repo.load(rev)["optimizer"]["state"]["0.weight"]["exp_avg_sq"].double().numpy().ravel()
        for rev in ("warm", "main")
    ]
    low, high = min(each.min() for each in tensors), max(each.max() for each in tensors)
    for spread, values in zip(found["states"], tensors, strict=True):
        counts, edges = np.histogram(values, bins=12, range=(low, high))
        assert spread["counts"] == counts.tolist()
        assert found["edges"] == edges.tolist()
        assert (spread["least"], spread["most"], spread["elements"]) == (
            values.min(),
            values.max(),
            values.size,
        )


def test_what_cannot_be_counted_is_a_problem_with_the_next_step(
    client: TestClient, repo: Repository
) -> None:
    known = {"rev": "main", "path": "model/0.weight"}
    assert (
        "did you mean"
        in problem(client, "histogram", **{**known, "path": "model/0.wieght"})["detail"]
    )
    assert problem(client, "histogram", **known, bins=513)["parameter"] == "bins"
    assert problem(client, "histogram", **known, scale="cubic")["parameter"] == "scale"
    assert "from 1 to 4" in problem(client, "histogram", **{**known, "rev": ["main"] * 5})["detail"]
    evict(repo.core, repo.state("main~1").uid)
    gone = problem(client, "histogram", **{**known, "rev": "main~1"})
    assert (gone["status"], gone["nearest"]) == (410, repo.state("main~2").uid)


def test_counting_ends_after_its_time_and_says_what_to_do_instead(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "COUNTING_S", 0.0)
    said = problem(client, "histogram", rev="main", path="model/0.weight")
    assert (said["status"], said["kind"]) == (400, "invalid-input")
    assert "download the tensor" in said["detail"]


def test_more_readers_than_places_are_turned_away(client: TestClient) -> None:
    # of a FastAPI application
    (served,) = client.app.state.served.values()  # type: ignore[attr-defined]
    served.payload_reads = ConcurrencyLimit(1, "busy", wait_s=0.01, retry_s=2)
    with served.payload_reads.one():
        answer = client.get(f"{BASE}/histogram", params={"rev": "main", "path": "model/0.weight"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


def test_counting_ends_when_its_client_hangs_up(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Endless()
    monkeypatch.setattr(routes, "count", reading)
    monkeypatch.setattr(routes, "COUNTING_S", 60.0)
    reading.hang_up(repo, f"{BASE}/histogram?rev=main&path=model")
