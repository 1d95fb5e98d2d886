"""The result of a population: the members of each round, how well they did, and which member came from which."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rich.text import Text

from datastates.lineage.show.lanes import draw, lanes
from datastates.lineage.states import State, Value
from datastates.workflows.printed import PrintedTable

__all__ = ["Member", "Population"]


@dataclass(frozen=True, slots=True)
class Member:
    """One member in one round, both counted from 1. ``state`` is None, and ``value`` NaN, if its training failed.

    ``parent`` is the variant from which it went on (None: the start); ``is_copy`` says that the parent is another member's. ``changes`` is
    what its configuration changes in the parent's.
    """

    round: int
    number: int
    parent: str | None
    is_copy: bool
    changes: Mapping[str, Value]
    config: Mapping[str, Value]
    value: float
    state: State | None
    error: str | None = None

    @property
    def variant(self) -> str:
        """The name of its variant in the study; its branch is ``<study>/<variant>``."""
        return name_of(self.round, self.number)

    @property
    def is_alive(self) -> bool:
        """Whether its training ended with a number."""
        return self.state is not None and not math.isnan(self.value)


@dataclass(frozen=True, slots=True)
class Population:
    """Every member in every round, in order. ``searched`` names the keys of the configuration that were searched."""

    study: str
    metric: str
    mode: str
    start: State
    searched: tuple[str, ...]
    members: tuple[Member, ...]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def rounds(self) -> int:
        """The number of rounds that were trained."""
        return self.members[-1].round

    @property
    def best(self) -> Member:
        """The best member of the last round. Its state builds on what it learnt in all rounds."""
        last = [member for member in self.members if member.round == self.rounds and member.is_alive]
        return (max if self.mode == "max" else min)(last, key=lambda member: member.value)

    def path(self, member: Member) -> tuple[Member, ...]:
        """The members that a member comes from, round by round, and the member itself: the schedule of configurations that was found."""
        known = {each.variant: each for each in self.members}
        steps = [member]
        while (parent := steps[-1].parent) is not None:
            steps.append(known[parent])
        return tuple(reversed(steps))

    def table(self) -> PrintedTable:
        """A table for a terminal: a line for each member, a column for each round, and the member that each was copied from."""
        table = PrintedTable("member", title=f"population {self.study}, {self.metric} after each round", title_justify="left")
        for number in range(1, self.rounds + 1):
            table.add_column(f"round {number}", justify="right")
        for number in sorted({member.number for member in self.members}):
            cells = [_cell(member) for member in self.members if member.number == number]
            table.add_row(str(number), *cells)
        return table

    def picture(self) -> Text:
        """The lineage, newest round first, as ``datastates log --graph`` draws it, with one line for each member and round."""
        uids = {member.variant: member.state.uid for member in self.members if member.state is not None}
        rows: list[tuple[State, str]] = []
        for member in sorted(self.members, key=lambda each: (-each.round, each.number)):
            if member.state is not None:
                parent = self.start.uid if member.parent is None else uids[member.parent]
                rows.append((replace(member.state, parents=(parent,)), self._line(member)))
        rows.append((replace(self.start, parents=()), f"start  {self.start.uid[:10]}"))
        lines: list[str] = []
        for drawn, (_, text) in zip(draw(lanes(state for state, _ in rows)), rows, strict=True):
            lines += [*drawn.before, f"{drawn.node}  {text}", *drawn.after]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def _line(self, member: Member) -> str:
        config = " ".join(f"{key}={_short(member.config.get(key))}" for key in self.searched)
        mark = "  best" if member == self.best else ""
        return f"{member.variant}  {self.metric}={member.value:.4g}  {config}" + (f"  copy of {member.parent}" * member.is_copy) + mark


def name_of(round_: int, number: int) -> str:
    """The name of a member's variant in a round."""
    return f"r{round_}/m{number}"


def _cell(member: Member) -> str:
    if member.state is None:
        return "failed"
    source = "" if not member.is_copy or member.parent is None else f" < {member.parent.rpartition('/m')[2]}"
    return f"{member.value:.4g}{source}"


def _short(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
