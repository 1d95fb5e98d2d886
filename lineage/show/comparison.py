"""A comparison of states: what was configured, measured and noted for each, and where each can be restored. Reads no payload.

Each state of a comparison is a column; each name that at least one of them has is a row. Rows that differ come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates.errors import InvalidInput
from datastates.lineage.change import runs
from datastates.lineage.search import walk
from datastates.lineage.search.holders import replicas_of
from datastates.lineage.states import Ref, State, Value

from .cells import code, status_html, table_html, text
from .detail import refs_at
from .goals import Direction, direction_of
from .origins import branches_of
from .relevance import by_relevance
from .texts import short, step_text

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.lineage.states import Run

__all__ = ["MOST", "Compared", "Comparison", "ComparisonRow", "check_count", "compare"]

MOST = 32
"""The most states that can be compared at once."""

_LONG = 80  # letters of a value in a notebook


@dataclass(frozen=True, slots=True)
class Compared:
    """One state of a comparison. ``rev`` is the text that asked for it, ``branch`` the branch that captured it; ``refs`` name it now.

    ``places`` are the tiers that are recorded as holding its bytes, with their machines: ``local on host``. ``nearest`` is the nearest
    state that can be restored: itself, or the newest of its first parents whose bytes are not gone; None if there is none.
    """

    rev: str
    state: State
    branch: str | None
    refs: tuple[Ref, ...]
    places: tuple[str, ...]
    nearest: State | None


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One name, and its value for each state in order; None where a state has none. ``direction`` says which values of a metric are
    better."""

    key: str
    values: tuple[Value, ...]
    differs: bool
    direction: Direction | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """States side by side. Of each kind the rows that differ come first; ``code`` has commits and versions."""

    states: tuple[Compared, ...]
    config: tuple[ComparisonRow, ...]
    metrics: tuple[ComparisonRow, ...]
    attributes: tuple[ComparisonRow, ...]
    code: tuple[ComparisonRow, ...]

    def _repr_html_(self) -> str:
        kinds = (("config.", self.config), ("metrics.", self.metrics), ("attr.", self.attributes), ("", self.code))
        rows = [(text(prefix + row.key), *map(_cell, row.values)) for prefix, each in kinds for row in each if row.differs]
        rows.append(("status", *(status_html(each.state.status) for each in self.states)))
        rows.append(("restorable", *("" if each.nearest is None else code(short(each.nearest.uid)) for each in self.states)))
        made = table_html(("", *(f"{each.rev} (step {step_text(each.state)})" for each in self.states)), rows)
        same = sum(not row.differs for _, each in kinds for row in each)
        return made + (f"<p>{same} more are the same in all of them</p>" if same else "")

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)


def compare(session: Session, revs: Sequence[str], found: Sequence[State]) -> Comparison:
    """A comparison of states; ``revs`` are the texts that asked for them.

    :raises InvalidInput: there are fewer than two, or more than ``MOST``.
    """
    check_count(len(found))
    uids = [state.uid for state in found]
    captured_on = branches_of(session, uids)
    ran = {uid: runs.get(session, uid) for uid in {state.run for state in found if state.run is not None}}
    ran_each = [None if state.run is None else ran[state.run] for state in found]
    return Comparison(
        states=tuple(
            Compared(
                rev=rev,
                state=state,
                branch=captured_on.get(state.uid),
                refs=tuple(refs_at(session, state.uid)),
                places=_places(session, state),
                nearest=walk.nearest_restorable(session, state.uid),
            )
            for rev, state in zip(revs, found, strict=True)
        ),
        config=_rows([state.config for state in found]),
        metrics=_metric_rows([state.metrics for state in found]),
        attributes=_rows([state.attributes for state in found]),
        code=_rows([_code(run) for run in ran_each]),
    )


def _cell(value: Value) -> str:
    return "" if value is None else text(f"{value:.6g}" if isinstance(value, float) else value, most=_LONG)


def check_count(count: int) -> None:
    """Check that so many states can be compared.

    :raises InvalidInput: they cannot; the error says what to do.
    """
    if count < 2:
        raise InvalidInput(f"a comparison needs two states or more, not {count}: name another one")
    if count > MOST:
        raise InvalidInput(
            f"{count} states are too many to stand beside each other: name at most {MOST}, "
            "or see all branches by their settings and metrics: 'datastates branches --csv', parallel coordinates on the page"
        )


def _places(session: Session, state: State) -> tuple[str, ...]:
    if not state.status.is_restorable:
        return ()
    held = [replica for replica in replicas_of(session, state.uid) if replica.status == "ok"]
    return tuple(sorted({f"{each.tier} on {each.node}" if each.node else each.tier for each in held}))


def _code(run: Run | None) -> dict[str, Value]:
    if run is None:
        return {}
    commit: dict[str, Value] = {}
    if run.git_commit is not None:
        commit["commit"] = run.git_commit + (" with changes" if run.git_dirty else "")
    return {**commit, **run.versions}


def _rows(each: Sequence[Mapping[str, Value]]) -> tuple[ComparisonRow, ...]:
    keys = sorted({key for values in each for key in values})
    rows = [_row(key, each) for key in keys]
    return tuple(sorted(rows, key=lambda row: not row.differs))


def _metric_rows(each: Sequence[Mapping[str, float]]) -> tuple[ComparisonRow, ...]:
    keys = by_relevance(key for values in each for key in values)
    rows = [_row(key, each, direction_of(key)) for key in keys]
    return tuple(sorted(rows, key=lambda row: not row.differs))


def _row(key: str, each: Sequence[Mapping[str, Value]], direction: Direction | None = None) -> ComparisonRow:
    told = [key in values for values in each]
    values = tuple(values.get(key) for values in each)
    same = all(told) and all(_is_same(values[0], value) for value in values)
    return ComparisonRow(key, values, not same, direction)


def _is_same(one: Value, other: Value) -> bool:
    return (one == other and isinstance(one, bool) == isinstance(other, bool)) or (one != one and other != other)
