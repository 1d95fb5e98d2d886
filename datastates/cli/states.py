"""States as a table or as CSV: the columns, and their contents."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from datastates.lineage.show.by_rank import by_rank
from datastates.lineage.show.relevance import relevant_keys
from datastates.lineage.show.texts import first_line
from datastates.lineage.states import Ref, State

from .render import age_text, by_state, refs_text, short, size_text, status_text, step_text
from .tables import Column, Table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.lineage.search.query import Field
    from datastates.lineage.states import Run, Value

__all__ = ["Known", "csv_lines", "states_table"]

_METRICS = 6
_NUMBERS = {"step", "micro_step", "metrics"}


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of states besides themselves: their branches by uid, the refs, and the runs by uid."""

    branches: Mapping[str, str]
    refs: Sequence[Ref]
    runs: Mapping[str, Run]

    @classmethod
    def of(cls, session: Session, states: Sequence[State], *, with_runs: bool) -> Known:
        from datastates.lineage.search import refs
        from datastates.lineage.show.origins import branches_of

        found: dict[str, Run] = {}
        if with_runs:
            from datastates.lineage.change import runs  # imports what changes a lineage

            found = {run: runs.get(session, run) for run in {state.run for state in states} if run is not None}
        return cls(branches_of(session, [state.uid for state in states]), refs.refs(session), found)


def states_table(states: Sequence[State], known: Known, *, chosen: Sequence[Field] | None, asked: Sequence[Field]) -> Table:
    """A table with one row for each state. The columns are the ``chosen`` ones; else those ``asked`` for, the metrics that matter, and the
    rest.
    """
    names = by_state(known.refs)
    fields = _usual(states, asked) if chosen is None else [("uid", ""), ("step", ""), *((one.name, one.key) for one in chosen)]
    fields = list(dict.fromkeys(fields))
    made = Table([_column(name, key, place, is_chosen=chosen is not None) for place, (name, key) in enumerate(fields)])
    for state in states:
        made.add(*(_cell(state, name, key, known, names.get(state.uid, ())) for name, key in fields))
    return made


def csv_lines(states: Sequence[State], known: Known, *, chosen: Sequence[Field] | None) -> Iterator[str]:
    """A header, and a line for each state: the chosen columns, else all that exist; names as in a query, values as they are."""
    fields = [("uid", ""), *((one.name, one.key) for one in chosen)] if chosen is not None else _every(states)
    fields = list(dict.fromkeys(fields))
    yield _csv([f"{name}.{key}" if key else name for name, key in fields])
    for state in states:
        yield _csv(["" if (value := _value(state, name, key, known)) is None else value for name, key in fields])


def _usual(states: Sequence[State], asked: Sequence[Field]) -> list[tuple[str, str]]:
    first = [one.key for one in asked if one.name == "metrics"]
    metrics = [("metrics", key) for key in relevant_keys((_whole(state, first) for state in states), _METRICS, first)]
    others = [(one.name, one.key) for one in asked if one.name not in ("metrics", "tag", "uid")]
    order = [("uid", ""), ("step", ""), ("branch", ""), *metrics, *others, ("status", ""), ("created", ""), ("refs", ""), ("message", "")]
    return list(dict.fromkeys(order))


def _whole(state: State, asked: Sequence[str]) -> dict[str, float]:
    """The state's metrics, without those of single ranks that nobody asked for."""
    return by_rank(state.metrics, state.world_size)[0] | {key: state.metrics[key] for key in asked if key in state.metrics}


def _every(states: Sequence[State]) -> list[tuple[str, str]]:
    plain = ("uid", "step", "branch", "status", "created", "message", "parent", "run.uid", "bytes_total", "bytes_new")
    metrics = relevant_keys((state.metrics for state in states), 1_000_000)
    attributes = sorted({key for state in states for key in state.attributes})
    return [*((name, "") for name in plain), *(("metrics", key) for key in metrics), *(("attr", key) for key in attributes)]


_HEADERS = {"uid": "state", "created": "captured"}
_RANKS = {"message": 900, "created": 800, "status": 500, "refs": 700, "branch": 100}
_FLEXIBLE = {"message": 20, "branch": 0, "refs": 0, "attr": 0, "config": 0, "tag": 0}


def _column(name: str, key: str, place: int, *, is_chosen: bool) -> Column:
    """The column of a field. Fields that were asked for stay longest; a state and its step stay always."""
    rank = 0 if name in ("uid", "step") or is_chosen else _RANKS.get(name, 200 + place)
    return Column(key or _HEADERS.get(name, name), name in _NUMBERS, name in _FLEXIBLE, rank)


def _cell(state: State, name: str, key: str, known: Known, refs: Sequence[Ref]) -> Text:
    match name:
        case "uid":
            return Text(short(state.uid), "yellow")
        case "step":
            return Text(step_text(state))
        case "status":
            return status_text(state.status)
        case "created":
            return Text(age_text(state.created_at))
        case "refs" | "tag":
            return Text(str(refs_text(refs)).strip(" ()"))
        case "message":
            return Text(first_line(state.message or ""))
        case "bytes_total" | "bytes_new":
            return Text(size_text(int(getattr(state, name))))
    value = _value(state, name, key, known)
    return Text("" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value))


def _value(state: State, name: str, key: str, known: Known) -> Value:
    """The value of a field as a query compares it."""
    match name:
        case "metrics":
            return state.metrics.get(key)
        case "attr":
            return state.attributes.get(key)
        case "config":
            return state.config.get(key)
        case "created":
            return state.created_at.isoformat()
        case "branch":
            return known.branches.get(state.uid)
        case "tag" | "refs":
            return " ".join(ref.name for ref in known.refs if ref.state == state.uid)
        case "parent":
            return state.parents[0] if state.parents else None
        case "run.uid":
            return state.run
        case "uid" | "step" | "micro_step" | "message" | "bytes_total" | "bytes_new":
            found: Value = getattr(state, name)
            return found
        case "status":
            return state.status.value
    run = known.runs.get(state.run or "")
    if run is None:
        return None
    said: Value = getattr(run, name.removeprefix("run."), None)
    return said


def _csv(values: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()
