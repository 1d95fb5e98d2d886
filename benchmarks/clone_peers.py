"""Methods to copy a state from one process into another's memory: datastates, the floor, and other
libraries, behind one interface."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from capture_peers import Objects, state_bytes, state_tensors, tree
from torch import Tensor

import datastates
from datastates.config import Config
from datastates.transport import same_host

CHUNK_BYTES = 4 << 20
TOKEN = "a token of this benchmark"
WINDOW = 8
UCX_OPTIONS = {"TCP_TX_SEG_SIZE": "1M", "TCP_RX_SEG_SIZE": "1M"}
"""The value that ``datastates.transport`` also sets. UCX's own defaults have a third of the speed.
"""


class Way(ABC):
    """One method to copy a state. Both processes have an instance, and ``wire`` between them
    carries small messages.

    The sender calls ``offer`` once, and ``serve`` for each transfer, after the receiver's request.
    The receiver calls ``expect`` once, after the sender's ``offer``. It then calls ``fetch``, which
    returns when the bytes are in ``landed``.
    """

    wire: Connection
    objects: Objects
    address = "127.0.0.1"  # the sender's
    interface = "lo"

    @abstractmethod
    def offer(self) -> None:
        """Sender: prepare everything that is done once for all transfers."""

    def serve(self) -> None:  # noqa: B027 # nothing to do where something in the background does it
        """Sender: send one transfer."""

    @abstractmethod
    def expect(self) -> None:
        """Receiver: prepare."""

    @abstractmethod
    def fetch(self) -> None:
        """Receiver: the measured transfer."""

    def landed(self) -> list[Tensor]:
        """The target of ``fetch``: live tensors, in the order of ``state_tensors``."""
        return state_tensors(self.objects)

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


class Flat(Way):
    """Methods that send one piece of memory, which both sides have touched, without tensors."""

    flat: Tensor

    def offer(self) -> None:
        self.flat = torch.cat(
            [tensor.reshape(-1).view(torch.uint8) for tensor in state_tensors(self.objects)]
        )
        self.meet()

    def expect(self) -> None:
        # written, so that every page exists
        self.flat = torch.full((state_bytes(self.objects),), 1, dtype=torch.uint8)
        self.meet()

    @abstractmethod
    def meet(self) -> None:
        """Connect the two sides."""

    def landed(self) -> list[Tensor]:
        sizes = [tensor.nbytes for tensor in state_tensors(self.objects)]
        return list(self.flat.split(sizes))


class _Ucxx:
    """This process's UCXX. It can be started once, and belongs to one event loop."""

    loop: asyncio.AbstractEventLoop | None = None
    module: Any = None

    @classmethod
    def start(cls) -> Any:
        if cls.loop is None:
            cls.module = importlib.import_module("ucxx")
            cls.loop = asyncio.new_event_loop()
            cls.run(cls._init())
        return cls.module

    @classmethod
    async def _init(cls) -> None:
        cls.module.init(
            options=UCX_OPTIONS,
            env_takes_precedence=True,
            progress_mode="thread",
            enable_python_future=True,
        )

    @classmethod
    def run(cls, coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert cls.loop is not None
        return cls.loop.run_until_complete(coroutine)

    @classmethod
    def stop(cls) -> None:
        if cls.loop is not None:
            cls.module.stop_notifier_thread()


class UcxxStream(Flat):
    """The floor: tag messages of 4 MiB, 8 in flight, as in the transport, without other work."""

    base_tag = 1 << 20

    def meet(self) -> None:
        ucxx = _Ucxx.start()
        self.wire.send(bytes(ucxx.get_worker_address()))
        address = ucxx.get_ucx_address_from_buffer(self.wire.recv())
        self.end = _Ucxx.run(ucxx.create_endpoint_from_worker_address(address))
        self.tag = ucxx.types.Tag
        data = self.flat.numpy().data
        self.pieces = [
            data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)
        ]

    def serve(self) -> None:
        _Ucxx.run(self._each(self.end.send))

    def fetch(self) -> None:
        _Ucxx.run(self._each(self.end.recv))

    async def _each(self, move: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        left = iter(enumerate(self.pieces))

        async def lane() -> None:
            for index, piece in left:
                await move(piece, tag=self.tag(self.base_tag + index), force_tag=True)

        await asyncio.gather(*(lane() for _ in range(WINDOW)))

    def close(self) -> None:
        _Ucxx.stop()


class UcxxMessages(UcxxStream):
    """One message for each tensor, whatever its size."""

    base_tag = 1 << 30

    def meet(self) -> None:
        super().meet()
        self.pieces = [part.numpy().data for part in self.landed()]


class RawSocket(Flat):
    """One TCP connection, ``sendall`` and ``recv_into``."""

    def offer(self) -> None:
        with socket.create_server((self.address, 0)) as listener:
            self.wire.send(listener.getsockname()[1])
            super().offer()
            self.peer = listener.accept()[0]

    def expect(self) -> None:
        self.peer = socket.create_connection((self.address, self.wire.recv()))
        super().expect()

    def meet(self) -> None:
        self.data = self.flat.numpy().data

    def serve(self) -> None:
        self.peer.sendall(self.data)

    def fetch(self) -> None:
        done = 0
        while done < len(self.data):
            done += self.peer.recv_into(self.data[done:])

    def close(self) -> None:
        self.peer.close()


class Gloo(Flat):
    """``torch.distributed.broadcast`` of one flat tensor."""

    def offer(self) -> None:
        self.rank = 0
        self.folder = tempfile.mkdtemp(prefix="datastates-gloo-")
        self.wire.send(self.folder)
        super().offer()

    def expect(self) -> None:
        self.rank = 1
        self.folder = self.wire.recv()
        super().expect()

    def meet(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", self.interface)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self.folder}/store", rank=self.rank, world_size=2
        )

    def serve(self) -> None:
        torch.distributed.broadcast(self.flat, src=0)

    fetch = serve

    def close(self) -> None:
        torch.distributed.destroy_process_group()
        shutil.rmtree(self.folder, ignore_errors=True)


class TorchFt(Way):
    """torchft's HTTPTransport, in one piece, then one ``_foreach_copy_`` into the live tensors."""

    timeout = timedelta(seconds=60)

    def offer(self) -> None:
        self.transport = self._make()
        self.transport.send_checkpoint([1], 0, tree(self.objects), self.timeout)
        self.wire.send(self.transport.metadata().replace(socket.gethostname(), "localhost"))

    def expect(self) -> None:
        self.transport = self._make()
        self.where = self.wire.recv()

    def fetch(self) -> None:
        _into(self.objects, self.transport.recv_checkpoint(0, self.where, 0, self.timeout))

    def _make(self) -> Any:
        # a line on stderr for each transfer
        BaseHTTPRequestHandler.log_message = lambda *_: None  # type: ignore[method-assign]
        return importlib.import_module("torchft.checkpointing.http_transport").HTTPTransport(
            self.timeout, num_chunks=0
        )

    def close(self) -> None:
        self.transport.shutdown()


class TorchSave(Way):
    """``torch.save`` to shared memory; ``torch.load`` maps it, then one ``_foreach_copy_`` into
    the live tensors. Both count."""

    def offer(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="datastates-clone-", dir="/dev/shm"))
        self.wire.send(self.folder / "state.pt")
        self.path = self.folder / "state.pt"

    def expect(self) -> None:
        self.path = self.wire.recv()

    def serve(self) -> None:
        torch.save(tree(self.objects), self.path)
        self.wire.send(None)

    def fetch(self) -> None:
        self.wire.recv()
        _into(self.objects, torch.load(self.path, mmap=True))

    def close(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)


