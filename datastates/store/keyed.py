"""A tier in whatever keeps bytes under keys: an object store, a table of a database, a folder on a share."""

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

_STATE, _CHUNK = "state/", "chunk/"
_UID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class KeyedTier(Tier):
    """A tier that keeps each state as objects under keys; a subclass says how one of them is read, written and listed.

    A chunk lies under its BLAKE3 digest, so that states share what is equal. The object that makes a state visible is written last. A
    state is fetched whole when it is opened, and nothing is ever removed.
    """

    def __init__(self) -> None:
        self._lock, self._is_closed = Lock(), False

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The object under a key.

        :raises KeyError: there is none.
        """

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Keep an object under a key; it is whole and safe once this returns."""

    @abstractmethod
    def keys(self, prefix: str) -> Iterable[str]:
        """Every key that begins so, in no order."""

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Write the chunks that are not there yet, then the state."""
        payload.check()
        uid, keys, bytes_new = payload.manifest.origin.uid, list[str](), 0
        with self._lock:  # or two threads would write, and count, the same chunk
            if not self.has(uid):
                for view in payload.chunks:
                    keys.append(f"{_CHUNK}{blake3(view).hexdigest()}")
                    if not self._holds(keys[-1]):
                        self.write(keys[-1], bytes(view))
                        bytes_new += view.nbytes
                self.write(f"{_STATE}{uid}", msgspec.msgpack.encode([encode(payload.manifest), keys]))
        return Placed(payload.manifest, bytes_new)

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Fetch a state.

        :raises NotFound: it is not here.
        :raises Corrupt: a chunk of it is gone, or what lists them is damaged.
        """
        place = f"the {self.name} tier"
        if not self.has(uid):
            raise NotFound(f"state {uid} is not on {place}")
        try:
            manifest, keys = msgspec.msgpack.decode(self.read(f"{_STATE}{uid}"), type=tuple[bytes, list[str]])
            chunks = [self.read(key) for key in keys]
        except (KeyError, msgspec.DecodeError) as exc:
            raise Corrupt(f"state {uid} is damaged on {place} ({exc}): restore another state") from exc
        return HeldReader(decode(manifest, source=place), chunks, source=place, verify=verify)

    def has(self, uid: str) -> bool:
        """Whether a state is here."""
        if self._is_closed:
            raise Closed(f"the {self.name} tier is closed: make another one")
        return _UID.fullmatch(uid) is not None and self._holds(f"{_STATE}{uid}")

    def uids(self) -> Iterator[str]:
        """The uid of every state that is here."""
        return (key.removeprefix(_STATE) for key in self.keys(_STATE))

    def close(self) -> None:
        """Use it no more; what a subclass opened it closes itself."""
        self._is_closed = True

    def _holds(self, key: str) -> bool:
        return key in self.keys(key)
