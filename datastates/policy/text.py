"""A cadence as text, as the environment and the terminal give it."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_

from datastates import values
from datastates.errors import InvalidInput

from .auto import BYTES_PER_S, Auto
from .cadence import Cadence
from .checkfreq import OVERHEAD, CheckFreq
from .contract import Policy
from .improvement import OnImprovement
from .mtbf import NODE_MTBF_S, Daly, TwoLevel, Young
from .spelling import read_duration, read_name, read_percent

__all__ = ["FORMS", "parse", "policy"]

FORMS = (
    "every:10, steps:100, seconds:30, best:val_loss, auto:3.5%:32M, checkfreq:3.5%, young, daly:6h, two-level:6h:7d or never, joined by |"
)


def policy(given: object, what: str = "cadence") -> Policy:
    """A policy, or the policy that a text means.

    :raises InvalidInput: it is neither.
    """
    if isinstance(given, Policy):
        return given
    if isinstance(given, str):
        return parse(str.__str__(given))
    raise InvalidInput(
        f"{what} is {values.shown(given)}: give a datastates.Cadence, such as Cadence(every=10), or a text such as 'every:10'"
    )


def parse(text: str) -> Policy:
    """The policy that a text means; ``str`` of a policy gives such a text.

    :raises InvalidInput: it means none; names the part, and the forms.
    """
    return reduce(or_, [_one(part.strip()) for part in text.split("|")])


def _one(text: str) -> Policy:
    word, *parts = (part.strip() for part in text.split(":"))
    make = _MAKERS.get(word)
    try:
        if make is not None:
            return make(*parts)
    except TypeError:  # too many parts, or too few
        pass
    except (InvalidInput, ValueError) as exc:
        raise InvalidInput(f"the cadence {text!r} means nothing: {exc}") from exc
    raise InvalidInput(f"the cadence {values.shown(text)} means nothing: say {FORMS}")


def _every(count: str) -> Policy:
    return Cadence(every=int(count), interval_s=None)


def _steps(count: str) -> Policy:
    return Cadence(interval_s=None, steps=int(count))


def _seconds(seconds: str) -> Policy:
    return Cadence(interval_s=read_duration(seconds))


def _never() -> Policy:
    return Cadence(interval_s=None)


def _best(metric: str, direction: str = "") -> Policy:
    rising = {"": None, "max": True, "min": False}
    if direction not in rising:
        raise InvalidInput(f"{direction!r} is neither max nor min")
    return OnImprovement(read_name(metric), rising[direction])


def _auto(share: str = "", rate: str = "") -> Policy:
    return Auto(read_percent(share) if share else OVERHEAD, values.size(rate, "the rate") if rate else BYTES_PER_S)


def _checkfreq(share: str = "") -> Policy:
    return CheckFreq(read_percent(share)) if share else CheckFreq()


def _young(mtbf: str = "") -> Policy:
    return Young(read_duration(mtbf) if mtbf else None)


def _daly(mtbf: str = "", order: str = "") -> Policy:
    if order not in ("", "first", "higher"):
        raise InvalidInput(f"the order {order!r} is neither first nor higher")
    return Daly(read_duration(mtbf) if mtbf else None, is_first_order=order == "first")


def _two_level(mtbf: str = "", node: str = "") -> Policy:
    return TwoLevel(read_duration(mtbf) if mtbf else None, node_mtbf_s=read_duration(node) if node else NODE_MTBF_S)


_MAKERS: dict[str, Callable[..., Policy]] = {
    "auto": _auto,
    "every": _every,
    "steps": _steps,
    "seconds": _seconds,
    "never": _never,
    "best": _best,
    "checkfreq": _checkfreq,
    "young": _young,
    "daly": _daly,
    "two-level": _two_level,
}
