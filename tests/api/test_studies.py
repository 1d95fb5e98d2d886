"""Studies, merged states and outliers over the web; pictures above all, which others made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from datastates import Repository
from datastates.api.serve import WebServer, serve_in_thread
from datastates.errors import InvalidInput
from datastates.studies import Job, Plan, SerialExecutor, Variant, explore, outliers
from datastates.thumbnails import MOST_BYTES
from tests.api.conftest import BASE, NAME, Serve

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

    from datastates.studies import OutlierReport

PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 40
PLAN = Plan(
    (
        Variant("a", None, 1, {"lr": 0.1}),
        Variant("a-more", "a", 1, {"lr": 0.2}),
        Variant("bad", None, 1, {"lr": 9.0}),
    )
)


def train(job: Job) -> None:
    """One epoch of nothing; ``bad`` raises."""
    if job.variant.name == "bad":
        raise ValueError("too hot")
    job.track(weight=torch.full((3,), float(str(job.config["lr"]))), rng=False, only=[])
    for _ in job.epochs():
        job.report(val_loss=float(str(job.config["lr"])), loss=1.0)


def study(repo: Repository) -> None:
    with SerialExecutor() as executor:
        explore(repo, "main", PLAN, train, executor, study="rates/first", progress=False, retries=0)


def report_of(repo: Repository) -> OutlierReport:
    """Twelve samples, of which the last stand out."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))

    def loss(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        return indices.float() ** 2

    return outliers(
        repo, "main", model=model, loss=loss, count=12, noise_rate=0.25, steps_per_epoch=4
    )


def test_a_study_over_the_web(client: TestClient, repo: Repository) -> None:
    assert client.get(f"{BASE}/studies").json() == {"items": [], "total": 0}
    study(repo)
    (item,) = client.get(f"{BASE}/studies").json()["items"]
    assert (item["name"], item["variants"], item["done"], item["failed"]) == (
        "rates/first",
        3,
        2,
        1,
    )
    found = client.get(f"{BASE}/studies/rates/first").json()
    assert (found["study"], found["metric"], found["metrics"]) == (
        item,
        "loss",
        ["loss", "val_loss"],
    )
    found = client.get(f"{BASE}/studies/rates/first", params={"metric": "val_loss"}).json()
    assert [
        (each["name"], each["depth"], each["stage"], each["rank"]) for each in found["variants"]
    ] == [
        ("a", 0, "done", 1),
        ("a-more", 1, "done", 2),
        ("bad", 0, "failed", None),
    ]
    on_disk = {
        branch["name"]: branch["bytes"]
        for branch in client.get(f"{BASE}/branches", params={"name": "rates/"}).json()["items"]
    }
    assert 0 < sum(on_disk.values()) == item["bytes"]
    assert [each["bytes"] for each in found["variants"]] == [
        on_disk.get(each["branch"], 0) for each in found["variants"]
    ]
    assert found["variants"][2]["error"].startswith("ValueError: too hot\n")
    assert found["variants"][1]["state"] == repo.state("done/rates/first/a-more").uid
    turned = client.get(
        f"{BASE}/studies/rates/first", params={"metric": "val_loss", "direction": "max"}
    ).json()
    assert [each["rank"] for each in turned["variants"]] == [2, 1, None]


def test_wrong_questions_are_refused(client: TestClient, repo: Repository) -> None:
    study(repo)
    for path, status in (
        ("studies/none", 404),
        ("studies/rates", 404),
        ("studies/rates/first?limit=0", 400),
        ("studies/rates/first?direction=up", 400),
        ("studies?limit=5000", 400),
        ("merges?limit=1000", 400),
        (f"merges?after={'0' * 24}", 404),
        ("outliers/1", 404),
        ("outliers/0", 400),
        ("outliers/x", 400),
        ("outliers/1/pictures/0", 404),
        ("outliers/1/pictures/-1", 400),
    ):
        assert client.get(f"{BASE}/{path}").status_code == status, path


def test_soups_come_with_their_parents_and_weights(client: TestClient, repo: Repository) -> None:
    weighted = repo.merge(["main", "fork", "main~1"], weights=[0.5, 0.3, 0.2], message="three")
    average = repo.merge(["main", "fork"], method="ema", decay=0.5)
    found = client.get(f"{BASE}/merges", params={"metric": "loss"}).json()
    ema, three, both = found["items"]
    assert (found["metric"], found["next"]) == ("loss", None)
    assert three["state"] == weighted.uid
    assert [(each["state"], each["branch"], each["weight"]) for each in three["parents"]] == [
        (repo.state("main").uid, "main", 0.5),
        (repo.state("fork").uid, "fork", 0.3),
        (repo.state("main~1").uid, "main", 0.2),
    ]
    assert three["parents"][0]["value"] == repo.state("main").metrics["loss"]
    assert (three["method"], three["kind"], three["message"]) == ("mean", "soup", "three")
    assert (both["refs"], both["message"]) == (["best", "soup"], "both")
    assert (ema["state"], ema["method"], ema["parents"][0]["branch"]) == (
        average.uid,
        "ema",
        "fork",
    )
    first = client.get(f"{BASE}/merges", params={"limit": 2}).json()
    rest = client.get(f"{BASE}/merges", params={"limit": 2, "after": first["next"]}).json()
    assert [each["state"] for each in (*first["items"], *rest["items"])] == [
        ema["state"],
        three["state"],
        both["state"],
    ]
    assert rest["next"] is None


def test_a_report_is_kept_with_its_highest_ranked(client: TestClient, repo: Repository) -> None:
    report = report_of(repo)
    report.to_repository(repo, "labels", describe=lambda index: f"shoe {index} <b>", most=5)
    (item,) = client.get(f"{BASE}/outliers").json()["items"]
    assert (item["name"], item["count"], item["suspects"], item["kept"], item["branches"]) == (
        "labels",
        12,
        3,
        5,
        ["main"],
    )
    first = client.get(f"{BASE}/outliers/{item['id']}", params={"limit": 2}).json()
    rest = client.get(f"{BASE}/outliers/{item['id']}", params={"after": first["next"]}).json()
    samples = first["samples"] + rest["samples"]
    assert ([each["rank"] for each in samples], [each["index"] for each in samples]) == (
        [1, 2, 3, 4, 5],
        [11, 10, 9, 8, 7],
    )
    assert samples[0]["lineage_loss"] == 121.0
    assert (samples[0]["description"], samples[0]["is_suspect"], samples[4]["is_suspect"]) == (
        "shoe 11 <b>",
        True,
        False,
    )
    assert (samples[0]["held_out_loss"], samples[0]["has_picture"], rest["next"]) == (
        None,
        False,
        None,
    )
    assert client.get(f"{BASE}/outliers/{item['id']}/pictures/11").status_code == 404

    report.to_repository(repo, "labels", most=2)
    (again,) = client.get(f"{BASE}/outliers").json()["items"]
    assert (again["kept"], again["id"]) == (2, item["id"])  # a link to it shows the new one
    report.to_repository(repo, "others", most=1)
    assert [each["name"] for each in client.get(f"{BASE}/outliers").json()["items"]] == [
        "others",
        "labels",
    ]


def test_pictures_of_the_report_are_served_as_what_they_are(
    client: TestClient, repo: Repository
) -> None:
    report_of(repo).to_repository(
        repo, show=lambda index: PNG if index == 11 else np.full((3, 3), index / 12), most=2
    )
    (item,) = client.get(f"{BASE}/outliers").json()["items"]
    path = f"{BASE}/outliers/{item['id']}/pictures"
    answer = client.get(f"{path}/11")
    assert (answer.content, answer.headers["content-type"]) == (PNG, "image/png")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert (
        client.get(f"{path}/11", headers={"If-None-Match": answer.headers["etag"]}).status_code
        == 304
    )
    assert client.get(f"{path}/10").content.startswith(PNG[:8])
    assert client.get(f"{path}/3").status_code == 404


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
            "give a PNG, JPEG, GIF or WebP",
        ),
        (b"<!doctype html><script>alert(1)</script>", "give a PNG, JPEG, GIF or WebP"),
        (b"", "give a PNG, JPEG, GIF or WebP"),
        (PNG + b"x" * MOST_BYTES, "at most 1,048,576"),
        (np.zeros((2, 2, 7)), "shape (2, 2, 7)"),
        (object(), "give numbers"),
        (np.array(["x"]), "give numbers"),
    ],
    ids=["svg", "html", "nothing", "large", "shape", "object", "text"],
)
def test_what_is_no_picture_is_neither_kept_nor_served(
    repo: Repository, serve: Serve, given: Any, said: str
) -> None:
    report = report_of(repo)
    with pytest.raises(InvalidInput, match=said.replace("(", r"\(").replace(")", r"\)")):
        report.to_repository(repo, show=lambda index: given, most=1)
    report.to_repository(repo, most=1)
    answer = shown_by(repo, lambda index: given)
    assert (answer.status_code, answer.json()["kind"]) == (503, "unavailable")
    assert said in answer.json()["detail"]


