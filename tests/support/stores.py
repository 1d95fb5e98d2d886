"""Servers of external tiers that tests and benchmarks start and stop: S3, Redis, and a proxy with
faults.

``scripts/stores`` installs them. The S3 server is OpenStack Swift with its gateway ``s3api``. Its
proxy process answers the requests. Processes for objects, containers and accounts are behind it.

    with s3_server(folder) as server, FaultyProxy(server) as proxy:
        url = server.bucket("states")  # s3://states
        variables = server.environment(proxy.endpoint)
        proxy.inject(AnswerStatus(503), method="PUT", path="/states/chunk", requests=2)

The fixtures ``s3`` and ``redis`` start a server when the first test of a process asks for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedRWPair
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, quote, urlencode

import pytest

from tests.support.effort import ROOT

LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0
"""A server that does not answer for so long has failed, even on a busy machine."""

# --- what both servers share


class Server(ABC):
    """A server on loopback whose process a test stops, resumes, kills and starts again.

    The port stays the same. The server ends with the thread that started it."""

    host = LOOPBACK

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.pid = 0
        """The process that ``stop``, ``kill`` and the like concern."""
        self._reserved: list[socket.socket] = []
        self._children: list[subprocess.Popen[str]] = []
        self.port = self._free_port()

    def stop(self) -> None:
        """Suspend the process. Connections are accepted, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(self.pid) in "TX", f"process {self.pid} does not stop")

    def resume(self) -> None:
        """Let the process continue."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once. Connections are refused afterwards."""
        _kill(self.pid)

    def restart(self) -> None:
        """Start the process again, on the same port and folder."""
        if self.is_running():
            self.kill()
        self.start()

    def is_running(self) -> bool:
        """Whether the process exists. A stopped process does."""
        return process_state(self.pid) != "X"

    def heal(self) -> None:
        """Answer again, whatever a test did to the process."""
        if self.is_running():
            self.resume()
        else:
            self.restart()

    def pids(self) -> set[int]:
        """Every process of the server."""
        return {child.pid for child in self._children}

    def close(self) -> None:
        """End every process and free the ports."""
        for child in self._children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        for held in self._reserved:
            held.close()

    @abstractmethod
    def start(self) -> None:
        """Start the process, set ``pid``, and wait until requests succeed."""

    def _free_port(self) -> int:
        """A port that nobody else gets before ``close``.

        The socket that holds it never listens. Linux then lets a server listen there that sets
        SO_REUSEADDR, and gives the port to nobody who asks for any."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        self._reserved.append(held)
        port: int = held.getsockname()[1]
        return port

    def _spawn(
        self, name: str, command: Sequence[str], *, pipe: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """A child that ends with this thread, and writes its messages to ``name.log``.

        :param pipe: what its standard input and output are.
        """
        with self._log(name).open("ab") as log:
            child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=pipe,
                stdout=pipe if pipe == subprocess.PIPE else log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "SWIFT_CONF_DIR": str(self.folder)},
                text=True,
            )
        self._children.append(child)
        return child

    def _wait_for_port(self, name: str, port: int, pid: int) -> None:
        def is_listening() -> bool:
            if process_state(pid) == "X":
                raise RuntimeError(f"{name} ended:\n{self._log(name).read_text()[-2000:]}")
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((LOOPBACK, port), PATIENCE_S).close()
                return True
            return False

        wait_until(is_listening, f"{name} does not listen on port {port}")

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def process_state(pid: int) -> str:
    """The letter of a process's state. It is X for one that has ended."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return letter if letter != "Z" else "X"


def _kill(pid: int) -> None:
    """End a process and its threads. A zombie may have threads that hold its sockets."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:  # its parent is another process, which does not wait for it
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} does not end")


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    """Ask again and again.

    :param otherwise: the message of the error after ``PATIENCE_S``.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.005)


# --- S3

