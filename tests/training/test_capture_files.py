"""Pictures and small files that are captured with a state: they are part of it wherever it goes, and
of nothing else."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Config, Repository, State, Tracker
from datastates.errors import Corrupt, InvalidInput
from datastates.files.bundle import export_bundle, import_bundle
from datastates.thumbnails import FILES_BYTES, MOST_FILES, files_of
from tests.storage.test_tiers import Archive
from tests.support.ranks import ranks_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
LARGE = os.urandom(200_000)


class Figure:
    """Something that is drawn as matplotlib draws a figure."""

    def __init__(self, drawn: bytes = PNG) -> None:
        self.drawn = drawn

    def savefig(self, into: io.BytesIO, *, format: str) -> None:
        assert format == "png"
        into.write(self.drawn)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", memory_bytes=64 << 20) as opened:
        yield opened


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(50_000.0)}


@pytest.fixture
def run(repo: Repository, weights: dict[str, torch.Tensor]) -> Iterator[Tracker]:
    with repo.track(weights=weights) as tracker:
        yield tracker


def read(repo: Repository, rev: str | State) -> dict[str, bytes]:
    with repo.core.open_payload(repo.core.state(rev), verify=True) as reader:
        return files_of(reader)


def test_files_come_back_byte_for_byte_under_their_names(
    repo: Repository, run: Tracker, tmp_path: Path
) -> None:
    (tmp_path / "table.csv").write_bytes(LARGE)
    (tmp_path / "link").symlink_to(tmp_path / "table.csv")
    given = {
        "samples": Figure(),
        "table": tmp_path / "table.csv",
        "copy.txt": str(tmp_path / "link"),
        "raw": b"",
    }
    uid = run.capture(files=given).wait("durable").uid
    expected = {"samples.png": PNG, "table.csv": LARGE, "copy.txt": LARGE, "raw": b""}
    assert read(repo, uid) == expected
    loaded = repo.load(uid, only="captured_files")["captured_files"]
    assert {name: bytes(file.numpy()) for name, file in loaded.items()} == expected
    run.capture().wait()
    assert read(repo, "main") == {}


def test_a_figure_of_matplotlib_is_a_picture(repo: Repository, run: Tracker) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    figure.subplots().plot([1, 2, 3])
    run.capture(files={"curve": figure}).wait()
    assert read(repo, "main")["curve.png"].startswith(PNG[:8])


def test_the_digest_covers_them(repo: Repository) -> None:
    def digest(branch: str, **files: bytes) -> str:
        with repo.track(branch=branch, rng=False, w=torch.zeros(4)) as run:
            return repo.state(run.capture(files=files).wait().uid).digest

    made = [digest("a", note=b"1"), digest("b", note=b"1"), digest("c", note=b"2"), digest("d")]
    assert made[0] == made[1]
    assert len(set(made)) == 3


def test_the_other_tensors_stay_where_they_are(
    repo: Repository, run: Tracker, weights: dict[str, torch.Tensor]
) -> None:
    plain = repo.state(run.capture().wait("durable").uid)
    layout = run.training.known()
    with_files = repo.state(run.capture(files={"it": LARGE}).wait("durable").uid)
    after = repo.state(run.capture().wait("durable").uid)
    assert with_files.bytes_total >= plain.bytes_total + len(LARGE)
    assert (after.bytes_total, after.bytes_new < plain.bytes_new) == (plain.bytes_total, True)
    again = run.training.known()
    assert layout is not None
    assert again is not None
    assert again.skeleton is layout.skeleton, "the plan without files was used again"
    assert torch.equal(repo.load(with_files.uid)["weights"]["w"], weights["w"])


def test_a_restore_and_a_resumed_training_leave_them_out(
    repo: Repository, run: Tracker, weights: dict[str, torch.Tensor]
) -> None:
    uid = run.capture(files={"it": LARGE}).wait("durable").uid
    weights["w"] += 1
    report = run.restore(uid)
    assert report.skipped == report.missing == report.unexpected == ()
    assert weights["w"][0] == 0
    run.capture(files={"it": b"again"}).wait()
    run.close()
    with repo.track(weights=weights) as again:
        assert again.report is not None
        assert again.report.skipped == ()
        again.capture().wait()
    assert read(repo, "main~1") == {"it": b"again"}


REFUSED: list[tuple[Any, str]] = [
    ({"it": "nowhere"}, "No such file"),
    ({"it": "/"}, "no regular file"),
    ({"it": "/dev/zero"}, "no regular file"),
    ({"it": 3}, "give the path of a file"),
    ({"it": ""}, "a path is not empty"),
    ({"it": bytes(FILES_BYTES + 1)}, "a state holds at most"),
    ({"a": bytes(FILES_BYTES), "b": b"1"}, "a state holds at most"),
    ({f"{number}": b"" for number in range(MOST_FILES + 1)}, "a state holds at most"),
    ({"../it.png": PNG}, "give each file another name"),
    ({"a\\b.png": PNG}, "give each file another name"),
    ({"..": PNG}, "give each file another name"),
    ({"a\r\nSet-Cookie: x": PNG}, "give each file another name"),
    ({"a\0.png": PNG}, "give each file another name"),
    ({"x" * 101: PNG}, "give each file another name"),
    ({"": PNG}, "give each file another name"),
    ({"it.png": PNG, "it": Figure()}, "give each file another name"),
    ({3: PNG}, "give a dict with a name for each"),
    ([PNG], "give a dict with a name for each"),
]


def test_what_cannot_be_captured_changes_nothing(repo: Repository, run: Tracker) -> None:
    run.capture().wait()
    for given, said in REFUSED:
        with pytest.raises(InvalidInput, match=said):
            run.capture(files=given)
    assert run.step == 1
    assert len(repo.find("step >= 0")) == 1


def test_a_figure_that_cannot_be_drawn_is_named(run: Tracker, tmp_path: Path) -> None:
    class Broken(Figure):
        def savefig(self, into: io.BytesIO, *, format: str) -> None:
            raise RuntimeError("no backend")

    with pytest.raises(InvalidInput, match=r"files\['it'\] cannot be drawn .*no backend"):
        run.capture(files={"it": Broken()})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="no regular file"):
        run.capture(files={"it": tmp_path / "pipe"})
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    with pytest.raises(InvalidInput, match="has 1099511627776 bytes"):
        run.capture(files={"it": tmp_path / "large"})


def test_the_name_of_the_files_is_taken(repo: Repository) -> None:
    with pytest.raises(
        InvalidInput, match="the name 'captured_files' is taken by the files of capture"
    ):
        repo.track(captured_files=torch.zeros(1))


def test_they_travel_with_bundles_clones_and_tiers(tmp_path: Path) -> None:
    archive, given = Archive(), {"it.bin": LARGE, "small.png": PNG}
    config = Config(tiers=[archive], memory_bytes=64 << 20)
    with datastates.open(tmp_path / "runs", config=config) as repo:
        with repo.track(w=torch.zeros(100)) as run:
            uid = run.capture(files=given).wait("external").uid
        with archive.open(uid, verify=True) as reader:
            assert files_of(reader) == given
        export_bundle(repo, ["main"], tmp_path / "bundle")
        with (
            repo.serve("tcp://127.0.0.1:0", token="t" * 16) as server,
            datastates.open(tmp_path / "cloned", memory_bytes=64 << 20) as cloned,
            datastates.connect(server.url, token="t" * 16) as peer,
        ):
            peer.clone("main", repo=cloned)
            assert read(cloned, uid) == given
    with datastates.open(tmp_path / "taken", memory_bytes=64 << 20) as taken:
        import_bundle(taken, tmp_path / "bundle")
        assert read(taken, uid) == given


def test_a_merge_has_the_files_of_no_parent(repo: Repository) -> None:
    for branch, count in (("one", 2), ("two", 300_000)):
        with repo.track(branch=branch, rng=False, model=torch.nn.Linear(4, 4)) as run:
            run.capture(files={"it": bytes(count), branch: b"x"}).wait()
    merged = repo.merge(["one", "two"], into="both")
    assert read(repo, merged) == {}
    repo.verify_merge(merged)
    assert set(repo.load(merged)) == {"model"}


def test_each_rank_of_a_job_may_have_files_and_those_of_rank_0_are_shown(tmp_path: Path) -> None:
    given = {"it.png": PNG, "more.txt": LARGE}
    with ranks_of(tmp_path / "runs", None, 2) as ranks:
        for files in (given, {}):
            captured = [
                rank.capture(files=files if rank.part.rank == 0 else None) for rank in ranks
            ]
            uids = {capture.wait("durable", timeout_s=60).uid for capture in captured}
            assert len(uids) == 1
            assert read(ranks[0].repo, uids.pop()) == files


@pytest.mark.parametrize(
    "found",
    [
        {"../../it.png": torch.zeros(3, dtype=torch.uint8)},
        {"it": torch.zeros(3)},
        {"it": torch.zeros(2, 2, dtype=torch.uint8)},
        {"it": torch.zeros(1, dtype=torch.uint8).expand(1 << 40)},
        {"it": torch.zeros(FILES_BYTES + 1, dtype=torch.uint8)},
        dict.fromkeys(map(str, range(3)), torch.zeros(2 << 20, dtype=torch.uint8)),
        {str(number): torch.zeros(1, dtype=torch.uint8) for number in range(MOST_FILES + 1)},
        {"it": "text"},
        [torch.zeros(3, dtype=torch.uint8)],
        "text",
    ],
    ids=["path", "floats", "matrix", "expanded", "large", "tied", "many", "text", "list", "none"],
)
def test_what_no_capture_wrote_is_not_read(repo: Repository, found: Any) -> None:
    with repo.track(w=torch.zeros(4), rng=False) as run:
        run.values["captured_files"] = found  # as a forged state has it
        run.capture().wait()
    with pytest.raises(Corrupt, match=r"in place of its files|more files, or larger ones"):
        read(repo, "main")
