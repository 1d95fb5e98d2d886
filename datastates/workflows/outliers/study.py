"""Finding the samples that a training could not make sense of: by losses along the lineage, and under variants that held them out."""

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
    """The other options of ``outliers``; see there."""

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
    """Score ``count`` samples by their losses under states that the lineage already holds, and rank them.

    A sample that has a *lineage* score (from ``branches``) and a *held-out* score (from ``study`` and ``plan``) is scored by the mean of
    both percentiles. More branches (other seeds) make the score better, and their disagreement is its ``spread``.

        def losses_of(model, indices):
            return (model(inputs[indices]) - targets[indices]).square().flatten()


        report = outliers(repo, "main", model=model, loss=losses_of, count=len(inputs), noise_rate=0.1, steps_per_epoch=4)

    States that cannot be restored are skipped; the report says which and why. The more epochs have their bytes, the better: if the study's
    repository has ``Config(durable_every=1)``, every epoch is read whatever writing costs.

    :param repo: where the states are.
    :param branches: any revisions. The mean loss along at most ``states`` of each one's own states, spread evenly, counts.
    :param model: the model into which the states are restored, one after another. It ends with the weights of the last.
    :param loss: ``loss(model, indices)`` returns one loss for each sample, ``[n]``. It is called in evaluation mode, without gradients.
    :param count: how many samples there are.
    :param study: adds the finished variants of ``explore``.
    :param plan: the study's plan. Each variant scores the samples on which neither it nor an ancestor of it was trained, and the states
        that they forked from count as a branch.
    :param subsets: subsets that are scored too; by default those of the plan.
    :param states: the most states of a branch that are read.
    :param noise_rate: the share of suspects; None: scikit-learn estimates it.
    :param name: the name under which the model was tracked.
    :param batch: how many indices ``loss`` gets at a time.
    :param steps_per_epoch: needed for the cost of training if the states do not record an ``epoch``.
    :param on_progress: called with how many states are done, and how many there are.
    :raises NotFound: there is no such branch or study.
    :raises InvalidInput: an argument does not fit, or the loss is not one number for each sample.
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