_SWIFT = """
import ctypes, os, signal, sys
import swift.account.server, swift.container.server, swift.obj.server, swift.proxy.server
import swift.common.middleware.s3api.s3api, swift.common.middleware.tempauth
from swift.common.ring import RingBuilder

folder, *ports = sys.argv[1:]
for name, port in zip(("account", "container", "object"), ports):
    builder = RingBuilder(4, 1, 0)
    device = {"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "device"}
    builder.add_dev({**device, "id": 0, "weight": 1})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{name}.ring.gz")

mains = {
    "account": swift.account.server.main,
    "container": swift.container.server.main,
    "object": swift.obj.server.main,
    "proxy": swift.proxy.server.main,
}
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for a killed child
while name := sys.stdin.readline().strip():
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(2, 1)
    sys.argv = [name, f"{folder}/{name}.conf", "-v"]
    mains[name]()
    os._exit(0)
"""
"""Starts the server that each line of its input names, and prints the number of its process.

All of them are forks of one process, because importing Swift takes half a second."""

_COMMON = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
swift_dir = {folder}
devices = {folder}/devices
workers = 0
mount_check = false
disable_fallocate = true
fallocate_reserve = 0
log_level = WARNING
"""

_BEHIND = """
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
mb_per_sync = 10000
network_chunk_size = 1048576
disk_chunk_size = 1048576
"""

_PROXY = """
[pipeline:main]
pipeline = catch_errors proxy-logging cache s3api tempauth bulk slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
object_chunk_size = 1048576
client_chunk_size = 1048576
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{memcached}
[filter:s3api]
use = egg:swift#s3api
location = {region}
allow_no_owner = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
"""

_CLUSTER = """
[swift-hash]
swift_hash_path_prefix = tests
swift_hash_path_suffix = tests
[storage-policy:0]
name = one
default = yes
"""


class Response(NamedTuple):
    """What a server answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class S3Server(Server):
    """OpenStack Swift with s3api. A test stops and kills its proxy process only."""

    access_key = "test:tester"
    secret = "testing"
    region = "us-east-1"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.endpoint = f"http://{LOOPBACK}:{self.port}"
        self._memcached_port = self._free_port()
        self._ports = {name: self._free_port() for name in ("account", "container", "object")}
        self._forks: dict[str, int] = {}
        self._starter: subprocess.Popen[str] | None = None
        self._configure()

    def start(self) -> None:
        starter = self._starter or self._begin()
        self.pid = self._fork(starter, "proxy")
        for name, port in {**self._ports, "proxy": self.port}.items():
            self._wait_for_port("swift", port, self._forks[name])

    def kill(self) -> None:
        super().kill()
        self._forks.pop("proxy", None)  # another process may get the number

    def bucket(self, name: str) -> str:
        """The URL of a bucket, which is created unless it exists."""
        answer = self.request("PUT", f"/{name}")
        if answer.status not in {200, 409}:
            raise RuntimeError(f"bucket {name} was not created: {answer}")
        return f"s3://{name}"

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """The variables by which a client finds this server.

        :param endpoint: the address of a proxy in front of it.
        """
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": self.region,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
            "AWS_UNSIGNED_PAYLOAD": "true",
        }

    def request(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Response:
        """Send a signed request, without a client library.

        :param target: path and query, encoded, such as ``/bucket/key?uploads``.
        """
        signed = self._sign(method, target) | dict(headers or {})
        return _send(self.port, method, target, signed, body)

    def pids(self) -> set[int]:
        return super().pids() | set(self._forks.values())

    def close(self) -> None:
        for pid in self._forks.values():
            _kill(pid)
        super().close()

    def _begin(self) -> subprocess.Popen[str]:
        """Start what is behind the proxy process, and the process that forks it."""
        user = ["-u", _user()] if os.geteuid() == 0 else []
        port = self._memcached_port
        cache = self._spawn("memcached", ["memcached", *user, "-l", LOOPBACK, "-p", str(port)])
        python = str(ROOT / ".swift" / "bin" / "python")
        command = [python, "-c", _SWIFT, str(self.folder), *map(str, self._ports.values())]
        self._starter = self._spawn("swift", command, pipe=subprocess.PIPE)
        for name in self._ports:
            self._fork(self._starter, name)
        self._wait_for_port("memcached", port, cache.pid)
        return self._starter

    def _fork(self, starter: subprocess.Popen[str], name: str) -> int:
        assert starter.stdin is not None
        assert starter.stdout is not None
        starter.stdin.write(f"{name}\n")
        starter.stdin.flush()
        number = starter.stdout.readline()
        if not number:
            raise RuntimeError(f"swift ended:\n{self._log('swift').read_text()[-2000:]}")
        self._forks[name] = int(number)
        return int(number)

    def _configure(self) -> None:
        (self.folder / "devices" / "device").mkdir(parents=True, exist_ok=True)
        os.setxattr(self.folder, "user.swift", b"")  # Swift needs a file system that has them
        values = {"folder": self.folder, "user": _user(), "memcached": self._memcached_port}
        values |= {"region": self.region, "secret": self.secret}
        (self.folder / "swift.conf").write_text(_CLUSTER)
        for name, port in {**self._ports, "proxy": self.port}.items():
            text = _COMMON + (_PROXY if name == "proxy" else _BEHIND)
            (self.folder / f"{name}.conf").write_text(text.format(name=name, port=port, **values))

    def _sign(self, method: str, target: str) -> dict[str, str]:
        """The headers of AWS's signature, version 4, of a request whose body is not signed."""
        path, _, query = target.partition("?")
        query = urlencode(sorted(parse_qsl(query, keep_blank_values=True)), quote_via=quote)
        now = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        headers = {
            "host": f"{LOOPBACK}:{self.port}",
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
            "x-amz-date": now,
        }
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        names = ";".join(headers)
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
        words = (now[:8], self.region, "s3", "aws4_request")
        digest = hashlib.sha256(request.encode()).hexdigest()
        key = f"AWS4{self.secret}".encode()
        for word in (*words, f"AWS4-HMAC-SHA256\n{now}\n{'/'.join(words)}\n{digest}"):
            key = hmac.digest(key, word.encode(), "sha256")
        credential = f"Credential={self.access_key}/{'/'.join(words)}"
        signature = f"{credential}, SignedHeaders={names}, Signature={key.hex()}"
        return {**headers, "authorization": f"AWS4-HMAC-SHA256 {signature}"}


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _send(port: int, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
    """One request on a connection of its own, with these headers and no others."""
    connection = http.client.HTTPConnection(LOOPBACK, port)
    try:
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if name.lower() != "content-length":
                connection.putheader(name, value)
        if body or method in {"PUT", "POST"}:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return Response(answer.status, answer.getheaders(), answer.read())
    finally:
        connection.close()


# --- Redis


class RedisServer(Server):
    """Redis, whose data are in memory only unless ``is_lasting``."""

    def __init__(
        self, folder: Path, *, password: str, maxmemory_bytes: int, policy: str, is_lasting: bool
    ) -> None:
        super().__init__(folder)
        self.password = password
        self._options = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if is_lasting else "no",
            "appendfsync": "always",
            "maxmemory": str(maxmemory_bytes),
            "maxmemory-policy": policy,
            "requirepass": password,
        }

    def command(self, *words: str | bytes) -> bytes | None:
        """Send a command, without a client library.

        Returns a string, or the text of a number, or None for a missing value. An error reply
        raises ``RuntimeError``."""
        connection = socket.create_connection((self.host, self.port), PATIENCE_S)
        with connection, connection.makefile("rwb") as stream:
            if self.password:
                _ask(stream, "AUTH", self.password)
            return _ask(stream, *words)

    def start(self) -> None:
        options = (word for name, value in self._options.items() for word in (f"--{name}", value))
        self.pid = self._spawn("redis", ["redis-server", *options]).pid
        self._wait_for_port("redis", self.port, self.pid)
        wait_until(self._is_loaded, "Redis does not load its data")

    def _is_loaded(self) -> bool:
        try:
            return self.command("PING") == b"PONG"
        except RuntimeError as error:
            if "LOADING" in str(error):
                return False
            raise


def _ask(stream: BufferedRWPair, *words: str | bytes) -> bytes | None:
    """The reply to a command, in Redis's protocol RESP."""
    encoded = [word.encode() if isinstance(word, str) else word for word in words]
    stream.write(b"*%d\r\n" % len(encoded))
    for word in encoded:
        stream.write(b"$%d\r\n%s\r\n" % (len(word), word))
    stream.flush()
    line = stream.readline()
    kind, rest = line[:1], line[1:].rstrip()
    if kind == b"$":
        return None if rest == b"-1" else stream.read(int(rest) + 2)[:-2]
    if kind in {b"+", b":"}:
        return rest
    raise RuntimeError(f"{encoded[0].decode()}: {rest.decode() or 'no reply'}")


# --- a proxy with faults


@dataclass(frozen=True, slots=True)
class AnswerStatus:
    """Answer with a status such as 503. The server does not see the request."""

    status: int


@dataclass(frozen=True, slots=True)
class Delay:
    """Forward the request after some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class CutBody:
    """Send only the first bytes of the body, and close the connection.

    The header Content-Length names all of them."""

    kept_bytes: int


@dataclass(frozen=True, slots=True)
class IgnoreRange:
    """Answer a request for a range with status 200 and the complete object."""


@dataclass(frozen=True, slots=True)
class BodyOf:
    """Answer with the headers of the object, and the body of another one."""

    path: str
    """Such as ``/bucket/key``."""


@dataclass(frozen=True, slots=True)
class LoseResponse:
    """Close the connection after the server has executed the request."""


@dataclass(frozen=True, slots=True)
class DropRequest:
    """Close the connection. The server does not see the request."""


Fault = AnswerStatus | Delay | CutBody | IgnoreRange | BodyOf | LoseResponse | DropRequest


@dataclass(slots=True)
class Injection:
    """A fault, and the requests that it concerns."""

    fault: Fault
    method: str
    path: str
    requests: int
    """How many requests it still concerns."""


class Request(NamedTuple):
    """A request that a proxy received. The bytes are those of the bodies."""

    method: str
    target: str
    request_bytes: int
    response_bytes: int


class FaultyProxy:
    """An HTTP proxy in front of the S3 server, in threads of this process.

    Clients sign for the proxy's address, because Swift checks the signature over the header Host
    that it receives. Several faults that match are used in the order of ``inject``.

    :param listener: a socket that listens. By default, the proxy listens on loopback.
    """

    def __init__(self, target: S3Server, listener: socket.socket | None = None) -> None:
        self.target = target
        self.requests: list[Request] = []
        self._injections: list[Injection] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = _ProxyServer(self, listener or socket.create_server((LOOPBACK, 0)))
        address, port = self._server.socket.getsockname()
        self.port: int = port
        self.endpoint = f"http://{address}:{port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="faulty-proxy", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def inject(
        self, fault: Fault, *, method: str = "", path: str = "", requests: int = 1
    ) -> Injection:
        """Let a fault happen to the next requests that match.

        :param method: such as ``GET``. An empty one matches every method.
        :param path: a part of the path and query.
        :param requests: how many requests the fault concerns.
        """
        injection = Injection(fault, method, path, requests)
        with self._lock:
            self._injections.append(injection)
        return injection

    def clear(self) -> None:
        """Switch every fault off, and forget the requests."""
        with self._lock:
            self._injections.clear()
            self.requests.clear()

    def counts(self) -> Counter[str]:
        """How many requests of each method were received."""
        with self._lock:
            return Counter(request.method for request in self.requests)

    def request_bytes(self) -> int:
        """The bytes of all bodies that clients sent."""
        with self._lock:
            return sum(request.request_bytes for request in self.requests)

    def response_bytes(self) -> int:
        """The bytes of all bodies that clients were sent."""
        with self._lock:
            return sum(request.response_bytes for request in self.requests)

    def answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Response | None, int]:
        """What a client is sent, and how much of the body. None closes the connection."""
        fault = self._next_fault(method, target)
        try:
            response = self._respond(fault, method, target, headers, body)
        except (OSError, http.client.HTTPException):  # the server was killed
            response = None
        if isinstance(fault, LoseResponse):
            response = None
        sent_bytes = len(response.body) if response is not None else 0
        if isinstance(fault, CutBody):
            sent_bytes = min(sent_bytes, fault.kept_bytes)
        with self._lock:
            self.requests.append(Request(method, target, len(body), sent_bytes))
        return response, sent_bytes

    def _next_fault(self, method: str, target: str) -> Fault | None:
        with self._lock:
            for injection in self._injections:
                is_method = injection.method in {"", method}
                if injection.requests > 0 and is_method and injection.path in target:
                    injection.requests -= 1
                    return injection.fault
        return None

    def _respond(
        self, fault: Fault | None, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Response | None:
        match fault:
            case AnswerStatus(status):
                text = f"<Error><Code>Injected{status}</Code></Error>".encode()
                return Response(status, [("Content-Type", "application/xml")], text)
            case DropRequest():
                return None
            case Delay(seconds):
                if self._closing.wait(seconds):
                    return None
            case IgnoreRange():
                # a client may have signed the header Range: another request without it
                return self.target.request(method, target)
            case BodyOf(path):
                return self._with_body_of(path, target, headers)
        return _send(self.target.port, method, target, headers, body)

    def _with_body_of(self, path: str, target: str, headers: Mapping[str, str]) -> Response:
        own = _send(self.target.port, "GET", target, headers, b"")
        ranges = {name: value for name, value in headers.items() if name.lower() == "range"}
        other = self.target.request("GET", path, headers=ranges)
        kept = [pair for pair in own.headers if pair[0].lower() != "content-range"]
        kept += [pair for pair in other.headers if pair[0].lower() == "content-range"]
        return Response(other.status, kept, other.body)


class _ProxyServer(ThreadingHTTPServer):
    """A thread a connection. ``server_close`` closes the connections that are open."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: FaultyProxy, listener: socket.socket) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.socket.listen(self.request_queue_size)
        self.proxy = proxy
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, address = super().get_request()
        with self._open_lock:
            self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]  # TCP
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._open_lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # the client has closed it
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client went away
            super().handle_error(request, client_address)


