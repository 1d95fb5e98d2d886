"""Events in the log have names that stay, and fields; JSON lines of them are what they say."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, JsonLines
from datastates.system.logs import event

ROOT = Path(__file__).parents[2]
FOLDERS = ("datastates", "lineage", "transport", "api")


def events_in_source() -> dict[str, set[frozenset[str]]]:
    """The fields of each event, as the calls of ``event`` have them."""
    found: defaultdict[str, set[frozenset[str]]] = defaultdict(set)
    for path in sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "node_modules" not in path.parts
    ):
        text = path.read_text()
        if "event(" not in text or "system.logs import" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "event"
            ):
                (name,) = node.args
                assert isinstance(name, ast.Constant), path
                found[str(name.value)].add(frozenset(str(each.arg) for each in node.keywords))
    return found


def events_in_document() -> dict[str, set[str]]:
    text = (ROOT / "docs/guide/observing.md").read_text()
    rows = re.findall(r"^\| (`[a-z]+\.[a-z_]+`.*?) \| (.*?) \|", text, re.MULTILINE)
    return {
        name: set(re.findall(r"`(\w+)`", fields))
        for names, fields in rows
        for name in re.findall(r"`([\w.]+)`", names)
    }


def test_every_event_and_its_fields_are_documented_and_no_other() -> None:
    source, document = events_in_source(), events_in_document()
    assert set(source) == set(document)
    for name, each in source.items():
        assert all(fields <= document[name] for fields in each), name
        assert set().union(*each) == document[name] or name == "tier.back", name


def test_no_field_is_called_like_a_part_of_every_record() -> None:
    taken = {
        *vars(logging.makeLogRecord({})),
        "message",
        "asctime",
        "time",
        "level",
        "logger",
        "exception",
        "event",
    }
    assert not taken & {
        field for each in events_in_source().values() for fields in each for field in fields
    }


def line_of(record: logging.LogRecord) -> dict[str, object]:
    text = JsonLines().format(record)
    assert "\n" not in text
    found: dict[str, object] = json.loads(
        text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON")
    )
    return found


def test_a_line_has_the_words_and_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said = event("guard.rewound", loss=float("nan"), step=3, where=Path("a/b"))
    logging.getLogger("datastates.test").warning("two\nlines of %s", "ä", extra=said)
    line = line_of(caplog.records[-1])
    assert datetime.fromisoformat(str(line["time"])).timestamp() == pytest.approx(
        caplog.records[-1].created, abs=0.002
    )
    assert line["level"] == "warning"
    assert line["logger"] == "datastates.test"
    assert line["message"] == "two\nlines of ä"
    assert (line["event"], line["loss"], line["step"], line["where"]) == (
        "guard.rewound",
        "nan",
        3,
        "a/b",
    )


def test_an_exception_is_a_text_of_the_line(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("no")
    logging.getLogger("datastates.test").error("failed", exc_info=error)
    assert "ValueError: no" in str(line_of(caplog.records[-1])["exception"])


def test_a_training_tells_what_happens_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "datastates")
    for _ in range(2):
        config = Config(memory_bytes=64 << 20, durable_every=1, durable_interval_s=None)
        with (
            datastates.open(tmp_path, config=config) as repo,
            repo.track(rng=False, w=torch.ones(5)) as run,
        ):
            state = run.capture().wait("durable")
    lines = [line_of(record) for record in caplog.records]
    durable = [line for line in lines if line.get("event") == "state.durable"]
    assert [line["step"] for line in durable] == [1, 2]
    assert durable[-1]["state"] == state.uid
    (resumed,) = (line for line in lines if line.get("event") == "branch.resumed")
    assert (resumed["branch"], resumed["step"]) == ("main", 1)
