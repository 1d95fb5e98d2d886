"""The state of a ``GradScaler`` whose numbers lie on a device, without waiting for them."""

from __future__ import annotations

from typing import Any

import torch

from datastates.content.tree import Number
from datastates.system.devices import devices

__all__ = ["state_of_scaler"]


def state_of_scaler(found: Any) -> dict[str, object] | None:
    """The state in its ``state_dict``, with numbers that arrive later; None: it is not such an object, and is asked like any other."""
    if not isinstance(found, torch.amp.GradScaler) or type(found).state_dict is not torch.amp.GradScaler.state_dict:
        return None
    scale, tracker = found._scale, found._growth_tracker
    if not found.is_enabled() or scale is None or tracker is None or not (devices().is_on(scale) and devices().is_on(tracker)):
        return None
    return {
        "scale": Number(scale, float),
        "growth_factor": found.get_growth_factor(),
        "backoff_factor": found.get_backoff_factor(),
        "growth_interval": found.get_growth_interval(),
        "_growth_tracker": Number(tracker, int),
    }
