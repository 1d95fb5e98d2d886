"""What a lineage tells a folder of packs beside the manifests, so that it can be rebuilt from the folder alone: the format of it.

A manifest says what its state is. It does not say what names point to, what people noted, how a training was configured, nor anything of
states that were only in memory. Times are microseconds since the epoch, as in the schema. Fields are only ever added, at the end.
"""

from __future__ import annotations

import msgspec

from .states import Value

__all__ = ["VERSION", "Entry", "EventLine", "Mark", "RemarkLine", "RunLine", "StateLine"]

VERSION = 1


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """How far a lineage was told: its newest rows, and by what they are known again in a lineage that was brought back from a copy."""

    run: int = 0
    state: int = 0
    state_uid: str = ""
    event: int = 0
    event_at: int = 0
    remarks: int = 0
    remarks_at: int = 0


class RunLine(msgspec.Struct, frozen=True, array_like=True):
    """A process or a training, or the configuration that came with states of another lineage."""

    uid: str
    process: str | None
    branch: str | None
    host: str
    user: str
    pid: int
    argv: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    config: dict[str, Value]
    versions: dict[str, str]
    started_at: int
    is_carried: bool | None


class StateLine(msgspec.Struct, frozen=True, array_like=True):
    """A state as it was recorded; ``edges`` are its further parents with kind and weight."""

    uid: str
    digest: str
    parent: str | None
    edges: tuple[tuple[str, str, float], ...]
    run: str | None
    step: int
    micro_step: int
    created_at: int
    message: str | None
    metrics: dict[str, float]
    attributes: dict[str, Value]
    status: str
    bytes_total: int
    bytes_new: int
    world_size: int


class EventLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of a reflog; ``message`` is that of the name."""

    id: int
    name: str
    kind: str
    old: str | None
    new: str | None
    reason: str
    created_at: int
    message: str | None


class RemarkLine(msgspec.Struct, frozen=True, array_like=True):
    """A note of somebody's on a state or on a branch."""

    uid: str
    state: str | None
    branch: str | None
    author: str
    text: str
    created_at: int
    edited_at: int | None


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What was new since the entry before; ``remarks`` are all that there are, or None where they are as they were."""

    lineage: str
    written_at: int
    mark: Mark
    runs: tuple[RunLine, ...] = ()
    states: tuple[StateLine, ...] = ()
    events: tuple[EventLine, ...] = ()
    remarks: tuple[RemarkLine, ...] | None = None
