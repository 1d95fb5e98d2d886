"""States as a list that a notebook shows as a table, and that pandas takes as a frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from datastates.errors import Unsupported
from datastates.lineage.show.html import states_html
from datastates.lineage.states import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

__all__ = ["States", "frame"]


class States(list[State]):
    """A list of states; a slice of it is one too."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> State: ...
    @overload
    def __getitem__(self, index: slice, /) -> States: ...
    def __getitem__(self, index: Any, /) -> State | States:
        found = super().__getitem__(index)
        return found if isinstance(found, State) else States(found)

    def frame(self) -> pd.DataFrame:
        """The states as a pandas frame, one row for each by uid; see ``frame``.

        :raises Unsupported: pandas is not installed.
        """
        return frame(self)

    def _repr_html_(self) -> str:
        return states_html(self)


def frame(states: Sequence[State]) -> pd.DataFrame:
    """A frame with one row for each state, indexed by uid, in their order; columns are named as in a query: ``metrics.loss``,
    ``attr.seed``, ``config.lr``.

    A metric that a state lacks is NaN, an attribute or a setting None; ``parent`` is the first parent, and the time is in UTC.

    :raises Unsupported: pandas is not installed.
    """
    try:
        import pandas as pd  # takes half a second, so only callers that ask pay for it
    except ImportError as exc:
        raise Unsupported("a frame needs pandas, which is not installed: pip install pandas") from exc
    columns: dict[str, Any] = {
        "step": pd.Series([state.step for state in states], dtype="int64"),
        "created": pd.Series([state.created_at for state in states], dtype="datetime64[us, UTC]"),
        "status": [state.status.value for state in states],
        "message": [state.message for state in states],
        "parent": [state.parents[0] if state.parents else None for state in states],
        "run": [state.run for state in states],
        "bytes_total": pd.Series([state.bytes_total for state in states], dtype="int64"),
        "bytes_new": pd.Series([state.bytes_new for state in states], dtype="int64"),
    }
    for key in sorted({key for state in states for key in state.metrics}):
        columns[f"metrics.{key}"] = pd.Series([state.metrics.get(key) for state in states], dtype="float64")
    for key in sorted({key for state in states for key in state.attributes}):
        columns[f"attr.{key}"] = pd.Series([state.attributes.get(key) for state in states], dtype="object")
    for key in sorted({key for state in states for key in state.config}):
        columns[f"config.{key}"] = pd.Series([state.config.get(key) for state in states], dtype="object")
    made = pd.DataFrame(columns)
    made.index = pd.Index([state.uid for state in states], name="uid")
    return made
