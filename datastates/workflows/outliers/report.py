"""The result of ``outliers``: every sample ranked, the suspects, the subsets, and the cost; as a table, CSV, JSON, HTML, a picture."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.change import reports
from datastates.opening.core import core_of
from datastates.show.thumbnails import image_of

from .ranking import Ranking, SampleScore, known
from .sources import Source

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from datastates.repository import Repository

__all__ = ["OutlierReport", "SampleScore"]

FORMAT = "datastates-outliers/1"
MOST_KEPT = 2000
"""The most samples of a report that are kept in a lineage."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OutlierReport(Ranking):
    """Every sample ranked, with suspects, subsets and cost; rich prints it as a table. ``sources`` are the branches that were read,
    ``skipped`` those that could not be.
    """

    def __repr__(self) -> str:
        return f"<OutlierReport: {int(self.selection.suspects.sum())} suspects among {len(self)} samples>"

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write CSV, one line for each sample, by rank; values that are not known are empty."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            names = [field.name for field in fields(SampleScore)]
            writer.writerow(names)
            writer.writerows(["" if (value := getattr(sample, name)) is None else value for name in names] for sample in self.samples())
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """The whole report as values that JSON can hold."""
        return {
            "format": FORMAT,
            "count": len(self),
            "noise_rate": self.selection.noise_rate,
            "is_noise_rate_estimated": self.selection.is_estimated,
            "cost_epochs": {**asdict(self.cost), "unrecorded": list(self.cost.unrecorded), "total": self.cost.total},
            "sources": [_source(source) for source in self.sources],
            "skipped": [asdict(skipped) for skipped in self.skipped],
            "subsets": [{key: known(value) for key, value in asdict(subset).items()} for subset in self.subsets],
            "samples": [asdict(sample) for sample in self.samples()],
        }

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one JSON object; values that are not known are null."""
        Path(path).write_text(json.dumps(self.to_dict(), allow_nan=False), encoding="utf-8")
        return Path(path)

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "Outliers",
        show: Callable[[int], object] | None = None,
        describe: Callable[[int], str] | None = None,
        most: int = 100,
    ) -> Path:
        """Write the report as one HTML page that needs no other files.

        :param path: the file to write.
        :param title: the heading.
        :param show: returns the picture or curve of a sample as an array, given its index.
        :param describe: returns a line about a sample, given its index.
        :param most: how many of the highest ranked samples are shown.
        :raises Unsupported: there is something to draw, and matplotlib is not installed.
        """
        from .page import page  # the page and the picture are imported only where they are asked for

        _check_most(most)
        Path(path).write_text(page(self, title=title, show=show, describe=describe, most=most), encoding="utf-8")
        return Path(path)

    def to_picture(
        self,
        path: str | os.PathLike[str],
        show: Callable[[int], object],
        *,
        describe: Callable[[int], str] | None = None,
        most: int = 24,
    ) -> Path:
        """Write the highest ranked samples as a sheet of pictures (PNG, or the format of the suffix).

        :param path: the file to write.
        :param show: returns the grey or colour picture of a sample, or a curve, as an array or tensor, given its index.
        :param describe: returns a line about a sample, given its index.
        :param most: how many samples are shown.
        :raises Unsupported: matplotlib is not installed.
        """
        from .picture import sheet

        _check_most(most)
        return sheet(self.top(most), Path(path), show, describe)

    def to_repository(
        self,
        repo: Repository,
        name: str = "outliers",
        *,
        show: Callable[[int], object] | None = None,
        describe: Callable[[int], str] | None = None,
        most: int = 200,
    ) -> None:
        """Keep the highest ranked samples in the lineage, where the page shows them. A report of the same name is replaced.

            report = outliers(repo, "main", model=model, loss=losses_of, count=len(inputs), noise_rate=0.1)
            report.to_repository(repo, "labels", show=lambda index: inputs[index].reshape(2, 2), most=24)

        :param repo: the repository whose page shows them.
        :param name: the name of the report there.
        :param show: returns the picture of a sample, given its index: an array as for ``to_html``, or bytes of a PNG, JPEG, GIF or WebP of
            at most 1 MiB. None: the page asks the function that ``serve`` was given as ``pictures``, if it was.
        :param describe: returns a line about a sample, given its index.
        :param most: how many samples are kept, at most 2000.
        :raises InvalidInput: a picture is not one, or is too large.
        :raises Unsupported: an array has to be drawn, and matplotlib is not installed.
        """
        core = core_of(repo)
        _check_most(most)
        if most > MOST_KEPT:
            raise InvalidInput(f"most is {most}: at most {MOST_KEPT} samples are kept; to_html and to_json write all of them")
        facts = {
            "count": len(self),
            "suspects": int(self.selection.suspects.sum()),
            "noise_rate": self.selection.noise_rate,
            "is_noise_rate_estimated": self.selection.is_estimated,
            "branches": [source.name for source in self.sources],
            "cost": str(self.cost),
        }
        samples = [_kept(sample, show, describe) for sample in self.top(most)]
        with core.writing() as session:
            reports.keep(session, name, facts, samples)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .table import tables

        yield from tables(self)


def _kept(sample: SampleScore, show: Callable[[int], object] | None, describe: Callable[[int], str] | None) -> reports.NewSample:
    facts = {key: value for key, value in asdict(sample).items() if key not in ("rank", "index")}
    facts["description"] = (
        None if describe is None else values.text(str(describe(sample.index)), f"the description of sample {sample.index}")
    )
    picture = None if show is None else image_of(show(sample.index), sample.index)
    return reports.NewSample(sample.rank, sample.index, facts, picture)


def _check_most(most: int) -> None:
    if most < 1:
        raise InvalidInput(f"most is {most}: it counts samples, from 1")


def _source(source: Source) -> dict[str, Any]:
    held_out = None if source.held_out is None else len(source.held_out)
    states = [{"uid": state.uid, "step": state.step} for state in source.states]
    return {"branch": source.name, "held_out": held_out, "states": states, "of": source.of, "gone": source.gone}
