"""The state of a ``GradScaler``: read without waiting for its device, and restored where either side may be switched off."""

from __future__ import annotations

from typing import Any

import torch

from datastates.content.tree import Number
from datastates.system.devices import devices

__all__ = ["state_of_scaler", "why_anew"]


def state_of_scaler(found: Any) -> dict[str, object] | None:
    """The state in its ``state_dict``, with numbers that arrive later; None: it is not such an object, and is asked like any other."""
    if not isinstance(found, torch.amp.GradScaler) or type(found).state_dict is not torch.amp.GradScaler.state_dict:
        return None
    if not found.is_enabled():  # it has none of the attributes below
        return None
    scale, tracker = found._scale, found._growth_tracker
    if scale is None or tracker is None or not (devices().is_on(scale) and devices().is_on(tracker)):
        return None
    return {
        "scale": Number(scale, float),
        "growth_factor": found.get_growth_factor(),
        "backoff_factor": found.get_backoff_factor(),
        "growth_interval": found.get_growth_interval(),
        "_growth_tracker": Number(tracker, int),
    }


def why_anew(live: object, stored: object) -> str | None:
    """Why a scaler is left as the script made it, in a restore; None if it takes the state, or is none of torch's.

    A scaler that is switched off has no state, and takes none.
    """
    if not isinstance(live, torch.amp.GradScaler) or type(live).load_state_dict is not torch.amp.GradScaler.load_state_dict:
        return None
    if live.is_enabled() and stored == {}:
        return "was switched off in the state, and begins anew"
    if not live.is_enabled() and stored:
        return "is switched off here, and what the state has of it is not restored"
    return None
