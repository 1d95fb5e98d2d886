"""The log for people: states from new to old, with the lanes of their branches beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from datastates.lineage import Ref, State

from .render import age_text, by_state, clean, metrics_text, refs_text, size_text, state_text, status_text, step_text, time_text

__all__ = ["log_lines"]


def log_lines(states: Sequence[State], refs: Iterable[Ref], *, is_drawn: bool, is_short: bool) -> list[Text]:
    """The lines of the log; a state has one with ``is_short``, else a handful."""
    names = by_state(refs)
    lines: list[Text] = []
    for state in states:
        lines += [state_text(state, names.get(state.uid, ()))] if is_short else _paragraph(state, names.get(state.uid, ()))
    return lines


def _paragraph(state: State, refs: Sequence[Ref]) -> list[Text]:
    head = Text.assemble(("state ", "yellow"), (state.uid, "yellow"), refs_text(refs))
    facts = [
        Text.assemble("  step ", (step_text(state), "bold"), f"  {time_text(state.created_at)}, {age_text(state.created_at)}  "),
    ]
    facts[0].append(status_text(state.status)).append(f", {size_text(state.bytes_total)}")
    if state.metrics:
        facts.append(Text(f"  {metrics_text(state.metrics)}"))
    if state.message:
        facts += [Text(f"  {clean(line)}", style="italic") for line in state.message.splitlines()]
    return [head, *facts, Text()]