_FRAMING = {"content-length", "transfer-encoding"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _ProxyServer

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = dict(self.headers.items())
        response, sent_bytes = self.server.proxy.answer(self.command, self.path, headers, body)
        if response is None:
            self.close_connection = True
            return
        self.send_response_only(response.status)
        for name, value in response.headers:
            if self.command == "HEAD" or name.lower() not in _FRAMING:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        self.wfile.write(response.body[:sent_bytes])
        if sent_bytes < len(response.body):
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

    def log_message(self, format: str, *args: object) -> None:
        """The list ``requests`` of the proxy is the log."""


# --- how tests and benchmarks get them


def s3_missing() -> str:
    """What keeps the S3 server from running here. Empty if nothing does."""
    if not (ROOT / ".swift" / "datastates-stores").exists():  # its installation is complete
        return "no OpenStack Swift in .swift: run scripts/stores"
    return "" if shutil.which("memcached") else "no memcached on this machine: run scripts/stores"


def redis_missing() -> str:
    """What keeps the Redis server from running here. Empty if nothing does."""
    return "" if shutil.which("redis-server") else "no Redis on this machine: run scripts/stores"


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """An S3 server whose objects are in ``folder``."""
    if missing := s3_missing():
        raise RuntimeError(missing)
    with contextlib.closing(S3Server(folder)) as server:
        server.start()
        yield server


@contextmanager
def redis_server(
    folder: Path,
    *,
    password: str = "",
    maxmemory_bytes: int = 0,
    policy: str = "noeviction",
    is_lasting: bool = False,
) -> Iterator[RedisServer]:
    """A Redis server.

    :param password: what clients have to send.
    :param maxmemory_bytes: how much it stores. Zero is no limit.
    :param policy: Redis's ``maxmemory-policy``. By default, it refuses what exceeds the limit.
    :param is_lasting: append each change to a file, with fsync, so that a restart keeps the data.
    """
    if missing := redis_missing():
        raise RuntimeError(missing)
    options = {"password": password, "policy": policy}
    server = RedisServer(folder, maxmemory_bytes=maxmemory_bytes, is_lasting=is_lasting, **options)
    with contextlib.closing(server):
        server.start()
        yield server


def need(missing: str) -> None:
    """Skip a test for this reason, if there is one. It fails if the servers are required."""
    if missing and os.environ.get("DATASTATES_REQUIRE_STORES") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="datastates-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    need(s3_missing())
    with _folder() as folder, s3_server(folder) as server:
        yield server


@pytest.fixture(scope="session")
def _redis() -> Iterator[RedisServer]:
    need(redis_missing())
    with _folder() as folder, redis_server(folder) as server:
        yield server


@pytest.fixture
def s3(_s3: S3Server) -> Iterator[S3Server]:
    """The S3 server of this test process. A test may stop and kill it."""
    yield _s3
    _s3.heal()


@pytest.fixture
def redis(_redis: RedisServer) -> Iterator[RedisServer]:
    """The Redis server of this test process, empty. A test may stop and kill it."""
    _redis.command("FLUSHALL")
    yield _redis
    _redis.heal()
