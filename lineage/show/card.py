"""One state as HTML for notebooks. ``State`` uses this module, so this module knows a state only by its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from .cells import code, facts_html, status_html, text
from .texts import age_text, short, size_text, step_text, time_text

__all__ = ["Shown", "state_html"]

_MESSAGE = 80


class Further(Protocol):
    """A further parent."""

    @property
    def parent(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def weight(self) -> float: ...


class Shown(Protocol):
    """The fields of a state that are shown."""

    @property
    def uid(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def micro_step(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def attributes(self) -> Mapping[str, object]: ...

    @property
    def config(self) -> Mapping[str, object]: ...

    @property
    def message(self) -> str | None: ...

    @property
    def created_at(self) -> datetime: ...

    @property
    def status(self) -> str: ...

    @property
    def parents(self) -> Sequence[str]: ...

    @property
    def edges(self) -> Sequence[Further]: ...

    @property
    def run(self) -> str | None: ...

    @property
    def bytes_total(self) -> int: ...

    @property
    def bytes_new(self) -> int: ...

    @property
    def world_size(self) -> int: ...


def state_html(state: Shown, *, now: datetime | None = None) -> str:
    """Everything that a state knows about itself, as HTML."""
    facts = [("state", code(state.uid)), ("step", text(step_text(state))), ("status", status_html(state.status))]
    facts.append(("captured", text(f"{time_text(state.created_at)}, {age_text(state.created_at, now)}")))
    facts += [("message", "<br>".join(map(text, state.message.splitlines())))] if state.message else []
    facts += [(f"metrics.{key}", text(f"{value:.9g}")) for key, value in sorted(state.metrics.items())]
    facts += [(f"attr.{key}", text(repr(value), most=_MESSAGE)) for key, value in sorted(state.attributes.items())]
    facts += [(f"config.{key}", text(repr(value), most=_MESSAGE)) for key, value in sorted(state.config.items())]
    kinds = {edge.parent: f" {edge.kind!s}, weight {edge.weight:g}" for edge in state.edges}
    facts += [("parent", code(short(parent)) + text(kinds.get(parent, ""))) for parent in state.parents]
    facts.append(("size", text(f"{size_text(state.bytes_total)}, {size_text(state.bytes_new)} of it new")))
    facts += [("ranks", text(state.world_size))] if state.world_size > 1 else []
    facts += [("run", code(short(state.run)))] if state.run else []
    return facts_html(facts)
