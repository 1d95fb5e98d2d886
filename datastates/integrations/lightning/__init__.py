"""Lightning on a repository: a callback that captures every step, and a CheckpointIO that makes
checkpoints states.

    trainer = L.Trainer(callbacks=[DatastatesCallback("runs", branch="main")])

Importing this imports Lightning: ``lightning.pytorch``, or ``pytorch_lightning`` where a script has
imported that one.
"""

from __future__ import annotations

from .callback import DatastatesCallback
from .checkpoint_io import DatastatesCheckpointIO

__all__ = ["DatastatesCallback", "DatastatesCheckpointIO"]
