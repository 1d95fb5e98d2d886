"""The newest states stay on their device as copies: no update waits for them, they are right,
and they are given up first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates.config import Config
from datastates.engine.copy import DeviceCopies, copy
from datastates.engine.device_copies import HOST, Packing, Pairs, Snapshot, Snapshots, packing_of
from datastates.engine.plan import CopyPlan, compile_plan
from datastates.errors import Corrupt, Torn
from datastates.maintenance import loading
from datastates.repository import Repository
from datastates.state.manifest import ALIGNED_BYTES, CHUNK_BYTES
from datastates.state.tree import flatten
from tests.engine.test_late_devices import STEPS, build, live, loaded, plain, step
from tests.engine.test_late_devices import one_processor as one_processor
from tests.engine.test_stills import Net, train
from tests.engine.test_stills import any_number_of_launches as any_number_of_launches
from tests.support.late import Hazard, LateDevices, Lateness
from tests.support.planting import without

STATE_BYTES = 2 << 20
"""About what a state has on its device."""

FIRST = 1
"""The first capture of a plan has no snapshot."""

Open = Callable[[int], Repository]


class Watched(LateDevices):
    """``fences``: which copies to the host a stream of the training waited for."""

    def __init__(self, lateness: Lateness) -> None:
        super().__init__(lateness)
        self.fences = set[Any]()

    @property
    def fenced(self) -> int:
        return len(self.fences)

    def wait(self, stream: Any, mark: Any) -> None:
        if mark.op.stream.is_side and not stream.is_side:
            self.fences.add(mark.op)
        super().wait(stream, mark)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """A repository that keeps so many states on a device."""
    made = list[Repository]()

    def make(states: int) -> Repository:
        config = Config(
            memory_bytes=64 * CHUNK_BYTES,
            durable_interval_s=None,
            device_bytes=states * STATE_BYTES,
        )
        made.append(datastates.open(tmp_path / f"runs-{len(made)}", config=config))
        return made[-1]

    yield make
    for repo in made:
        repo.close()


def check(
    repo: Repository,
    late: LateDevices,
    *,
    is_large: bool = False,
    is_deferring: bool = True,
    before: Callable[[int], None] = lambda number: None,
) -> int:
    """A training that is captured after each step: each state is what it had, and no capture
    waited; how many stayed on the device."""
    (model, optimizer), expected = build(is_large=is_large), plain(is_large=is_large)
    late.put(model)
    with late.running(), repo.track(model=model, optimizer=optimizer, defer=is_deferring) as run:
        captures = []
        for number in range(STEPS):
            step(model, optimizer, number, lambda batch: late.put(batch.clone()))
            before(number)
            waits = late.schedule.waits_of_this_thread()
            captures.append(run.capture())
            assert late.schedule.waits_of_this_thread() == waits, "capture waited for the device"
        late.schedule.catch_up()
        for number, capture in enumerate(captures):
            capture.wait(timeout_s=30)
            found = loaded(repo, capture.uid)
            wrong = [
                path
                for path, value in expected[number].items()
                if not torch.equal(value, found[path])
            ]
            assert not wrong, (
                f"state {number}: {len(wrong)} of {len(found)} tensors are wrong, {wrong[0]} among"
                " them"
            )
    return repo.stats().activity.snapshots


def held(repo: Repository) -> Sequence[Snapshot]:
    host = repo.core.running
    assert host is not None
    return host.snapshots._held


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_no_update_waits_for_what_is_kept_on_the_device(lateness: Lateness, opened: Open) -> None:
    late, alone = Watched(lateness), Watched(lateness)
    is_large = lateness in (Lateness.COPIES, Lateness.BOTH)
    assert check(opened(STEPS * 2), late, is_large=is_large) == STEPS - FIRST
    assert check(opened(0), alone, is_large=is_large) == 0
    assert (late.fenced, alone.fenced) == (FIRST + is_large, STEPS - 1 + STEPS * is_large)


def test_a_tensor_that_is_another_at_each_step_is_packed_anew(opened: Open) -> None:
    late, repo = LateDevices(Lateness.BOTH), opened(STEPS * 2)
    (model, optimizer), expected, captures = build(), [], []
    model.register_buffer("average", torch.zeros(64))
    late.put(model)
    with late.running(), repo.track(model=model, optimizer=optimizer) as run:
        for number in range(STEPS):
            step(model, optimizer, number, lambda batch: late.put(batch.clone()))
            model.average = late.put(torch.full((64,), float(number)))
            captures.append(run.capture())
            expected.append(float(number))
        late.schedule.catch_up()
        stored = [
            repo.load(capture.wait(timeout_s=30).uid)["model"]["average"] for capture in captures
        ]
    assert [float(each.mean()) for each in stored] == expected
    assert repo.stats().activity.snapshots


def test_what_is_not_deferred_is_not_waited_for_either(opened: Open) -> None:
    late = Watched(Lateness.COPIES)
    assert check(opened(STEPS * 2), late, is_deferring=False) == STEPS - FIRST
    assert late.fenced == FIRST


@pytest.mark.parametrize("states", [1, 2])
def test_a_capture_for_which_there_is_no_room_is_fenced(states: int, opened: Open) -> None:
    late = LateDevices(Lateness.COPIES)
    late.schedule.patience_s = 60
    assert check(opened(states), late) == states


PLANTED: dict[str, tuple[Lateness, type, str, str, str]] = {
    "the copies do not wait for it": (
        Lateness.COMPUTE,
        DeviceCopies,
        "_cross",
        "devices().wait(crossing.side, crossing.begun)",
        "pass",
    ),
    "it is written anew while it crosses": (
        Lateness.COPIES,
        Snapshots,
        "_memory_for",
        "not each.is_crossing and",
        "",
    ),
    "it is no copy": (
        *(Lateness.COPIES, DeviceCopies, "_begin_on", "snapshot.written, snapshot.stretches"),
        (
            "snapshot.written, [(source.start, source.flat) for source in"
            " job.plan.routes[device].deferred]"
        ),
    ),
    "the host does not wait for the copies": (
        Lateness.COPIES,
        DeviceCopies,
        "finish",
        "crossing.arrived.synchronize()",
        "pass",
    ),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_wait_that_is_taken_out_is_noticed(
    planted: tuple[Lateness, type, str, str, str], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    lateness, owner, name, line, instead = planted
    without(monkeypatch, owner, name, line, instead)
    late = LateDevices(lateness)
    late.schedule.patience_s = 5
    with pytest.raises((AssertionError, Torn, Corrupt, Hazard)):
        check(opened(1), late)


@pytest.mark.parametrize("is_held", [True, False])
def test_memory_that_is_given_up_is_held_until_it_has_crossed(
    is_held: bool, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, repo = LateDevices(Lateness.COPIES), opened(STEPS)
    late.schedule.patience_s = 5
    if not is_held:
        without(monkeypatch, DeviceCopies, "_cross", "crossing.held += pairs[1]", "pass")

    def give_up(number: int) -> None:
        if number == 2:
            late.memories = replace(late.memories, failures=1)

    if is_held:
        check(repo, late, before=give_up)
        return
    with pytest.raises((AssertionError, Torn, Corrupt, Hazard)):
        check(repo, late, before=give_up)


TROUBLES: dict[str, Callable[[LateDevices], None]] = {
    "the allocator tried again": lambda late: setattr(
        late, "memories", replace(late.memories, failures=1)
    ),
    "a step took more": lambda late: setattr(
        late, "memories", replace(late.memories, peak=late.memories.total - 1)
    ),
    "another process took it": lambda late: setattr(
        late, "memories", replace(late.memories, reach=1 << 20)
    ),
    "there is none for one more": lambda late: setattr(late, "most_bytes", 1 << 20),
    "nobody counts it": lambda late: setattr(late, "memory", _unknown),
}


def _unknown(device: torch.device) -> Any:
    raise RuntimeError("this allocator does not count")


@pytest.mark.parametrize("number", range(1, STEPS))
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_all_are_given_up_first_where_memory_runs_short(
    trouble: Callable[[LateDevices], None],
    number: int,
    opened: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    late, repo = LateDevices(Lateness.COPIES), opened(STEPS)
    assert (
        check(repo, late, before=lambda now: trouble(late) if now == number else None)
        == number - FIRST
    )
    assert not held(repo)
    assert sum("kept on" in message for message in caplog.messages) == 1


def test_what_the_training_took_beside_snapshots_is_what_it_needs(opened: Open) -> None:
    late, repo = LateDevices(Lateness.COPIES), opened(STEPS)
    total = late.memories.total

    def use(number: int) -> None:
        most = total - total // 8 - 3 * STATE_BYTES  # what the training takes
        late.memories = replace(
            late.memories, peak=most + sum(each.memory.numel() for each in held(repo))
        )

    assert check(repo, late, before=use) == STEPS - FIRST


def test_a_plan_that_is_new_begins_without_those_of_the_one_before(opened: Open) -> None:
    late, repo = LateDevices(Lateness.BOTH), opened(STEPS)
    weight = late.put(torch.ones(300, 300))
    objects: dict[str, Any] = {"weight": weight, "others": []}
    with late.running(), repo.track(**objects) as run:
        for _ in range(3):
            run.capture()
        assert len(held(repo)) == 2
        objects["others"].append(late.put(torch.ones(200, 200)))
        run.capture()
        assert not held(repo), "who knows what the next step takes"
        run.capture()
        assert len(held(repo)) == 1
        late.schedule.catch_up()
    assert not held(repo), "the training is over"


def test_a_budget_below_one_state_is_said_once(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    late = LateDevices(Lateness.COPIES)
    late.memories = replace(late.memories, total=1 << 20, reach=1 << 20)
    assert check(opened(1), late) == 0
    assert sum("no state is kept on cuda:0" in message for message in caplog.messages) == 1


def test_a_training_on_the_cpu_reaches_no_device_for_them(opened: Open) -> None:
    late, repo = LateDevices(Lateness.COPIES), opened(4)
    with late.running(), repo.track(weight=torch.ones(300, 300)) as run:
        for _ in range(3):
            run.capture()
    assert not late.reached
    assert not repo.stats().activity.snapshots


def test_what_the_host_has_is_fenced_as_ever(opened: Open) -> None:
    late, repo = LateDevices(Lateness.COPIES), opened(4)
    model = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])
    late.put(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with late.running(), repo.track(model=model, optimizer=optimizer) as run:
        expected, captures = [], []
        for _ in range(STEPS):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            expected.append({name: value.clone() for name, value in model.state_dict().items()})
            captures.append(run.capture())
        late.schedule.catch_up()
        for capture, state in zip(captures, expected, strict=True):
            found = repo.load(capture.wait(timeout_s=30).uid)["model"]
            assert all(torch.equal(value, found[name]) for name, value in state.items())
    assert repo.stats().activity.snapshots == STEPS - FIRST


def test_an_edit_by_hand_after_the_capture_tears_nothing(opened: Open) -> None:
    late, repo = LateDevices(Lateness.BOTH), opened(4)
    weight = nn.Parameter(torch.zeros(300, 300))
    late.put(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with late.running(), repo.track(weight=weight, optimizer=optimizer) as run:
        run.capture()
        run.fence()
        captures = []
        for _ in range(3):
            with torch.no_grad():
                weight.add_(1)
            captures.append(run.capture())
        late.schedule.catch_up()
        for number, capture in enumerate(captures, 1):
            assert bool((repo.load(capture.wait(timeout_s=30).uid)["weight"] == number).all())


@pytest.mark.parametrize(
    "lateness", [Lateness.COPIES, Lateness.COMPUTE], ids=lambda each: each.value
)
@pytest.mark.parametrize("is_deferring", [True, False], ids=["deferred", "at once"])
def test_still_chunks_are_held_and_those_that_changed_after_all_are_right(
    is_deferring: bool, lateness: Lateness, opened: Open
) -> None:
    def change(model: Net, number: int) -> None:
        if number == 4:
            model.frozen.data.add_(1)

    def later(model: Net, number: int) -> None:
        if number == 4:
            model.frozen.data.add_(1)

    repo = opened(4)
    assert (
        train(
            repo, LateDevices(lateness), 7, change, after=later, eager=4, is_deferring=is_deferring
        )
        == []
    )
    assert repo.stats().activity.snapshots == 6


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each restore copied on a device."""
    found = list[int]()

    def counted(pairs: Pairs) -> None:
        found.append(len(pairs[0]))
        copy(pairs)

    monkeypatch.setattr(loading, "copy", counted)
    return found


