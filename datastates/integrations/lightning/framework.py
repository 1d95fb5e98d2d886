"""Lightning under the name that the script uses: ``lightning.pytorch``, or ``pytorch_lightning``, which has classes of its own."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = [
    "NAME",
    "Callback",
    "CheckpointIO",
    "DDPStrategy",
    "EarlyStopping",
    "LightningModule",
    "StochasticWeightAveraging",
    "Timer",
    "TorchCheckpointIO",
    "WeightAveraging",
    "version",
]


def _name() -> str:
    """The package whose Trainer this process uses, as far as its imports show; ``lightning.pytorch`` if they do not."""
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
        return "pytorch_lightning"
    if find_spec("lightning") is not None:
        return "lightning.pytorch"
    if find_spec("pytorch_lightning") is not None:
        return "pytorch_lightning"
    raise ModuleNotFoundError("datastates.integrations.lightning needs Lightning: pip install 'datastates[lightning]'")


NAME = _name()

_pytorch: Any = import_module(NAME)
_callbacks: Any = import_module(f"{NAME}.callbacks")
_io: Any = import_module(f"{NAME}.plugins.io")

Callback: Any = _pytorch.Callback
LightningModule: Any = _pytorch.LightningModule
EarlyStopping: Any = _callbacks.EarlyStopping
StochasticWeightAveraging: Any = _callbacks.StochasticWeightAveraging
Timer: Any = _callbacks.Timer
WeightAveraging: Any = _callbacks.WeightAveraging
DDPStrategy: Any = import_module(f"{NAME}.strategies").DDPStrategy
CheckpointIO: Any = _io.CheckpointIO
TorchCheckpointIO: Any = _io.TorchCheckpointIO
version: str = _pytorch.__version__
