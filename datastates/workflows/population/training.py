"""Population-based training (Jaderberg et al., 2017): members train side by side, and the worst go on from copies of the best.

One round of a member is a variant of one study; its parent is the variant from which it goes on. So a copy is a copy of a state, taken from
the nearest memory that has it, and the lineage shows which member came from which. The metrics in the lineage and the seed alone decide
what happens after a round, so another call after a crash decides the same.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Unpack

from datastates import values
from datastates.errors import InvalidInput, Unavailable
from datastates.lineage.states import State, Value
from datastates.workflows.plans import arguments
from datastates.workflows.plans.builders import Choice, Data, Distribution, LogUniform, Uniform, distributions
from datastates.workflows.plans.plan import Plan, Variant
from datastates.workflows.running import record
from datastates.workflows.running.executors import Processes
from datastates.workflows.running.explorer import USUAL, RunOptions, explore
from datastates.workflows.running.pool import check_pickles
from datastates.workflows.running.result import Exploration, read_study
from datastates.workflows.running.worker import Train

from .members import Member, Population, name_of

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["Perturb", "perturbed", "population"]

Perturb = Callable[[Mapping[str, Value], Mapping[str, Distribution], random.Random], Mapping[str, Value]]
"""A rule of exploring: takes the copied member's configuration, what is searched, and a source of random numbers; returns the new
values.
"""

_AGAIN = 0.25
_FACTORS = (0.8, 1.25)


class PopulationOptions(RunOptions, total=False):
    """The other options of ``population``; see there."""

    mode: Literal["min", "max"]
    members: int
    rounds: int
    epochs_per_round: int
    initial: Sequence[Mapping[str, Value]]
    exploit: float
    perturb: Perturb | None
    seed: int
    executor: Executor | Callable[[], Executor] | None
    data: Data | None


_USUAL = PopulationOptions(
    mode="min",
    members=8,
    rounds=4,
    epochs_per_round=1,
    initial=(),
    exploit=0.25,
    perturb=None,
    seed=0,
    executor=None,
    data=None,
    **USUAL,
)


@values.takes(
    repo=arguments.repository,
    start=values.revision,
    train=values.callback,
    study=values.string,
    search=distributions,
    metric=values.key,
    mode=values.string,
    members=arguments.variants,
    rounds=arguments.variants,
    epochs_per_round=arguments.positive,
    initial=values.several(arguments.configuration),
    config=values.optional(arguments.configuration),
    exploit=values.number,
    perturb=values.optional(values.callback),
    seed=arguments.seed,
    retries=values.count,
    threads=arguments.positive,
    ranks=arguments.positive,
    share=values.optional(values.string),
    progress=values.flag,
)
@values.unpacks(PopulationOptions, **_USUAL)
def population(
    repo: Repository,
    start: str | State,
    train: Train,
    *,
    study: str,
    search: Mapping[str, Distribution],
    metric: str,
    **options: Unpack[PopulationOptions],
) -> Population:
    """Train ``members`` from ``start`` for ``rounds``. After each round the worst go on from copies of the best, changed a little.

    After a round the worst members (the part ``exploit``), and any that failed or reported NaN, go on from as many of the best, with the
    copied configuration changed by ``perturb``. A member that begins or is copied gets a ``seed`` of its own, unless ``config`` has one.

    The same call after a crash goes on where it stopped. A call with more ``rounds`` trains further and repeats nothing.

    :param repo: the repository that holds the members' states.
    :param start: the state from which all members begin.
    :param train: a function that gets a ``Job`` for each round of each member and reports ``metric``. Options that an optimizer owns come
        back with the state: call ``reconfigure(job, optimizer)`` after ``job.track``.
    :param study: the name of the study.
    :param search: the distributions from which configurations are drawn, by name.
    :param metric: the metric by which members are compared.
    :param mode: whether the lowest (``min``) or the highest value (``max``) is best.
    :param members: how many members there are.
    :param rounds: how many rounds are trained.
    :param epochs_per_round: the epochs of each member in a round.
    :param initial: the configurations of the first members at the beginning.
    :param config: the configuration that the members' configurations change.
    :param exploit: the part of the members that is replaced after a round (at least one member; 0: none ever, for comparison).
    :param perturb: how a copy's configuration is changed; None: ``perturbed``.
    :param seed: the seed of every draw.
    :param executor: as in ``explore``, like the next five.
    :param retries: how often a member that raises is tried again.
    :param threads: the threads of each worker.
    :param ranks: how many processes train each member together; see ``explore``.
    :param share: a url at which ``repo`` is served meanwhile.
    :param progress: whether progress is shown.
    :param data: the ``subsets``, and those that members ``train`` on, as the builders of plans take them.
    :raises InvalidInput: a number or a name is not valid, or the metric was not reported.
    :raises Conflict: the study was trained with other arguments.
    :raises Unavailable: no member of a round ended with a number; the message has the first one's error.
    """
    members, rounds, mode, exploit = options["members"], options["rounds"], options["mode"], options["exploit"]
    config, executor, perturb, data = options["config"], options["executor"], options["perturb"], options["data"]
    retries, threads, share, progress = options["retries"], options["threads"], options["share"], options["progress"]
    ranks = options["ranks"]
    _check(search, options["initial"], members=members, rounds=rounds, exploit=exploit, mode=mode)
    split = arguments.split({} if data is None else data, "data")
    has_seed = "seed" in {**(config or {}), **search}
    rule = _Rule(metric, mode, dict(search), exploit, perturb or perturbed, options["seed"], has_seed=has_seed)
    with ExitStack() as stack:
        if executor is None:
            check_pickles(train, None)
            executor = stack.enter_context(Processes(max(1, min(members, len(os.sched_getaffinity(0)) // (threads * ranks)))))
        trained: list[Member] = []
        for round_ in range(1, rounds + 1):
            begun = _begin(rule, members, options["initial"]) if round_ == 1 else rule.next(trained[-members:])
            plan = _plan(trained, begun, options["epochs_per_round"], split)
            if _is_over(repo, study, round_):
                report = read_study(repo, study, plan, config=config)  # a failure there is final: others went on from it
            else:
                report = explore(
                    repo, start, plan, train, executor, study=study, config=config, retries=retries, threads=threads, ranks=ranks,
                    share=share, progress=progress,
                )  # fmt: skip
            trained += [rule.member(step, report) for step in begun]
            _check_alive(trained[-members:], study)
    return Population(study, metric, mode, report.start, tuple(search), tuple(trained))


def _source(value: object, what: str) -> random.Random:
    if not isinstance(value, random.Random):
        raise InvalidInput(f"{what} is {values.shown(value)}: give a random.Random")
    return value


@values.takes(config=arguments.configuration, search=distributions, source=_source)
def perturbed(config: Mapping[str, Value], search: Mapping[str, Distribution], source: random.Random) -> dict[str, Value]:
    """The usual rule: a quarter of the values are drawn anew; the others move a little and stay within bounds.

    A ``LogUniform`` is multiplied by 0.8 or 1.25, a ``Uniform`` moves by a tenth of its range, a ``Choice`` moves to a neighbour.
    """
    found: dict[str, Value] = {}
    for key, distribution in search.items():
        is_new = source.random() < _AGAIN
        found[key] = distribution.draw(source) if is_new else _moved(config.get(key), distribution, source)
    return found


def _moved(value: Value, distribution: Distribution, source: random.Random) -> Value:
    match distribution:
        case Choice(known) if value in known:
            at = known.index(value) + source.choice((-1, 1))
            return known[min(max(at, 0), len(known) - 1)]
        case LogUniform(low, high) if isinstance(value, int | float):
            return min(max(value * source.choice(_FACTORS), float(low)), float(high))
        case Uniform(low, high) if isinstance(value, int | float):
            return min(max(value + source.choice((-0.1, 0.1)) * (high - low), float(low)), float(high))
    return distribution.draw(source)  # the value came from elsewhere


@dataclass(frozen=True, slots=True)
class _Step:
    """A member at the beginning of a round: the variant from which it goes on, and what changes."""

    round: int
    number: int
    parent: str | None
    is_copy: bool
    changes: Mapping[str, Value]

    @property
    def variant(self) -> str:
        return name_of(self.round, self.number)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The pure rule that derives the beginnings of the next round from the members of a round."""

    metric: str
    mode: str
    search: Mapping[str, Distribution]
    exploit: float
    perturb: Perturb
    seed: int
    has_seed: bool

    def next(self, members: Sequence[Member]) -> list[_Step]:
        """The next beginnings: every member goes on, the worst from a copy of one of the best."""
        ranking = sorted(members, key=self._rank)
        alive = [member for member in ranking if member.is_alive]
        count = min(max(1, int(len(members) * self.exploit)), len(members) // 2) if self.exploit > 0 else 0
        best, worst = alive[: max(1, count)], ranking[len(ranking) - count :]
        return [self._copy(each, best) if not each.is_alive or each in worst else self._goes_on(each) for each in members]

    def _rank(self, member: Member) -> tuple[float, int]:
        value = member.value if self.mode == "min" else -member.value
        return (math.inf if math.isnan(value) else value, member.number)

    def _goes_on(self, member: Member) -> _Step:
        return _Step(member.round + 1, member.number, member.variant, False, {})

    def _copy(self, member: Member, best: Sequence[Member]) -> _Step:
        source = random.Random(f"{self.seed}/{member.round}/{member.number}")
        donor = source.choice(best)
        rule = getattr(self.perturb, "__name__", "perturb")
        moved = arguments.configuration(self.perturb(donor.config, self.search, source), f"the configuration from {rule}")
        changes = {**moved, **self.seeded(source)}
        return _Step(member.round + 1, member.number, donor.variant, True, changes)

    def seeded(self, source: random.Random) -> dict[str, Value]:
        """A seed of a member's own, so that a copy does not repeat what it was copied from."""
        return {} if self.has_seed else {"seed": source.getrandbits(31)}

    def member(self, step: _Step, report: Exploration) -> Member:
        """The member that results from a beginning."""
        result = report[step.variant]
        state = report.done.get(step.variant)
        if state is not None and self.metric not in state.metrics:
            known = ", ".join(sorted(state.metrics)) or "none"
            raise InvalidInput(f"variant {step.variant!r} of study {report.study!r} did not report {self.metric!r}: it reported {known}")
        value = math.nan if state is None else state.metrics[self.metric]
        config = report.plan.config(step.variant, report.config)
        return Member(step.round, step.number, step.parent, step.is_copy, step.changes, config, value, state, result.error)


def _begin(rule: _Rule, members: int, initial: Sequence[Mapping[str, Value]]) -> list[_Step]:
    steps = []
    for number in range(1, members + 1):
        drawn = {key: each.draw(random.Random(f"{rule.seed}/{number}/{key}")) for key, each in rule.search.items()}
        given = initial[number - 1] if number <= len(initial) else {}
        seeded = rule.seeded(random.Random(f"{rule.seed}/0/{number}"))
        steps.append(_Step(1, number, None, False, {**drawn, **seeded, **given}))
    return steps


def _plan(trained: Sequence[Member], begun: Sequence[_Step], epochs: int, split: arguments.Split) -> Plan:
    """The plan of the study so far, without the members that failed, and of the round that begins."""
    names, held = split.train, split.validation
    variants = [Variant(each.variant, each.parent, epochs, each.changes, names, held) for each in trained if each.state is not None]
    variants += [Variant(each.variant, each.parent, epochs, each.changes, names, held) for each in begun]
    return Plan(tuple(variants), split.subsets, split.seen)


def _is_over(repo: Repository, study: str, round_: int) -> bool:
    """Whether the next round has begun: it was decided from this round as it is now."""
    following = record.branch_of(study, name_of(round_ + 1, 0)).removesuffix("0")
    return any(name.startswith(following) for name in record.refs_of(repo))


def _check(
    search: Mapping[str, Distribution],
    initial: Sequence[Mapping[str, Value]],
    *,
    members: int,
    rounds: int,
    exploit: float,
    mode: str,
) -> None:
    if members < 1 or rounds < 1:
        raise InvalidInput(f"{members} members and {rounds} rounds: both count from 1")
    if not 0 <= exploit <= 0.5:
        raise InvalidInput(f"exploit is {exploit}: it is the part of the members that is replaced, from 0 to 0.5")
    if mode not in ("min", "max"):
        raise InvalidInput(f"mode is {mode!r}: choose 'min' or 'max'")
    if not search:
        raise InvalidInput("nothing is searched: name a key of the configuration, and what its values are drawn from")
    if len(initial) > members:
        raise InvalidInput(f"{len(initial)} initial configurations for {members} members: give no more than one each")


def _check_alive(members: Sequence[Member], study: str) -> None:
    if not any(member.is_alive for member in members):
        first = members[0]
        raise Unavailable(f"no member of study {study!r} came to a number in round {first.round}; {first.variant}: {first.error or 'NaN'}")
