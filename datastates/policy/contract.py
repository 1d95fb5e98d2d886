"""The contract of cadences, ``Policy``, and the cadences that need no measured costs.

A policy decides when a state is written to disk. Its methods are pure functions: they get facts
from the engine and return decisions. ``|`` joins policies. The file also reads and formats the
texts of policies, and decides how much memory states get.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import OURS
from datastates.lineage.views.text import Direction, direction_of
from datastates.values import Value

_UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0, "": 1.0}
_PARTING = re.compile("[%:|]|^\\s+|\\s+\\Z")
_ESCAPED = re.compile("%([0-9a-f]{1,6});")
_DURATION = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?|inf)\s*(d|h|min|m|s|)")
INTERVAL_S = 30.0
"""The default seconds between two writes of the newest state."""

SMALL_BYTES = 128 << 20
"""As many small states are kept as fit into this.

A small training then takes less than 200 MiB more, including imports."""

AT_ONCE_BYTES = 256 << 20
"""If the user chose the capacity, small states may take this much memory at once."""

FEWEST = 3
"""The least number of states that get memory at once, however large: one is being written, one
is the head, one is being captured."""

FEW = 4
"""The least number of states that have memory in the end, however large: one more, to go back
to."""

UNCOUNTED_BYTES = 4 << 20
"""Bytes that states may take outside their slots before they count toward the limit."""

_RESERVE_BYTES = 64 << 20
"""The memory that is left to the training and to other processes in any case."""

_CADENCE = f"{OURS}cadence"
_COSTS = ("interval_s", "write_s", "overhead_s", "held_s", "captures", "writes")
_OPTIONAL = ("further_s", "cpu_s", "size")
_CHOICE = ("why", "every", "interval_s", "further_every")


@dataclass(frozen=True, slots=True)
class Costs:
    """What captures and writes of a training cost, in seconds, as ``policy.auto.Measures`` computes
    them.

    ``interval_s`` is the time from one capture to the next while no write runs. A write takes
    ``write_s``, and delays the training by ``overhead_s`` in all. Time that merely overlaps with
    training is not lost. A capture blocks the training for ``held_s``, written or not. ``captures``
    and ``writes`` are how many were measured. ``further_s`` is how long it takes to put a state
    onto the further tiers. It is None if no such tier took one.

    ``pace_s`` is the time between two captures, written or not. ``sure_s`` is a delay that a write
    causes almost certainly, and ``error_s`` is its standard error. Writing a state takes ``cpu_s``
    of the processor's time (None: not measured), and adds ``size`` bytes to the disk. ``debt`` is
    the number of written bytes that exceed the policy's ``bytes_per_s`` so far. Lately up to
    ``waiting`` states waited for the disk at once. It is inf if a capture had to wait because
    memory was full.
    """

    interval_s: float
    write_s: float
    overhead_s: float
    held_s: float
    captures: int
    writes: int
    further_s: float | None = None
    pace_s: float = 0.0
    sure_s: float = 0.0
    error_s: float = 0.0
    cpu_s: float | None = None
    size: float = 0.0
    debt: float = 0.0
    waiting: float = 0


@dataclass(frozen=True, slots=True)
class CadenceChoice:
    """How often states of a training become durable automatically, and ``why``. ``run.cadence``
    returns it.

    ``cadence`` is the policy as text. ``every`` (captures) and ``interval_s`` are its values, as
    given or as computed. They are None if it does not use them. ``further_every`` is the number of
    durable states for each one that is written to further tiers. ``costs`` are those used in the
    computation, and None if there was no computation.
    """

    cadence: str
    why: str
    every: int | None = None
    interval_s: float | None = None
    further_every: int = 1
    costs: Costs | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """The facts about a line when its policy decides about one of its states.

    ``index`` is the number of the capture in its line, from 0. It is None if there was no new
    capture, and only time passed or a write ended. ``step`` and ``metrics`` are the state's.
    ``last_write``, ``last_index`` and ``last_step`` describe the newest state that the policy
    picked. They are None before the first. ``extremes`` are the least and the greatest value of
    each metric so far. ``count`` captures were made so far, ``idle`` of them since the last write
    ended. ``waiting`` states are being written, or wait for that. ``choice`` is the policy's last
    choice. ``size`` and ``debt`` are in bytes, as in ``Costs``.
    """

    now: float
    index: int | None = None
    last_write: float | None = None
    is_newest: bool = True
    step: int = 0
    last_index: int | None = None
    last_step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    extremes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    count: int = 0
    idle: int = 0
    waiting: int = 0
    choice: CadenceChoice | None = None
    size: float = 0.0
    debt: float = 0.0

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way or waits."""
        return self.waiting > 0

    @property
    def since(self) -> int:
        """How many captures there were since the one that was picked last, or since the start."""
        return self.count - 1 - self.last_index if self.last_index is not None else self.count


