"""A repository in a notebook: how much it holds, where its branches stand, and its newest states as a graph."""

from __future__ import annotations

from datastates.lineage.show.cells import code, table_html, text
from datastates.lineage.show.html import graph_html
from datastates.lineage.show.summary import Summary, summary
from datastates.lineage.show.texts import age_text, metrics_text, short, step_text
from datastates.lineage.states import Ref, State
from datastates.opening.core import Core

__all__ = ["repository_html"]

_HEADS, _NEWEST = 20, 30
_METRICS = 100


def repository_html(core: Core) -> str:
    """HTML that uses the notebook's colours; for a closed repository only its name."""
    name = f"<p><strong>datastates</strong> {code(core.location)}"
    if core.is_closed:
        return f"{name}, closed</p>"
    with core.reading() as session:
        found = summary(session, heads=_HEADS, newest=_NEWEST)
    counts = (_count(found.states, "state"), _count(found.branches, "branch", "branches"), _count(found.tags, "tag"))
    return f"{name}: {', '.join(counts)}</p>{_heads(found)}{_graph(found)}"


def _heads(found: Summary) -> str:
    if not found.heads:
        return ""
    made = table_html(("branch", "head", "step", "metrics", "captured"), (_head(ref, state) for ref, state in found.heads))
    more = found.branches - len(found.heads)
    return made + (f"<p>and {_count(more, 'more branch', 'more branches')}</p>" if more else "")


def _head(ref: Ref, state: State) -> tuple[str, ...]:
    return (
        f"<strong>{text(ref.name, most=60)}</strong>",
        code(short(state.uid)),
        text(step_text(state)),
        text(metrics_text(state.metrics, state.world_size), most=_METRICS),
        text(age_text(state.created_at)),
    )


def _graph(found: Summary) -> str:
    if not found.newest:
        return "<p>nothing was captured yet</p>"
    more = found.states - len(found.newest)
    return graph_html(found.newest, found.named) + (f"<p>and {_count(more, 'older state')}</p>" if more else "")


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
