"""What each log says of the runs that were beside our trainings, read as its own tools read it."""

from __future__ import annotations

import importlib
import json
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datastates import Tracker
from datastates.integrations.metrics_log import MetricsLog

Point = tuple[int, str, float]

# the header of the file is as long as that of a piece
_BLOCK, _PIECE = (
    32768,
    struct.Struct("<IHB"),
)
_WHOLE, _LAST = 1, 4


@dataclass
class Seen:
    """A run of theirs: its metrics by step, what it was told of ours, its parent; ``open``,
    ``finished`` or ``failed``."""

    points: list[Point] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    parent: str | None = None
    ended: str = "open"


class Theirs(ABC):
    """One log in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def beside(self, run: Tracker) -> MetricsLog:
        """The adapter, as a user makes it."""

    @abstractmethod
    def runs(self) -> dict[str, Seen]:
        """What it has, by what it calls a run."""


class Mlflow(Theirs):
    """A file of SQLite."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from mlflow import MlflowClient

        self.client = MlflowClient(f"sqlite:///{folder}/mlflow.db")

    def beside(self, run: Tracker) -> MetricsLog:
        from datastates.integrations.mlflow import MlflowLog

        return MlflowLog(run, experiment="ours", client=self.client)

    def runs(self) -> dict[str, Seen]:
        found = self.client.search_runs(
            [each.experiment_id for each in self.client.search_experiments()]
        )
        return {run.info.run_id: self._seen(run) for run in found}

    def _seen(self, run: Any) -> Seen:
        points = [
            (point.step, key, point.value)
            for key in run.data.metrics
            for point in self.client.get_metric_history(run.info.run_id, key)
        ]
        told = {key: value for key, value in run.data.tags.items() if key.startswith("datastates.")}
        ended = {"RUNNING": "open", "FINISHED": "finished", "FAILED": "failed"}[run.info.status]
        return Seen(
            sorted(points), told, run.data.params, run.data.tags.get("mlflow.parentRunId"), ended
        )


class Wandb(Theirs):
    """What W&B keeps of offline runs, to be synchronised later: a file a session."""

    def beside(self, run: Tracker) -> MetricsLog:
        from datastates.integrations.wandb import WandbLog

        return WandbLog(run, project="ours", mode="offline", dir=str(self.folder))

    def runs(self) -> dict[str, Seen]:
        import wandb

        wandb.teardown()  # its own process has written everything then
        found: dict[str, Seen] = {}
        for path in sorted(
            (self.folder / "wandb").glob("offline-run-*/run-*.wandb"),
            key=lambda path: path.stat().st_mtime_ns,
        ):
            seen = found.setdefault(path.stem.removeprefix("run-"), Seen())
            seen.ended = "open"
            for record in _records(path):
                _read(record, seen)
        return found


def _records(path: Path) -> list[Any]:
    """Protocol buffers in the log format of LevelDB: blocks of 32 KiB, in them pieces with a
    checksum, a length and their place."""
    from wandb.proto import wandb_internal_pb2

    data, at, found, part = path.read_bytes(), _PIECE.size, [], b""
    assert data.startswith(b":W&B")
    while at + _PIECE.size <= len(data):
        if _BLOCK - at % _BLOCK < _PIECE.size:
            at += _BLOCK - at % _BLOCK
        _, length, place = _PIECE.unpack_from(data, at)
        at += _PIECE.size + length
        part += data[at - length : at]
        if place in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def _read(record: Any, seen: Seen) -> None:
    match record.WhichOneof("record_type"):
        case "history":
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            named = {
                key: value
                for key, value in items.items()
                if key != "step" and not key.startswith(("_", "datastates."))
            }
            seen.points += [(items["step"], key, value) for key, value in named.items()]
        case "config":
            for item in record.config.update:
                value, key = json.loads(item.value_json), item.key or ".".join(item.nested_key)
                if key == "datastates":
                    seen.told |= {
                        f"datastates.{name}": each
                        for name, each in value.items()
                        if name != "parent"
                    }
                    seen.parent = value.get("parent", seen.parent)
                elif key != "_wandb":
                    seen.config[key] = str(value)
        case "summary":
            for item in record.summary.update:
                key = item.key or ".".join(item.nested_key)
                if key == "datastates.head":
                    seen.told[key] = json.loads(item.value_json)
        case "exit":
            seen.ended = "failed" if record.exit.exit_code else "finished"


class Tensorboard(Theirs):
    """Files of events; what TensorBoard shows of them, which leaves out what was purged."""

    def beside(self, run: Tracker) -> MetricsLog:
        from datastates.integrations.tensorboard import TensorboardLog

        return TensorboardLog(run, self.folder)

    def runs(self) -> dict[str, Seen]:
        folders = sorted({path.parent for path in self.folder.rglob("events.out.tfevents.*")})
        return {str(folder.relative_to(self.folder)): self._seen(folder) for folder in folders}

    def _seen(self, folder: Path) -> Seen:
        accumulator: Any = importlib.import_module(
            "tensorboard.backend.event_processing.event_accumulator"
        )

        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        tags: dict[str, list[str]] = events.Tags()
        seen = Seen(
            [
                (each.step, key, each.value)
                for key in tags["scalars"]
                for each in events.Scalars(key)
            ]
        )
        for each in events.Tensors("datastates/text_summary"):
            rows = dict(
                re.findall(
                    r"^\| (\S+) \| (.*) \|$", each.tensor_proto.string_val[0].decode(), re.MULTILINE
                )
            )
            seen.parent = rows.pop("datastates.parent", seen.parent)
            seen.told |= {
                key: value for key, value in rows.items() if key.startswith("datastates.")
            }
            seen.config |= {
                key: value for key, value in rows.items() if not key.startswith("datastates.")
            }
        for each in (
            events.Tensors("datastates.head/text_summary")
            if "datastates.head/text_summary" in tags["tensors"]
            else ()
        ):
            seen.told["datastates.head"], seen.ended = (
                each.tensor_proto.string_val[0].decode(),
                "finished",
            )
        return seen


KINDS: dict[str, Callable[[Path], Theirs]] = {
    "mlflow": Mlflow,
    "wandb": Wandb,
    "tensorboard": Tensorboard,
}
