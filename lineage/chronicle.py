"""The format in which a lineage tells a folder of packs what the manifests lack, so that it can be
rebuilt from the folder alone.

A manifest says what its state is. It does not say what names point to, what people noted, how a
training was configured, where a state was cloned from, what it held when it was sealed, how studies
went, nor anything about states that were only in memory. Times are microseconds since the epoch, as
in the schema. Fields are only ever added, at the end.
"""

from __future__ import annotations

import msgspec

from datastates.values import Value

VERSION = 1


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """How far a lineage has been told: its newest rows, and how to recognize them in a lineage
    that was restored from a copy."""

    run: int = 0
    state: int = 0
    state_uid: str = ""
    event: int = 0
    event_at: int = 0
    remarks: int = 0
    remarks_at: int = 0
    clone: int = 0
    clone_at: int = 0
    amendment: int = 0
    amended: str = ""


class RunLine(msgspec.Struct, frozen=True, array_like=True):
    """A process or a training, or the configuration that came with states of another lineage;
    told again when it has ended."""

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
    finished_at: int | None = None


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
    """A line of a reflog; ``message`` is that of the ref."""

    id: int
    name: str
    kind: str
    old: str | None
    new: str | None
    reason: str
    created_at: int
    message: str | None


class RemarkLine(msgspec.Struct, frozen=True, array_like=True):
    """A note on a state or on a branch."""

    uid: str
    state: str | None
    branch: str | None
    author: str
    text: str
    created_at: int
    edited_at: int | None


class CloneLine(msgspec.Struct, frozen=True, array_like=True):
    """The arrival of a state from another process, in the memory of a run."""

    id: int
    state: str
    source: str
    source_repository: str
    node: str
    run: str | None
    bytes_moved: int
    created_at: int


class SealLine(msgspec.Struct, frozen=True, array_like=True):
    """The seal of a state: what it holds, by a digest that cannot be forged."""

    state: str
    digest: str


class VariantLine(msgspec.Struct, frozen=True, array_like=True):
    """A variant of a study, as it is now."""

    study: str
    name: str
    place: int
    parent: str | None
    epochs: int
    config: str
    planned_at: int
    began_at: int | None
    ended_at: int | None
    attempts: int
    took_s: float
    error: str | None


class SampleLine(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a report."""

    rank: int
    sample: int
    body: str
    picture: bytes | None


class ReportLine(msgspec.Struct, frozen=True, array_like=True):
    """A report on outliers, as it is now."""

    name: str
    created_at: int
    body: str
    samples: tuple[SampleLine, ...]


class AttributesLine(msgspec.Struct, frozen=True, array_like=True):
    """All attributes and metrics of a state that people changed after it was told."""

    state: str
    attributes: dict[str, Value]
    metrics: dict[str, float]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What was new since the entry before.

    ``remarks`` are all notes that exist, or None if they have not changed."""

    lineage: str
    written_at: int
    mark: Mark
    runs: tuple[RunLine, ...] = ()
    states: tuple[StateLine, ...] = ()
    events: tuple[EventLine, ...] = ()
    remarks: tuple[RemarkLine, ...] | None = None
    clones: tuple[CloneLine, ...] = ()
    seals: tuple[SealLine, ...] = ()
    variants: tuple[VariantLine, ...] = ()
    reports: tuple[ReportLine, ...] = ()
    attributes: tuple[AttributesLine, ...] = ()