class Policy(ABC):
    """Decides which captures become durable automatically. Tagged states and branch heads at exit
    always do.

    Give one, or several joined by ``|``, to ``Config`` or ``Repository.track`` as ``cadence``.
    ``str`` gives the text that ``DATASTATES_CADENCE`` takes. Every method is a pure function: it
    takes facts and returns a decision.
    """

    __slots__ = ()

    is_computed = False
    """Whether ``choose`` ever chooses anything."""
    asks_mtbf = False
    """Whether ``informed`` should get the rate at which processes fail."""
    bytes_per_s: float | None = None
    """The rate, in bytes a second, at which ``Moment.debt`` is paid off. None if the policy does
    not limit it."""

    @abstractmethod
    def is_due(self, moment: Moment, /) -> bool:
        """Whether to write a state now."""

    @abstractmethod
    def next_due(self, moment: Moment, /) -> float | None:
        """The time at which the newest state is due without a new capture. None: never, or at the
        next capture."""

    @abstractmethod
    def told(self) -> CadenceChoice:
        """The choice before anything is measured."""

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """The choice at these costs, or ``current`` itself if that still holds. None if the policy
        does not depend on costs."""
        return None

    def informed(self, mtbf_s: float, /) -> Policy:
        """The same policy with an observed failure of this repository's processes every ``mtbf_s``
        seconds. Values that the user gave stay."""
        return self

    def counted(self) -> Policy | None:
        """The part of the policy that depends only on a capture's number and metrics. Every rank of
        a group can decide it alone.

        None if there is no such part, because the policy depends on clocks, costs or earlier picks.
        """
        return None

    @abstractmethod
    def __str__(self) -> str:
        """The policy as text."""

    def __or__(self, other: object) -> Policy:
        """A policy that writes what either would write."""
        if not isinstance(other, Policy):
            raise InvalidInput(
                f"a cadence is joined by | with {values.shown(other)}: join it with another, such"
                " as OnImprovement('loss')"
            )
        return AnyOf((*_members(self), *_members(other)))


