"""The same captures from a GPU: pinned slots, copies on a side stream, and a fence that stops
the stream and not the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates.config import Config
from datastates.engine.copy import CopyJob, Stager
from datastates.engine.handle import Capture
from datastates.engine.plan import compile_plan
from datastates.errors import Torn
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.state.tree import flatten
from datastates.storage.arena import Arena, DeviceRegistrar

from .build import copied, differing, live
from .optimizers import Net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

BUSY_CYCLES = 1_000_000_000
"""About half a second of a GPU that does nothing else."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(16 * CHUNK_BYTES)
    made.pin(DeviceRegistrar(torch.device("cuda")))
    yield made
    made.close()


@pytest.fixture
def stager(arena: Arena) -> Iterator[Stager]:
    made = Stager(arena)
    yield made
    made.close()


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=32 * CHUNK_BYTES, durable_interval_s=None)
    ) as opened:
        yield opened


def begin(arena: Arena, stager: Stager, *sources: torch.Tensor) -> tuple[CopyJob, threading.Event]:
    plan = compile_plan(flatten(list(sources)), fenced={id(source) for source in sources})
    slots = arena.acquire(plan.layout.chunk_lengths)
    assert slots is not None
    done = threading.Event()
    job = CopyJob(plan, slots, on_done=lambda _: done.set())
    stager.begin(job)
    return job, done


def check(repo: Repository, captures: list[Capture], expected: list[dict[str, object]]) -> None:
    for capture, value in zip(captures, expected, strict=True):
        capture.wait(timeout_s=60)
        on_host = {
            path: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
            for path, leaf in value.items()
        }
        assert differing(on_host, repo.load(capture.uid)) == []


def test_slots_are_pinned(arena: Arena) -> None:
    slots = arena.acquire([CHUNK_BYTES, 100])
    assert slots is not None
    arena.register()
    assert all(arena.tensor(slot).is_pinned() for slot in slots)


def test_deferred_and_eager_tensors_of_both_devices_come_back(arena: Arena, stager: Stager) -> None:
    sources = [
        torch.randn(1_500_000, device="cuda"),
        torch.randn(7, device="cuda", dtype=torch.bfloat16),
        torch.randn(300, 300),
        torch.randn(3),
        torch.randn(400, 500, device="cuda").t(),
        torch.randn(50, 60, device="cuda")[::2],
    ]
    plan = compile_plan(flatten(sources), fenced={id(sources[0]), id(sources[2]), id(sources[4])})
    for source, back in zip(sources, copied(plan, arena, stager), strict=True):
        assert torch.equal(source.cpu(), back)
        torch.cuda.synchronize()


def test_neither_capture_nor_fence_blocks_the_host_and_what_was_live_is_copied(
    arena: Arena, stager: Stager
) -> None:
    source = torch.randn(2_000_000, device="cuda")
    expected = source.cpu()
    begin(arena, stager, source)[1].wait(60)  # streams and pinned memory are made once
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    job, done = begin(arena, stager, source)
    stager.fence(job)
    # enqueued behind the copy, while the copy has not even begun; the version says "changed" at
    # once
    source.add_(1)
    assert not job.is_copied.is_set()
    assert not done.is_set()
    assert done.wait(60)
    assert job.error is None
    chunks = [
        arena.tensor(slot)[:length]
        for slot, length in zip(job.slots, job.plan.layout.chunk_lengths, strict=True)
    ]
    assert torch.equal(torch.cat(chunks).view(torch.float32), expected)
    assert torch.equal(source.cpu(), expected + 1)


@pytest.mark.parametrize("is_data", [True, False], ids=["sample", "version"])
def test_an_edit_without_a_fence_is_seen(is_data: bool, arena: Arena, stager: Stager) -> None:
    source = torch.randn(2_000_000, device="cuda")
    begin(arena, stager, source)[1].wait(60)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY_CYCLES)
        job, done = begin(arena, stager, source)
    if is_data:
        torch.cuda.synchronize()
        done.wait(60)
        assert job.error is None
        copied_slots = arena.tensor(job.slots[0])
        copied_slots.zero_()  # as an edit before the copy would have left it
        assert job.armed is not None
        assert job.plan.tripwire.tripped(job.armed, job.armed.versions, job.slots, arena.flat)
    else:
        source.add_(1)
        assert done.wait(60)
        assert isinstance(job.error, Torn)


@pytest.mark.parametrize(
    "form", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}], ids=str
)
def test_a_training_on_a_gpu_that_runs_ahead_is_captured_as_it_was(
    form: dict[str, bool], repo: Repository
) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **form)  # type: ignore[arg-type]  # bools
    expected: list[dict[str, object]] = []
    with repo.track(model=model, optimizer=optimizer) as run:
        captures = []
        for _ in range(30):
            (model(torch.randn(16, 128, device="cuda")) ** 2).mean().backward()
            optimizer.step()
            expected.append(live(model, {"optimizer": optimizer}))
            captures.append(run.capture())
        check(repo, captures[-8:], expected[-8:])
    twin = Net().cuda()
    repo.restore("main", model=twin)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


def test_capture_synchronises_with_no_device(repo: Repository) -> None:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with repo.track(model=model, optimizer=optimizer) as run:
        for number in range(5):
            loss = (model(torch.randn(16, 128, device="cuda")) ** 2).mean()
            loss.backward()
            optimizer.step()
            # pinned memory and streams are made once
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            try:
                capture = run.capture(metrics={"loss": loss})
            finally:
                torch.cuda.set_sync_debug_mode("default")
            capture.wait(timeout_s=60)
            assert repo.state(capture.uid).metrics == {"loss": pytest.approx(loss.item())}


def test_a_recorded_step_that_is_replayed_behind_a_fence_is_captured_as_it_was(
    repo: Repository,
) -> None:
    torch.manual_seed(0)
    model, batch = Net().cuda(), torch.randn(16, 128, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    expected, captures = list[dict[str, object]](), list[Capture]()

    def update() -> None:
        optimizer.zero_grad()
        (model(batch) ** 2).mean().backward()
        optimizer.step()

    with repo.track(model=model, optimizer=optimizer) as run:
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for _ in range(3):
                update()
        torch.cuda.current_stream().wait_stream(warm)
        run.capture()  # its copies go on while the graph is recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            update()
        for _ in range(20):
            batch.normal_()
            run.fence()
            graph.replay()
            expected.append(live(model, {"optimizer": optimizer}))
            captures.append(run.capture())
        check(repo, captures[-8:], expected[-8:])


@pytest.mark.long
def test_a_compiled_step_is_captured_as_it_was(repo: Repository) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    forward, step = (
        torch.compile(model, mode="reduce-overhead"),
        torch.compile(optimizer.step, mode="reduce-overhead"),
    )
    expected, captures = list[dict[str, object]](), list[Capture]()
    with repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(20):
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            (forward(torch.randn(16, 128, device="cuda")) ** 2).mean().backward()
            step()
            expected.append(live(model, {"optimizer": optimizer}))
            captures.append(run.capture())
        check(repo, captures[-8:], expected[-8:])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device on this machine")
def test_a_model_on_two_devices_is_captured_as_it_was(repo: Repository) -> None:
    model = nn.ModuleList([nn.Linear(512, 512, device=f"cuda:{index}") for index in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(10):
            for layer in model:
                layer(torch.randn(4, 512, device=next(layer.parameters()).device)).sum().backward()
            expected = {
                path: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
                for path, leaf in live(model, {}).items()
            }
            capture = run.capture()
            optimizer.step()
            capture.wait(timeout_s=60)
            assert differing(expected, repo.load(capture.uid)) == []
