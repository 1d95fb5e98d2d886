"""The report of a run: JSON with every sample, and Markdown for people. Both contain only results
of the run."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from common import short, spread, table

from .case import Outcome, Status
from .goals import GOALS, judged
from .where import Where


class PartReport(msgspec.Struct):
    """A part: its time limit and its time in seconds, its outcomes, and the reason if it ended
    early."""

    name: str
    title: str
    limit_s: float
    took_s: float
    note: str
    cases: list[Outcome]


class Report(msgspec.Struct):
    """A run.

    ``began`` is in UTC. ``machine`` has versions and commit. ``reached`` are the parts that began.
    """

    began: str
    kind: str
    is_quick: bool
    machine: str
    budget_s: float
    took_s: float = 0.0
    is_whole: bool = False
    parts: list[PartReport] = []
    not_reached: list[str] = []

    @property
    def is_accelerator(self) -> bool:
        """Whether the results are valid for an accelerator."""
        return self.kind == "cuda"

    @property
    def device(self) -> str:
        """The name of the device, or of its replacement."""
        named = [
            case.found["name"]
            for part in self.parts
            for case in part.cases
            if part.name == "environment" and "name" in case.found
        ]
        return (
            str(named[0])
            if named
            else {"cpu": "the CPU", "late": "late devices"}.get(
                self.kind, "a device that did not say its name"
            )
        )

    @property
    def outcomes(self) -> dict[str, list[Outcome]]:
        """By part."""
        return {part.name: part.cases for part in self.parts}


def written(report: Report, folder: Path) -> Path:
    """Write both files atomically. Returns the path of the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "-", f"{report.began[:16]}-{report.kind}")
    _replace(folder / f"{stem}.json", msgspec.json.format(msgspec.json.encode(report), indent=1))
    return _replace(folder / f"{stem}.md", markdown(report).encode())


def _replace(path: Path, content: bytes) -> Path:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)
    return path


def headline(report: Report) -> str:
    """The result of this run, in one sentence."""
    counted = Counter(case.status for part in report.parts for case in part.cases)
    counts = (
        ", ".join(f"{counted[status]} {status.value}" for status in Status if counted[status])
        or "nothing was begun"
    )
    end = "" if report.is_whole else "; it ended before its end"
    if report.is_accelerator:
        return f"Ran on {report.device} on {report.began[:10]}: {counts}{end}."
    said = (
        f"Nothing here was proven on an accelerator: this ran on {report.device}, to show that the"
        " program does."
    )
    return f"{said} {counts[0].upper()}{counts[1:]}{end}."


def markdown(report: Report) -> str:
    """The whole report, with figures as ``median [least .. greatest]``."""
    size = "tiny sizes" if Where(report.kind, report.is_quick).is_tiny else "full sizes"
    lines = [
        f"# A run of {report.began[:16].replace('T', ' ')} UTC on {report.device}",
        "",
        headline(report),
        "",
        f"{report.machine}; {size}; {report.took_s:.0f} of {report.budget_s:.0f} s.",
        "",
    ]
    if report.not_reached:
        lines += [f"Parts that were not reached: {', '.join(report.not_reached)}.", ""]
    lines += ["## Goals", "", _goals(report), ""]
    for part in report.parts:
        lines += [
            f"## {part.title}",
            "",
            f"{part.took_s:.0f} of {part.limit_s:.0f} s.{f' {part.note}.' if part.note else ''}",
            "",
        ]
        lines += [_cases(part.cases), ""] if part.cases else []
    return "\n".join(lines)


def _goals(report: Report) -> str:
    verdicts = judged(GOALS, report.outcomes, is_accelerator=report.is_accelerator)
    rows = [
        [goal.text, "" if found is None else short(found), verdict.value]
        for goal, found, verdict in verdicts
    ]
    return table(["goal", "found", "verdict"], rows)


def _cases(cases: Sequence[Outcome]) -> str:
    rows = [
        [
            _cell(each.case),
            each.status.value,
            f"{each.took_s:.1f}",
            _cell("; ".join(filter(None, [each.why, _said(each.found)]))),
        ]
        for each in cases
    ]
    return table(["case", "outcome", "s", "found"], rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _said(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in found.items())


def _value(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return short(value)
        case [int() | float(), *_]:
            return spread(value)
        case dict():
            return f"({_said(value)})"
        case list():
            return "; ".join(map(str, value)) or "none"
    return str(value)