def guarded(
    repo: Repository, late: LateDevices, *, is_waiting: bool
) -> tuple[list[tuple[int, int]], dict[str, torch.Tensor]]:
    """A training with a loss that is NaN once: its rewinds, and what it has in the end."""
    model, optimizer = build()
    late.put(model)
    with late.running(), repo.track(model=model, optimizer=optimizer) as run:
        watched = run.guard()
        for number in range(9):
            loss = step(model, optimizer, number, lambda batch: late.put(batch.clone())).item()
            if not watched.rewound(math.nan if number == 6 else loss):
                capture = run.capture()
                if is_waiting:
                    capture.wait(timeout_s=30)
        late.schedule.catch_up()
        return [(rewind.step, rewind.good.step) for rewind in watched.rewinds], live(
            model, optimizer
        )


@pytest.mark.parametrize(
    "lateness", [Lateness.COPIES, Lateness.COMPUTE], ids=lambda each: each.value
)
@pytest.mark.parametrize("states", [2, 12])
def test_a_guard_goes_back_to_the_device_as_it_does_to_memory(
    states: int, lateness: Lateness, opened: Open, copied: list[int]
) -> None:
    expected = guarded(opened(0), LateDevices(lateness), is_waiting=False)
    assert copied == []
    found = guarded(opened(states), LateDevices(lateness), is_waiting=states == 2)
    assert found[0] == expected[0] == [(7, 5)]
    assert all(torch.equal(value, found[1][path]) for path, value in expected[1].items())
    assert copied == [
        len([path for path in found[1] if not path.endswith(("/step", "num_batches_tracked"))]) + 1
    ], "and what batch norm counts"


