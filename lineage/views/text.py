"""Text for people: uids, sizes, times, and untrusted text made harmless.

Pure functions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datastates.lineage.states import State

_RELEVANCE_WORD = re.compile(r"[^\W_]+")
_CHECKED = {"val": 0, "valid": 0, "validation": 0, "eval": 0, "dev": 0, "test": 1}
"""The first words of metrics that are measured on data that is not trained on."""


def by_relevance(keys: Iterable[str], first: Sequence[str] = ()) -> list[str]:
    """Keys in the order in which they are shown; ``first`` are those that a request named, in
    its order."""
    asked = {key: place for place, key in reversed(list(enumerate(first)))}
    return sorted(set(keys), key=lambda key: (asked.get(key, len(first)), *_rank(key)))


def is_validation(key: str) -> bool:
    """Whether a metric is measured on data that is not trained on, judged by its first word."""
    return _rank(key)[0] == 1


def relevant_keys(
    values: Iterable[Mapping[str, object]], most: int, first: Sequence[str] = ()
) -> list[str]:
    """The ``most`` keys that get columns in a table, by relevance; among equally relevant keys,
    those that most values have.

    All keys of ``first`` get one.
    """
    counts = Counter(key for each in values for key in each)
    rest = sorted(
        counts.keys() - set(first), key=lambda key: (_rank(key)[0], -counts[key], _rank(key))
    )
    return by_relevance([*first, *rest[: max(0, most - len(set(first)))]], first)


def _rank(key: str) -> tuple[int, int, str, int, str]:
    """The sort key of a metric. ``loss`` is first, then ``val_loss`` and similar keys, then
    other losses, then all other keys by prefix."""
    words = [word.lower() for word in _RELEVANCE_WORD.findall(key)] or [""]
    is_loss = int(words[-1] != "loss")
    group = (
        0
        if words == ["loss"]
        else 1
        if words[0] in _CHECKED and len(words) > 1
        else 2
        if words[-1] == "loss"
        else 3
    )
    return group, _CHECKED.get(words[0], 0) if group == 1 else 0, words[0], is_loss, key


# The metrics of each rank, which are recorded as ``loss@3``: shown as one value, with the range
# from least to greatest.


_OF_RANK = re.compile(r"(.+)@(0|[1-9][0-9]*)", re.DOTALL)


def by_rank(
    metrics: Mapping[str, float], world_size: int
) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """The metrics of a state, and separately those that each of its ranks has.

    A metric that a user calls ``acc@5``, where there is no ``acc@0``, is not a rank's.
    """
    whole: dict[str, float] = {}
    ranks: dict[str, dict[int, float]] = {}
    for key, value in metrics.items():
        found = _split(key, metrics) if world_size > 1 else None
        if found is None or found[1] >= world_size:
            whole[key] = value
        else:
            ranks.setdefault(found[0], {})[found[1]] = value
    return whole, {name: dict(sorted(values.items())) for name, values in ranks.items()}


def ranks_of(keys: Iterable[str]) -> dict[str, list[int]]:
    """For the metrics of many states, by name: the ranks that had a separate value.

    Metrics that only one rank had are left out."""
    known = set(keys)
    ranks: dict[str, list[int]] = {}
    for name, rank in filter(None, (_split(key, known) for key in known)):
        ranks.setdefault(name, []).append(rank)
    return {name: sorted(found) for name, found in ranks.items() if len(found) > 1}


def _split(key: str, known: Container[str]) -> tuple[str, int] | None:
    """The name and the rank in the key of one rank's metric. None unless the metric of all ranks
    and the metric of rank 0 exist too."""
    found = _OF_RANK.fullmatch(key)
    return (
        None
        if found is None or found[1] not in known or f"{found[1]}@0" not in known
        else (found[1], int(found[2]))
    )


def spread_text(values: Mapping[int, float], digits: int) -> str:
    """``0.7 to 1.3, mean 1``; values that are not numbers are ignored."""
    numbers = [value for value in values.values() if math.isfinite(value)]
    if not numbers:
        return "no numbers"
    return (
        f"{min(numbers):.{digits}g} to {max(numbers):.{digits}g}, mean"
        f" {math.fsum(numbers) / len(numbers):.{digits}g}"
    )


# Texts for uids, sizes and times.


_SHORT = 10


def short(uid: str | None) -> str:
    """The beginning of a uid, as people read and type it."""
    return "-" if uid is None else uid[:_SHORT]


def plural(count: int, noun: str) -> str:
    """A number with its noun, such as ``1 state`` or ``2 branches``."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def clean(text: str) -> str:
    """Text that others wrote, without anything that a terminal would obey or that would reverse
    the direction of a line."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def first_line(text: str) -> str:
    """The part of a message that fits into a row."""
    return clean(text.strip().partition("\n")[0])


def size_text(count: int) -> str:
    """A number of bytes in powers of 1024: ``1.2 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def kept_text(captured: int, restorable: int, size: int) -> str:
    """How many states of a training are left, such as ``200 captured, 200 can be restored, 1.2 MiB
    of data on disk``."""
    return (
        f"{captured:,} captured, {restorable:,} can be restored, {size_text(size)} of data on disk"
    )


