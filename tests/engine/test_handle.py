"""What a capture's handle says and waits for, and what happens when the background fails or the
arena is full."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import datastates
from datastates.config import Config
from datastates.engine import handle
from datastates.engine.copy import CopyJob, DeviceCopies
from datastates.engine.handle import StagedCapture
from datastates.errors import Closed, Conflict, InvalidInput, OverBudget, Unavailable
from datastates.lineage.states import Status
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.testing import fail_at
from datastates.training.tracker import Tracker

from .build import held_back

WEIGHT = 1024  # a whole chunk, so that so many states fit as there are chunks
"""200 x 200 float32: deferred, and one slot a state."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Repository]]:
    """Opens repositories of so many slots that write nothing by time, and closes them."""
    made: list[Repository] = []

    def open_repository(
        slots: int = 8, *, on_step: Callable[[str], None] | None = None
    ) -> Repository:
        config = Config(memory_bytes=slots * CHUNK_BYTES, durable_interval_s=None, on_step=on_step)
        made.append(datastates.open(tmp_path / "runs", config=config))
        return made[-1]

    yield open_repository
    for repo in made:
        repo.close()


def track(
    repo: Repository, **options: object
) -> tuple[Tracker, torch.Tensor, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.randn(WEIGHT, WEIGHT))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    # whatever a test asks for
    run = repo.track(weight=weight, optimizer=optimizer, rng=False, **options)  # type: ignore[arg-type]
    return run, weight, optimizer


class Blocked:
    """An ``on_step`` at which the writer waits until it is let go on."""

    def __init__(self) -> None:
        self.is_waiting, self.go_on = threading.Event(), threading.Event()

    def __call__(self, step: str) -> None:
        self.is_waiting.set()
        assert self.go_on.wait(60)


# --- waiting --------------------------------------------------------------------------------------