def _into(objects: Objects, state: dict[str, Any]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(state_tensors(objects), state_tensors(state))


_repos: dict[int, datastates.Repository] = {}


def _repo(objects: Objects) -> datastates.Repository:
    """A captured state, until the process ends. All methods share it, because memory is short."""
    if id(objects) in _repos:
        return _repos[id(objects)]
    ends = contextlib.ExitStack()
    atexit.register(ends.close)
    folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="datastates-clone-"))
    room = state_bytes(objects) * 5 // 4 + (256 << 20)
    repo = ends.enter_context(
        datastates.open(folder, config=Config(memory_bytes=room, durable_interval_s=None))
    )
    repo.track(**objects).capture().wait()
    _repos[id(objects)] = repo
    return repo


class Ours(Way):
    """A captured state, served by its repository and cloned into live objects, atomically or in
    place. Every chunk is checked."""

    is_atomic = False
    is_connected = True
    is_near = True  # read from the sender's memory, which both processes of this benchmark may do
    data = "tcp"
    is_secret = False

    def offer(self) -> None:
        self.ends = contextlib.ExitStack()
        scheme = "ucx" if self.data == "ucx" else "tcp"
        self.tls = self.ends.enter_context(_certificate(self.address)) if self.is_secret else None
        server = self.ends.enter_context(
            _repo(self.objects).serve(
                f"{scheme}://{self.address}:0", token=TOKEN, data=self.data, tls=self.tls
            )
        )
        self.wire.send((server.url, self.tls and self.tls.certificate))

    def expect(self) -> None:
        self.ends = contextlib.ExitStack()
        self.url, trusted = self.wire.recv()
        self.tls = None if trusted is None else datastates.Tls(trusted=trusted)
        self.peer = self._connect() if self.is_connected else None

    def _connect(self) -> datastates.Peer:
        peer = datastates.connect(self.url, token=TOKEN, data=self.data, tls=self.tls)
        self.ends.callback(peer.close)
        return peer

    def fetch(self) -> None:
        # read when a connection begins: one for each clone
        os.environ[same_host.SWITCH] = "1" if self.is_near else "0"
        peer = self.peer or self._connect()
        peer.clone("main", objects=self.objects, atomic=self.is_atomic)
        if not self.is_connected:
            self.ends.close()

    def close(self) -> None:
        self.ends.close()


