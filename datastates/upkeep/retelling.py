"""What a folder of packs knows of its lineage: the chronicle says what was; manifests say what came after it, or everything without it.

If there are only manifests, the first parent of many a state is unknown, because that was only in memory. Such a state gets as its parent
the newest earlier state of its branch, which is an ancestor unless the branch went back in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from datastates.content.manifest import Manifest
from datastates.errors import DatastatesError
from datastates.lineage.change.rebuild import new_state
from datastates.lineage.change.record import check
from datastates.lineage.chronicle import (
    AttributesLine,
    CloneLine,
    Entry,
    EventLine,
    RemarkLine,
    ReportLine,
    RunLine,
    SealLine,
    StateLine,
    VariantLine,
)
from datastates.lineage.states import RefKind
from datastates.modules.entry import lines_of
from datastates.opening.chronicle import Chronicle

__all__ = ["Retelling", "retell"]

_REINDEXED = "capture (found by reindex)"


@dataclass(slots=True)
class Retelling:
    """A lineage as its folder records it: states with parents first, lines of reflogs in order. ``lacking`` says what the folder lacks."""

    runs: list[RunLine] = field(default_factory=list)
    states: list[StateLine] = field(default_factory=list)
    events: list[EventLine] = field(default_factory=list)
    remarks: tuple[RemarkLine, ...] = ()
    clones: list[CloneLine] = field(default_factory=list)
    seals: list[SealLine] = field(default_factory=list)
    variants: list[VariantLine] = field(default_factory=list)
    reports: list[ReportLine] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    @property
    def ended_at(self) -> dict[str, int]:
        """When each run captured its last state."""
        found: dict[str, int] = {}
        for state in self.states:
            if state.run is not None:
                found[state.run] = max(found.get(state.run, 0), state.created_at)
        return found


def retell(chronicle: Chronicle | None, manifests: Mapping[tuple[str, int], Manifest]) -> Retelling:
    """The lineage from a chronicle, and from manifests by uid and rank, without those that only other lineages know."""
    told = Retelling()
    states: dict[str, StateLine] = {}
    runs: dict[str, RunLine] = {}
    events: dict[int, EventLine] = {}
    for entry in () if chronicle is None else chronicle.entries:
        runs |= {run.uid: run for run in entry.runs}
        states |= {state.uid: state for state in entry.states}
        states |= {each.state: _annotated(states[each.state], each) for each in entry.attributes if each.state in states}
        events |= {event.id: event for event in entry.events}
        told.remarks = told.remarks if entry.remarks is None else entry.remarks
    told.events = [events[id_] for id_ in sorted(events)]
    _tell_the_rest(told, () if chronicle is None else chronicle.entries)
    _say_what_is_lacking(told, chronicle)
    found = {line.uid: (line, branch) for line, branch in lines_of(manifests) if line.uid not in states}
    _add(told, states, _in_order(found), is_whole=chronicle is not None)
    told.states = _parents_first(told, states)
    _know_runs(told, runs)
    told.runs = sorted(runs.values(), key=lambda run: run.process is not None)
    return told


def _annotated(state: StateLine, changed: AttributesLine) -> StateLine:
    return msgspec.structs.replace(state, attributes=changed.attributes, metrics=changed.metrics)


def _tell_the_rest(told: Retelling, entries: Sequence[Entry]) -> None:
    """Add everything besides runs, states and names: the last entry on each."""
    told.clones = [line for _, line in sorted({line.id: line for entry in entries for line in entry.clones}.items())]
    told.seals = list({line.state: line for entry in entries for line in entry.seals}.values())
    told.variants = list({(line.study, line.name): line for entry in entries for line in entry.variants}.values())
    told.reports = list({line.name: line for entry in entries for line in entry.reports}.values())


def _say_what_is_lacking(told: Retelling, chronicle: Chronicle | None) -> None:
    if chronicle is None:
        told.lacking.append(
            "the folder has no chronicle: tags, notes, configurations, seals, clones, studies, states that "
            "were only in memory, and where branches were moved by hand are not known"
        )
    elif chronicle.damaged_bytes:
        told.lacking.append(f"{chronicle.damaged_bytes} bytes of the chronicle are damaged: what they told is lost")


def _in_order(found: Mapping[str, tuple[StateLine, str | None]]) -> list[tuple[StateLine, str | None]]:
    """The states, oldest first, and each after its first parent, whatever the clock said."""
    ordered: dict[str, tuple[StateLine, str | None]] = {}
    for line, _ in sorted(found.values(), key=lambda each: (each[0].created_at, each[0].step)):
        path: dict[str, None] = {}
        uid: str | None = line.uid
        while uid is not None and uid in found and uid not in ordered and uid not in path:
            path[uid] = None
            uid = found[uid][0].parent
        ordered |= {each: found[each] for each in reversed(path)}
    return list(ordered.values())


def _add(
    told: Retelling,
    states: dict[str, StateLine],
    found: Sequence[tuple[StateLine, str | None]],
    *,
    is_whole: bool,
) -> None:
    """Add states that are only in manifests, the oldest first: each moves its branch, unless that was moved later."""
    heads = {event.name: event for event in told.events}
    last = max((event.id for event in told.events), default=0)
    coming, bridged = {line.uid for line, _ in found}, 0
    for line, branch in found:
        head = None if branch is None else heads.get(branch)
        known = line
        if line.parent is not None and line.parent not in states and line.parent not in coming:
            bridged += 1
            known = msgspec.structs.replace(line, parent=None if head is None or branch is None else head.new)
        known = msgspec.structs.replace(known, edges=tuple(edge for edge in line.edges if edge[0] in states or edge[0] in coming))
        states[line.uid] = known
        if branch is not None and (head is None or _moves(head, known)):
            last += 1
            old = None if head is None else head.new
            heads[branch] = event = EventLine(last, branch, RefKind.BRANCH.value, old, line.uid, _REINDEXED, line.created_at, None)
            told.events.append(event)
    if bridged:
        told.lacking.append(
            f"{bridged} states name a parent that is not known: each hangs on to the newest one before it on its branch, or is a root"
        )
    if found and is_whole:
        told.lacking.append(f"{len(found)} states are newer than the chronicle, or it was damaged: their manifests tell of them")


def _moves(head: EventLine, line: StateLine) -> bool:
    """Whether a state came after the last event of its branch's name: it has that event's state as its parent, or is not older."""
    return head.kind == RefKind.BRANCH.value and ((head.new is not None and line.parent == head.new) or head.created_at <= line.created_at)


def _know_runs(told: Retelling, runs: dict[str, RunLine]) -> None:
    """Add runs of which nothing is recorded but that they captured a state."""
    unknown = 0
    for line in told.states:
        if line.run is not None and line.run not in runs:
            unknown += 1
            runs[line.run] = RunLine(line.run, None, None, "", "", 0, (), None, None, {}, {}, line.created_at, None)
    if unknown:
        told.lacking.append(f"who ran {unknown} of the trainings, and how they were configured")


def _parents_first(told: Retelling, states: dict[str, StateLine]) -> list[StateLine]:
    """The states that can be recorded, each after its parents; a parent that is not available is left out."""
    ordered: dict[str, StateLine] = {}
    seen: set[str] = set()  # a circle of forged parents is cut where it closes
    refused = 0
    for uid in states:
        path = [uid]
        while path:
            line = states[path[-1]]
            seen.add(line.uid)
            above = next((parent for parent in _parents(line) if parent in states and parent not in seen), None)
            if above is not None:
                path.append(above)
                continue
            path.pop()
            if line.uid not in ordered:
                known = _of_known_parents(line, ordered)
                if _is_recordable(known):
                    ordered[line.uid] = known
                else:
                    refused += 1
    if refused:
        told.lacking.append(f"{refused} states cannot be recorded: what they say of themselves is nothing that a lineage holds")
    return list(ordered.values())


def _parents(line: StateLine) -> tuple[str, ...]:
    further = tuple(edge[0] for edge in line.edges)
    return further if line.parent is None else (line.parent, *further)


def _of_known_parents(line: StateLine, known: Mapping[str, object]) -> StateLine:
    edges = tuple(edge for edge in line.edges if edge[0] in known)
    return msgspec.structs.replace(line, parent=line.parent if line.parent in known else None, edges=edges)


def _is_recordable(line: StateLine) -> bool:
    try:
        check(new_state(line))
    except (DatastatesError, ValueError, OverflowError):
        return False
    return True