@dataclass(frozen=True, slots=True)
class AnyOf(Policy):
    """Several policies, any of which may pick a state.

    Made by ``|``; at most one of them computes anything."""

    members: tuple[Policy, ...]

    def __post_init__(self) -> None:
        computed = [str(one) for one in self.members if one.is_computed]
        if len(computed) > 1:
            raise InvalidInput(
                f"{' and '.join(computed)} each compute a cadence: choose one of them"
            )

    @property
    def is_computed(self) -> bool:  # type: ignore[override]  # a constant of other policies
        """See ``Policy``."""
        return any(one.is_computed for one in self.members)

    @property
    def asks_mtbf(self) -> bool:  # type: ignore[override]  # a constant of other policies
        """See ``Policy``."""
        return any(one.asks_mtbf for one in self.members)

    @property
    def bytes_per_s(self) -> float | None:  # type: ignore[override]  # a constant of other policies
        """See ``Policy``."""
        return next((one.bytes_per_s for one in self.members if one.bytes_per_s is not None), None)

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        return any(one.is_due(moment) for one in self.members)

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return min(
            (at for one in self.members if (at := one.next_due(moment)) is not None), default=None
        )

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return self._together([one.told() for one in self.members])

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        for one in self.members:
            if one.is_computed:
                own = (
                    None
                    if current is None
                    else replace(current, cadence=str(one), why=current.why.partition("; or ")[0])
                )
                chosen = one.choose(costs, own)
                if chosen is None or (own is not None and chosen is own):
                    return current
                return self._together(
                    [chosen if other is one else other.told() for other in self.members], chosen
                )
        return None

    def informed(self, mtbf_s: float, /) -> Policy:
        """See ``Policy``."""
        return AnyOf(tuple(one.informed(mtbf_s) for one in self.members))

    def counted(self) -> Policy | None:
        """See ``Policy``. None if a part is computed, because that part also decides what is
        written to further tiers."""
        found = (
            []
            if self.is_computed
            else [own for one in self.members if (own := one.counted()) is not None]
        )
        return AnyOf(tuple(found)) if found else None

    def _together(
        self, said: Sequence[CadenceChoice], chosen: CadenceChoice | None = None
    ) -> CadenceChoice:
        """One choice that describes all members' choices. A computed one comes first."""
        first = chosen or next(
            (each for one, each in zip(self.members, said, strict=True) if one.is_computed), said[0]
        )
        why = "; or ".join(dict.fromkeys([first.why, *(each.why for each in said)]))
        return replace(first, cadence=str(self), why=why)

    def __str__(self) -> str:
        return "|".join(map(str, self.members))


def _members(policy: Policy) -> tuple[Policy, ...]:
    return policy.members if isinstance(policy, AnyOf) else (policy,)


def span(seconds: float) -> str:
    """A time span for people: ``0.35 s``, ``12 s``, ``3.4 min``, ``2.0 h``, ``1.2 d``."""
    for unit, scale, most in (
        ("ms", 1e-3, 0.1),
        ("s", 1.0, 120.0),
        ("min", 60.0, 7200.0),
        ("h", 3600.0, 172800.0),
    ):
        if seconds < most:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


# --- Texts: numbers, shares, time spans, names ---


def plain(value: float) -> str:
    """A number without needless digits, exact."""
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(float(value))


def percent(share: float) -> str:
    """A share in percent if that is exact, else as it is."""
    text = f"{share * 100:.12g}%"
    return text if read_percent(text) == share else repr(share)


def read_percent(text: str) -> float:
    """The share for a text such as ``3.5%`` or ``0.035``.

    :raises InvalidInput: it is not a number.
    """
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no share: say it as 3.5% or 0.035") from None


def duration(seconds: float) -> str:
    """A time span in the largest unit in which it is a whole number."""
    for unit in ("d", "h", "m"):
        if seconds > 0 and seconds % _UNITS[unit] == 0:
            return f"{plain(seconds / _UNITS[unit])}{unit}"
    return plain(seconds)


def read_duration(text: str) -> float:
    """The seconds for a text such as ``90``, ``90s``, ``2m``, ``6h`` or ``1.5d``.

    :raises InvalidInput: it is not a time span.
    """
    found = _DURATION.fullmatch(text.strip())
    try:
        if found is not None:
            return float(found[1]) * _UNITS[found[2]]
    except ValueError:
        pass
    raise InvalidInput(f"{text!r} is no time span: say it as 90, 90s, 2m, 6h or 1.5d")


def name(key: str) -> str:
    """The name of a metric, with the characters that separate policies escaped."""
    return _PARTING.sub(lambda found: "".join(f"%{ord(letter):x};" for letter in found[0]), key)


