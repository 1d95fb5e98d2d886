"""Finding samples of which a training could not make sense: by losses along the lineage, and under variants that held them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, Unpack

from torch import nn

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.repository import Repository
from datastates.workflows.plans import arguments
from datastates.workflows.plans.plan import Plan, plan_of

from .losses import LossOf, Meter, measure
from .report import OutlierReport
from .scores import put_together
from .sources import gather
from .subset_scores import check_subsets, score_subsets
from .suspects import check_rate, select

__all__ = ["outliers"]


def _model(value: object, what: str) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise InvalidInput(f"{what} is {values.shown(value)}: give the torch.nn.Module that states are to be restored into")
    return value


class OutlierOptions(TypedDict, total=False):
    """What else ``outliers`` takes; see there."""

    subsets: Mapping[str, Sequence[int]] | None
    states: int
    noise_rate: float | None
    name: str
    batch: int
    steps_per_epoch: int | None
    on_progress: Callable[[int, int], None] | None


@values.takes(
    repo=arguments.repository,
    branches=values.revisions,
    model=_model,
    loss=values.callback,
    count=arguments.samples,
    study=values.optional(values.string),
    plan=values.optional(plan_of),
    subsets=values.optional(arguments.subsets),
    states=arguments.positive,
    noise_rate=values.optional(check_rate),
    name=values.string,
    batch=arguments.samples,
    steps_per_epoch=values.optional(arguments.positive),
    on_progress=values.optional(values.callback),
)
@values.unpacks(OutlierOptions, subsets=None, states=8, noise_rate=None, name="model", batch=1024, steps_per_epoch=None, on_progress=None)
def outliers(
    repo: Repository,
    branches: str | State | Sequence[str | State] = (),
    *,
    model: nn.Module,
    loss: LossOf,
    count: int,
    study: str | None = None,
    plan: Plan | None = None,
    **options: Unpack[OutlierOptions],
) -> OutlierReport:
    """Score ``count`` samples by their losses under states that the lineage holds already, and rank them.

    Where a sample has a *lineage* score (from ``branches``) and a *held-out* score (from ``study`` and ``plan``), its score is the mean of
    both percentiles. More branches (other seeds) make the score better, and their disagreement is its ``spread``.

        def losses_of(model, indices):
            return (model(inputs[indices]) - targets[indices]).square().flatten()


        report = outliers(repo, "main", model=model, loss=losses_of, count=len(inputs), noise_rate=0.1, steps_per_epoch=4)

    What cannot be restored is skipped; the report says what and why. The more epochs have their bytes, the better: of a study whose
    repository has ``Config(durable_every=1)`` every epoch is read, else often only the last of each variant.

    :param repo: where the states are.
    :param branches: any revisions: the mean loss along at most ``states`` of each one's own states, spread evenly, counts.
    :param model: what the states are restored into, one after another: it ends with the weights of the last.
    :param loss: ``loss(model, indices)`` gives one loss a sample, ``[n]``; it is called in evaluation mode, without gradients.
    :param count: how many samples there are.
    :param study: adds the finished variants of ``explore``.
    :param plan: the study's plan: each variant scores the samples on which neither it nor an ancestor of it was trained, and what they
        forked from counts as a branch.
    :param subsets: subsets that are scored too; the plan's, if not given.
    :param states: how many states of a branch are read at most.
    :param noise_rate: the share of suspects; None: estimated, by scikit-learn.
    :param name: the name under which the model was tracked.
    :param batch: how many indices ``loss`` gets at a time.
    :param steps_per_epoch: tells what training cost where the states do not record an ``epoch``.
    :param on_progress: told how many states of how many are done.
    :raises NotFound: there is no such branch or study.
    :raises InvalidInput: an argument does not fit; the loss is not one number a sample.
    :raises Unavailable: not one state could be read.
    :raises Unsupported: ``noise_rate`` is None, and scikit-learn, which estimates it, is not installed.
    """
    names, subsets = values.revisions(branches), options["subsets"]
    check_subsets(subsets or {}, count)
    if not names and study is None:
        raise InvalidInput("outliers was given neither branches nor a study: name at least one of them")
    epoch, most = options["steps_per_epoch"], options["states"]
    found = gather(repo, names, study=study, plan=plan, count=count, states=most, steps_per_epoch=epoch)
    meter = Meter(repo, model, loss, name=options["name"], batch=options["batch"])
    losses = measure(meter, found.sources, count, options["on_progress"] or (lambda done, total: None))
    scores = put_together(losses.lineage.mean(), losses.held_out.mean(), losses.spread)
    selection = select(scores, options["noise_rate"])
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
