"""One state on its way into the slots of an arena, as the copying threads hand it on to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datastates.store.roles import Held
from datastates.system.bell import Latch
from datastates.system.devices import Mark, Stream
from datastates.system.interrupts import Mutex

from .digested import Digested
from .plan import CopyPlan
from .snapshots import Snapshot
from .stills import Look
from .tripwire import Armed

if TYPE_CHECKING:
    import torch

__all__ = ["CopyJob", "Crossing"]


@dataclass(slots=True)
class Crossing:
    """A job's copies from one device. The mark ``begun`` is behind everything that the copies must see. ``aside`` has what was put aside,
    with its places in the state's stream of bytes.

    ``held`` has the tensors that copies read, until they are done. ``arrived`` is the mark behind the last copy, once ``is_queued``.
    ``look`` is what is known of still chunks, if there may be any; its ``lanes`` arrive with the rest, unless something waits for them
    sooner. ``digested`` and its ``lanes`` are of chunks that the device digests as they cross. ``is_apart``: everything is put aside, and
    the copies read nothing that the training changes.
    """

    device: torch.device
    side: Stream
    begun: Mark
    aside: list[tuple[int, torch.Tensor]]
    held: list[torch.Tensor]
    look: Look | None = None
    is_apart: bool = False
    digested: Digested | None = None
    lanes: list[torch.Tensor] = field(default_factory=list)
    arrived: Mark | None = None
    is_queued: Latch = field(default_factory=Latch)


@dataclass(slots=True)
class CopyJob:
    """One state on its way into ``slots``. ``is_copied`` is set once nothing reads the sources any more.

    ``error`` is written before ``is_copied`` is set. ``on_done`` runs on the stage thread after that. ``versions`` are the tripwire's,
    as of the first fence or of the end of the copy, whichever is earlier. ``began`` is when the stage thread took the job.
    ``is_host_read`` is set once no host memory is read any more. ``numbers`` belong to the job; they lie on devices until it is copied,
    then on the host. ``digests`` has the digests of chunks that their device digested. ``here`` has still ones that were not copied
    because memory has them, which it does as long as they are ``held``; ``late`` are those that were copied after all. ``snapshots`` are
    the copies of the state ``uid`` that stay on devices, until memory has the state.
    """

    plan: CopyPlan
    slots: list[int]
    on_done: Callable[[CopyJob], None]
    armed: Armed | None = None
    error: BaseException | None = None
    is_copied: Latch = field(default_factory=Latch)
    eager_done: Latch = field(default_factory=Latch)
    crossings: list[Crossing] = field(default_factory=list)
    is_host_read: Latch = field(default_factory=Latch)
    numbers: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] | None = None
    seal: Mutex = field(default_factory=Mutex)
    began: float | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    here: dict[int, Held] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    uid: str = ""
    snapshots: list[Snapshot] = field(default_factory=list)
