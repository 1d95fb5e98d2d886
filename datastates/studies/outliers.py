"""``outliers`` finds samples with unusual losses, and ``OutlierReport`` is its result.

The losses come from states of the lineage and from variants that held the samples out.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torch import nn  # noqa: TC002 - values.checked reads the annotations

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import Revision
from datastates.lineage.write import attachments
from datastates.maintenance.core import core_of
from datastates.repository import Repository
from datastates.thumbnails import image_of

from . import plan as arguments
from .outlier_scores import (
    LossOf,
    Meter,
    Ranking,
    SampleScore,
    Source,
    check_rate,
    check_subsets,
    gather,
    known,
    measure,
    put_together,
    score_subsets,
    select,
)
from .plan import Plan

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FORMAT = "datastates-outliers/1"
MOST_KEPT = 2000
"""The most samples of a report that are kept in a lineage."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OutlierReport(Ranking):
    """Every sample ranked, with suspects, subsets and cost; rich prints it as a table. ``sources``
    are the branches that were read, ``skipped`` those that could not be.
    """

    def __repr__(self) -> str:
        return (
            f"<OutlierReport: {int(self.selection.suspects.sum())} suspects among {len(self)}"
            " samples>"
        )

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write CSV, one line for each sample, by rank; values that are not known are empty."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            names = [field.name for field in fields(SampleScore)]
            writer.writerow(names)
            writer.writerows(
                ["" if (value := getattr(sample, name)) is None else value for name in names]
                for sample in self.samples()
            )
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """The whole report as values that JSON can hold."""
        return {
            "format": FORMAT,
            "count": len(self),
            "noise_rate": self.selection.noise_rate,
            "is_noise_rate_estimated": self.selection.is_estimated,
            "cost_epochs": {
                **asdict(self.cost),
                "unrecorded": list(self.cost.unrecorded),
                "total": self.cost.total,
            },
            "sources": [_source(source) for source in self.sources],
            "skipped": [asdict(skipped) for skipped in self.skipped],
            "subsets": [
                {key: known(value) for key, value in asdict(subset).items()}
                for subset in self.subsets
            ],
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
        # the page and the picture are imported only where they are used
        from .outlier_report import (
            page,
        )

        _check_most(most)
        Path(path).write_text(
            page(self, title=title, show=show, describe=describe, most=most), encoding="utf-8"
        )
        return Path(path)

    def to_picture(
        self,
        path: str | os.PathLike[str],
        show: Callable[[int], object],
        *,
        describe: Callable[[int], str] | None = None,
        most: int = 24,
    ) -> Path:
        """Write the highest ranked samples as a sheet of pictures (PNG, or the format of the
        suffix).

        :param path: the file to write.
        :param show: returns the grey or colour picture of a sample, or a curve, as an array or
            tensor, given its index.
        :param describe: returns a line about a sample, given its index.
        :param most: how many samples are shown.
        :raises Unsupported: matplotlib is not installed.
        """
        from .outlier_report import sheet

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
        """Store the highest ranked samples in the lineage, where the page shows them.

        A report of the same name is replaced.

            report = outliers(
                repo, "main", model=model, loss=losses_of, count=len(inputs), noise_rate=0.1
            )
            report.to_repository(
                repo, "labels", show=lambda index: inputs[index].reshape(2, 2), most=24
            )

        :param repo: the repository whose page shows them.
        :param name: the name of the report there.
        :param show: returns the picture of a sample, given its index: an array as for ``to_html``,
            or bytes of a PNG, JPEG, GIF or WebP of at most 1 MiB. None: the page uses the function
            that ``serve`` got as ``pictures``, if there is one.
        :param describe: returns a line about a sample, given its index.
        :param most: how many samples are kept, at most 2000.
        :raises InvalidInput: a picture is not one, or is too large.
        :raises Unsupported: an array has to be drawn, and matplotlib is not installed.
        """
        core = core_of(repo)
        _check_most(most)
        if most > MOST_KEPT:
            raise InvalidInput(
                f"most is {most}: at most {MOST_KEPT} samples are kept; to_html and to_json write"
                " all of them"
            )
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
            attachments.keep(session, name, facts, samples)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .outlier_report import tables

        yield from tables(self)


def _kept(
    sample: SampleScore, show: Callable[[int], object] | None, describe: Callable[[int], str] | None
) -> attachments.NewSample:
    facts = {key: value for key, value in asdict(sample).items() if key not in ("rank", "index")}
    facts["description"] = (
        None
        if describe is None
        else values.text(str(describe(sample.index)), f"the description of sample {sample.index}")
    )
    picture = None if show is None else image_of(show(sample.index), sample.index)
    return attachments.NewSample(sample.rank, sample.index, facts, picture)


def _check_most(most: int) -> None:
    if most < 1:
        raise InvalidInput(f"most is {most}: it counts samples, from 1")


def _source(source: Source) -> dict[str, Any]:
    held_out = None if source.held_out is None else len(source.held_out)
    states = [{"uid": state.uid, "step": state.step} for state in source.states]
    return {
        "branch": source.name,
        "held_out": held_out,
        "states": states,
        "of": source.of,
        "gone": source.gone,
    }


# --- Finding outliers ---


@values.checked
def outliers(
    repo: arguments.AnyRepository,
    branches: Annotated[Revision | Sequence[Revision], values.revisions] = (),
    *,
    model: nn.Module,
    loss: LossOf,
    count: arguments.Samples,
    study: str | None = None,
    plan: Plan | None = None,
    subsets: Annotated[Mapping[str, Sequence[int]], arguments.check_subsets] | None = None,
    states: arguments.Positive = 8,
    noise_rate: Annotated[float, check_rate] | None = None,
    name: str = "model",
    batch: arguments.Samples = 1024,
    steps_per_epoch: arguments.Positive | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> OutlierReport:
    """Score ``count`` samples by their losses under states that the lineage already holds, and rank
    them.

    A sample that has a *lineage* score (from ``branches``) and a *held-out* score (from ``study``
    and ``plan``) is scored by the mean of both percentiles. More branches (other seeds) make the
    score better, and their disagreement is its ``spread``.

        def losses_of(model, indices):
            return (model(inputs[indices]) - targets[indices]).square().flatten()


        report = outliers(
            repo,
            "main",
            model=model,
            loss=losses_of,
            count=len(inputs),
            noise_rate=0.1,
            steps_per_epoch=4,
        )

    States that cannot be restored are skipped, and the report lists them with the reason. Results
    improve with the number of epochs whose bytes exist. With ``Config(durable_every=1)`` in the
    study's repository, every epoch can be read.

    :param repo: where the states are.
    :param branches: any revisions. The mean loss along at most ``states`` of each one's own states,
        spread evenly, counts.
    :param model: the model into which the states are restored, one after another. It ends with the
        weights of the last.
    :param loss: ``loss(model, indices)`` returns one loss for each sample, ``[n]``. It is called in
        evaluation mode, without gradients.
    :param count: how many samples there are.
    :param study: adds the finished variants of ``explore``.
    :param plan: the study's plan. Each variant scores the samples on which neither it nor an
        ancestor of it was trained, and the states that they forked from count as a branch.
    :param subsets: subsets that are scored too, by default the plan's subsets.
    :param states: the most states of a branch that are read.
    :param noise_rate: the share of suspects. By default, scikit-learn estimates it.
    :param name: the name under which the model was tracked.
    :param batch: how many indices ``loss`` gets at a time.
    :param steps_per_epoch: needed for the cost of training if the states do not record an
        ``epoch``.
    :param on_progress: called with how many states are done, and how many there are.
    :raises NotFound: there is no such branch or study.
    :raises InvalidInput: an argument does not fit, or the loss is not one number for each sample.
    :raises Unavailable: not one state could be read.
    :raises Unsupported: ``noise_rate`` is None, and scikit-learn, which estimates it, is not
        installed.
    """
    names = values.revisions(branches)
    check_subsets(subsets or {}, count)
    if not names and study is None:
        raise InvalidInput(
            "outliers was given neither branches nor a study: name at least one of them"
        )
    found = gather(
        repo,
        names,
        study=study,
        plan=plan,
        count=count,
        states=states,
        steps_per_epoch=steps_per_epoch,
    )
    meter = Meter(repo, model, loss, name=name, batch=batch)
    losses = measure(meter, found.sources, count, on_progress or (lambda done, total: None))
    scores = put_together(losses.lineage.mean(), losses.held_out.mean(), losses.spread)
    selection = select(scores, noise_rate)
    if subsets is None:
        subsets = plan.subsets if plan is not None else {}
    return OutlierReport(
        scores=scores,
        selection=selection,
        subsets=score_subsets(scores, selection, subsets),
        sources=tuple(losses.sources),
        skipped=(*found.skipped, *losses.skipped),
        cost=found.cost(losses.passes),
    )
