"""UCXX's worker of this process, and the two threads that drive it.

    progress    UCXX's own: moves the bytes
    notifier    ``datastates-ucx``: tells the loop what was completed

``ucxx.init`` is not used, so that this worker lives beside one that the user's program has, ends with the loop, and comes back with
the next; and so that a forked child never tears it down, which would break the parent's (they share event descriptors).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import weakref
from typing import Any

from . import ucx_settings  # noqa: F401 — before UCX is loaded

# isort: split
from ucxx import exceptions, get_ucx_address_from_buffer
from ucxx._cuda_context import ensure_cuda_context
from ucxx._lib import libucxx

from datastates.errors import Closed, Unavailable

__all__ = ["UcxError", "Worker", "keep_over_fork"]

UcxError: type[Exception] = exceptions.UCXError

_OPTIONS = {"TCP_TX_SEG_SIZE": "1M", "TCP_RX_SEG_SIZE": "1M"}  # the defaults move a third; the user's UCX_… win
_REFILL = 25  # UCXX's pool has 100, and is refilled when it has fewer than half


class Worker:
    """Made and closed on the loop that is told of completed requests. ``address`` is for peers.

    :raises Unavailable: UCX does not start.
    :raises Closed: this process was forked from one that uses UCX.
    """

    def __init__(self) -> None:
        if _inherited:
            raise Closed("this process was forked from one that uses UCX, which does not work in both: start it by spawn instead of fork")
        self._loop = asyncio.get_running_loop()
        options = {name: os.environ.get(f"UCX_{name}", value) for name, value in _OPTIONS.items()}
        try:
            self._context = libucxx.UCXContext(options)
            self._raw = libucxx.UCXWorker(self._context, enable_delayed_submission=True, enable_python_future=True)
        except UcxError as exc:
            raise Unavailable(f"UCX does not start ({exc}): check the UCX_… variables; UCX_LOG_LEVEL=info says more") from exc
        self._raw.set_progress_thread_start_callback(_use_cuda)
        self._raw.start_progress_thread(polling_mode=False, epoll_timeout=1)
        self._thread = threading.Thread(target=self._notify, name="datastates-ucx", daemon=True)
        self._thread.start()
        self._begun = 0
        self.address = bytes(self._raw.address)
        keep_over_fork(self)

    def endpoint(self, address: bytes) -> Any:
        """UCXX's endpoint to the worker that has this address. The first takes 0.1 s; may run in any thread."""
        place = get_ucx_address_from_buffer(address)
        return libucxx.UCXEndpoint.create_from_worker_address(self._raw, place, True)

    def refill(self) -> None:
        """Say before each request: the pool of futures, of which each takes one, is not to run dry, which costs a warning."""
        self._begun += 1
        if self._begun % _REFILL == 0:
            self._raw.populate_python_futures_pool()

    def close(self) -> None:
        """End both threads and let go of UCX's memory; every endpoint was closed before."""
        self._raw.stop_request_notifier_thread()
        while self._thread.is_alive():
            self._thread.join(0.01)  # in short waits: on its way out it needs the interpreter's lock
        self._raw.stop_progress_thread()
        _alive.discard(self)
        del self._raw, self._context
        gc.collect()  # UCXX's objects refer to each other

    def _notify(self) -> None:
        asyncio.set_event_loop(self._loop)  # the pool's futures are made for it
        raw, states = self._raw, libucxx.PythonRequestNotifierWaitState
        while True:
            raw.populate_python_futures_pool()
            state = raw.wait_request_notifier(period_ns=10**9)
            if state == states.Shutdown:
                break
            if state != states.Timeout:
                self._loop.call_soon_threadsafe(raw.run_request_notifier)
        raw.clear_python_futures_pool()


_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[object] = []


def keep_over_fork(owner: object) -> None:
    """``owner`` holds something of UCXX: a child that is forked while it lives never destroys its copy."""
    _alive.add(owner)


def _use_cuda() -> None:
    """As UCXX does in its progress thread; fails without a GPU, and is then ignored."""
    ensure_cuda_context(0)


def _keep_inherited() -> None:
    """In a forked child: nothing that belongs to the parent is ever destroyed here, not even when the interpreter ends."""
    if _alive:
        _inherited.extend(_alive)
        _alive.clear()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_inherited))


os.register_at_fork(after_in_child=_keep_inherited)
