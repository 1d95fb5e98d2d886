"""Tiers on other machines, each at a URL.

ObjectTier    a bucket of S3, Google or Azure, with the layout of a folder of packs
RedisTier     a server with the Redis protocol
FolderTier    a folder of packs on a shared file system
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from configparser import RawConfigParser
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

import numpy as np

from datastates.errors import (
    Conflict,
    Corrupt,
    DatastatesError,
    InvalidInput,
    NotFound,
    Unavailable,
)
from datastates.lineage.states import Status
from datastates.state.digest import MAX_MANIFEST, Sound, tensors_of
from datastates.state.manifest import Manifest
from datastates.system import logs

from .dedup import PutPlan, places_of, plan_put, readable
from .durable_files import TEMPORARY, next_step
from .keyed import (
    IDENTITY,
    REQUESTS,
    UID,
    KeyedTier,
    RemoteReader,
    awaited,
    identity_of,
    owned,
    part_name,
)
from .local import LocalTier
from .pack import manifest_name, padded, uid_of
from .tier import Payload, Placed, Reader, Tier

if TYPE_CHECKING:
    from obstore.store import ObjectStore

UPLOAD_PART_BYTES = 8 << 20
"""The size of a part of a multipart upload. Smaller packs are put in one request."""

ORPHAN_AGE = timedelta(days=1)
"""The age from which a pack that no manifest needs is an orphan: its upload failed or lost."""

_CONNECT_S = 5.0
_RESPONSE_S = 30.0
"""The longest wait for a connection, and for a response or a part of one, in seconds."""

_LARGEST_BYTES = 512 << 20  # what a server with the Redis protocol takes
_COPIED_BYTES = 1 << 16
_DEEPEST = 2  # the response to SCAN has an array in an array
_BUCKETS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")


class ObjectTier(KeyedTier):
    """A bucket with the layout of a folder of packs: ``<uid>.<rank>-<number>.safetensors`` has the
    bytes that a part added, and ``<uid>.<rank>.manifest`` makes it visible.

    ``store`` is a store of the library obstore (``pip install 'datastates[s3]'``). Several
    processes may write at once: each pack has a name of its own, and manifests are only created. A
    store that ignores create-only puts keeps the last of two equal manifests, and both packs.
    """

    def __init__(self, store: ObjectStore, *, name: str = "s3", url: str = "") -> None:
        super().__init__()
        self.name = name  # type: ignore[misc] # there may be several
        self.store, self.url = store, url
        self.requests = 0

    def check(self, repository: str) -> None:
        """Check the permissions, what the server enforces, and whose bucket or prefix it is."""
        if not self._is_checked:
            self.node = self._check_identity(repository)
            for _ in self.keys("probe/"):
                break
        super().check(repository)

    # --- objects ----------------------------------------------------------------------------------

    def read(self, key: str) -> memoryview:
        """The object under a key.

        :raises KeyError: there is no such object.
        """
        import obstore

        with self._asking(key):
            return memoryview(obstore.get(self.store, key).bytes())

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """``length`` bytes of an object from ``start`` on.

        :raises KeyError: there is no such object.
        """
        import obstore

        with self._asking(key):
            found = memoryview(obstore.get_range(self.store, key, start=start, length=length))
        if found.nbytes != length:
            raise Unavailable(
                f"the {self.name} tier returned {found.nbytes} of {length} bytes of {key} from"
                f" {start} on: try again, or check that the server supports ranges"
            )
        return found

    def write(self, key: str, data: bytes) -> None:
        """Put an object in one request."""
        import obstore

        with self._asking(key):
            obstore.put(self.store, key, data, use_multipart=False)

    def write_new(self, key: str, data: bytes) -> bool:
        """Put an object unless there is one under this key. Returns False, too, if the response of
        a put was lost and the client repeated the request."""
        import obstore

        if self._overwrites and self.holds(key):
            return False
        try:
            with self._asking(key):
                obstore.put(self.store, key, data, use_multipart=False, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def keys(self, prefix: str) -> Iterator[str]:
        """Every key that begins with ``prefix``."""
        return (key for key, _ in self._listed(prefix))

    def holds(self, key: str) -> bool:
        """Whether there is an object under a key."""
        import obstore

        try:
            with self._asking(key):
                obstore.head(self.store, key)
        except KeyError:
            return False
        return True

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        import obstore

        with suppress(KeyError), self._asking(key):
            obstore.delete(self.store, key)

    # --- states -----------------------------------------------------------------------------------

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Upload the new chunks as one pack, then the manifest.

        Chunks of ``base`` are referred to by digest alone.

        :raises Conflict: another state of this uid is here.
        :raises Unavailable: the store failed; nothing of the state is visible.
        """
        self._check_open()
        payload.check()
        origin = payload.manifest.origin
        if UID.fullmatch(origin.uid) is None:
            raise InvalidInput(f"state {origin.uid!r}: uids have no dots or slashes")
        with self._lock:
            return self._put(payload, base)

    def _put(self, payload: Payload, base: Manifest | None) -> Placed:
        origin = payload.manifest.origin
        here = self._found(origin.uid, origin.rank)
        if here is None:
            name = f"{origin.uid}.{origin.rank}-{1 + secrets.randbelow(10**15)}.safetensors"
            plan = plan_put([payload.manifest], [places_of(base)], name)
            (placed,), encoded = plan.manifests, b"".join(readable(plan.manifests))
            self._upload(plan, payload)
            self.write_new(manifest_name(origin.uid, origin.rank), encoded)
            # the response may have been lost, and two writers may both have created it
            here = self._found(origin.uid, origin.rank)
            if here == placed:
                return Placed(placed, placed.bytes_new)
            if here is not None and plan.layout is not None:
                self.delete(name)
        if here is None or here.digest != payload.manifest.digest:
            raise Conflict(
                f"state {origin.uid} was not put: the {self.name} tier has another state of that"
                " uid, so one of them is forged; delete that one, and copy this one again"
            )
        return Placed(here, 0)

    def manifest(self, uid: str) -> Manifest:
        """The manifest of a state; if it has several parts, of the part of rank 0.

        :raises NotFound: it is not here.
        :raises Corrupt: it is damaged, or another state's.
        """
        return self._manifest(uid, 0)

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """Open the part of one rank."""
        self._check_open()
        manifest = awaited(lambda: self._manifest(uid, rank))
        refs, packs = manifest.refs, manifest.packs

        def follows(one: int, other: int) -> bool:
            first, second = refs[one], refs[other]
            end = first.offset + padded(first.length)
            return (first.pack, end) == (second.pack, second.offset)

        def fetch(indices: Sequence[int]) -> list[memoryview]:
            first, last = refs[indices[0]], refs[indices[-1]]
            name, end = packs[first.pack].name, last.offset + last.length
            try:
                data = self.read_range(name, first.offset, end - first.offset)
            except KeyError as exc:
                raise Corrupt(
                    f"{part_name(uid, rank)} is damaged on the {self.name} tier, where {name} is"
                    " gone: restore another state"
                ) from exc
            data = memoryview(data)
            starts = [refs[index].offset - first.offset for index in indices]
            return [
                data[start : start + refs[index].length]
                for start, index in zip(starts, indices, strict=True)
            ]

        return RemoteReader(manifest, fetch, follows, source=f"the {self.name} tier", verify=verify)

    @property
    def bytes_stored(self) -> int:
        """The bytes of all packs, by one listing."""
        return sum(size for key, (_, size) in self._listed("") if uid_of(key, "safetensors"))

    def uids(self) -> Iterator[str]:
        """The uid of every state that is here."""
        self._check_open()
        return (uid for uid, rank in self.parts() if rank == 0)

    def parts(self) -> Iterator[tuple[str, int]]:
        """The uid and rank of every part whose manifest is here."""
        return filter(None, (uid_of(key, "manifest") for key in self.keys("")))

    def sound(self, uid: str, rank: int) -> Sound:
        """The manifest of one part, with its tensors.

        :raises NotFound: it is not here.
        :raises Corrupt: it is damaged, or another state's.
        """
        manifest = self._manifest(uid, rank)
        return Sound(manifest, tensors_of(manifest.content))

    def whole_parts(self, parts: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Placed]:
        """Those of these parts whose packs are here in full size."""
        sizes = {key: size for key, (_, size) in self._listed("")}
        found = dict[tuple[str, int], Placed]()
        for uid, rank in parts:
            manifest = self._found(uid, rank)
            if manifest is not None and all(
                sizes.get(pack.name) == pack.size for pack in manifest.packs
            ):
                found[uid, rank] = Placed(manifest, manifest.bytes_new)
        return found

    def owner(self) -> tuple[str, str] | None:
        """The uids of this place and of its lineage. None if it has none yet."""
        try:
            return identity_of(self.read(IDENTITY), self.name)
        except KeyError:
            return None

    def orphans(self) -> dict[str, int]:
        """The packs older than a day that no manifest needs, and their sizes in bytes.

        :raises DatastatesError: a manifest cannot be read, so that it is unknown what it needs.
        """
        before, needed = datetime.now(UTC) - ORPHAN_AGE, set[str]()
        found = {
            key: size
            for key, (changed, size) in self._listed("")
            if uid_of(key, "safetensors") is not None and changed < before
        }
        for key, _ in self._listed("") if found else ():  # after the packs
            part = uid_of(key, "manifest")
            if part is not None:
                needed.update(pack.name for pack in self._manifest(*part).packs)
        return {key: size for key, size in found.items() if key not in needed}

    def _has(self, uid: str, rank: int) -> bool:
        self._check_open()
        return UID.fullmatch(uid) is not None and self.holds(manifest_name(uid, rank))

    def _found(self, uid: str, rank: int) -> Manifest | None:
        try:
            return self._manifest(uid, rank)
        except NotFound:
            return None

    def _manifest(self, uid: str, rank: int) -> Manifest:
        import obstore

        missing = NotFound(f"{part_name(uid, rank)} is not on the {self.name} tier")
        if UID.fullmatch(uid) is None:
            raise missing
        key = manifest_name(uid, rank)
        try:
            with self._asking(key):
                response = obstore.get(self.store, key)
                if response.meta["size"] > MAX_MANIFEST:
                    raise Corrupt(
                        f"{key} on the {self.name} tier has {response.meta['size']} bytes, and a"
                        f" manifest has at most {MAX_MANIFEST}: restore another state"
                    )
                data = memoryview(response.bytes())
        except KeyError:
            raise missing from None
        return self._decoded(data, uid, rank)

    def _upload(self, plan: PutPlan, payload: Payload) -> None:
        import obstore

        layout = plan.layout
        if layout is None:
            return

        def pieces() -> Iterator[bytes | memoryview]:
            yield layout.header
            for _, index in plan.new:
                yield (chunk := payload.chunks[index])
                if rest := padded(chunk.nbytes) - chunk.nbytes:
                    yield bytes(rest)

        if layout.size <= UPLOAD_PART_BYTES:
            self.write(plan.name, b"".join(pieces()))
            return
        with self._asking(plan.name):
            obstore.put(
                self.store,
                plan.name,
                pieces(),
                use_multipart=True,
                chunk_size=UPLOAD_PART_BYTES,
                max_concurrency=REQUESTS,
            )
            size = obstore.head(self.store, plan.name)["size"]
        if size != layout.size:
            raise Unavailable(
                f"the {self.name} tier holds {size} of the {layout.size} bytes of {plan.name}: it"
                " is put again"
            )

    def _listed(self, prefix: str) -> Iterator[tuple[str, tuple[datetime, int]]]:
        import obstore

        folder = prefix[: prefix.rfind("/") + 1]
        with self._asking(prefix):
            for page in obstore.list(self.store, prefix=folder or None):
                for item in page:
                    if item["path"].startswith(prefix):
                        yield item["path"], (item["last_modified"], item["size"])

    @contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Count a request, and raise errors of the library as ours."""
        import obstore.exceptions as errors

        self.requests += 1
        try:
            yield
        except FileNotFoundError as exc:
            said = _said(exc)
            if "NoSuchBucket" in said:
                raise InvalidInput(
                    f"the {self.name} tier has no such bucket: create it, or correct the URL"
                    f" ({said})"
                ) from exc
            raise KeyError(key) from exc
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as exc:
            raise InvalidInput(
                f"the {self.name} tier refuses this process: check its credentials, its clock and"
                f" its permissions to list, read and write ({_said(exc)})"
            ) from exc
        except errors.AlreadyExistsError:
            raise
        except errors.BaseError as exc:
            said = _said(exc)
            if "169.254.169.254" in said:  # where a machine in a cloud asks for its role
                raise InvalidInput(
                    f"the {self.name} tier has no credentials: set AWS_ACCESS_KEY_ID and"
                    f" AWS_SECRET_ACCESS_KEY, or fill ~/.aws/credentials ({said})"
                ) from exc
            if "certificate" in str(exc):
                raise InvalidInput(
                    f"the {self.name} tier's certificate is not trusted: correct the endpoint, or"
                    f" install the certificate ({said})"
                ) from exc
            raise Unavailable(f"the {self.name} tier does not respond: {said}") from exc


def _said(error: BaseException) -> str:
    """The message of an error of obstore, without what it adds for debugging. Of a server's
    document, its code and message."""
    said = str(error).split("\n\nDebug source")[0].strip()
    before, document, body = said.partition("<?xml")
    parts = re.findall(r"<(?:Code|Message)>([^<]*)<", body)
    return f"{before}{' '.join(parts)}" if document else said


class RedisTier(KeyedTier):
    """A server with the Redis protocol. Each thread that waits for a response has one connection.

    Chunks are sent from the memory of the state, and received into the memory that is returned. The
    states last as long as the server keeps them: configure its persistence, and no eviction.
    """

    requests_at_once = 2  # one thread of the server answers all of them

    def __init__(
        self,
        host: str,
        port: int = 6379,
        *,
        database: int = 0,
        user: str = "",
        password: str = "",
        prefix: str = "",
        is_encrypted: bool = False,
        name: str = "redis",
        url: str = "",
    ) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc] # there may be several
        self.url = url
        self._address, self._is_encrypted, self._prefix = (host, port), is_encrypted, prefix
        self._login = [["AUTH", user, password] if user else ["AUTH", password]] if password else []
        if database:
            self._login.append(["SELECT", str(database)])
        self._free: deque[_Connection] = deque()
        self.requests = 0

    def check(self, repository: str) -> None:
        """Check the connection, and whose prefix it is."""
        if not self._is_checked:
            self.node = self._check_identity(repository)
        super().check(repository)

    def read(self, key: str) -> memoryview:
        """The object under a key.

        :raises KeyError: there is no such object.
        """
        found: memoryview | None = self._ask("GET", self._prefix + key)
        if found is None:
            raise KeyError(key)
        return found

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """``length`` bytes of an object from ``start`` on.

        :raises KeyError: there is no such object.
        """
        name = self._prefix + key
        found: memoryview = self._ask("GETRANGE", name, str(start), str(start + length - 1))
        if not found and length and not self.holds(key):
            raise KeyError(key)
        return found

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Set an object."""
        self._ask("SET", self._prefix + key, data)

    def write_new(self, key: str, data: bytes) -> bool:
        """Set an object unless there is one under this key."""
        return self._ask("SET", self._prefix + key, data, "NX") is not None

    def keys(self, prefix: str) -> Iterator[str]:
        """Every key that begins with ``prefix``."""
        pattern = re.sub(r"([\[\]*?\\])", r"\\\1", self._prefix + prefix) + "*"
        cursor, seen = "0", set[str]()
        while True:
            found, names = self._ask("SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
            fresh = {bytes(name).decode().removeprefix(self._prefix) for name in names} - seen
            yield from fresh
            seen |= fresh
            cursor = bytes(found).decode()
            if cursor == "0":
                return

    def holds(self, key: str) -> bool:
        """Whether there is an object under a key."""
        return bool(self._ask("EXISTS", self._prefix + key))

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        self._ask("DEL", self._prefix + key)

    def close(self) -> None:
        """Close the connections that no thread uses."""
        super().close()
        while self._free:
            self._free.pop().close()

    def _write_chunk(self, key: str, view: memoryview) -> None:
        self.write(key, view)

    def _ask(self, *words: str | bytes | memoryview) -> Any:
        self._check_open()
        self.requests += 1
        try:
            connection, is_used = self._free.pop(), True
        except IndexError:
            connection, is_used = self._connect(), False
        try:
            found = connection.ask(*words)
        except (OSError, ValueError) as exc:
            connection.close()
            if is_used and words[-1] != "NX":  # the server may have closed it meanwhile
                while self._free:
                    self._free.pop().close()
                return self._ask(*words)
            raise Unavailable(f"the {self.name} tier does not respond: {exc}") from exc
        if self._is_closed:
            connection.close()
        else:
            self._free.append(connection)
        if isinstance(found, _Refusal):
            raise self._refused(str(found))
        return found

    def _connect(self) -> _Connection:
        host, port = self._address
        try:
            connection = _Connection(host, port, is_encrypted=self._is_encrypted)
            found = [connection.ask(*words) for words in self._login]
        except ssl.SSLError as exc:
            raise InvalidInput(
                f"the {self.name} tier's certificate is not trusted: correct the address, or"
                f" install the certificate ({exc})"
            ) from exc
        except (OSError, ValueError) as exc:
            raise Unavailable(
                f"the {self.name} tier at {host}:{port} does not respond: {exc}"
            ) from exc
        refused = next((each for each in found if isinstance(each, _Refusal)), None)
        if refused is not None:
            connection.close()
            raise self._refused(refused)
        return connection

    def _refused(self, said: str) -> DatastatesError:
        kind = said.split(" ", 1)[0]
        if kind in ("NOAUTH", "WRONGPASS", "NOPERM") or said.startswith("ERR AUTH"):
            return InvalidInput(
                f"the {self.name} tier refuses this process: set REDISCLI_AUTH to its password"
                f" ({said})"
            )
        if "DB index" in said:
            return InvalidInput(f"the {self.name} tier has no such database: {said}")
        if kind == "OOM":
            return Unavailable(
                f"the {self.name} tier is full: raise the server's maxmemory, or delete states"
                f" ({said})"
            )
        return Unavailable(f"the {self.name} tier refuses a request: {said}")


class _Refusal(str):
    """An error that the server returned."""


class _Connection:
    """One connection to a server with the Redis protocol.

    :raises OSError: the server cannot be reached, or does not respond in time.
    :raises ValueError: the response is not in that protocol.
    """

    def __init__(self, host: str, port: int, *, is_encrypted: bool) -> None:
        self._socket = socket.create_connection((host, port), timeout=_CONNECT_S)
        self._socket.settimeout(_RESPONSE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_encrypted:
            context = ssl.create_default_context()
            self._socket = context.wrap_socket(self._socket, server_hostname=host)
        self._input = self._socket.makefile("rb")

    def ask(self, *words: str | bytes | memoryview) -> Any:
        """Send a command; returns the response, which may be a ``_Refusal``."""
        head = b"*%d\r\n" % len(words)
        for word in words:
            data = word.encode() if isinstance(word, str) else word
            head += b"$%d\r\n" % len(data)
            if len(data) > _COPIED_BYTES:
                self._socket.sendall(head)
                self._socket.sendall(data)
                head = b""
            else:
                head += data
            head += b"\r\n"
        self._socket.sendall(head)
        return self._response()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._input.close()
        self._socket.close()

    def _response(self, depth: int = 0) -> Any:
        line = self._input.readline(_COPIED_BYTES)
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("the connection was closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            return _Refusal(rest.decode(errors="replace"))
        if kind == b"+":
            return rest
        count = int(rest)
        if kind == b":":
            return count
        if count < 0:
            return None
        if kind == b"*" and depth < _DEEPEST:
            return [self._response(depth + 1) for _ in range(min(count, _COPIED_BYTES))]
        if kind != b"$" or count > _LARGEST_BYTES:
            raise ValueError(f"the server returned {line[:20]!r}")
        view = np.empty(count + 2, np.uint8).data.cast("B")
        done = 0
        while done < count + 2:
            got = self._input.readinto(view[done:])
            if not got:
                raise ConnectionResetError("the connection was closed")
            done += got
        return view[:count].toreadonly()


class FolderTier(LocalTier):
    """A folder of packs on a file system that other machines mount, such as NFS. It must have
    ``flock``."""

    gives = Status.EXTERNAL

    def __init__(self, root: str | Path, *, name: str = "folder", url: str = "") -> None:
        try:
            super().__init__(Path(root))
        except (OSError, Unavailable) as exc:
            raise InvalidInput(f"the {name} tier cannot be used: {exc}") from exc
        self.name = name  # type: ignore[misc] # there may be several
        self.url = url

    def check(self, repository: str) -> None:
        """Check that the folder can be written, and whose it is."""
        path, new = self.root / IDENTITY, self.root / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            new.write_text(f"{secrets.token_hex(12)}\n{repository}\n")
            with suppress(FileExistsError):
                path.hardlink_to(new)
            new.unlink()
            found = path.read_bytes()
        except OSError as exc:
            raise InvalidInput(
                f"the {self.name} tier cannot be used ({exc}): {next_step(exc)}"
            ) from exc
        self.node = owned(found, repository, self.name)


def tier_of_url(url: str) -> Tier:
    """The tier at a URL: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///folder`` or
    ``redis://host/0``.

    Options follow as a query: ``name``, and for buckets those of the library obstore, such as
    ``endpoint`` and ``region``. Credentials come from the environment, or from the file of AWS.

    :raises InvalidInput: it is no such URL, contains a secret, or its library is missing.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    secret = next((key for key in options if logs.is_secret(key)), None)
    if secret or parts.password or logs.text(url) != url:
        raise InvalidInput(
            f"a URL of a tier contains a secret ({secret or 'a password'}): URLs are stored, so put"
            " it into the environment, as AWS_SECRET_ACCESS_KEY or REDISCLI_AUTH"
        )
    scheme, name = parts.scheme.lower(), url_name(url)
    options.pop("name", None)
    prefix = options.pop("prefix", "") if scheme.startswith("redis") else ""
    is_local = parts.netloc in ("", "localhost") and parts.path.startswith("/")
    if scheme == "file" and not (is_local and parts.path.strip("/")):
        raise InvalidInput(
            f"{url} names no folder: write three slashes and an absolute path, as file:///share/run"
        )
    if options and scheme not in _BUCKETS:
        raise InvalidInput(f"{url} has an option that does not exist: {', '.join(options)}")
    try:
        if scheme == "file":
            return FolderTier(unquote(parts.path), name=name, url=url)
        if scheme in ("redis", "rediss"):
            return RedisTier(
                parts.hostname or "localhost",
                parts.port or 6379,
                database=int(parts.path.strip("/") or 0),
                user=parts.username or "",
                password=os.environ.get("REDISCLI_AUTH", ""),
                prefix=prefix,
                is_encrypted=scheme == "rediss",
                name=name,
                url=url,
            )
        if scheme in _BUCKETS:
            return ObjectTier(_store(parts, options), name=name, url=url)
    except DatastatesError:
        raise
    except ValueError as exc:
        raise InvalidInput(
            f"{url} is no URL of a tier ({exc}): write s3://bucket/run, file:///folder or"
            " redis://host/0"
        ) from exc
    raise InvalidInput(
        f"{url} is no URL of a tier: give s3://bucket/prefix, gs://…, az://…, file:///folder or"
        " redis://host/0"
    )


def url_name(url: str) -> str:
    """The name of the tier at a URL."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    default = {"file": "folder", "rediss": "redis"}.get(scheme, scheme)
    return dict(parse_qsl(parts.query)).get("name", default)


def _store(parts: SplitResult, options: dict[str, str]) -> ObjectStore:
    """The store of a bucket."""
    try:
        import obstore.exceptions as errors
        from obstore.store import from_url
    except ImportError as exc:
        raise InvalidInput(
            "tiers in buckets need the library obstore: pip install 'datastates[s3]'"
        ) from exc
    config: dict[str, Any] = dict(options)
    client: dict[str, Any] = {
        "connect_timeout": f"{_CONNECT_S:g}s",
        "timeout": f"{_RESPONSE_S:g}s",
    }
    if parts.scheme.startswith("s3"):
        config = {"unsigned_payload": True, **_of_environment(), **config}
        if "endpoint" in config:
            config = {"virtual_hosted_style_request": False, "region": "us-east-1", **config}
    if config.get("endpoint", "").startswith("http://"):
        client["allow_http"] = True
    make: Callable[..., ObjectStore] = from_url
    try:
        return make(
            urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")),
            client_options=client,
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=_RESPONSE_S)},
            **config,
        )
    except errors.BaseError as exc:
        raise ValueError(_said(exc)) from exc


def _of_environment() -> dict[str, str]:
    """The endpoint in the environment, and the keys in the file of AWS's tools unless the
    environment has some. The library reads other variables itself."""
    found = {}
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if os.environ.get(name):
            found["endpoint"] = os.environ[name]
            break
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return found
    path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    profile, file = os.environ.get("AWS_PROFILE", "default"), RawConfigParser()
    file.read(Path(path).expanduser())
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    return found | {
        name.removeprefix("aws_"): file[profile][name]
        for name in names
        if file.has_option(profile, name)
    }