def test_a_state_with_nan_is_seen_on_the_device(opened: Open) -> None:
    late, repo = LateDevices(Lateness.BOTH), opened(4)
    weight = late.put(torch.ones(300, 300))
    model = nn.ParameterDict({"weight": nn.Parameter(weight)})
    late.put(model)
    with late.running(), repo.track(model=model) as run:
        watched = run.guard()
        for number in range(1, 8):
            with torch.no_grad():
                model["weight"].fill_(math.nan if number == 4 else number)
            if not watched.rewound(math.nan if number == 6 else 1.0):
                run.capture()
        late.schedule.catch_up()
        assert [rewind.good.step for rewind in watched.rewinds] == [3], (
            "the state of step 4 is good by its loss, and holds NaN"
        )


@pytest.mark.parametrize("is_planted", [False, True], ids=["as it is", "its stream does not wait"])
def test_a_restore_on_another_stream_has_read_before_the_memory_is_written_anew(
    is_planted: bool, opened: Open, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    late, repo = LateDevices(Lateness.COPIES), opened(1)
    if is_planted:
        without(
            monkeypatch,
            Snapshots,
            "reading",
            "devices().wait(each.stream, reading)",
        )
    weight, other = late.put(torch.zeros(700, 700)), late.put(torch.zeros(700, 700))
    with late.running(), repo.track(weight=weight) as run:
        for number in range(3):
            weight.fill_(number)
            run.capture().wait(timeout_s=30)
        late.schedule.patience_s = 60
        with late.on(late.stream(torch.device("cuda", 0))):
            repo.restore("main", weight=other)
        assert copied == [1]
        weight.fill_(3)
        run.capture()
        late.schedule.catch_up()
        assert bool((other == 2).all()) is not is_planted


@pytest.mark.parametrize("is_planted", [False, True], ids=["as it is", "it does not wait"])
def test_an_update_on_another_stream_comes_after_the_copy(
    is_planted: bool, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, repo = LateDevices(Lateness.COMPUTE), opened(4)
    if is_planted:
        without(
            monkeypatch,
            DeviceCopies,
            "fence",
            "behind: Mark | None = crossing.begun",
            "behind: Mark | None = None",
        )
    weight = nn.Parameter(torch.zeros(300, 300))
    late.put(weight)
    with (
        late.running(),
        repo.track(weight=weight, optimizer=torch.optim.SGD([weight], lr=1.0)) as run,
    ):
        run.capture().wait(timeout_s=30)
        late.schedule.patience_s = 60
        capture = run.capture()
        with torch.no_grad(), late.on(late.stream(torch.device("cuda", 0))):
            run.fence()
            weight.add_(1)
        late.schedule.catch_up()
        capture.wait(timeout_s=30)
        assert bool((repo.load(capture.uid)["weight"] == 0).all()) is not is_planted


def test_a_state_is_found_by_what_it_is_and_not_by_its_name_alone(opened: Open) -> None:
    late, repo = LateDevices(Lateness.BOTH), opened(4)
    with late.running(), repo.track(weight=late.put(torch.ones(300, 300))) as run:
        run.capture()
        capture = run.capture()
        late.schedule.catch_up()
        state, host = capture.wait(timeout_s=30), repo.core.running
        assert host is not None
        with host.snapshots.reading(state.uid, state.digest) as found:
            assert len(found) == 1
        with host.snapshots.reading(state.uid, "0" * 64) as found:
            assert not found


@pytest.mark.parametrize("only", [None, "weight"])
def test_what_lies_elsewhere_is_restored_from_memory(
    only: str | None, opened: Open, copied: list[int]
) -> None:
    late, repo = LateDevices(Lateness.BOTH), opened(4)
    weight, there, here = (
        late.put(torch.ones(300, 300)),
        late.put(torch.zeros(300, 300), 1),
        torch.zeros(300, 300),
    )
    with late.running(), repo.track(weight=weight) as run:
        run.capture()
        run.capture()
        late.schedule.catch_up()
        for into in (there, here):
            repo.restore("main", weight=into, only=only)
        late.schedule.catch_up()
        assert bool((there == 1).all())
        assert bool((here == 1).all())
        assert copied == []
        repo.restore("main", weight=weight.zero_(), only=only)
        late.schedule.catch_up()
        assert bool((weight == 1).all())
        assert copied == [1]


def filled(plan: CopyPlan) -> Snapshot:
    packing = packing_of(plan.routes[HOST], plan.gaps)
    parts = [
        torch.zeros(part, dtype=packing.word) if isinstance(part, int) else part
        for part in packing.parts
    ]
    marked: Any = None
    return Snapshot("", packing, torch.cat(parts).view(torch.uint8), marked, marked)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_snapshot_has_each_tensor_as_far_into_a_kib_as_the_stream(is_mixed: bool) -> None:
    sizes = [
        (20_000, torch.float32),
        (3, torch.float64),
        (100_001, torch.uint8),
        (1_500_000, torch.float32),
        (70_001, torch.uint8),
        (5, torch.int8),
    ]
    tensors = [torch.randint(0, 100, (size,)).to(dtype) for size, dtype in sizes]
    frozen = {id(tensors[2]), id(tensors[4])}
    plan = compile_plan(flatten({"tensors": tensors}), frozen=frozen)
    if is_mixed:
        plan.routes[HOST] = replace(
            plan.routes[HOST],
            large=tuple(each for each in plan.routes[HOST].large if each.flat.numel() != 100_001),
        )
    snapshot = filled(plan)
    assert snapshot.memory.numel() == snapshot.packing.size
    for source in plan.sources:
        piece = snapshot.piece(source.start, source.flat.numel())
        if is_mixed and source.flat.numel() == 100_001:
            assert piece is None
            continue
        assert piece is not None
        assert torch.equal(piece, source.flat)
        assert piece.storage_offset() % ALIGNED_BYTES == source.start % ALIGNED_BYTES
    assert snapshot.piece(0, 1 << 40) is None
    assert [start for start, _, _ in snapshot.packing.stretches] == sorted(
        {start for start, _ in snapshot.stretches}
    )
    covered = sum(data.numel() for _, data in snapshot.stretches)
    assert covered - sum(each.flat.numel() for each in plan.sources) < len(sizes) * ALIGNED_BYTES


def test_packing_of_nothing_is_nothing() -> None:
    assert packing_of(compile_plan(flatten({"a": torch.empty(0)})).routes[HOST], []) == Packing(
        (), torch.int64, (), 0
    )


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (
            [torch.zeros(4096, dtype=torch.float64), torch.zeros(2, dtype=torch.float32)],
            torch.int64,
        ),
        ([torch.zeros(20_000), torch.zeros(()), torch.zeros(20_000)[1:]], torch.int32),
        ([torch.zeros(20_000), torch.zeros(20_000, dtype=torch.int16)[1:]], torch.int16),
        ([torch.zeros(20_000), torch.zeros(3, dtype=torch.bool)], torch.uint8),
        ([torch.zeros(20_000, dtype=torch.uint8)[1:4097]], torch.uint8),
    ],
    ids=lambda each: "" if isinstance(each, list) else str(each),
)
def test_what_is_packed_is_joined_by_the_widest_words_that_it_consists_of(
    tensors: list[torch.Tensor], word: torch.dtype
) -> None:
    plan = compile_plan(flatten({"tensors": tensors}))
    packing = packing_of(plan.routes[HOST], plan.gaps)
    assert packing.word == word
    assert all(isinstance(part, int) or part.dtype == word for part in packing.parts)
    assert (
        sum(part if isinstance(part, int) else part.numel() for part in packing.parts)
        * word.itemsize
        == packing.size
    )
