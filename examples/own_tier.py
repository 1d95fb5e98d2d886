"""A tier of your own: each state that becomes durable is put into an object store too, and read from there when the disk is gone.

The store is whatever behaves like a dict of bytes: here a dict; an adapter of S3, of a database, of a folder on a share does too.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from threading import Lock

import msgspec
from blake3 import blake3

from datastates import Closed, NotFound
from datastates.store import HeldReader, Manifest, Payload, Placed, Reader, Tier, decode, encode


class BucketTier(Tier):
    name = "bucket"

    def __init__(self, objects: MutableMapping[str, bytes]) -> None:
        self._objects, self._lock, self._is_closed = objects, Lock(), False

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        payload.check()
        with self._lock:
            uid, keys, bytes_new = payload.manifest.origin.uid, [], 0
            if not self.has(uid):
                for view in payload.chunks:  # chunks first, each under its digest, so that states share what is equal
                    keys.append(f"chunk/{blake3(view).hexdigest()}")
                    if keys[-1] not in self._objects:
                        self._objects[keys[-1]], bytes_new = bytes(view), bytes_new + view.nbytes
                self._objects[f"state/{uid}"] = msgspec.msgpack.encode([encode(payload.manifest), keys])  # last: now it is there
        return Placed(payload.manifest, bytes_new)

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        if self._is_closed:
            raise Closed("the bucket is closed")
        try:
            manifest, keys = msgspec.msgpack.decode(self._objects[f"state/{uid}"], type=tuple[bytes, list[str]])
            chunks = [self._objects[key] for key in keys]
        except KeyError as exc:
            raise NotFound(f"state {uid} is not in the bucket: it has no {exc}") from None
        return HeldReader(decode(manifest, source="the bucket"), chunks, source="the bucket", verify=verify)

    def uids(self) -> Iterator[str]:
        return (key.removeprefix("state/") for key in list(self._objects) if key.startswith("state/"))

    def close(self) -> None:
        self._is_closed = True


def main() -> None:
    """Train, lose the disk, and restore from the bucket."""
    import shutil
    import tempfile
    from pathlib import Path

    import torch

    import datastates

    objects: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = torch.nn.Linear(64, 64)
        with datastates.open(folder, config=datastates.Config(tiers=[BucketTier(objects)])) as repo, repo.track(model=model) as run:
            state = run.capture(metrics={"loss": 1.0}).wait("external")
            print(f"step {state.step} is {state.status}: {len(objects)} objects in the bucket")  # noqa: T201 # what it is for
        trained = model.weight.detach().clone()
        shutil.rmtree(Path(folder) / "packs")
        torch.nn.init.zeros_(model.weight)
        with datastates.open(folder, config=datastates.Config(tiers=[BucketTier(objects)])) as repo:
            repo.restore("main", {"model": model})
        print("restored from the bucket:", torch.equal(model.weight, trained))  # noqa: T201 # likewise


if __name__ == "__main__":
    main()
