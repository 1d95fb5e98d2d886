"""A lineage store for the states of a DNN while it trains.

    repo = datastates.open("runs/")
    with repo.track(model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(3):
            for batch in run.steps(loader):
                loss = train_step(batch)
                run.capture(metrics={"loss": loss})

Names are imported when they are first used, so that ``import datastates.lineage`` and the terminal do without torch.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from .algebra.ensemble import Ensemble, Prediction
    from .capture.handle import Capture
    from .clone.peer import Peer, connect
    from .clone.serving import Server
    from .clone.transfer import Cloned, Transfer
    from .config import BackPressure, Config, OnFailure
    from .content.encoding import register_encoder
    from .errors import (
        Ambiguous,
        Cancelled,
        Closed,
        Conflict,
        Corrupt,
        DatastatesError,
        Dirty,
        Disconnected,
        InvalidInput,
        ModuleFailed,
        NotFound,
        OverBudget,
        PeerFault,
        SyntaxProblem,
        Torn,
        Unauthorized,
        Unavailable,
        Unsupported,
    )
    from .integrations.saved import load, save
    from .lineage.states import Ref, RefEvent, Run, State, Status
    from .modules.contract import Item, Module
    from .objects.report import RestoreReport
    from .objects.rng import RngState
    from .objects.sampler import PermutationSampler
    from .policy.auto import Auto
    from .policy.cadence import Cadence
    from .policy.checkfreq import CheckFreq
    from .policy.contract import CadenceChoice
    from .policy.improvement import OnImprovement
    from .policy.mtbf import Daly, TwoLevel, Young
    from .policy.retention import Retention
    from .repository import Repository, open
    from .system.logs import JsonLines
    from .tracking.guard import Guard, Rewind
    from .tracking.tracker import Tracker
    from .transport.contract import Tls
    from .upkeep.reindex import reindex

    __version__: str
    """The version that is installed, such as ``"0.1.0"``."""

__all__ = [
    "Ambiguous",
    "Auto",
    "BackPressure",
    "Cadence",
    "CadenceChoice",
    "Cancelled",
    "Capture",
    "CheckFreq",
    "Cloned",
    "Closed",
    "Config",
    "Conflict",
    "Corrupt",
    "Daly",
    "DatastatesError",
    "Dirty",
    "Disconnected",
    "Ensemble",
    "Guard",
    "InvalidInput",
    "Item",
    "JsonLines",
    "Module",
    "ModuleFailed",
    "NotFound",
    "OnFailure",
    "OnImprovement",
    "OverBudget",
    "Peer",
    "PeerFault",
    "PermutationSampler",
    "Prediction",
    "Ref",
    "RefEvent",
    "Repository",
    "RestoreReport",
    "Retention",
    "Rewind",
    "RngState",
    "Run",
    "Server",
    "State",
    "Status",
    "SyntaxProblem",
    "Tls",
    "Torn",
    "Tracker",
    "Transfer",
    "TwoLevel",
    "Unauthorized",
    "Unavailable",
    "Unsupported",
    "Young",
    "__version__",
    "connect",
    "load",
    "open",
    "register_encoder",
    "reindex",
    "save",
]

_MODULES = {
    "Auto": "policy.auto",
    "BackPressure": "config",
    "OnFailure": "config",
    "Cadence": "policy.cadence",
    "CadenceChoice": "policy.contract",
    "Capture": "capture.handle",
    "CheckFreq": "policy.checkfreq",
    "Cloned": "clone.transfer",
    "Config": "config",
    "Daly": "policy.mtbf",
    "Ensemble": "algebra.ensemble",
    "Guard": "tracking.guard",
    "Item": "modules.contract",
    "JsonLines": "system.logs",
    "Module": "modules.contract",
    "OnImprovement": "policy.improvement",
    "Peer": "clone.peer",
    "PermutationSampler": "objects.sampler",
    "Prediction": "algebra.ensemble",
    "Ref": "lineage.states",
    "RefEvent": "lineage.states",
    "Repository": "repository",
    "RestoreReport": "objects.report",
    "Retention": "policy.retention",
    "Rewind": "tracking.guard",
    "RngState": "objects.rng",
    "Run": "lineage.states",
    "Server": "clone.serving",
    "State": "lineage.states",
    "Status": "lineage.states",
    "Tls": "transport.contract",
    "Tracker": "tracking.tracker",
    "Transfer": "clone.transfer",
    "TwoLevel": "policy.mtbf",
    "Young": "policy.mtbf",
    "connect": "clone.peer",
    "load": "integrations.saved",
    "open": "repository",
    "register_encoder": "content.encoding",
    "reindex": "upkeep.reindex",
    "save": "integrations.saved",
}
"""The module in which each public name lives. Public names that are not listed here are errors."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, and keep it."""
    if name == "__version__":
        from importlib.metadata import version  # takes 20 ms, so only callers that ask pay for it

        value: object = version("datastates")
    elif name in __all__:
        value = getattr(_imported(_MODULES.get(name, "errors")), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _imported(name: str) -> ModuleType:
    """Import a module of ours with the garbage collector paused: it would walk torch's objects over and over, for 150 of 500 ms."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(f".{name}", __name__)
    finally:
        if was_on:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
