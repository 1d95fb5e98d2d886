"""The results of the main job: read back from the lineage, judged, and printed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from datastates.lineage.states import RefKind, State, Status
from datastates.repository import Repository

if TYPE_CHECKING:
    from rich.console import Console

PREFIX = "#8a8f98"
COLOURS = ("#1b1f24", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def draw(
    path: Path,
    branches: Mapping[str, Sequence[State]],
    *,
    resumed: Sequence[State],
    tag: State,
    best: State,
    title: str,
) -> None:
    """Write a PNG: training loss on the left, held-out loss from the tag on to the right.

    ``branches`` holds the states of each branch, oldest first, back to the root; the part that they
    share up to ``tag`` is drawn once, in grey. ``resumed`` is drawn as circles around the points
    that it should repeat.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    first = next(iter(branches.values()))
    prefix = [state for state in first if state.step <= tag.step]
    _line(left, prefix, "loss", PREFIX, window=10)
    _line(right, prefix[-max(1, len(prefix) // 3) :], "val_loss", PREFIX)
    for (name, states), colour in zip(branches.items(), COLOURS, strict=False):
        own = [state for state in states if state.step >= tag.step]
        _line(left, own, "loss", colour, window=10, before=prefix)
        _line(right, own, "val_loss", colour, label=name)
    points = [
        (state.step, state.metrics["val_loss"]) for state in resumed if "val_loss" in state.metrics
    ]
    if points:
        style = {
            "marker": "o",
            "markersize": 9,
            "markerfacecolor": "none",
            "markeredgecolor": COLOURS[0],
            "linestyle": "",
        }
        right.plot(*zip(*points, strict=True), **style, label="main resumed in a fresh process")
    _finish(left, right, tag, best)
    figure.savefig(path, dpi=150, facecolor="white")


def _line(
    axes: Any,
    states: Sequence[State],
    metric: str,
    colour: str,
    *,
    window: int = 1,
    label: str | None = None,
    before: Sequence[State] = (),
) -> None:
    points = [(state.step, state.metrics[metric]) for state in states if metric in state.metrics]
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    if window > 1:
        axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
        earlier = [state.metrics[metric] for state in before if state.step < steps[0]][-window:]
        values = _smooth([*earlier, *values], window)[len(earlier) :]
    marker = None if window > 1 else "o"
    axes.plot(
        steps,
        values,
        color=colour,
        linewidth=1.8,
        label=label,
        marker=marker,
        markersize=3.5,
        solid_capstyle="round",
    )


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value with those around it."""
    parts = (values[max(0, at - window // 2) : at + window // 2 + 1] for at in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _finish(left: Any, right: Any, tag: State, best: State) -> None:
    for axes in (left, right):
        axes.axvline(tag.step, color=PREFIX, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("step")
        axes.margins(x=0.02)
    left.annotate(
        "tag: warm",
        (tag.step, 1),
        xycoords=("data", "axes fraction"),
        xytext=(5, -10),
        textcoords="offset points",
        color="#555",
    )
    left.set_ylabel("nats a byte")
    left.set_title("training loss (mean of 10 steps; each step faint)", loc="left", fontsize=11)
    right.set_title("held-out loss", loc="left", fontsize=11)
    label = f"best: {best.metrics['val_loss']:.3f} at step {best.step}"
    style = {
        "marker": "*",
        "markersize": 15,
        "color": "#e69f00",
        "markeredgecolor": "#1b1f24",
        "linestyle": "",
    }
    right.plot(best.step, best.metrics["val_loss"], **style, zorder=5, label=label)
    right.legend(frameon=False, loc="upper right")


# The results of the main job: read back from the lineage, judged, and printed.


@dataclass(slots=True)
class Cost:
    """The cost of capturing for the training thread: time in ``capture`` and waiting for the
    fence, of ``wall_s`` seconds of training."""

    captures: int = 0
    blocked_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as the run that never stopped took it and as the fresh process did."""

    step: int
    loss: float
    resumed_loss: float


@dataclass(frozen=True, slots=True)
class Proof:
    """``branch`` was resumed from a state of ``of``.

    ``digests`` has the digest of each of the two branches, where ``branch`` ends."""

    branch: str
    of: str
    steps: tuple[Step, ...]
    digests: tuple[str, str]

    @property
    def is_bit_exact(self) -> bool:
        """Whether every loss is equal, and every byte of the last state: the digest covers
        weights, moments, RNG and position."""
        return (
            all(step.loss == step.resumed_loss for step in self.steps)
            and len(self.steps) > 0
            and self.digests[0] == self.digests[1]
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the demo.

    The states that were ``captured`` take ``disk_bytes``, and so many of them are
    ``restorable``."""

    proofs: tuple[Proof, ...]
    best: State
    cost: Cost
    captured: int
    restorable: int
    disk_bytes: int
    picture: Path

    @property
    def is_bit_exact(self) -> bool:
        """Whether each resumed run repeated its branch, bit for bit."""
        return all(proof.is_bit_exact for proof in self.proofs) and len(self.proofs) > 0


def examine(
    repo: Repository, picture: Path, costs: Sequence[Cost], resumed: Mapping[str, str]
) -> Outcome:
    """Compare each branch that was ``resumed`` with the one that it repeats, find the best
    state, and draw the losses of all branches."""
    branches = {
        ref.name: repo.log(ref.name)[::-1] for ref in repo.refs() if ref.kind is RefKind.BRANCH
    }
    branches = {"main": branches.pop("main"), **branches}
    proofs = tuple(_prove(name, branches[name], of, branches[of]) for name, of in resumed.items())
    states = {state.uid: state for each in branches.values() for state in each}
    tag, (again, *_) = repo.state("warm"), [branches.pop(name) for name in resumed]
    best = repo.find("metrics.val_loss > 0 order by metrics.val_loss limit 1")[0]
    draw(
        picture,
        branches,
        resumed=[state for state in again if state.step > tag.step],
        tag=tag,
        best=best,
        title="A byte-level GPT on Python's standard library: one prefix, four ways on",
    )
    cost = Cost(
        sum(c.captures for c in costs),
        sum(c.blocked_s for c in costs),
        sum(c.wall_s for c in costs),
    )
    restorable = sum(state.status is Status.DURABLE for state in states.values())
    return Outcome(
        proofs, best, cost, len(states), restorable, repo.core.tiers.durable.bytes_stored, picture
    )


def _prove(branch: str, resumed: Sequence[State], of: str, whole: Sequence[State]) -> Proof:
    never_stopped = {state.step: state for state in whole}
    own = [state for state in resumed if state.uid != never_stopped[state.step].uid]
    steps = tuple(
        Step(state.step, never_stopped[state.step].metrics["loss"], state.metrics["loss"])
        for state in own
    )
    return Proof(branch, of, steps, (never_stopped[resumed[-1].step].digest, resumed[-1].digest))


def show(outcome: Outcome, repo: Repository, console: Console) -> None:
    """Print the graph, the comparisons, the best state, the cost of capturing, what is on disk,
    where the picture is, and how to browse."""
    # the terminal's own view of a history; loaded only when it is shown
    from datastates.cli.history import log_lines

    refs = repo.refs()
    states = [state for ref in refs for state in repo.log(ref.name)]
    named = outline(states, {ref.state for ref in refs} | {outcome.best.uid, states[-1].uid})
    for line in log_lines(named, refs, is_drawn=True, is_short=True):
        if console.is_terminal:
            console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            console.print(line, soft_wrap=True)
    for proof in outcome.proofs:
        console.print(_comparison(proof))
        verdict = "[green]equal bit for bit[/]" if proof.is_bit_exact else "[red]NOT equal[/]"
        equal = sum(step.loss == step.resumed_loss for step in proof.steps)
        console.print(
            f"{equal} of {len(proof.steps)} losses and the digests {proof.digests[0][:12]} and"
            f" {proof.digests[1][:12]}: {verdict}"
        )
    best, cost = outcome.best, outcome.cost
    console.print(
        f"best state: {best.uid[:10]}, step {best.step}, held-out loss"
        f" {best.metrics['val_loss']:.4f}"
    )
    console.print(
        f"{cost.captures} captures blocked training for {1e3 * cost.blocked_s / cost.captures:.2f}"
        f" ms each, {100 * cost.blocked_s / cost.wall_s:.2f} % of {cost.wall_s:.0f} s"
    )
    disk_mb = outcome.disk_bytes / 1e6
    console.print(
        f"{outcome.restorable} of {outcome.captured} states can be restored; they take"
        f" {disk_mb:,.0f} MB on disk"
    )
    console.print(f"picture: {os.path.relpath(outcome.picture)}")
    console.print(
        f"to browse it: datastates serve --repo {os.path.relpath(outcome.picture.parent)}",
        soft_wrap=True,
    )


def outline(states: Sequence[State], keep: set[str]) -> list[State]:
    """The states of ``keep``, newest first, each the child of its nearest ancestor among them."""
    by_uid = {state.uid: state for state in states}
    found = []
    for state in sorted(
        (by_uid[uid] for uid in keep), key=lambda state: state.created_at, reverse=True
    ):
        parents = state.parents[:1]
        while parents and parents[0] not in keep:
            parents = by_uid[parents[0]].parents[:1]
        found.append(replace(state, parents=parents))
    return found


def _comparison(proof: Proof, ends: int = 4) -> Table:
    title = (
        f"loss after step {proof.steps[0].step - 1} of {proof.of}"
        if proof.steps
        else "no step was repeated"
    )
    table = Table(
        "step",
        f"{proof.of}, never stopped",
        f"{proof.branch}, in a fresh process",
        title=title,
        title_justify="left",
    )
    for index, step in enumerate(proof.steps):
        if ends <= index < len(proof.steps) - ends:
            if index == ends:
                table.add_row("…", "…", "…")
            continue
        table.add_row(
            str(step.step),
            repr(step.loss),
            repr(step.resumed_loss),
            style=None if step.loss == step.resumed_loss else "red",
        )
    return table
