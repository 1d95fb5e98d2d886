"""A report as text, CSV, JSON, HTML and a picture: each is read back."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from datastates.errors import InvalidInput, Unsupported
from datastates.studies import OutlierReport
from datastates.studies.outlier_report import number, tables
from datastates.studies.outlier_scores import Described, Spread, SubsetScore, put_together
from datastates.studies.outlier_sources import OutlierCost, Skipped, Source
from datastates.studies.outlier_suspects import by_distance, by_mixture

from .test_outlier_cost import state

NAN = float("nan")
EVIL = "<script>alert('$1 & \"2\"')</script>"


@pytest.fixture
def report() -> OutlierReport:
    """Five samples, of which the last is known to nobody; texts that break out of HTML and of
    rich's markup."""
    spread = Spread(5)
    for losses in ([1.0, 4.0, 2.0, 3.0, NAN], [2.0, 9.0, 1.0, 3.0, NAN]):
        spread.add(np.array(losses))
    scores = put_together(
        np.array([1.5, 6.5, 1.25, 3.0, NAN]), np.array([NAN, 5.0, 1.0, NAN, NAN]), spread
    )
    sources = (
        Source("main", (state("a", 10), state("b", 20)), None, 3, 1),
        Source("s/v", (state("c", 30),), np.array([1, 2]), 1, 0),
    )
    subsets = (SubsetScore(EVIL, 2, 66.7, NAN, 1), SubsetScore("[bold]", 1, 0.0, 1.5, 0))
    skipped = (Skipped("other", EVIL, "f" * 24, 7), Skipped("s/w", "never begun"))
    selection = by_mixture(scores.strength, 0.25, scores.order())
    return OutlierReport(
        scores, selection, subsets, sources, skipped, OutlierCost(20.0, 2.4, ("s/v",))
    )


def shown(report: OutlierReport, width: int = 200) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(report)
    return file.getvalue()


