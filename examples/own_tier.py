"""A custom tier: each durable state is also written to an object store, and read from there if the
disk is gone."""

from __future__ import annotations

import shutil
import tempfile

import torch

import datastates
from datastates.storage import KeyedTier


class BucketTier(KeyedTier):
    name = "bucket"

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects  # represents a bucket of S3, a table of a database, …

    def read(self, key: str) -> bytes:
        return self.objects[key]

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def keys(self, prefix: str) -> list[str]:
        return [key for key in list(self.objects) if key.startswith(prefix)]


if __name__ == "__main__":
    bucket, model = dict[str, bytes](), torch.nn.Linear(64, 64)
    with tempfile.TemporaryDirectory() as folder:
        with (
            datastates.open(folder, config=datastates.Config(tiers=[BucketTier(bucket)])) as repo,
            repo.track(model=model) as run,
        ):
            state = run.capture().wait("external")
        shutil.rmtree(f"{folder}/packs")
        with datastates.open(folder, config=datastates.Config(tiers=[BucketTier(bucket)])) as repo:
            report = repo.restore("main", model=model)
    print(  # noqa: T201 # what it is for
        f"step {state.step} is {state.status}: {len(bucket)} objects, of which {report.restored}"
        " came back"
    )