def time_text(moment: datetime) -> str:
    """A time in the local zone, to the second."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age_text(moment: datetime, now: datetime | None = None) -> str:
    """The age as a text: ``3 minutes ago``."""
    seconds = max(0, int(((now or datetime.now(UTC)) - moment).total_seconds()))
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return f"{seconds} second{'s' if seconds != 1 else ''} ago"


def step_text(state: State) -> str:
    """The step, with the batch of an accumulation that is not complete."""
    return f"{state.step}+{state.micro_step}" if state.micro_step else str(state.step)


def metrics_text(metrics: Mapping[str, float], world_size: int = 1) -> str:
    """``loss=0.31 val_loss=0.4``, by relevance; for a state of several ranks ``loss=0.31 (0.3 to
    0.4, mean 0.35)``."""
    whole, ranks = by_rank(metrics, world_size)
    spread = {name: f" ({spread_text(values, 6)})" for name, values in ranks.items()}
    return clean(
        " ".join(f"{key}={whole[key]:.6g}{spread.get(key, '')}" for key in by_relevance(whole))
    )


# Whether a metric is better when it is smaller or larger, judged by its name.


class Direction(StrEnum):
    """Which of two values is the better one: the smaller or the larger."""

    MIN = "min"
    MAX = "max"


_FALLING = {
    "loss",
    "nll",
    "perplexity",
    "ppl",
    "error",
    "errors",
    "err",
    "mse",
    "rmse",
    "mae",
    "wer",
    "cer",
    "fid",
    "cost",
    "regret",
}
_RISING = {
    "acc",
    "accuracy",
    "auc",
    "auroc",
    "f1",
    "bleu",
    "rouge",
    "map",
    "miou",
    "iou",
    "dice",
    "precision",
    "recall",
    "reward",
    "return",
    "score",
    "r2",
    "psnr",
    "ssim",
    "top1",
    "top5",
    "correct",
}
# "loss_scale" is no loss
_BESIDE = {
    "scale",
    "weight",
    "coef",
    "coefficient",
    "time",
    "seconds",
    "ms",
    "count",
    "lr",
}
_PLAIN = re.compile(r"[a-z0-9]+")
_GOALS_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")


def named_direction(key: str) -> Direction | None:
    """The direction that follows from a metric's name: losses and errors fall, accuracies rise.

    None: the name has no direction."""
    words = _words(key)
    if words & _BESIDE:
        return None
    return Direction.MIN if words & _FALLING else Direction.MAX if words & _RISING else None


def direction_of(key: str) -> Direction:
    """Larger for accuracies and other metrics known to rise; smaller for everything else, such
    as losses."""
    words = _words(key)
    return Direction.MAX if words & _RISING and not words & _FALLING else Direction.MIN


@lru_cache(maxsize=1024)
def _words(key: str) -> frozenset[str]:
    return frozenset(
        {word.lower() for word in _GOALS_WORD.findall(key)} | set(_PLAIN.findall(key.lower()))
    )
