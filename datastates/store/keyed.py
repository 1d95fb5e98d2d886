"""A tier in any store that keeps bytes under keys: an object store, a database table, a folder on a share."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from threading import Lock

import msgspec
from blake3 import blake3

from datastates.content.digest import decode, encode
from datastates.content.manifest import Manifest
from datastates.errors import Closed, Corrupt, NotFound

from .held import HeldReader
from .tier import Payload, Placed, Reader, Tier

__all__ = ["KeyedTier"]

_STATE, _PART, _CHUNK = "state/", "part/", "chunk/"
_UID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class KeyedTier(Tier):
    """A tier that keeps each state as objects under keys; a subclass defines how objects are read, written and listed.

    A chunk's key is its BLAKE3 digest, so that states share equal chunks. The object that makes a state visible is written last. A
    state is fetched whole when it is opened, and nothing is ever removed. Each rank of a job puts its part under a key of its own, which
    looks like any other key to the subclass.
    """

    holds_parts = True

    def __init__(self) -> None:
        self._lock, self._is_closed = Lock(), False

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The object under a key.

        :raises KeyError: there is no such object.
        """

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Store an object under a key; it is whole and safe once this returns."""

    @abstractmethod
    def keys(self, prefix: str) -> Iterable[str]:
        """Every key that begins with ``prefix``, in no order."""

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Write the chunks that are not there yet, then the state."""
        payload.check()
        origin, keys, bytes_new = payload.manifest.origin, list[str](), 0
        with self._lock:  # otherwise two threads would write, and count, the same chunk
            if not self._has(origin.uid, origin.rank):
                for view in payload.chunks:
                    keys.append(f"{_CHUNK}{blake3(view).hexdigest()}")
                    if not self._holds(keys[-1]):
                        self.write(keys[-1], bytes(view))
                        bytes_new += view.nbytes
                self.write(_key(origin.uid, origin.rank), msgspec.msgpack.encode([encode(payload.manifest), keys]))
        return Placed(payload.manifest, bytes_new)

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Fetch a state; if it has several parts, that of rank 0.

        :raises NotFound: it is not here.
        :raises Corrupt: a chunk of it is gone, or the list of its chunks is damaged.
        """
        return self.open_part(uid, 0, verify=verify)

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """Fetch the part of one rank."""
        place, what = f"the {self.name} tier", f"rank {rank} of state {uid}" if rank else f"state {uid}"
        if not self._has(uid, rank):
            raise NotFound(f"{what} is not on {place}")
        try:
            encoded, keys = msgspec.msgpack.decode(self.read(_key(uid, rank)), type=tuple[bytes, list[str]])
            chunks = [self.read(key) for key in keys]
        except (KeyError, msgspec.DecodeError) as exc:
            raise Corrupt(f"{what} is damaged on {place} ({exc}): restore another state") from exc
        manifest = decode(encoded, source=place)
        if (manifest.origin.uid, manifest.origin.rank) != (uid, rank):
            raise Corrupt(f"{what} is damaged on {place}, which has another one under its key: restore another state")
        return HeldReader(manifest, chunks, source=place, verify=verify)

    def has(self, uid: str) -> bool:
        """Whether a state is here; if it has several parts, that of rank 0."""
        return self._has(uid, 0)

    def uids(self) -> Iterator[str]:
        """The uid of every state that is here."""
        return (key.removeprefix(_STATE) for key in self.keys(_STATE))

    def close(self) -> None:
        """Refuse further use; a subclass closes what it opened itself."""
        self._is_closed = True

    def _has(self, uid: str, rank: int) -> bool:
        if self._is_closed:
            raise Closed(f"the {self.name} tier is closed: make another one")
        return _UID.fullmatch(uid) is not None and self._holds(_key(uid, rank))

    def _holds(self, key: str) -> bool:
        return key in self.keys(key)


def _key(uid: str, rank: int) -> str:
    """The key of a part's list of chunks. No key has a dot, or is the folder of another: a subclass may use keys as file names."""
    return f"{_PART}{uid}/{rank}" if rank else f"{_STATE}{uid}"
