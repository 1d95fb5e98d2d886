"""The log for people: states from new to old, with the lanes of their branches beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from datastates.lineage.show.lanes import draw, lanes
from datastates.lineage.states import Ref, State

from .render import age_text, by_state, clean, metrics_text, refs_text, state_text, step_text, stored_text, time_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["GONE", "log_lines", "write_lines"]

GONE = "o"
"""The node of a state that cannot be restored. That of a state that can be is ``*``."""

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def log_lines(states: Sequence[State], refs: Iterable[Ref], *, is_drawn: bool, is_short: bool) -> list[Text]:
    """The lines of the log; one for each state with ``is_short``, else a few. ``states`` come newest first."""
    names = by_state(refs)
    texts = [[state_text(s, names.get(s.uid, ()))] if is_short else _paragraph(s, names.get(s.uid, ())) for s in states]
    if not is_drawn:
        return [line for paragraph in texts for line in paragraph]
    lines: list[Text] = []
    for state, drawn, paragraph in zip(states, draw(lanes(states)), texts, strict=True):
        width = max(len(drawn.node), len(drawn.rest)) + 1
        lines += map(_coloured, drawn.before)
        node = drawn.node if state.status.is_restorable else drawn.node.replace("*", GONE)
        lines.append(_coloured(node.ljust(width)).append(paragraph[0]))
        # The lines after a node come at once: what follows a merge stands beside the lanes that it opened.
        lines += map(_coloured, drawn.after)
        lines += [_coloured(drawn.rest.ljust(width)).append(line) for line in paragraph[1:]]
    return lines


def write_lines(console: Console, lines: Iterable[Text]) -> None:
    """Write each line: cut to the width of a terminal, whole for a program or a file."""
    for line in lines:
        if console.is_terminal:
            console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            console.print(line, soft_wrap=True)


def _coloured(prefix: str) -> Text:
    text = Text()
    for column, box in enumerate(prefix):
        text.append(box, "" if box in f" *{GONE}" else _COLOURS[column // 2 % len(_COLOURS)])
    return text


def _paragraph(state: State, refs: Sequence[Ref]) -> list[Text]:
    head = Text.assemble(("state ", "yellow"), (state.uid, "yellow"), refs_text(refs))
    facts = [
        Text.assemble("  step ", (step_text(state), "bold"), f"  {time_text(state.created_at)}, {age_text(state.created_at)}  "),
    ]
    facts[0].append(stored_text(state))
    if state.metrics:
        facts.append(Text(f"  {metrics_text(state.metrics, state.world_size)}"))
    if state.message:
        facts += [Text(f"  {clean(line)}", "italic") for line in state.message.splitlines()]
    return [head, *facts, Text()]
