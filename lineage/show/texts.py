"""Words for people, wherever they read them: uids, sizes, times, and text of others made harmless. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Protocol

from .by_rank import by_rank, spread_text
from .relevance import by_relevance

__all__ = ["age_text", "clean", "first_line", "kept_text", "metrics_text", "plural", "short", "size_text", "step_text", "time_text"]

_SHORT = 10


class Stepped(Protocol):
    """Anything that has a step."""

    @property
    def step(self) -> int: ...

    @property
    def micro_step(self) -> int: ...


def short(uid: str | None) -> str:
    """The beginning of a uid, as people read and type it."""
    return "-" if uid is None else uid[:_SHORT]


def plural(count: int, noun: str) -> str:
    """A number with its noun, such as ``1 state`` or ``2 branches``."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def clean(text: str) -> str:
    """Text that others wrote, without anything that a terminal would obey or that would reverse the direction of a line."""
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
    """What is left of the states of a training, such as ``200 captured, 200 can be restored, 1.2 MiB of data on disk``."""
    return f"{captured:,} captured, {restorable:,} can be restored, {size_text(size)} of data on disk"


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


def step_text(state: Stepped) -> str:
    """The step, with the batch of an accumulation that is not complete."""
    return f"{state.step}+{state.micro_step}" if state.micro_step else str(state.step)


def metrics_text(metrics: Mapping[str, float], world_size: int = 1) -> str:
    """``loss=0.31 val_loss=0.4``, by relevance; for a state of several ranks ``loss=0.31 (0.3 to 0.4, mean 0.35)``."""
    whole, ranks = by_rank(metrics, world_size)
    spread = {name: f" ({spread_text(values, 6)})" for name, values in ranks.items()}
    return clean(" ".join(f"{key}={whole[key]:.6g}{spread.get(key, '')}" for key in by_relevance(whole)))
