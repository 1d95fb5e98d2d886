"""What a study plans to train, and for each variant its cost and why it failed, beside the states that its training recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import bindparam, insert, select, update

from datastates.lineage.amendments import Amended, amend
from datastates.lineage.schema import VariantRow, table, to_us
from datastates.lineage.states import Value
from datastates.system import masking

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["ERROR_CHARACTERS", "Planned", "begin", "end", "fail", "failures", "plan"]

ERROR_CHARACTERS = 20_000
"""How many characters of an error are kept: its first line, and its end, which says where it was raised."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One variant as its plan has it: the variant that it continues from (None: the start), its epochs, and what it changes."""

    name: str
    parent: str | None
    epochs: int
    config: Mapping[str, Value]


def plan(session: Session, study: str, variants: Sequence[Planned]) -> None:
    """Note what a study is to train, in the order of its plan. What is known of variants planned before stays."""
    known = {row["name"]: dict(row) for row in session.execute(_KNOWN, {"of": study}).mappings()}
    rows = [_row(study, place, variant) for place, variant in enumerate(variants)]
    new = [row | {"planned_at": to_us(None), "attempts": 0, "took_s": 0.0} for row in rows if row["name"] not in known]
    if new:
        session.execute(_PLAN, new)
    changed = [row for row in rows if row["name"] in known and row != known[row["name"]]]
    if changed:
        session.connection().execute(_PLAN_AGAIN, [{f"new_{key}": value for key, value in row.items()} for row in changed])
    amend(session, Amended.VARIANT, [str(row["name"]) for row in (*new, *changed)], study=study)


def begin(session: Session, study: str, variant: str) -> None:
    """Note that a worker begins to train a variant; this clears the error of an earlier attempt."""
    session.execute(_BEGIN, {"of": study, "variant": variant, "now": to_us(None)})
    amend(session, Amended.VARIANT, [variant], study=study)


def end(session: Session, study: str, variant: str, took_s: float) -> None:
    """Note that the worker ended normally, after ``took_s`` of training."""
    session.execute(_END, {"of": study, "variant": variant, "now": to_us(None), "more_s": took_s})
    amend(session, Amended.VARIANT, [variant], study=study)


def fail(session: Session, study: str, variant: str, error: str) -> None:
    """Note that an attempt failed, and why."""
    session.execute(_FAIL, {"of": study, "variant": variant, "now": to_us(None), "why": _shortened(error)})
    amend(session, Amended.VARIANT, [variant], study=study)


def failures(session: Session, study: str, since: int) -> dict[str, str]:
    """Why the last attempts at variants failed, for attempts that ended after ``since``, in microseconds."""
    return {row.name: row.error for row in session.execute(_FAILURES, {"of": study, "since": since})}


def _shortened(error: str) -> str:
    """The error without secrets, in a form that every database accepts."""
    said = masking.text(error.replace("\0", "?").encode("utf-8", "replace").decode())
    if len(said) <= ERROR_CHARACTERS:
        return said
    first = said.partition("\n")[0][: ERROR_CHARACTERS // 4]
    return f"{first}\n…\n{said[len(first) + 3 - ERROR_CHARACTERS :]}"


def _row(study: str, place: int, variant: Planned) -> dict[str, object]:
    config = msgspec.json.encode(masking.named(dict(variant.config))).decode()
    return {"study": study, "name": variant.name, "place": place, "parent": variant.parent, "epochs": variant.epochs, "config": config}


_variant = table(VariantRow)
_is_it = (_variant.c.study == bindparam("of")) & (_variant.c.name == bindparam("variant"))
_planned = [_variant.c[name] for name in ("study", "name", "place", "parent", "epochs", "config")]
_KNOWN = select(*_planned).where(_variant.c.study == bindparam("of"))
_PLAN = insert(_variant)
_PLAN_AGAIN = (
    update(_variant)
    .where(_variant.c.study == bindparam("new_study"), _variant.c.name == bindparam("new_name"))
    .values({name: bindparam(f"new_{name}") for name in ("place", "parent", "epochs", "config")})
)
_BEGIN = update(_variant).where(_is_it).values(began_at=bindparam("now"), ended_at=None, error=None, attempts=_variant.c.attempts + 1)
_END = update(_variant).where(_is_it).values(ended_at=bindparam("now"), took_s=_variant.c.took_s + bindparam("more_s"))
_FAIL = update(_variant).where(_is_it).values(ended_at=bindparam("now"), error=bindparam("why"))
_FAILURES = select(_variant.c.name, _variant.c.error).where(
    _variant.c.study == bindparam("of"), _variant.c.error.is_not(None), _variant.c.ended_at >= bindparam("since")
)