def test_a_handle_goes_from_in_flight_to_captured_to_durable(
    opened: Callable[..., Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = track(opened())
    with held_back(monkeypatch) as gate:
        capture = run.capture(metrics={"loss": 2.0})
        assert (capture.status, capture.state, capture.error, capture.is_skipped) == (
            None,
            None,
            None,
            False,
        )
        assert "in flight" in repr(capture)
        with pytest.raises(
            TimeoutError,
            match=(
                rf"state {capture.uid} \(step 1\) is not captured after 0.01 s; it is being copied"
            ),
        ):
            capture.wait(timeout_s=0.01)
        gate.open()
        state = capture.wait()
    assert (state.uid, state.status, state.step, state.metrics) == (
        capture.uid,
        Status.CAPTURED,
        1,
        {"loss": 2.0},
    )
    assert capture.wait("durable", timeout_s=60).status == Status.DURABLE == capture.status
    assert capture.wait("captured") == capture.state
    assert "durable" in repr(capture)


def test_a_handle_can_be_waited_on_by_another_thread(
    opened: Callable[..., Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = track(opened())
    with held_back(monkeypatch) as gate:
        capture = run.capture()
        found: list[str] = []
        waiter = threading.Thread(target=lambda: found.append(capture.wait("durable").uid))
        waiter.start()
        gate.open()
        waiter.join(60)
    assert found == [capture.uid]


@pytest.mark.parametrize("status", ["written", "lost", "evicted", ""])
def test_only_a_status_that_can_come_can_be_waited_for(
    status: str, opened: Callable[..., Repository]
) -> None:
    run, _, _ = track(opened())
    with pytest.raises(
        InvalidInput, match=f"cannot wait for {status!r}: wait for one of captured, durable"
    ):
        run.capture().wait(status)


def test_a_state_that_left_memory_before_it_was_durable_says_so(
    opened: Callable[..., Repository],
) -> None:
    repo = opened(4)
    run, _, optimizer = track(repo)
    captures = []
    for index in range(8):
        captures.append(run.capture())
        captures[-1].wait(timeout_s=60)
        if index == 1:
            repo.branch("side", captures[0].uid)  # main goes on, and names its head only
        optimizer.step()
    gone = [capture for capture in captures if repo.state(capture.uid).status is Status.EVICTED]
    assert gone
    assert not {captures[0], captures[-1]} & set(gone)
    for capture in gone:
        assert capture.wait().status is Status.CAPTURED
        with pytest.raises(
            Unavailable, match=f"state {capture.uid} left memory before it became durable"
        ):
            capture.wait("durable", timeout_s=60)


def test_a_wait_for_what_closing_the_repository_gave_up_ends(
    opened: Callable[..., Repository],
) -> None:
    repo = opened()
    run, _, optimizer = track(repo)
    captures = [run.capture()]
    optimizer.step()
    captures.append(run.capture())
    waiter = threading.Thread(target=lambda: captures[0].wait("captured"))
    waiter.start()
    repo.close()
    waiter.join(60)
    assert captures[1].wait("durable", timeout_s=60).status is Status.DURABLE
    assert captures[0].wait(timeout_s=60).status is Status.CAPTURED
    with pytest.raises(
        Unavailable,
        match=f"state {captures[0].uid} was in memory only when its repository was closed",
    ):
        captures[0].wait("durable", timeout_s=60)


# --- errors of the background ---------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_error_of_the_writer_comes_as_itself_from_the_handle_and_from_the_next_capture_once(
    after: int, opened: Callable[..., Repository]
) -> None:
    steps: list[str] = []
    error = RuntimeError("the disk is on fire")
    probe = opened(on_step=steps.append)
    track(probe)[0].capture().wait("durable", timeout_s=60)
    probe.close()
    run, _, optimizer = track(opened(on_step=fail_at(steps[after], error)), branch="other")
    capture = run.capture()
    with pytest.raises(RuntimeError, match="on fire") as first:
        capture.wait("durable", timeout_s=60)
    assert first.value is error is capture.error
    with pytest.raises(RuntimeError, match="on fire") as second:
        run.capture()
    assert second.value is error
    optimizer.step()
    assert run.capture().wait("durable", timeout_s=60).status is Status.DURABLE


def test_an_error_right_after_a_copy_comes_from_that_handle_and_the_next_capture_is_copied(
    opened: Callable[..., Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, optimizer = track(opened())
    error = RuntimeError("the number did not come")

    def fail(staged: StagedCapture) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(StagedCapture, "settle", fail)
        capture = run.capture()
        with pytest.raises(RuntimeError, match="did not come") as first:
            capture.wait(timeout_s=60)
    assert first.value is error
    with pytest.raises(RuntimeError, match="did not come"):
        run.capture()
    optimizer.step()
    assert run.capture().wait("durable", timeout_s=60).status is Status.DURABLE


def test_an_error_at_the_end_of_a_copy_ends_that_capture_and_not_the_thread_that_copies(
    opened: Callable[..., Repository],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, _, optimizer = track(opened())

    def fail(self: DeviceCopies, job: CopyJob) -> None:
        raise RuntimeError("changed while it was looked at")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceCopies, "end", fail)
        capture = run.capture()
        with pytest.raises(RuntimeError, match="changed while"):
            capture.wait(timeout_s=60)
    assert "the thread that copies goes on" in caplog.text
    with pytest.raises(RuntimeError, match="changed while"):
        run.capture()
    optimizer.step()
    assert run.capture().wait("durable", timeout_s=60).status is Status.DURABLE


def test_an_error_of_the_record_comes_as_itself_and_the_branch_goes_on_from_its_tip(
    opened: Callable[..., Repository],
) -> None:
    run, _, optimizer = track(opened())
    first = run.capture().wait("durable", timeout_s=60)
    optimizer.step()
    second = run.capture().wait("durable", timeout_s=60)
    other = opened()
    other.move("main", first.uid, expected=second.uid)
    capture = run.capture()
    with pytest.raises(Conflict) as lost:
        capture.wait(timeout_s=60)
    assert lost.value is capture.error
    assert type(lost.value).__name__ in repr(capture)
    with pytest.raises(Conflict) as again:
        run.capture()
    assert again.value is lost.value
    other.move("main", second.uid, expected=first.uid)
    assert run.capture().wait(timeout_s=60).parents == (second.uid,)


def test_closing_raises_what_the_last_capture_failed_with(
    opened: Callable[..., Repository],
) -> None:
    run, _, optimizer = track(opened())
    first = run.capture().wait("durable", timeout_s=60)
    optimizer.step()
    second = run.capture().wait("durable", timeout_s=60)
    opened().move("main", first.uid, expected=second.uid)
    run.capture()
    with pytest.raises(Conflict):
        run.close()
    run.close()


# --- back-pressure --------------------------------------------------------------------------------


def test_a_capture_that_waits_for_room_always_gets_it(opened: Callable[..., Repository]) -> None:
    repo = opened(2)
    run, weight, optimizer = track(repo, back_pressure="wait", durable_every=1)
    expected = []
    captures = []
    for _ in range(12):
        expected.append(weight.detach().clone())
        captures.append(run.capture())
        optimizer.step()
    run.close()
    for capture, value in zip(captures, expected, strict=True):
        assert capture.status is Status.DURABLE
        assert torch.equal(repo.load(capture.uid)["weight"], value)


def test_a_capture_that_waits_gets_room_even_if_nothing_was_to_become_durable(
    opened: Callable[..., Repository],
) -> None:
    repo = opened(1)
    run, _, optimizer = track(repo, back_pressure="wait")
    captures = []
    for _ in range(4):
        captures.append(run.capture())
        optimizer.step()
    assert run.head is not None
    assert run.head.uid == captures[-1].uid
    assert [repo.state(capture.uid).status for capture in captures] == [
        Status.DURABLE,
        Status.EVICTED,
        Status.EVICTED,
        Status.CAPTURED,
    ]


def test_a_capture_without_room_is_skipped_and_the_branch_goes_on_without_it(
    opened: Callable[..., Repository],
) -> None:
    blocked = Blocked()
    repo = opened(2, on_step=blocked)
    run, weight, optimizer = track(repo, back_pressure="skip", durable_every=1)
    first = run.capture()
    optimizer.step()
    second = run.capture()
    optimizer.step()
    second.wait()
    assert blocked.is_waiting.wait(60)
    skipped = run.capture()
    assert skipped.is_skipped
    assert "skipped" in repr(skipped)
    with pytest.raises(
        Unavailable, match="the capture of step 3 was skipped: the arena had no room"
    ):
        skipped.wait()
    blocked.go_on.set()
    assert first.wait("durable", 60).step == 1
    assert second.wait("durable", 60).step == 2
    last = run.capture()
    assert last.wait().parents == (second.uid,)
    assert last.wait().step == 4
    assert torch.equal(repo.load(last.uid)["weight"], weight.detach())


def test_drop_oldest_gives_up_the_oldest_write_that_waits(
    opened: Callable[..., Repository],
) -> None:
    blocked = Blocked()
    repo = opened(4, on_step=blocked)
    run, _, optimizer = track(repo, back_pressure="drop-oldest", durable_every=1)
    captures = []
    for _ in range(5):
        captures.append(run.capture())
        captures[-1].wait(timeout_s=60)
        optimizer.step()
    assert blocked.is_waiting.wait(60)
    blocked.go_on.set()
    gone = []
    for capture in captures:
        try:
            capture.wait("durable", timeout_s=60)
        except Unavailable as error:
            gone.append((capture, str(error)))
    ((lost, message),) = gone
    assert lost in captures[1:3]
    assert (
        message == f"state {lost.uid} gave way to newer ones before it was written"
        " (back_pressure='drop-oldest')"
    )
    assert repo.state(lost.uid).status is not Status.DURABLE
    assert [state.step for state in repo.log("main")] == [5, 4, 3, 2, 1]


def test_a_state_that_can_never_fit_is_refused_with_the_budget_it_needs(
    opened: Callable[..., Repository],
) -> None:
    repo = opened(1)
    big = torch.zeros(CHUNK_BYTES + 1, dtype=torch.uint8)
    too_big = repo.track(branch="big", big=big, rng=False)
    with pytest.raises(
        OverBudget,
        match=(
            rf"takes {CHUNK_BYTES + 64} bytes .* has {CHUNK_BYTES}: .* at least {6 * CHUNK_BYTES}"
            r" \(three"
        ),
    ):
        too_big.capture()
    run, _, _ = track(repo)
    assert run.capture().wait(timeout_s=60).step == 1


@pytest.mark.parametrize("status", ["replicated", "external"])
def test_a_status_that_no_tier_gives_is_refused(
    opened: Callable[..., Repository], status: str
) -> None:
    run, _, _ = track(opened(4))
    with pytest.raises(
        InvalidInput,
        match=rf"no tier of this repository makes states {status}: open it with Config\(tiers=",
    ):
        run.capture().wait(status)


def test_a_capture_that_comes_while_the_repository_closes_is_refused_and_the_end_does_not_wait_for_it(
    opened: Callable[..., Repository],
) -> None:
    class Slow:
        """An object whose state is there once the repository has begun to close."""

        is_slow = False

        def state_dict(self) -> dict[str, int]:
            if self.is_slow:
                began.set()
                assert ended.wait(60)
            return {}

        def load_state_dict(self, state: object) -> None:
            pass

    began, ended, errors = threading.Event(), threading.Event(), list[str]()
    repo, slow = opened(4), Slow()
    run = repo.track(branch="slow", weight=torch.zeros(3), slow=slow, rng=False)
    run.capture().wait(timeout_s=60)
    stager = repo.core.runner().stager
    slow.is_slow = True

    def train() -> None:
        try:
            run.capture()
        except Closed as error:
            errors.append(str(error))

    training = threading.Thread(target=train)
    training.start()
    assert began.wait(60)
    close = stager.close

    def closing() -> None:
        close()
        ended.set()
        training.join()

    stager.close = closing  # type: ignore[method-assign]
    repo.close()
    assert errors == ["the repository is closed: open it again to capture"]


def test_whoever_waits_says_so_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "SAY_AGAIN_S", 0.01)
    said: list[str] = []
    waiting = handle.Capture(
        handle.Progress("0" * 24), 1, want=said.append, hurry=lambda: said.append("hurry")
    )
    with pytest.raises(TimeoutError, match=r"is not durable after 0\.5 s; it is being copied"):
        waiting.wait("durable", timeout_s=0.5)
    assert said[:1] == ["0" * 24]
    assert said.count("hurry") > 3
