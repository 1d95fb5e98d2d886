"""``outliers`` finds samples with unusual losses, and ``OutlierReport`` is its result.

The losses come from states of the lineage and from variants that held the samples out.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import nn  # noqa: TC002 - values.checked reads the annotations

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import Revision
from datastates.lineage.write import attachments
from datastates.maintenance.core import core_of
from datastates.repository import Repository
from datastates.thumbnails import image_of

from . import plan as arguments
from .outlier_data import Batches, Indexed, LossOf, Task
from .outlier_scores import (
    Described,
    Meter,
    Ranking,
    SampleScore,
    Score,
    check_subsets,
    choose,
    known,
    measure,
    score_subsets,
    scores_of,
    select_all,
)
from .outlier_sources import Source, gather
from .outlier_suspects import check_rate
from .plan import MOST_SAMPLES, Plan

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FORMAT = "datastates-outliers/1"
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
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
        """Write CSV, one line for each sample, by rank; values that are not known are empty.

        A text that a spreadsheet would run as a formula begins with an apostrophe."""
        plain = [field.name for field in fields(SampleScore)[:-2]]
        along = (source.states for source in self.sources if source.held_out is None)
        states = next(along, ()) if self.described.curve else ()
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*plain, *self.scores.columns, *(f"loss {s.step}" for s in states)])
            for sample in self.samples():
                row = [getattr(sample, name) for name in plain]
                row += [*sample.scores.values(), *sample.curve]
                writer.writerow(["" if value is None else _cell(value) for value in row])
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """The whole report as values that JSON can hold."""
        return {
            "format": FORMAT,
            "count": len(self),
            "noise_rate": self.selection.noise_rate,
            "is_noise_rate_estimated": self.selection.is_estimated,
            "scores": {
                name: {
                    "suspects": int(selection.suspects.sum()),
                    "noise_rate": selection.noise_rate,
                    "false_suspects": selection.false_suspects,
                }
                for name, selection in self.selections.items()
            },
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
            "samples": [
                asdict(sample) | {"curve": list(sample.curve)} for sample in self.samples()
            ],
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


def _cell(value: object) -> object:
    is_formula = isinstance(value, str) and value.lstrip(" ").startswith(_FORMULAS)
    return f"'{value}" if is_formula else value


def _kept(
    sample: SampleScore, show: Callable[[int], object] | None, describe: Callable[[int], str] | None
) -> attachments.NewSample:
    kept = ("score", "strength", "lineage_loss", "held_out_loss", "spread", "sources", "is_suspect")
    facts: dict[str, Any] = {key: getattr(sample, key) for key in kept}
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
    loss: LossOf | None = None,
    count: Annotated[int, arguments.samples] | None = None,
    data: Iterable[Any] | None = None,
    task: Literal["classification", "regression", "unknown inputs"] | None = None,
    scores: Sequence[str] | None = None,
    names: Sequence[str] | Callable[[int], str] | None = None,
    classes: Sequence[str] | None = None,
    study: str | None = None,
    plan: Plan | None = None,
    subsets: Annotated[Mapping[str, Sequence[int]], arguments.check_subsets] | None = None,
    states: arguments.Positive = 12,
    noise_rate: Annotated[float, check_rate] | None = None,
    name: str = "model",
    batch: arguments.Samples = 1024,
    steps_per_epoch: arguments.Positive | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> OutlierReport:
    """Score samples under states that the lineage already holds, and rank them.

    The first score decides the ranking. By default the scores are fixed for each task:

    - classification: ``margin`` (area under the margin, Pleiss et al. 2020), ``normalized margin``,
      ``loss``, ``distance`` and ``neighbours``. A study adds ``held-out loss`` and
      ``held-out margin``.
    - regression: ``loss``, ``last loss`` and ``distance``. A study adds ``held-out loss``.
    - unknown inputs: ``distance`` (Mahalanobis) and ``neighbours`` (cosine, 10 neighbours), in the
      features of the first and the last state of the first branch.
    - with ``loss=``: ``loss``.

    With a study, ``loss`` is the mean of two percentiles: along the lineage and held out. More
    branches (other seeds) make scores better, and their disagreement is the ``spread``.

        report = outliers(
            repo,
            "main",
            model=model,
            data=[(inputs, targets)],
            noise_rate=0.1,
            steps_per_epoch=4,
        )

    States that cannot be restored are skipped, and the report lists them with the reason. Results
    improve with the number of epochs whose bytes exist. With ``Config(durable_every=1)`` in the
    study's repository, every epoch can be read.

    :param repo: where the states are.
    :param branches: any revisions. At most ``states`` of each one's own states, spread evenly, are
        read.
    :param model: the model into which the states are restored, one after another. It ends with the
        weights of the last.
    :param loss: instead of ``data``: ``loss(model, indices)`` returns one loss for each sample,
        ``[n]``. It is called in evaluation mode, without gradients.
    :param count: with ``loss``, how many samples there are.
    :param data: a loader without shuffle, or a list, of batches ``(inputs, targets)``. It is read
        once at the start, and once or twice for each state. ``model(inputs)`` returns outputs
        ``[n, classes]``, ``[n]`` or ``[n, k]``, or an object that has them as ``logits``.
    :param task: by default classification for whole targets, one-hot rows and texts, and regression
        (with squared errors) for other numbers.
    :param scores: which scores to compute and compare; the first decides the ranking.
    :param names: the name of each sample, or a function of its index.
    :param classes: the names of the classes, in the order of the model's outputs.
    :param study: adds the finished variants of ``explore``.
    :param plan: the study's plan. Each variant scores the samples on which neither it nor an
        ancestor of it was trained, and the states that they forked from count as a branch.
    :param subsets: subsets that are scored too, by default the plan's subsets.
    :param states: the most states of a branch that are read.
    :param noise_rate: the share of suspects. By default it is estimated; for losses without classes
        scikit-learn does that.
    :param name: the name under which the model was tracked.
    :param batch: how many indices ``loss`` gets at a time.
    :param steps_per_epoch: needed for the cost of training if the states do not record an
        ``epoch``.
    :param on_progress: called with how many states are done, and how many there are.
    :raises NotFound: there is no such branch or study.
    :raises InvalidInput: an argument does not fit, the data cannot be used or changed between two
        passes, or the loss is not one number for each sample.
    :raises Unavailable: not one state could be read.
    :raises Unsupported: ``noise_rate`` is None, and scikit-learn is needed and not installed.
    """
    revisions = values.revisions(branches)
    if not revisions and study is None:
        raise InvalidInput(
            "outliers was given neither branches nor a study: name at least one of them"
        )
    if (data is None) is (loss is None) or (loss is None) is not (count is None):
        raise InvalidInput(
            "outliers needs data=, batches of (inputs, targets), or both loss= and count="
        )
    check_subsets(subsets or {}, count or 0 if data is None else MOST_SAMPLES)
    samples: Indexed | Batches
    if loss is not None and count is not None:
        samples = Indexed(loss, count, batch)
    elif data is not None:
        samples = Batches(data, None if task is None else Task(task), classes)
    if isinstance(names, Sequence) and len(names) != samples.count:
        raise InvalidInput(f"there are {len(names)} names for {samples.count} samples")
    found = gather(
        repo,
        revisions,
        study=study,
        plan=plan,
        count=samples.count,
        states=states,
        steps_per_epoch=steps_per_epoch,
    )
    chosen = choose(scores, samples.task, found.sources)
    has_distance = not {Score.DISTANCE, Score.NEIGHBOURS}.isdisjoint(chosen)
    meter = Meter(repo, model, samples, name=name, distances=has_distance)
    numbers = measure(meter, found.sources, on_progress or (lambda done, total: None))
    columns = scores_of(numbers, chosen)
    selections = select_all(numbers, columns, samples.task, noise_rate)
    selection = selections[chosen[0]]
    if subsets is None:
        subsets = plan.subsets if plan is not None else {}
    is_class = samples.task is Task.CLASSIFICATION
    return OutlierReport(
        scores=columns,
        selection=selection,
        subsets=score_subsets(columns, selection, subsets),
        sources=tuple(numbers.sources),
        skipped=(*found.skipped, *numbers.skipped),
        cost=found.cost(numbers.passes),
        selections=selections,
        described=Described(
            names,
            classes,
            None if samples.task is Task.UNKNOWN_INPUTS else samples.targets,
            numbers.predicted if is_class else None,
            numbers.curve,
        ),
    )
