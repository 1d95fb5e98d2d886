"""A lineage store for the states of a DNN while it trains.

    repo = datastates.open("runs/")
    with repo.track(model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(3):
            for batch in run.steps(loader):
                loss = train_step(batch)
                run.capture(metrics={"loss": loss})

``datastates.errors`` has every error. Names are imported when they are first used, so that
``import datastates.lineage`` and the terminal do without torch.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from datastates.compare.ensemble import Ensemble, Prediction
    from datastates.engine.handle import Capture
    from datastates.engine.processors import CapturedState, Processor
    from datastates.integrations.saved import load, save
    from datastates.lineage.states import Ref, RefEvent, Run, State, Status
    from datastates.maintenance.reindex import reindex
    from datastates.policy.auto import Auto
    from datastates.policy.computed import CheckFreq, Daly, TwoLevel, Young
    from datastates.policy.contract import Cadence, CadenceChoice, OnImprovement
    from datastates.policy.retention import Retention
    from datastates.state.encoding import register_encoder
    from datastates.state.generators import RngState
    from datastates.state.report import RestoreReport
    from datastates.state.sampler import PermutationSampler
    from datastates.system.logs import JsonLines
    from datastates.training.guard import Guard, Rewind
    from datastates.training.tracker import Tracker
    from datastates.transport.contract import Tls
    from datastates.transport.peer import Peer, connect
    from datastates.transport.serving import Server
    from datastates.transport.transfer import Cloned, Transfer

    from .config import BackPressure, Config, OnFailure
    from .errors import Conflict, DatastatesError, NotFound, Unavailable
    from .repository import Repository, open

    __version__: str
    """The version that is installed, such as ``"0.1.0"``."""

__all__ = [
    "Auto",
    "BackPressure",
    "Cadence",
    "CadenceChoice",
    "Capture",
    "CapturedState",
    "CheckFreq",
    "Cloned",
    "Config",
    "Conflict",
    "Daly",
    "DatastatesError",
    "Ensemble",
    "Guard",
    "JsonLines",
    "NotFound",
    "OnFailure",
    "OnImprovement",
    "Peer",
    "PermutationSampler",
    "Prediction",
    "Processor",
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
    "Tls",
    "Tracker",
    "Transfer",
    "TwoLevel",
    "Unavailable",
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
    "Cadence": "policy.contract",
    "CadenceChoice": "policy.contract",
    "Capture": "engine.handle",
    "CapturedState": "engine.processors",
    "CheckFreq": "policy.computed",
    "Cloned": "transport.transfer",
    "Config": "config",
    "Conflict": "errors",
    "Daly": "policy.computed",
    "DatastatesError": "errors",
    "Ensemble": "compare.ensemble",
    "Guard": "training.guard",
    "JsonLines": "system.logs",
    "NotFound": "errors",
    "OnFailure": "config",
    "OnImprovement": "policy.contract",
    "Peer": "transport.peer",
    "PermutationSampler": "state.sampler",
    "Prediction": "compare.ensemble",
    "Processor": "engine.processors",
    "Ref": "lineage.states",
    "RefEvent": "lineage.states",
    "Repository": "repository",
    "RestoreReport": "state.report",
    "Retention": "policy.retention",
    "Rewind": "training.guard",
    "RngState": "state.generators",
    "Run": "lineage.states",
    "Server": "transport.serving",
    "State": "lineage.states",
    "Status": "lineage.states",
    "Tls": "transport.contract",
    "Tracker": "training.tracker",
    "Transfer": "transport.transfer",
    "TwoLevel": "policy.computed",
    "Unavailable": "errors",
    "Young": "policy.computed",
    "connect": "transport.peer",
    "load": "integrations.saved",
    "open": "repository",
    "register_encoder": "state.encoding",
    "reindex": "maintenance.reindex",
    "save": "integrations.saved",
}
"""The module in which each public name is defined."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, and keep it."""
    if name == "__version__":
        from importlib.metadata import version  # takes 20 ms, so only callers that ask pay for it

        value: object = version("datastates")
    elif name in _MODULES:
        value = getattr(_imported(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _imported(name: str) -> ModuleType:
    """Import a module of ours with the garbage collector paused: it would walk torch's objects
    over and over, for 150 of 500 ms."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(f".{name}", __name__)
    finally:
        if was_on:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
