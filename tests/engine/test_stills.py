"""What stays the same on a device is not copied from there, and what does not is: on devices
that do everything late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates.config import Config
from datastates.engine import commit, device_copies
from datastates.engine import copy as crossing
from datastates.engine.commit import Commits
from datastates.engine.copy import DeviceCopies, Stager
from datastates.engine.device_copies import Pairs, beside
from datastates.engine.handle import Capture, Work
from datastates.engine.plan import CopyPlan
from datastates.errors import Corrupt, Torn
from datastates.repository import Repository
from datastates.state.device_digest import Digester
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from tests.support.late import Hazard, LateDevices, Lateness
from tests.support.planting import without

CONFIG = Config(memory_bytes=64 * CHUNK_BYTES, durable_interval_s=None)
FROZEN_BYTES, TRAINED_BYTES = 64 << 10, 16 << 10
WHOLE_BYTES = FROZEN_BYTES + TRAINED_BYTES
KNOWN = 2
"""Captures after which what stays the same is known to."""


class Net(nn.Module):
    """80 KiB, of which the last fifth is trained."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.frozen = nn.Parameter(torch.randn(128, 128, generator=generator), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(64, 64, generator=generator))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (self.trained * self.frozen[:64, :64]).sum().backward()
        optimizer.step()


