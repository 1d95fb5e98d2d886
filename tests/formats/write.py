"""Write what later versions have to read.

    .venv/bin/python -m tests.formats.write

makes a folder beside this file, called after the formats that this version writes: a repository, a
bundle of it, and what a reader finds in them. A version that writes another format writes another
folder.
"""

from __future__ import annotations

import json
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

import datastates
from datastates import Repository
from datastates.files.bundle import VERSION, export_bundle
from datastates.lineage.migrations import KNOWN

HERE = Path(__file__).parent
LAYOUT = 2
"""1: tensors lie end to end in the stream; 2: large ones begin at whole KiB."""

NAME = f"lineage-{len(KNOWN)}-bundle-{VERSION}-layout-{LAYOUT}"
"""What this version writes."""


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with state of its own."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def box(step: int) -> dict[str, Any]:
    """Values of each kind that a state may hold."""
    return {
        "bfloat16": torch.linspace(-1, step, 33).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j, complex(step, -0.5)]),
        "empty": torch.zeros(0, 4),
        "int64": torch.arange(step, step + 9),
        "scalar": torch.tensor(0.1),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "zeros": torch.zeros(70_000),  # a chunk that every state shares
        "odd": torch.arange(20_001, dtype=torch.int32),
        "ones": torch.ones(25_003),
        "sparse": torch.tensor([[0.0, 2.0], [0.0, float(step)]]).to_sparse(),
        "array": np.arange(step + 3, dtype=np.int16),
        "plain": {
            "step": step,
            "names": ("a", "ü"),
            "big": 1 << 80,
            "none": None,
            "raw": b"\x00\xff",
            "nan": float("nan"),
        },
    }


def train(repo: Repository, branch: str, steps: int, start: str | None = None) -> None:
    """So many states on a branch, each of which becomes durable."""
    model, optimizer = make()
    held = {"box": box(0)}
    with repo.track(
        model=model, optimizer=optimizer, tracked=held, branch=branch, start=start
    ) as run:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.ones(2, 6) * step).square().mean().backward()
            optimizer.step()
            held["box"] = box(step)
            run.capture(
                metrics={"loss": 1 / step},
                attributes={"kind": "kept", "seed": 2**60},
                message=f"step {step}",
            ).wait("durable")


def digest_of(value: object) -> str:
    """Of all that a state gives back, in the order in which it does."""
    digest = blake3()

    def add(path: str, each: object) -> None:
        if isinstance(each, dict):
            for key, inner in each.items():
                add(f"{path}/{key!r}", inner)
        elif isinstance(each, list | tuple):
            digest.update(f"{path} {type(each).__name__} {len(each)}\n".encode())
            for index, inner in enumerate(each):
                add(f"{path}/{index}", inner)
        elif isinstance(each, torch.Tensor):
            dense = (each.to_dense() if each.is_sparse else each).contiguous()
            digest.update(f"{path} {each.dtype} {list(each.shape)} {each.layout}\n".encode())
            digest.update(
                dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
            )
        elif isinstance(each, np.ndarray):
            digest.update(f"{path} {each.dtype} {list(each.shape)}\n".encode() + each.tobytes())
        else:
            digest.update(f"{path} {each!r}\n".encode())

    add("", value)
    return digest.hexdigest()


def facts(repo: Repository) -> dict[str, Any]:
    """What a reader of any version finds in it."""
    return {
        "refs": {ref.name: ref.state for ref in repo.refs()},
        "states": {
            state.uid: {
                "digest": state.digest,
                "step": state.step,
                "parents": list(state.parents),
                "metrics": dict(state.metrics),
                "attributes": dict(state.attributes),
                "message": state.message,
                "content": digest_of(repo.load(state.uid)),
            }
            for state in repo.find("step >= 0")
        },
    }


def pack(folder: Path, into: Path) -> None:
    """A small archive of a folder."""
    with tarfile.open(into, "w:xz", preset=9) as archive:
        archive.add(folder, folder.name)


def main() -> None:
    """Write the folder, unless it is there."""
    into = HERE / NAME
    into.mkdir()
    random.seed(7)
    np.random.seed(7)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with datastates.open(folder / "runs", memory_bytes=64 << 20) as repo:
            train(repo, "main", 2)
            repo.tag("warm", "main~1", message="where they part")
            train(repo, "fork", 1, start="warm")
            repo.merge(["main", "fork"], weights=[0.75, 0.25], tag="soup")
            export_bundle(repo, ["soup", "main"], folder / "bundle", with_parents=True)
        with datastates.open(folder / "runs") as repo:
            (into / "expected.json").write_text(json.dumps(facts(repo), indent=1) + "\n")
        pack(folder / "runs", into / "repository.tar.xz")
        pack(folder / "bundle", into / "bundle.tar.xz")


if __name__ == "__main__":
    main()
