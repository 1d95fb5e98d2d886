"""How a plan looks on a terminal before any of it runs."""

from __future__ import annotations

import logging

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from datastates import values
from datastates.errors import InvalidInput
from datastates.workflows.plans.plan import Plan, Variant, plan_of
from datastates.workflows.printed import PrintedGroup

from .work import Work

__all__ = ["announce", "describe"]

_logger = logging.getLogger(__name__)


def _work_of(value: object, what: str) -> Work:
    if not isinstance(value, Work):
        raise InvalidInput(f"{what} is {values.shown(value)}: give what work(plan) returns")
    return value


def announce(study: str, plan: Plan, work: Work, console: Console | None = None) -> None:
    """Show what is about to run: all of it on a terminal, one line in the log elsewhere."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        console.print(Text(f"study {study}: ", style="bold"), end="")
        console.print(describe(plan, work))
        return
    _logger.info("study %s: %s; %s", study, _headline(plan), _cost(work))
    if leaks := plan.leaks():
        _logger.warning("study %s: %s", study, _warning(plan, leaks))


@values.takes(plan=plan_of, work=_work_of, limit=values.count)
def describe(plan: Plan, work: Work, *, limit: int = 40) -> PrintedGroup:
    """A plan's variants as a tree with their data and cost, its saving, and what its validation cannot tell.

    At most ``limit`` variants are shown.
    """
    hidden = len(plan) - limit
    parts: list[RenderableType] = [Text(_headline(plan), style="bold"), _table(plan, limit)]
    if hidden > 0:
        parts.append(Text(f"and {_count(hidden, 'variant')} more", style="dim"))
    parts.append(Text(_cost(work)))
    if leaks := plan.leaks():
        parts.append(Text(_warning(plan, leaks), style="yellow"))
    return PrintedGroup(*parts)


def _headline(plan: Plan) -> str:
    stages = max(_depths(plan).values()) + 1
    data = f", {plan.size:,} samples in {len(plan.subsets)} subsets" if plan.subsets else ""
    return f"{_count(len(plan), 'variant')} in {_count(stages, 'stage')}{data}"


def _table(plan: Plan, limit: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("variant", "changes", "trained on", "validated on", "epochs", "full epochs"):
        table.add_column(title, justify="left" if title in ("variant", "changes") else "right", overflow="fold")
    depths = _depths(plan)
    for variant in plan.variants[:limit]:
        table.add_row(*map(Text, _cells(plan, variant, depths[variant.name])))
    return table


def _cells(plan: Plan, variant: Variant, depth: int) -> tuple[str, ...]:
    share = plan.samples(variant.name) / plan.size if plan.size else 1.0
    trained = "as it chooses" if variant.train is None else f"{plan.samples(variant.name):,} ({share:.0%})"
    validated = f"{len(plan.rows(variant.validation)):,}" if variant.validation else "-"
    changes = ", ".join(f"{key}={value}" for key, value in variant.config.items())
    return ("  " * depth + variant.name, changes, trained, validated, str(variant.epochs), f"{variant.epochs * share:.1f}")


def _cost(work: Work) -> str:
    prefix = f", the prefix's {work.prefix_epochs:g} in it" if work.prefix_epochs else ""
    return (
        f"costs {work.tree_epochs:.1f} epochs over the full data{prefix}; each variant from scratch would cost {work.scratch_epochs:.1f}: "
        f"W_N/W_D = {work.saving:.2f}"
    )


def _warning(plan: Plan, leaks: dict[str, tuple[str, ...]]) -> str:
    names = list(leaks)
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"the start was trained on what {_count(len(names), 'variant')} of {len(plan)} {'is' if len(names) == 1 else 'are'} validated on "
        f"({some}): their validation shows what they forgot, not what they never saw"
    )


def _depths(plan: Plan) -> dict[str, int]:
    depths: dict[str, int] = {}
    for variant in plan.variants:
        depths[variant.name] = 0 if variant.parent is None else depths[variant.parent] + 1
    return depths


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