@pytest.fixture(autouse=True)
def any_number_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operators stand for Triton's kernels."""
    monkeypatch.setattr(device_copies, "_MOST_LAUNCHES", 1 << 30)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy from a device."""
    found, copy = list[int](), crossing.copy

    def counted(pairs: Pairs, *, non_blocking: bool = False) -> None:
        found.append(sum(source.numel() for source in pairs[1]) if non_blocking else 0)
        copy(pairs, non_blocking=non_blocking)

    monkeypatch.setattr(crossing, "copy", counted)
    return found


def train(
    repo: Repository,
    late: LateDevices,
    steps: int,
    change: Callable[[Net, int], None] = lambda model, step: None,
    *,
    after: Callable[[Net, int], None] = lambda model, step: None,
    eager: int = 1 << 30,
    of: Callable[[Net], object] = nn.Module.parameters,
    is_deferring: bool = True,
) -> list[str]:
    """A training whose states hold what they are to hold, or are torn; the paths of what tore.

    The first ``eager`` are waited for."""
    twin, model = Net(), Net()
    late.put(model)
    optimizers = [torch.optim.SGD(list(of(each)), lr=0.1) for each in (model, twin)]  # type: ignore[call-overload]
    expected, captures, torn = [], [], list[str]()
    with (
        late.running(),
        repo.track(model=model, optimizer=optimizers[0], rng=False, defer=is_deferring) as run,
    ):
        for step in range(steps):
            model.step(optimizers[0])
            change(model, step)
            captures.append(run.capture())
            after(model, step)
            if step < eager:
                late.schedule.catch_up()
                captures[-1].wait(timeout_s=30)
                late.schedule.be_late_again()
        late.schedule.catch_up()
    for step in range(steps):
        twin.step(optimizers[1])
        change(twin, step)
        expected.append({name: value.clone() for name, value in twin.state_dict().items()})
        after(twin, step)
    for capture, state in zip(captures, expected, strict=True):
        try:
            found = repo.load(capture.wait(timeout_s=30).uid)["model"]
        except Torn as exc:
            torn += exc.paths
        else:
            assert [
                name for name, value in state.items() if not torch.equal(value, found[name])
            ] == []
    return torn


def trained(model: Net) -> list[nn.Parameter]:
    return [model.trained]


def check_that_frozen_bytes_cross_twice(
    repo: Repository, crossed: list[int], lateness: Lateness, of: Callable[[Net], object]
) -> None:
    assert not train(repo, LateDevices(lateness), KNOWN + 2, of=of)
    assert sum(crossed) == KNOWN * WHOLE_BYTES + 2 * TRAINED_BYTES
    assert TRAINED_BYTES / WHOLE_BYTES <= 0.22


@pytest.mark.parametrize(
    "of", [nn.Module.parameters, trained], ids=["of all parameters", "of the trained ones"]
)
@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_four_fifths_that_are_frozen_cross_twice_and_never_again(
    lateness: Lateness, of: Callable[[Net], object], repo: Repository, crossed: list[int]
) -> None:
    check_that_frozen_bytes_cross_twice(repo, crossed, lateness, of)


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_what_an_optimizer_keeps_of_frozen_parameters_does_not_cross_again_either(
    lateness: Lateness, repo: Repository, crossed: list[int]
) -> None:
    late, model = LateDevices(lateness), Net()
    model.frozen.requires_grad_(True)
    late.put(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with late.running(), repo.track(model=model, optimizer=optimizer, rng=False) as run:
        model.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        model.frozen.requires_grad_(False)
        for _ in range(KNOWN + 2):
            model.step(optimizer)
            lived = [each.clone() for each in (model.frozen, model.trained)]
            lived += [
                optimizer.state[each]["momentum_buffer"].clone()
                for each in (model.frozen, model.trained)
            ]
            capture = run.capture()
            late.schedule.catch_up()
            capture.wait(timeout_s=30)
            late.schedule.be_late_again()
        tree = repo.load(capture.uid)
    found = [tree["model"][name] for name in ("frozen", "trained")]
    found += [tree["optimizer"]["state"][name]["momentum_buffer"] for name in ("frozen", "trained")]
    assert all(map(torch.equal, found, lived))
    assert sum(crossed) == 2 * (KNOWN * WHOLE_BYTES + 2 * TRAINED_BYTES)


def check_that_changes_are_captured(
    repo: Repository, lateness: Lateness, *, is_deferring: bool = True
) -> None:
    """As a target network changes, once in a while."""

    def change(model: Net, step: int) -> None:
        if step == KNOWN + 1:
            model.frozen.data.add_(1.0)

    assert not train(
        repo, LateDevices(lateness, seed=7), KNOWN + 3, change, is_deferring=is_deferring
    )


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_what_is_frozen_and_changes_all_the_same_is_captured_as_it_was(
    lateness: Lateness, repo: Repository, crossed: list[int]
) -> None:
    check_that_changes_are_captured(repo, lateness)
    # those of the one before the change
    assert sum(crossed) == (KNOWN + 3) * WHOLE_BYTES - FROZEN_BYTES


def test_without_deferring_nothing_is_digested_and_all_is_copied(
    repo: Repository, crossed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[device_copies.FrozenChunks]()
    monkeypatch.setattr(device_copies.FrozenChunks, "look", looks.append)
    check_that_changes_are_captured(repo, Lateness.COPIES, is_deferring=False)
    assert sum(crossed) == (KNOWN + 3) * WHOLE_BYTES
    assert not looks


def test_what_changes_each_time_is_looked_at_less_and_less(
    repo: Repository, crossed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = list[bool](), device_copies.FrozenChunks.look

    def counted(self: device_copies.FrozenChunks) -> device_copies.FrozenCheck | None:
        found = look(self)
        looks.append(found is not None)
        return found

    monkeypatch.setattr(device_copies.FrozenChunks, "look", counted)

    def change(model: Net, step: int) -> None:
        if step < 8:
            model.frozen.data.add_(1.0)

    assert not train(repo, LateDevices(Lateness.COPIES), 18, change)
    assert looks[:13] == [True] * 4 + [False] + [True] + [False] * 2 + [True] + [False] * 4
    assert looks[13:] == [True] * 5, "what stays the same is looked at each time"
    assert sum(crossed) == 14 * WHOLE_BYTES + 4 * TRAINED_BYTES


def check_that_what_changes_late_is_right_or_torn(
    repo: Repository, lateness: Lateness
) -> list[str]:
    def change(model: Net, step: int) -> None:
        if step > KNOWN:
            model.frozen.data[:1].add_(step)

    late = LateDevices(lateness)
    late.schedule.patience_s = 0.5  # the copies are later than the change
    return train(repo, late, KNOWN + 3, change, after=change, eager=KNOWN + 1, of=trained)


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_what_changes_between_captures_that_nobody_waits_for_is_right_or_torn(
    lateness: Lateness, repo: Repository
) -> None:
    torn = check_that_what_changes_late_is_right_or_torn(repo, lateness)
    assert {*torn} <= {"model/frozen"}
    assert torn or lateness is not Lateness.COPIES


def check_that_nothing_crosses_ahead(
    repo: Repository, crossed: list[int], lateness: Lateness
) -> None:
    late = LateDevices(lateness)
    late.schedule.patience_s = 0.01
    assert not train(repo, late, KNOWN + 3, eager=KNOWN + 1)
    assert sum(crossed) == KNOWN * WHOLE_BYTES + 3 * TRAINED_BYTES


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_a_training_that_runs_ahead_copies_nothing_that_stays_the_same(
    lateness: Lateness, repo: Repository, crossed: list[int]
) -> None:
    check_that_nothing_crosses_ahead(repo, crossed, lateness)


def check_what_moved(repo: Repository) -> None:
    def change(model: Net, step: int) -> None:
        if step == KNOWN:
            model.frozen.data = model.frozen.data + 1

    assert not train(repo, LateDevices(Lateness.COPIES), KNOWN + 2, change, of=trained)


def test_a_frozen_weight_that_lies_elsewhere_is_read_there(repo: Repository) -> None:
    check_what_moved(repo)


def check_what_memory_lets_go_of(
    repo: Repository, crossed: list[int], *, is_meanwhile: bool
) -> None:
    """All that memory had goes: before the last capture, or ``is_meanwhile``, before that is in
    memory."""
    late, model, process = LateDevices(Lateness.COPIES), Net(), commit.digest
    late.put(model)
    memory = repo.core.engage().memory

    def release() -> None:
        for uid in list(memory.uids()):
            memory.remove(uid)

    def meanwhile(work: Work, arena: Arena) -> None:
        release()
        for chunk in work.known:
            # nothing was copied there
            arena.tensor(work.slots[chunk], work.lengths[chunk]).fill_(255)
        process(work, arena)

    def capture() -> Capture:
        made = run.capture()
        late.schedule.catch_up()
        made.wait(timeout_s=30)
        return made

    with (
        late.running(),
        repo.track(model=model, rng=False) as run,
        pytest.MonkeyPatch.context() as patched,
    ):
        for _ in range(KNOWN + 1):
            capture()
        before = sum(crossed)
        if is_meanwhile:
            patched.setattr(commit, "digest", meanwhile)
        else:
            release()
        found = repo.load(capture().uid)["model"]
    assert sum(crossed) - before == (TRAINED_BYTES if is_meanwhile else WHOLE_BYTES)
    assert all(torch.equal(value, found[name]) for name, value in Net().state_dict().items())


@pytest.mark.parametrize("is_meanwhile", [False, True], ids=["before", "meanwhile"])
def test_what_memory_lets_go_of_is_copied_again_or_held(
    is_meanwhile: bool, repo: Repository, crossed: list[int]
) -> None:
    check_what_memory_lets_go_of(repo, crossed, is_meanwhile=is_meanwhile)


PLANTED: dict[str, tuple[type, str, str, str, Callable[[Repository, list[int]], object]]] = {
    "late copies are left out": (
        *(DeviceCopies, "_cross_changed", "copy(pairs, non_blocking=True)", "pass"),
        lambda repo, crossed: check_that_changes_are_captured(repo, Lateness.COPIES),
    ),
    "the lanes are not waited for": (
        *(DeviceCopies, "_cross", "are_known.synchronize()", "pass"),
        lambda repo, crossed: check_that_nothing_crosses_ahead(repo, crossed, Lateness.COPIES),
    ),
    "chunks are taken for still at once": (
        *(
            device_copies.FrozenChunks,
            "_learn",
            "if self._last.get(chunk) == digest",
            "if chunk not in self._last or digest",
        ),
        lambda repo, crossed: check_that_frozen_bytes_cross_twice(
            repo, crossed, Lateness.COPIES, trained
        ),
    ),
    "what was copied late is not compared": (
        *(
            Stager,
            "_check",
            "torn += [path for path in self._changed(job) if path not in torn]",
            "pass",
        ),
        lambda repo, crossed: check_that_what_changes_late_is_right_or_torn(repo, Lateness.COPIES),
    ),
    "a frozen tensor that moved is read where it was": (
        *(
            CopyPlan,
            "_take_over",
            "source.is_deferred or source.is_still or",
            "source.is_deferred or",
        ),
        lambda repo, crossed: check_what_moved(repo),
    ),
    "memory may let go of what is still": (
        *(Commits, "enter", "work = staged.work =", "self._release(job); work = staged.work ="),
        lambda repo, crossed: check_what_memory_lets_go_of(repo, crossed, is_meanwhile=True),
    ),
    "memory never lets go of what was still": (
        *(Commits, "_release", "self._memory.release(held)", "pass"),
        lambda repo, crossed: check_what_memory_lets_go_of(repo, crossed, is_meanwhile=False),
    ),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_fault_is_noticed(
    planted: tuple[type, str, str, str, Callable[[Repository, list[int]], object]],
    repo: Repository,
    crossed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name, line, instead, check = planted
    without(monkeypatch, owner, name, line, instead)
    with pytest.raises((AssertionError, Corrupt, Hazard, Torn)):
        check(repo, crossed)


@pytest.mark.parametrize("is_wrong", [False, True], ids=["it fails", "it is wrong"])
def test_a_device_that_cannot_digest_is_copied_from_as_ever(
    is_wrong: bool,
    repo: Repository,
    crossed: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lanes = Digester.lanes

    def broken(digester: Digester) -> torch.Tensor:
        if not is_wrong:
            raise RuntimeError("no compiler")
        return lanes(digester) + 1

    monkeypatch.setattr(Digester, "lanes", broken)
    assert not train(repo, LateDevices(Lateness.COPIES), KNOWN + 2)
    assert sum(crossed) == (KNOWN + 2) * WHOLE_BYTES
    assert sum("copied at each capture" in message for message in caplog.messages) == 1


def test_a_capture_without_frozen_parameters_looks_at_nothing(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[object]()
    monkeypatch.setattr(crossing, "beside", lambda *given: looked.append(given))
    monkeypatch.setattr(crossing, "is_within", lambda *given: looked.append(given))
    monkeypatch.setattr(device_copies.FrozenChunks, "look", looked.append)
    model = Net()
    model.frozen.requires_grad_(True)
    late = LateDevices(Lateness.COPIES)
    late.put(model)
    with late.running(), repo.track(model=model, rng=False) as run:
        run.capture()
        late.schedule.catch_up()
    assert not looked


@pytest.mark.parametrize(
    ("chunks", "left"),
    [
        (set(), [(10, 3 * CHUNK_BYTES)]),
        ({0}, [(CHUNK_BYTES, 2 * CHUNK_BYTES + 10)]),
        ({1}, [(10, CHUNK_BYTES - 10), (2 * CHUNK_BYTES, CHUNK_BYTES + 10)]),
        ({2, 3}, [(10, 2 * CHUNK_BYTES - 10)]),
        ({0, 1, 2, 3}, []),
    ],
)
def test_what_lies_beside_chunks_is_left(chunks: set[int], left: list[tuple[int, int]]) -> None:
    flat = (torch.arange(3 * CHUNK_BYTES) // 1000).to(torch.uint8)
    found = [*beside([(10, flat)], frozenset(chunks))]
    assert [(start, data.numel()) for start, data in found] == left
    assert all(
        torch.equal(data, flat[start - 10 : start - 10 + data.numel()]) for start, data in found
    )
