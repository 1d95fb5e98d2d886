"""The process that runs UCX for a training: ``python -m datastates.transport.wire.ucx_helper SOCKET OUT IN PARENT``.

OUT, IN and SOCKET are descriptors.

Anyone who reaches UCX's TCP port may write to any address of the process that opened it, and a bad address from a peer ends that process.
So this process holds nothing worth having: no secret, no file, and no memory except what is in transit. It is single-threaded: it waits for
UCX and for orders at once, and reports everything that has ended by then together.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import select
import signal
import socket
import sys
from typing import Any

from . import confinement
from .ucx_words import Close, Closed, Connect, Connected, Ended, Failed, Go, Order, Receive, Report, Send, Started, frame, orders

__all__ = ["main"]

_RESOURCE = re.compile(r"^#\s+resource\b.* (\w+/\S+)\s*$", re.MULTILINE)
_READ = 256 << 10
_ROUNDS = 256  # of progress before orders are looked at again
_CLOSE_NS = 10**9
_IDLE_S = 1.0


class Helper:
    """One worker, its endpoints, and the transfers under way."""

    def __init__(self, control: socket.socket, out: int, into: int) -> None:
        sys.modules.setdefault("dask", None)  # type: ignore[arg-type]  # not there: ucxx would import all of it for what only its benchmarks use
        from ucxx import exceptions, get_ucx_address_from_buffer, types
        from ucxx._lib import arr, libucxx

        self._error: type[Exception] = exceptions.UCXError
        self._too_long: type[Exception] = exceptions.UCXMessageTruncatedError
        self._tag, self._whole_tag = types.Tag, types.TagMaskFull
        self._array, self._libucxx, self._place = arr.Array, libucxx, get_ucx_address_from_buffer
        self._control, self._fds, self._inbox = control, (out, into), orders()
        self._links: dict[int, Any] = {}
        self._under_way: dict[int, tuple[int, Any]] = {}
        self._said = bytearray()
        self._out = self._into = memoryview(b"")

    def start(self) -> None:
        """Make the worker, then give up the rights that making it needed."""
        still_open = confinement.before()  # UCX has a thread as soon as there is a context
        context = self._libucxx.UCXContext({})
        resources = tuple(dict.fromkeys(_RESOURCE.findall(context.info)))
        self._worker = self._libucxx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        import ucxx

        versions = (ucxx.__version__, ".".join(map(str, ucxx.get_ucx_version())))
        still_open += confinement.after()
        self._say(Started(bytes(self._worker.address), versions, resources, tuple(still_open)))

    def serve(self) -> None:
        """Follow orders until nobody is left to give any."""
        poller = select.epoll()
        poller.register(self._control, select.EPOLLIN)
        poller.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        is_idle = False
        while True:
            if self._said:
                self._flush()
            events = poller.poll(_IDLE_S if is_idle and self._worker.arm() else 0)
            if any(fd == self._control.fileno() for fd, _ in events) and not self._listen():
                return
            rounds = 0
            while rounds < _ROUNDS and self._worker.progress_once():
                rounds += 1
            if not rounds:
                self._worker.progress()  # which also cancels transfers on endpoints that broke
            is_idle = not self._look() and not rounds

    def _listen(self) -> bool:
        try:
            data = self._control.recv(_READ, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        for order in self._inbox.take(data):
            self._obey(order)
        return bool(data)

    def _obey(self, order: Order) -> None:
        match order:
            case Send():
                self._begin(order, self._out)
            case Receive():
                self._begin(order, self._into)
            case Connect():
                self._connect(order)
            case Close(link):
                self._close(link)
            case Go(is_writable):
                out, into = self._fds
                self._out = _mapped(out, is_writable=is_writable)
                self._into = _mapped(into, is_writable=True)

    def _connect(self, order: Connect) -> None:
        try:
            place = self._place(order.address)
            self._links[order.link] = self._libucxx.UCXEndpoint.create_from_worker_address(self._worker, place, True)
        except self._error as exc:
            self._say(Connected(order.link, str(exc)[:500]))
        else:
            self._say(Connected(order.link))

    def _begin(self, order: Send | Receive, region: memoryview) -> None:
        endpoint = self._links.get(order.link)
        if endpoint is None:
            self._say(Ended(order.number, "the link is closed"))
            return
        memory = self._array(region[order.start : order.start + order.length])
        try:
            if isinstance(order, Send):
                request = endpoint.tag_send(memory, self._tag(order.tag))
            else:
                request = endpoint.tag_recv(memory, self._tag(order.tag), self._whole_tag)
        except self._error as exc:
            self._say(Ended(order.number, str(exc)[:500]))
        else:
            self._under_way[order.number] = order.link, request

    def _look(self) -> bool:
        """Report what has ended; returns whether anything has."""
        ended = [number for number, (_, request) in self._under_way.items() if request.completed]
        for number in ended:
            _, request = self._under_way.pop(number)
            try:
                request.check_error()
            except self._too_long:
                self._say(Ended(number, "it is longer", is_too_long=True))
            except self._error as exc:
                self._say(Ended(number, str(exc)[:500]))
            else:
                self._say(Ended(number))
        return bool(ended)

    def _close(self, link: int) -> None:
        endpoint = self._links.pop(link, None)
        if endpoint is not None:
            endpoint.close_blocking(_CLOSE_NS, 1)
        while any(owner == link and not request.completed for owner, request in self._under_way.values()):
            self._worker.progress()
        self._look()
        self._say(Closed(link))

    def _say(self, report: Report) -> None:
        self._said += frame(report)

    def _flush(self) -> None:
        self._control.sendall(self._said)
        self._said.clear()


def _mapped(fd: int, *, is_writable: bool) -> memoryview:
    import os

    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, protection))


def main() -> None:
    """Run until the training closes its end of the socket, or dies."""
    control_fd, out, into, parent = map(int, sys.argv[1:])
    confinement.bind_to(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        helper = Helper(control, out, into)
        helper.start()
    except Exception as exc:  # whatever it is, the training reports it
        control.sendall(frame(Failed(f"{exc}"[:500] or type(exc).__name__)))
        return
    helper.serve()
    ctypes.CDLL(None)._exit(0)  # there is nothing to wind up, and UCX's threads need not be waited for


if __name__ == "__main__":
    main()