def shown_by(repo: Repository, show: Callable[[int], object], index: int = 11) -> Any:
    """The answer for a picture where this function shows samples."""
    import httpx

    with serve_in_thread({NAME: repo}) as server:
        server.show_samples(show)
        (item,) = httpx.get(f"{server.url}{BASE}/outliers").json()["items"]
        return httpx.get(f"{server.url}{BASE}/outliers/{item['id']}/pictures/{index}")


def test_the_users_function_shows_samples_and_wins_over_the_report(repo: Repository) -> None:
    report_of(repo).to_repository(repo, show=lambda index: PNG, most=1)
    jpeg = b"\xff\xd8\xff" + b"y" * 9
    answer = shown_by(repo, lambda index: jpeg)
    assert (answer.content, answer.headers["content-type"]) == (jpeg, "image/jpeg")
    # only what the report kept
    assert shown_by(repo, lambda index: jpeg, index=3).status_code == 404


def test_an_error_of_the_users_function_tells_no_stranger_what_it_said(repo: Repository) -> None:
    report_of(repo).to_repository(repo, most=1)

    def show(index: int) -> object:
        raise OSError("/home/secret/data is gone")

    answer = shown_by(repo, show)
    assert answer.status_code == 503
    assert "it raised OSError" in answer.json()["detail"]
    assert "secret" not in answer.text


def test_one_picture_is_asked_for_once(repo: Repository) -> None:
    import httpx

    report_of(repo).to_repository(repo, most=3)
    asked: list[int] = []

    def show(index: int) -> object:
        asked.append(index)
        return PNG

    with serve_in_thread({NAME: repo}) as server:
        server.show_samples(show)
        (item,) = httpx.get(f"{server.url}{BASE}/outliers").json()["items"]
        samples = httpx.get(f"{server.url}{BASE}/outliers/{item['id']}").json()["samples"]
        assert {each["has_picture"] for each in samples} == {True}
        for _ in range(3):
            assert httpx.get(f"{server.url}{BASE}/outliers/{item['id']}/pictures/11").content == PNG
    assert asked == [11]


def test_pictures_are_of_the_web_alone(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="shows no pictures"):
        repo.serve("memory://", pictures=lambda index: PNG)
    server = repo.serve("http://127.0.0.1:0", pictures=lambda index: PNG)
    assert isinstance(server, WebServer)
    server.close()


def test_too_many_samples_are_not_kept(repo: Repository) -> None:
    report = report_of(repo)
    for most, said in ((0, "from 1"), (2001, "at most 2000")):
        with pytest.raises(InvalidInput, match=said):
            report.to_repository(repo, most=most)