class Page(HTMLParser):
    """What a browser would see: tags, attributes, the rows of each table, all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.sources: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_samples_come_by_rank_with_what_is_not_known_as_none(report: OutlierReport) -> None:
    samples = list(report.samples())

    assert [sample.index for sample in samples] == [1, 3, 0, 2, 4]
    assert [sample.rank for sample in samples] == [1, 2, 3, 4, 5]
    assert (samples[0].lineage_loss, samples[0].held_out_loss, samples[0].sources) == (6.5, 5.0, 2)
    assert samples[1].held_out_loss is None
    assert samples[4].score is samples[4].spread is samples[4].lineage_loss is None
    assert report.suspects() == samples[:1]
    assert report.top(2) == samples[:2]


def test_csv_reads_back(report: OutlierReport, tmp_path: Path) -> None:
    with report.to_csv(tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert [int(row["index"]) for row in rows] == [1, 3, 0, 2, 4]
    for row, sample in zip(rows, report.samples(), strict=True):
        assert int(row["rank"]) == sample.rank
        assert row["is_suspect"] == str(sample.is_suspect)
        for name in ("score", "strength", "lineage_loss", "held_out_loss", "spread"):
            assert (
                row[name] == ""
                if getattr(sample, name) is None
                else float(row[name]) == getattr(sample, name)
            )


def test_json_reads_back_and_has_no_nan(report: OutlierReport, tmp_path: Path) -> None:
    text = report.to_json(tmp_path / "r.json").read_text()
    plain = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    assert plain == report.to_dict()
    assert plain["format"] == "datastates-outliers/1"
    assert [sample["index"] for sample in plain["samples"]] == [1, 3, 0, 2, 4]
    assert plain["samples"][1]["held_out_loss"] is None
    assert plain["cost_epochs"] == {
        "training": 20.0,
        "passes": 2.4,
        "unrecorded": ["s/v"],
        "total": pytest.approx(20.8),
    }
    assert plain["subsets"][0]["error"] is None
    assert [source["held_out"] for source in plain["sources"]] == [None, 2]
    assert plain["skipped"][0]["uid"] == "f" * 24


def test_page_reads_back_whole_escaped_and_without_anything_from_elsewhere(
    report: OutlierReport, tmp_path: Path
) -> None:
    picture = np.arange(12.0).reshape(3, 4)
    path = report.to_html(
        tmp_path / "r.html",
        title=EVIL,
        show=lambda index: picture,
        describe=lambda index: f"{index} {EVIL}",
        most=4,
    )
    page = Page(path.read_text())

    assert page.open == []
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert page.text.count(EVIL) == 2 + 4 + 4 + 1 + 1, (
        "title and heading, gallery, table, subset, why it was skipped"
    )
    assert len(page.sources) == 4
    for source in page.sources:
        head, data = source.split(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    rows = [row for row in page.rows if row and row[0].isdigit()]
    assert [int(row[1]) for row in rows] == [1, 3, 0, 2]
    assert rows[0][4:7] == ["6.50", "5.00", "yes"]
    assert rows[1][4:7] == ["3.00", "-", ""]
    assert (
        "20.8 epochs: 20.0 of training, and 2.4 forward passes at 1/3 epoch each; no epochs on"
        " record for s/v" in page.text
    )


FORMULA = "=cmd|' /C calc'!A0"
NAMES = (FORMULA, 'a,"b"\nc', EVIL, " +1", "plain")


@pytest.fixture
def named(report: OutlierReport) -> OutlierReport:
    """The same samples with names, classes and losses along a lineage."""
    columns = {"margin": report.scores.strength, "distance": np.array([9.0, 0, 1, 2, NAN])}
    selections = {
        "margin": report.selection,
        "distance": by_distance(np.array([9.0, 0, 0.1, -0.1, NAN])),
    }
    told = Described(
        NAMES,
        (EVIL, "@class"),
        np.array([0.0, 1.0, 1.0, 0.0, 0.0]),
        np.array([1, 0, 1, 0, -1]),
        [np.array([1, 2, 3, np.inf, 1], dtype=np.float32), np.ones(5, dtype=np.float32)],
    )
    scores = replace(report.scores, columns=columns)
    return replace(report, scores=scores, selections=selections, described=told)


def test_csv_has_names_and_no_text_that_a_spreadsheet_runs(
    named: OutlierReport, tmp_path: Path
) -> None:
    with named.to_csv(tmp_path / "r.csv").open(newline="") as file:
        rows = {int(row["index"]): row for row in csv.DictReader(file)}

    assert rows[0]["name"] == "'" + FORMULA
    assert rows[1]["name"] == NAMES[1]
    assert rows[3]["name"] == "' +1"
    assert (rows[1]["given"], rows[1]["predicted"]) == ("'@class", EVIL)
    assert (rows[4]["predicted"], rows[4]["distance"]) == ("", "")
    assert [rows[at]["loss 10"] for at in (0, 3)] == ["1.0", ""]
    assert float(rows[2]["strength"]) < 0, "numbers stay numbers"


def test_page_shows_names_classes_and_curves_by_each_score_and_escapes_them(
    named: OutlierReport, tmp_path: Path
) -> None:
    text = named.to_html(tmp_path / "r.html", show=lambda index: np.ones((2, 2))).read_text()
    page = Page(text)

    assert page.open == []
    assert "script" not in page.tags
    assert "<script" not in text
    assert page.tags.count("polyline") == 2 * 5, "a curve for each sample by each score"
    assert "Highest by distance" in page.text
    rows = [row for row in page.rows if row and row[0].isdigit()]
    assert rows[0][:5] == ["1", "1", NAMES[1], "@class", EVIL]
    assert [row[1] for row in rows if row[0] == "1"] == ["1", "0"], "each score has its own order"
    assert ["distance", "1", "-", "0", "0, 3, 2, 1, 4"] in page.rows


def test_report_tells_what_its_scores_miss_and_how_many_suspects_are_false(
    report: OutlierReport, named: OutlierReport
) -> None:
    assert "not detected: most labels of one similar class" in shown(report)
    assert "not detected: inputs far from all others" in shown(report)
    assert "false suspects: not known" in shown(report)
    assert "not detected: inputs far from all others" not in shown(named)
    wrong = replace(named, scores=replace(named.scores, columns={"distance": np.zeros(5)}))
    assert "not detected: wrong targets" in shown(wrong)
    told = replace(named, selection=replace(named.selection, false_suspects=0.25))
    assert "false suspects: about 0.2 are expected" in shown(told)


def test_samples_by_another_score_are_asked_for_by_its_name(named: OutlierReport) -> None:
    assert [sample.index for sample in named.suspects("distance")] == [0]
    assert named.top(1, "distance")[0].scores["distance"] == 9.0
    with pytest.raises(InvalidInput, match="no 'loss': it has margin, distance"):
        named.top(1, "loss")


def test_bars_of_the_page_hold_every_sample_that_is_known(
    report: OutlierReport, tmp_path: Path
) -> None:
    page = Page(report.to_html(tmp_path / "r.html").read_text())
    bars = {part for part in page.text.splitlines() if "samples, " in part}

    assert "rect" in page.tags
    assert "1 samples, 1 of them suspects" in "".join(bars)
    assert "img" not in page.tags


def test_table_tells_rank_losses_subsets_cost_and_what_was_skipped(report: OutlierReport) -> None:
    text = shown(report)

    assert "1 suspects among 5 samples, at a noise rate of 25.0 % (given)" in text
    assert (
        "2 of 3 states along the lineage (1 branch), 1 of 1 states of variants that held samples"
        " out (1 branch); 1 have no bytes" in text
    )
    assert "20.8 epochs" in text
    assert f"skipped: other, step 7: {EVIL}" in text
    assert "[bold]" in text
    line = next(line for line in text.splitlines() if re.match(r" +1 +1 +100\.00 ", line))
    assert "6.50" in line
    assert "5.00" in line


@pytest.mark.parametrize(
    "shape", [(5, 4), (5, 4, 3), (5, 4, 4), (3, 5, 4), (1, 5, 4), (5, 4, 1), (20,)]
)
def test_pictures_and_curves_of_every_shape_are_drawn(
    report: OutlierReport, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    path = report.to_picture(
        tmp_path / "r.png",
        lambda index: torch.rand(shape),
        describe=lambda index: "$no formula",
        most=3,
    )
    page = report.to_html(tmp_path / "r.html", show=lambda index: torch.rand(shape).numpy(), most=2)

    assert path.read_bytes().startswith(b"\x89PNG")
    assert page.read_text().count("data:image/png") == 2


def test_pixels_of_the_page_are_those_that_were_shown(
    report: OutlierReport, tmp_path: Path
) -> None:
    from matplotlib.image import imread

    shown = np.array([[0, 255], [255, 0]], dtype=np.uint8)
    source = Page(
        report.to_html(tmp_path / "r.html", show=lambda index: shown, most=1).read_text()
    ).sources[0]
    pixels = imread(io.BytesIO(base64.b64decode(source.split(",")[1])))

    np.testing.assert_array_equal(pixels[:, :, 0], [[0, 1], [1, 0]])


def test_what_is_no_picture_is_refused_with_its_shape(
    report: OutlierReport, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=r"show\(1\) gave an array of shape \(2, 2, 2, 2\)"):
        report.to_picture(tmp_path / "r.png", lambda index: torch.zeros(2, 2, 2, 2))
    with pytest.raises(InvalidInput, match="most is 0"):
        report.to_html(tmp_path / "r.html", most=0)


def test_missing_packages_are_named(
    report: OutlierReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("matplotlib", "sklearn")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)

    with pytest.raises(Unsupported, match=r"pip install 'datastates\[workflows\]'"):
        report.to_picture(tmp_path / "r.png", lambda index: torch.zeros(2, 2))
    scores = put_together(np.arange(20.0), np.full(20, NAN), Spread(20))
    with pytest.raises(Unsupported, match="pass noise_rate="):
        by_mixture(scores.strength, None, scores.order())
    assert by_mixture(scores.strength, 0.1, scores.order()).suspects.sum() == 2
    assert math.isclose(
        Page(report.to_html(tmp_path / "r.html").read_text()).text.count("alert"), 2
    )


def test_in_80_columns_what_does_not_fit_ends_in_an_ellipsis_and_no_number_is_lost(
    report: OutlierReport,
) -> None:
    file = io.StringIO()
    for part in tables(
        report,
        most=8,
        describe=lambda index: f"sample {index}, labelled as a coat, but rather a pullover",
    ):
        Console(file=file, width=80).print(part)
    text = file.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if "sample " in line and "…" in line]
    assert len(rows) == 5, (
        "each sample that is ranked has one line, and its description is cut where it must be"
    )
    for sample, row in zip(report.top(8), rows, strict=True):
        shown = row.split()
        assert shown[:4] == [
            str(sample.rank),
            str(sample.index),
            number(sample.score),
            number(sample.spread),
        ]
    heads = " ".join(lines)
    for heading in ("rank", "sample", "percentile", "spread", "suspect", "what"):
        assert heading in heads