def read_name(text: str) -> str:
    """The name that ``name`` spelled."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


# --- Cadence by counts and times ---


@dataclass(frozen=True, slots=True)
class Cadence(Policy):
    """Decides which captures become durable automatically. Tagged states and branch heads at exit
    always do.

    ``every`` counts the captures of this tracker: 5 picks captures 5, 10, 15 and so on.
    ``interval_s`` is the least time between two writes of the newest state. ``steps`` picks the
    first capture at or after each multiple of so many steps of the optimizers. If all are None,
    tags, the exit and ``capture.wait("durable")`` alone make states durable. Give it to ``Config``
    or ``Repository.track`` as ``cadence``, alone or joined by ``|`` with others.

        repo.track(model=model, cadence=datastates.Cadence(every=10, interval_s=None))

    :raises InvalidInput: one of the values is not of its kind.
    """

    every: int | None = None
    interval_s: float | None = INTERVAL_S
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            object.__setattr__(
                self,
                "every",
                values.integer(self.every, "durable_every, which counts captures,", least=1),
            )
        if self.interval_s is not None:
            object.__setattr__(
                self, "interval_s", values.seconds(self.interval_s, "durable_interval_s")
            )
        if self.steps is not None:
            object.__setattr__(self, "steps", values.integer(self.steps, "steps", least=1))

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        if moment.index is not None:
            if self.every is not None and (moment.index + 1) % self.every == 0:
                return True
            if (
                self.steps is not None
                and moment.step // self.steps != (moment.last_step or 0) // self.steps
            ):
                return True
        if self.interval_s is None or not moment.is_newest:
            return False
        return moment.last_write is None or moment.now - moment.last_write >= self.interval_s

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        if self.interval_s is None or moment.last_write is None:
            return None
        return moment.last_write + self.interval_s

    def counted(self) -> Policy | None:
        """See ``Policy``."""
        # a subclass may depend on anything
        return (
            Cadence(self.every, None) if type(self) is Cadence and self.every is not None else None
        )

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        parts = (
            (
                None
                if self.every is None
                else "each capture"
                if self.every == 1
                else f"every {self.every} captures"
            ),
            None if self.steps is None else f"a state every {self.steps} steps",
            (
                None
                if self.interval_s is None
                else f"the newest state every {plain(self.interval_s)} s"
            ),
        )
        why = f"{' and '.join(filter(None, parts)) or 'nothing by itself'}, as it was told"
        return CadenceChoice(str(self), why, every=self.every, interval_s=self.interval_s)

    def __or__(self, other: object) -> Policy:
        """A policy that writes what either would write. Two cadences that do not set the same field
        differently become one with the fields of both.
        """
        if type(self) is type(other) is Cadence:  # a subclass may decide otherwise
            pairs = [
                (self.every, other.every),
                (self.interval_s, other.interval_s),
                (self.steps, other.steps),
            ]
            if all(None in pair or pair[0] == pair[1] for pair in pairs):
                every, interval_s, steps = (
                    mine if mine is not None else theirs for mine, theirs in pairs
                )
                # they keep their order
                return Cadence(every, interval_s, steps)  # type: ignore[arg-type]
        return Policy.__or__(self, other)

    def __str__(self) -> str:
        parts = {"every": self.every, "steps": self.steps, "seconds": self.interval_s}
        return (
            "|".join(f"{name}:{plain(value)}" for name, value in parts.items() if value is not None)
            or "never"
        )


# --- Cadence by improvement of a metric ---


@dataclass(frozen=True, slots=True)
class OnImprovement(Policy):
    """Writes each state whose ``metric`` is better than in every earlier capture of its training.
    NaN and infinities are never better.

    ``is_rising`` is whether larger values are better. If it is None, the metric's name decides, as
    everywhere (accuracies rise, losses fall). Earlier captures of a resumed training do not count:
    its first value after the resume counts as an improvement.

        cadence = datastates.Cadence(every=100) | datastates.OnImprovement("val_loss")
        repo.track(model=model, cadence=cadence)

    :raises InvalidInput: ``metric`` cannot be a metric's name, or ``is_rising`` is neither True,
        False nor None.
    """

    metric: str
    is_rising: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", values.key(self.metric, "the metric of OnImprovement"))
        if self.is_rising is not None:
            object.__setattr__(self, "is_rising", values.flag(self.is_rising, "is_rising"))

    @property
    def rises(self) -> bool:
        """Whether larger values are better."""
        return (
            direction_of(self.metric) is Direction.MAX if self.is_rising is None else self.is_rising
        )

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        value = moment.metrics.get(self.metric)
        if moment.index is None or value is None or not math.isfinite(value):
            return False
        before = moment.extremes.get(self.metric)
        return before is None or (value > before[1] if self.rises else value < before[0])

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return None

    def counted(self) -> Policy | None:
        """See ``Policy``."""
        return self if type(self) is OnImprovement else None  # a subclass may depend on anything

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return CadenceChoice(
            str(self),
            f"each state with a {'larger' if self.rises else 'smaller'} {self.metric} than all"
            " before",
        )

    def __str__(self) -> str:
        direction = "" if self.is_rising is None else ":max" if self.is_rising else ":min"
        return f"best:{name(self.metric)}{direction}"


# --- Memory of states: pure functions of their sizes ---


def bytes_at_once(sizes: Iterable[int], capacity: int, *, is_given: bool) -> int:
    """The memory that captures take as they need it, given in ``sizes`` the bytes of one state of
    each training; at most ``capacity``.

    ``is_given``: the user chose the capacity.
    """
    small_bytes = AT_ONCE_BYTES if is_given else SMALL_BYTES
    return min(capacity, max(small_bytes, FEWEST * sum(sizes)))


def bytes_allowed(size: int, *, warm: int, at_once: int, kept: int) -> int:
    """The bytes that may be warm after a capture of ``size`` bytes, before states are evicted.

    Touching up to a quarter of the state's bytes more costs no more than its copy does. Versions
    that share most of their chunks need few new ones, so all of them stay. A version that shares no
    chunks reuses the memory of an older one.
    """
    return min(kept, max(at_once, warm + size // 4))


def is_tight(available_bytes: int, held_bytes: int) -> bool:
    """Whether states should take no more memory, because less than an eighth of their possible
    memory is left.

    :param available_bytes: what the process may still take, within its control groups.
    :param held_bytes: what states hold already.
    """
    return available_bytes < max(_RESERVE_BYTES, (available_bytes + held_bytes) // 8)


def bytes_kept(
    sizes: Iterable[int], capacity: int, *, is_given: bool, latest: int | None = None
) -> int:
    """The bytes that hold states in the end.

    ``latest``: how many of its newest states each training should keep."""
    # the newest is the head; one is being written, one captured
    count = FEW if latest is None else max(FEWEST, latest + 2)
    return capacity if is_given else min(capacity, max(SMALL_BYTES, count * sum(sizes)))


# --- Costs and choice as plain values in the record of a run ---


def noted(costs: Costs, choice: CadenceChoice | None) -> dict[str, Value]:
    """Costs and choice, as a run's configuration keeps them."""
    found: dict[str, Value] = {
        f"{_CADENCE}.costs.{name}": getattr(costs, name) for name in (*_COSTS, *_OPTIONAL)
    }
    if choice is not None:
        found[_CADENCE] = choice.cadence
        found |= {f"{_CADENCE}.{name}": getattr(choice, name) for name in _CHOICE}
    return found


def read_costs(config: Mapping[str, Value]) -> Costs | None:
    """The costs in a run's record; None if it has none, or not all."""
    found = {name: config.get(f"{_CADENCE}.costs.{name}") for name in _COSTS}
    if not all(isinstance(value, int | float) for value in found.values()):
        return None
    more = {
        name: value
        for name in _OPTIONAL
        if isinstance(value := config.get(f"{_CADENCE}.costs.{name}"), float)
    }
    return Costs(**found, **more)  # type: ignore[arg-type]  # they are numbers


def read_choice(config: Mapping[str, Value]) -> CadenceChoice | None:
    """The choice in a run's record; None if it has none."""
    cadence, why = config.get(_CADENCE), config.get(f"{_CADENCE}.why")
    if not isinstance(cadence, str) or not isinstance(why, str):
        return None
    every, interval_s, further_every = (config.get(f"{_CADENCE}.{name}") for name in _CHOICE[1:])
    return CadenceChoice(
        cadence,
        why,
        every=every if isinstance(every, int) else None,
        interval_s=interval_s if isinstance(interval_s, float) else None,
        further_every=further_every if isinstance(further_every, int) else 1,
        costs=read_costs(config),
    )
