"""Limits of a variant: the GPUs that it may use, the time that it may take, and the time without
progress.

A variant with limits is trained in a child process of its worker. The worker sets the child's
``CUDA_VISIBLE_DEVICES``, and ends the child when a limit is exceeded. A child stays for further
variants with the same GPUs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Annotated, TypeVar

from datastates import values
from datastates.errors import InvalidInput
from datastates.system.devices import visible

from .processes import Slot
from .records import Claim, Outcome

_logger = logging.getLogger(__name__)
_LOOK_S = 0.5
_GRACE_S = 10.0
_EPSILON = 1e-9
_PROGRESS = "DATASTATES_VARIANT_PROGRESS"
A = TypeVar("A")


def gpu_count(value: object, what: str) -> float:
    """A whole number of GPUs, or a part of one.

    :raises InvalidInput: it is neither.
    """
    found = values.number(value, what)
    if found <= 0 or (found > 1 and found != int(found)):
        raise InvalidInput(
            f"{what} is {values.shown(value)}: give a whole number of GPUs, or a part of one such"
            " as 0.5"
        )
    return found


Gpus = Annotated[float, gpu_count]
"""GPUs of a variant."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of each variant of a study; None where there is none.

    ``gpus`` below 1 lets several variants share one GPU."""

    gpus: float | None = None
    timeout_s: float | None = None
    stall_s: float | None = None

    @property
    def is_any(self) -> bool:
        """Whether there is a limit."""
        return (self.gpus, self.timeout_s, self.stall_s) != (None, None, None)


NO_LIMITS = Limits()


@contextmanager
def devices(gpus: float | None) -> Iterator[tuple[str, ...] | None]:
    """GPUs that no other variant of this user on this machine uses, for the time of the block.
    ``None`` returns None. Waits until enough GPUs are free.

    :raises InvalidInput: this process sees fewer.
    """
    if gpus is None:
        yield None
        return
    seen, count = visible(), max(1, int(gpus))
    if len(seen) < count:
        raise InvalidInput(
            f"gpus_per_variant is {gpus:g}, and process {os.getpid()} sees {len(seen)} GPUs"
            " (CUDA_VISIBLE_DEVICES): run the workers where there are as many, or ask for fewer"
        )
    shares = 1 if gpus >= 1 else int(1 / gpus + _EPSILON)
    folder = Path(tempfile.gettempdir()) / f"datastates-gpus-{os.getuid()}"
    while True:
        with ExitStack() as claims:
            found: list[str] = []
            for name, device in ((f"{each}-{k}", each) for k in range(shares) for each in seen):
                claim = Claim.take(folder, name, f"process {os.getpid()}")
                if claim is not None:
                    claims.enter_context(claim)
                    found.append(device)
                if len(found) == count:
                    yield tuple(found)
                    return
        time.sleep(_LOOK_S)


# --- The child process of a worker ---

_at_work: list[Slot] = []
_free: list[tuple[tuple[str, ...] | None, Slot]] = []
_ends_children: list[Finalize] = []
_lock = threading.Lock()


def limited(call: Callable[[A], Outcome], given: A, variant: str, limits: Limits) -> Outcome:
    """The outcome of ``call(given)`` in a child process with the limits' GPUs. The child is ended
    if it exceeds a limit. The error of the outcome then names the limit."""
    with devices(limits.gpus) as given_gpus, tempfile.NamedTemporaryFile() as file:
        slot, error = _take_child(given_gpus), None
        try:
            wait([slot.pid])  # importing torch takes seconds
            began = moved = time.monotonic()
            seen = os.stat(file.name).st_mtime_ns
            future = slot.pool.submit(_with_progress, file.name, call, given)
            while error is None and not wait([future], _LOOK_S).done:
                now, progress = time.monotonic(), os.stat(file.name).st_mtime_ns
                if progress != seen:
                    seen, moved = progress, now
                if limits.stall_s is not None and now - moved > limits.stall_s:
                    error = f"it made no progress for {limits.stall_s:g} s (stall_s)"
                elif limits.timeout_s is not None and now - began > limits.timeout_s:
                    error = f"it took more than {limits.timeout_s:g} s (timeout_s)"
            if error is None:
                return future.result()
            _logger.warning("variant %s: %s, its process is ended", variant, error)
            slot.end(_GRACE_S)
            return Outcome(variant, None, f"{error}, and was ended", is_ended=True)
        except BrokenProcessPool as exc:
            slot.end(0.0)
            return Outcome(variant, None, f"its process died: {exc}", is_death=True)
        except (KeyboardInterrupt, SystemExit):
            slot.end(_GRACE_S)
            raise
        finally:
            _put_back(given_gpus, slot)


def _take_child(gpus: tuple[str, ...] | None) -> Slot:
    """A child that sees these GPUs: the one that became free last, or a new one."""
    if not _ends_children:
        # a process of multiprocessing joins its children, before it runs what atexit has
        _ends_children.append(Finalize(None, end_children, exitpriority=10))
    # processes of Dask may have no children, because they would leave them behind when they are
    # killed: ours end with their parent
    vars(multiprocessing.current_process())["_config"].pop("daemon", None)
    with _lock:
        found = next((each for each in reversed(_free) if each[0] == gpus), None)
        if found is not None:
            _free.remove(found)
        environ = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        slot = Slot(environ) if found is None else found[1]
        _at_work.append(slot)
    return slot


def _put_back(gpus: tuple[str, ...] | None, slot: Slot) -> None:
    with _lock:
        _at_work.remove(slot)
        if not slot.is_ended:
            _free.append((gpus, slot))


def _with_progress(path: str, call: Callable[[A], Outcome], given: A) -> Outcome:
    os.environ[_PROGRESS] = path  # ranks, which this process may launch, inherit it
    return call(given)


@contextmanager
def noting_progress(look: Callable[[], object]) -> Iterator[None]:
    """Note whenever the value of ``look()`` changes during the block, for the worker that limits
    this process; ``look`` is called on another thread."""
    path = os.environ.get(_PROGRESS)
    if path is None:
        yield
        return
    over = threading.Event()

    def note() -> None:
        last = look()
        while not over.wait(_LOOK_S / 2):
            if (now := look()) != last:
                last = now
                with suppress(FileNotFoundError):  # the worker has ended this process
                    os.utime(path)

    thread = threading.Thread(target=note, name="datastates-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def signal_children(number: int) -> None:
    """Send a signal to the children that are at work."""
    for slot in [*_at_work]:
        slot.terminate(number)


def end_children() -> None:
    """End the children of this process that are at rest."""
    with _lock:
        children, _free[:] = [slot for _, slot in _free], []
    for slot in children:
        slot.end(_GRACE_S)
