"""torch.distributed.checkpoint and datastates, in turns in one process: the time that each blocks,
and the number of correct states."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from .case import Case, Found, Skip
from .place import Place
from .state import Model, not_late, opened

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError:  # before torch 2.9
    HAS_STAGERS = False
else:
    HAS_STAGERS = True

dcp: Any = torch.distributed.checkpoint  # for type checkers it exports nothing

BUSY_S = 0.02


def cases(place: Place) -> Sequence[Case]:
    """The cases of this part."""
    if not HAS_STAGERS:
        return [Case(name, _skipped) for name in ("blocked", "torn states")]
    return [Case("blocked", _blocked, limit_s=100), Case("torn states", _torn, limit_s=60)]


def _skipped(place: Place) -> Found:
    raise Skip(
        "stagers of torch.distributed.checkpoint came with torch 2.9, and this is"
        f" {torch.__version__}"
    )


class _Saver:
    """Asynchronous saves into two folders alternately. One is in flight at a time, as the
    documentation requires."""

    def __init__(self, folder: Path, options: StagingOptions | None) -> None:
        self._folder, self._count, self._options = folder, 0, options
        self._stager: DefaultStager | None = None
        self._staged: Any = None
        self._saved: Any = None

    def save(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Begin a save, once the last one is done."""
        self.finish()
        self._count += 1
        if self._options is not None and (self._stager is None or not stagers_last()):
            self.close()
            self._stager = DefaultStager(self._options)
        writer = FileSystemWriter(
            folder or self._folder / str(self._count % 2), sync_files=False, overwrite=True
        )
        begun: Any = async_save(
            state, storage_writer=writer, no_dist=True, async_stager=self._stager
        )
        self._saved = getattr(begun, "upload_completion", begun)
        self._staged = getattr(begun, "staging_completion", None)

    def fence(self) -> None:
        """Until the tensors may change, as it is documented."""
        if self._staged is not None:
            self._staged.result()

    def finish(self) -> None:
        """Until the state is written."""
        if self._saved is not None:
            self._saved.result()

    def close(self) -> None:
        self.finish()
        if self._stager is not None:
            self._stager.close()


@cache
def stagers_last() -> bool:
    """Whether a stager can be used for several saves; torch 2.11 empties it after the first."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        for _ in range(2):
            stager.stage({"x": torch.zeros(1)})
    except KeyError:
        return False
    return True


def _options(place: Place) -> dict[str, StagingOptions | None]:
    """The default, and stagers, which are reused if they can be: pinned, and pinned with a separate
    stream if there is a device."""
    pinned = {
        "use_pinned_memory": place.is_accelerator,
        "use_non_blocking_copy": place.is_accelerator,
        "use_shared_memory": False,
    }
    which = "one stager" if stagers_last() else "a stager each"
    found: dict[str, StagingOptions | None] = {
        "default": None,
        which: StagingOptions(use_async_staging=False, **pinned),
    }
    return found | (
        {f"{which}, staging later": StagingOptions(use_async_staging=True, **pinned)}
        if place.is_accelerator
        else {}
    )


def _blocked(place: Place) -> Found:
    """Milliseconds until the call returned, and until the tensors may change."""
    not_late(place)
    model = Model.make(place)
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="datastates-gpu-", dir=_roomy(model.size)) as folder,
        opened(model.size) as repo,
    ):
        savers = {
            name: _Saver(Path(folder) / str(index), options)
            for index, (name, options) in enumerate(_options(place).items())
        }
        with repo.track(**model.objects) as run:

            def ours() -> Callable[[], object]:
                capture = run.capture()
                waiting.append(capture)
                return run.fence

            def theirs(saver: _Saver) -> Callable[[], object]:
                saver.save(
                    {"model": model.model.state_dict(), "optimizer": model.optimizer.state_dict()}
                )
                return saver.fence

            waiting = list[Any]()
            ways: dict[str, Callable[[], Callable[[], object]]] = {"ours": ours}
            # bound now
            ways |= {
                f"dcp {name}": lambda saver=saver: theirs(saver)  # type: ignore[misc]
                for name, saver in savers.items()
            }
            for index in range(2 if place.is_quick else 6):
                for name, way in ways.items():
                    model.optimizer.step()
                    place.finish()
                    start = time.perf_counter()
                    fence = way()
                    blocked = time.perf_counter() - start
                    fence()
                    place.finish()
                    free = time.perf_counter() - start
                    while waiting:
                        waiting.pop().wait(timeout_s=50)
                    for saver in savers.values():
                        saver.finish()
                    if index > (0 if place.is_quick else 2):
                        for figure, seconds in (
                            ("blocked_ms", blocked),
                            ("until it may change_ms", free),
                        ):
                            found.setdefault(f"{name}: {figure}", []).append(1e3 * seconds)
        for saver in savers.values():
            saver.close()
    return {"bytes": model.size, **found}


def _roomy(size: int) -> str | None:
    """A folder for some states in memory, because the disk is not measured."""
    shared = Path("/dev/shm")
    if not shared.exists():
        return None
    return str(shared) if shutil.disk_usage(shared).free > 12 * size else None


def _torn(place: Place) -> Found:
    """A training that runs ahead of a busy device. Each method makes its documented wait before the
    weights change."""
    not_late(place)
    found: Found = {}
    for name, options in _options(place).items():
        found[f"torn_of_dcp_{name.replace(' ', '_').replace(',', '')}"] = _torn_of_dcp(
            place, options
        )
    return {"states": STATES, **found, "torn_of_ours": _torn_of_ours(place)}


STATES = 8


def _weights(place: Place) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"w{index}": torch.randn(512, 512, device=place.device) for index in range(8)}


def _step(place: Place, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Change all tensors after other queued work of the device. Returns their values."""
    place.keep_busy(BUSY_S)
    for weight in weights.values():
        weight.mul_(0.999).add_(1)
    return {name: weight.clone() for name, weight in weights.items()}


def _torn_of_dcp(place: Place, options: StagingOptions | None) -> int:
    weights, expected = _weights(place), []
    with tempfile.TemporaryDirectory(prefix="datastates-gpu-") as name:
        saver = _Saver(Path(name), options)
        for number in range(STATES):
            saver.finish()
            saver.fence()
            expected.append(_step(place, weights))
            saver.save(dict(weights), Path(name) / f"state-{number}")
        saver.close()
        place.finish()
        return sum(
            _differs(_loaded(Path(name) / f"state-{number}"), each)
            for number, each in enumerate(expected)
        )


def _loaded(folder: Path) -> dict[str, Tensor]:
    into = {f"w{index}": torch.empty(512, 512) for index in range(8)}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    return into


def _torn_of_ours(place: Place) -> int:
    weights, expected, captures = _weights(place), [], []
    with opened(8 << 20, states=STATES + 2) as repo, repo.track(weights=weights) as run:
        for _ in range(STATES):
            run.fence()
            expected.append(_step(place, weights))
            captures.append(run.capture())
        place.finish()
        for capture in captures:
            capture.wait(timeout_s=20)
        return sum(
            _differs(repo.load(capture.uid)["weights"], each)
            for capture, each in zip(captures, expected, strict=True)
        )


def _differs(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return any(not torch.equal(found[name], value.cpu()) for name, value in expected.items())
