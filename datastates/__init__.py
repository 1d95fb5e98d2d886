"""A lineage store for the states of a DNN while it trains.

    repo = datastates.open("runs/")
    with repo.track(model=model, optimizer=optimizer) as run:
        for batch in run.steps(loader):
            loss = train_step(batch)
            run.capture(metrics={"loss": loss})

Names are imported when they are first used, so that ``import datastates.lineage`` and the terminal do without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capture.handle import Capture
    from .config import BackPressure, Config
    from .encoding import register_encoder
    from .errors import (
        Ambiguous,
        Closed,
        Conflict,
        Corrupt,
        DatastatesError,
        InvalidInput,
        NotFound,
        OverBudget,
        SyntaxProblem,
        Torn,
        Unavailable,
        Unsupported,
    )
    from .lineage.states import Ref, RefEvent, Run, State, Status
    from .report import RestoreReport
    from .repository import Repository, open
    from .sampler import PermutationSampler
    from .tracker import Tracker

    __version__: str

__all__ = [
    "Ambiguous",
    "BackPressure",
    "Capture",
    "Closed",
    "Config",
    "Conflict",
    "Corrupt",
    "DatastatesError",
    "InvalidInput",
    "NotFound",
    "OverBudget",
    "PermutationSampler",
    "Ref",
    "RefEvent",
    "Repository",
    "RestoreReport",
    "Run",
    "State",
    "Status",
    "SyntaxProblem",
    "Torn",
    "Tracker",
    "Unavailable",
    "Unsupported",
    "__version__",
    "open",
    "register_encoder",
]

_MODULES = {
    "BackPressure": "config",
    "Capture": "capture.handle",
    "Config": "config",
    "PermutationSampler": "sampler",
    "Ref": "lineage.states",
    "RefEvent": "lineage.states",
    "Repository": "repository",
    "RestoreReport": "report",
    "Run": "lineage.states",
    "State": "lineage.states",
    "Status": "lineage.states",
    "Tracker": "tracker",
    "open": "repository",
    "register_encoder": "encoding",
}
"""Where a public name lives; those that are not here are errors."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, and keep it."""
    if name == "__version__":
        from importlib.metadata import version  # 20 ms that only who asks should pay

        value: object = version("datastates")
    elif name in __all__:
        value = getattr(import_module(f".{_MODULES.get(name, 'errors')}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