class OursAtomic(Ours):
    """Atomic: all chunks are checked before the first tensor is written."""

    is_atomic = True


class OursOverTcp(Ours):
    """As between two hosts: over datastates' own connections, authenticated."""

    is_near = False


class OursAtomicOverTcp(OursAtomic):
    """As between two hosts."""

    is_near = False


class OursOverTls(Ours):
    """As between two hosts, encrypted."""

    is_near = False
    is_secret = True


class OursOverUcx(Ours):
    """Over UCX."""

    is_near = False
    data = "ucx"


@contextlib.contextmanager
def _certificate(address: str) -> Iterator[datastates.Tls]:
    """For an address, self-signed."""
    with tempfile.TemporaryDirectory(prefix="datastates-tls-") as folder:
        certificate, key = Path(folder, "certificate.pem"), Path(folder, "key.pem")
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ]
        command += [
            "-keyout",
            str(key),
            "-out",
            str(certificate),
            "-subj",
            "/CN=test",
            "-addext",
            f"subjectAltName=IP:{address}",
        ]
        subprocess.run(command, check=True, capture_output=True)
        yield datastates.Tls(certificate=certificate, key=key)


class OursConnecting(Ours):
    """A new connection each time."""

    is_connected = False


FLOOR = "floor: UCXX stream"
WAYS: dict[str, type[Way]] = {
    FLOOR: UcxxStream,
    "UCXX, a message a tensor": UcxxMessages,
    "raw socket": RawSocket,
    "gloo broadcast": Gloo,
    "torchft HTTPTransport": TorchFt,
    "torch.save + load, shared memory": TorchSave,
    "datastates, in place": Ours,
    "datastates, atomic": OursAtomic,
    "datastates over TCP, in place": OursOverTcp,
    "datastates over TCP, atomic": OursAtomicOverTcp,
    "datastates over TLS, in place": OursOverTls,
    "datastates over UCX, in place": OursOverUcx,
    "datastates, with connect": OursConnecting,
}


def why_not(name: str) -> str | None:
    """The reason why a method cannot be measured here, or None."""
    if (
        issubclass(WAYS[name], UcxxStream | OursOverUcx)
        and importlib.util.find_spec("ucxx") is None
    ):
        return "ucxx is not installed (pip install datastates[cu13])"
    if WAYS[name] is TorchFt and importlib.util.find_spec("torchft") is None:
        return (
            "torchft is not installed (pip install --no-deps torchft-nightly, and its opentelemetry"
            " packages)"
        )
    return None
