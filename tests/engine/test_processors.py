"""A user's own processors: which states they see, when, and what becomes of a training when they
are slow, raise, or are interrupted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import (
    BackPressure,
    CapturedState,
    Config,
    Processor,
    Repository,
    Status,
    Tracker,
    Unavailable,
)
from datastates.engine.processors import Processors, ProcessorSwitch
from datastates.errors import Closed, InvalidInput, ProcessorFailed
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from datastates.storage.memory import MemoryTier
from datastates.testing import ProcessorSuite

WIDTH = 1000
"""A float32 matrix of it is copied in the background, and takes one slot."""


@dataclass
class Seen:
    """What a processor was given of one state."""

    uid: str
    step: int
    branch: str | None
    metrics: dict[str, float]
    tree: dict[str, Any]
    thread: str


@dataclass
class Noting(Processor):
    """Keeps what it is given; waits before each state where a test says so; raises for the steps
    of ``bad``."""

    name: str = "noting"
    priority: int = 1000
    bad: tuple[int, ...] = ()
    seen: list[Seen] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    is_waiting: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def process(self, captured: CapturedState) -> None:
        self.is_waiting.set()
        assert self.go_on.wait(60)
        state = captured.state
        self.log.append(f"{self.name} {state.step}")
        if state.step in self.bad:
            raise ArithmeticError(f"step {state.step} is bad")
        self.seen.append(
            Seen(
                state.uid,
                state.step,
                captured.branch,
                state.metrics,
                captured.tree(),
                threading.current_thread().name,
            )
        )

    def close(self) -> None:
        self.log.append(f"{self.name} closed")

    @classmethod
    def running(cls, **options: Any) -> Noting:
        made = cls(**options)
        made.go_on.set()
        return made


class TestNoting(ProcessorSuite):
    @pytest.fixture
    def processor(self) -> Processor:
        return Noting.running()


Opening = Callable[..., Repository]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opening]:
    made: list[Repository] = []

    def open_repository(*processors: Processor, slots: int = 16, **options: Any) -> Repository:
        config = Config(
            memory_bytes=slots * CHUNK_BYTES,
            durable_interval_s=None,
            processors=processors,
            **options,
        )
        made.append(datastates.open(tmp_path / "runs", config=config))
        return made[-1]

    yield open_repository
    for repo in made:
        repo.close()


def begin(repo: Repository, branch: str = "main") -> tuple[Tracker, torch.Tensor]:
    weight = torch.zeros(WIDTH, WIDTH)
    return repo.track(branch=branch, weight=weight, rng=False), weight


def capture(run: Tracker, weight: torch.Tensor) -> datastates.Capture:
    run.fence()
    weight += 1
    return run.capture(metrics={"mean": float(weight.mean())})


# --- which states ---------------------------------------------------------------------------------


def test_a_processor_sees_every_capture_in_order_with_its_facts_and_its_tensors(
    opened: Opening,
) -> None:
    processor = Noting.running()
    with opened(processor) as repo:
        run, weight = begin(repo)
        captures = [capture(run, weight) for _ in range(40)]  # finished in rounds
        run.close()
    assert [(seen.uid, seen.step, seen.branch) for seen in processor.seen] == [
        (each.uid, each.step, "main") for each in captures
    ]
    assert [seen.metrics for seen in processor.seen] == [
        {"mean": float(step)} for step in range(1, 41)
    ]
    assert all(
        torch.equal(seen.tree["weight"], torch.full((WIDTH, WIDTH), float(seen.step)))
        for seen in processor.seen
    )
    assert {seen.thread for seen in processor.seen} == {"datastates-processors"}


def test_a_processor_sees_a_merge(opened: Opening) -> None:
    processor = Noting.running()
    with opened(processor) as repo:
        run, weight = begin(repo)
        first, second = capture(run, weight).wait(), capture(run, weight).wait()
        merged, branched = (
            repo.merge([first, second], only="weight"),
            repo.merge([first, second], only="weight", into="merged"),
        )
    assert [(seen.uid, seen.branch) for seen in processor.seen[2:]] == [
        (merged.uid, None),
        (branched.uid, "merged"),
    ]
    assert torch.equal(processor.seen[2].tree["weight"], torch.full((WIDTH, WIDTH), 1.5))


def test_a_processor_does_not_see_a_clone(opened: Opening, tmp_path: Path) -> None:
    processor = Noting.running()
    with (
        datastates.open(tmp_path / "source", memory_bytes=8 * CHUNK_BYTES) as source,
        opened(processor) as repo,
    ):
        run, weight = begin(source)
        state = capture(run, weight).wait()
        with source.serve("memory://processors") as server, datastates.connect(server.url) as peer:
            peer.clone(state.uid, repo=repo)
        assert repo.state(state.uid).digest == state.digest
    assert processor.seen == []


def test_a_processor_may_ask_the_repository_for_what_was_recorded(opened: Opening) -> None:
    found: list[tuple[str, int]] = []

    class Asking(Processor):
        name = "asking"

        def process(self, captured: CapturedState) -> None:
            found.append((repo.state("main").uid, len(repo.log("main"))))
            repo.tag(f"seen-{captured.state.step}", captured.state)

    with opened(Asking()) as repo:
        run, weight = begin(repo)
        state = capture(run, weight).wait()
        run.close()
    assert found == [(state.uid, 1)]


# --- when -----------------------------------------------------------------------------------------


def test_processors_are_called_by_priority_and_closed_with_the_repository(opened: Opening) -> None:
    late, early = Noting.running(name="late"), Noting.running(name="early", priority=5)
    late.log = early.log
    repo = opened(late, early)
    run, weight = begin(repo)
    for _ in range(2):
        capture(run, weight)
    run.close()
    assert early.log == [
        "early 1",
        "late 1",
        "early 2",
        "late 2",
    ], "a tracker that is closed waits for them"
    repo.close()
    repo.close()
    assert early.log[4:] == ["early closed", "late closed"]


def test_a_repository_that_captures_nothing_starts_no_processor(opened: Opening) -> None:
    processor = Noting.running()
    opened(processor).close()
    assert processor.log == []
    assert "datastates-processors" not in {thread.name for thread in threading.enumerate()}


def test_captures_go_on_while_a_processor_is_slow(opened: Opening) -> None:
    processor = Noting()
    with opened(processor) as repo:
        run, weight = begin(repo)
        captures = [capture(run, weight).wait("durable") for _ in range(8)]
        assert processor.is_waiting.wait(60)
        assert processor.seen == []
        assert run.head == captures[-1], "what asks for the lineage does not wait for processors"
        processor.go_on.set()
        run.close()
    assert [seen.step for seen in processor.seen] == [*range(1, 9)]


def test_what_waits_for_a_slow_processor_keeps_its_memory_and_back_pressure_skips_captures(
    opened: Opening,
) -> None:
    processor = Noting()
    with opened(processor, slots=3, back_pressure=BackPressure.SKIP) as repo:
        run, weight = begin(repo)
        captures = [capture(run, weight) for _ in range(30)]
        taken = [each for each in captures if not each.is_skipped]
        assert 1 <= len(taken) <= 3
        processor.go_on.set()
        run.close()
    assert [seen.uid for seen in processor.seen] == [each.uid for each in taken]
    assert all(float(seen.tree["weight"][0, 0]) == seen.step for seen in processor.seen)


def test_a_capture_waits_for_a_slow_processor_when_memory_is_full(opened: Opening) -> None:
    processor = Noting()
    with opened(processor, slots=2) as repo:
        run, weight = begin(repo)
        capture(run, weight).wait()
        assert processor.is_waiting.wait(60)
        letting_go = threading.Timer(0.5, processor.go_on.set)
        letting_go.start()
        for _ in range(6):
            capture(run, weight)
        run.close()
        letting_go.join()
    assert [seen.step for seen in processor.seen] == [*range(1, 8)]


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_processor_that_raises_loses_no_state_and_its_error_is_said_once_and_kept_by_the_handle(
    opened: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Noting.running(name="bad", priority=1, bad=(1, 2)), Noting.running(name="good")
    with opened(bad, good) as repo:
        run, weight = begin(repo)
        with caplog.at_level(logging.WARNING, "datastates"):
            captures = [capture(run, weight) for _ in range(3)]
            states = [each.wait("durable") for each in captures]
            run.close()
        assert [repo.state(state.uid).status for state in states] == [Status.DURABLE] * 3
    for number, each in enumerate(captures[:2], 1):
        assert isinstance(each.error, ProcessorFailed)
        assert (
            str(each.error)
            == f"processor 'bad' failed on state {each.uid} (step {number}): ArithmeticError('step"
            f" {number} is bad'); the state is kept"
        )
        assert isinstance(each.error.__cause__, ArithmeticError)
        assert each.wait().uid == each.uid
    assert captures[2].error is None
    assert [seen.step for seen in good.seen] == [1, 2, 3]
    (said,) = [
        record.getMessage() for record in caplog.records if "processor" in record.getMessage()
    ]
    assert said.startswith("processor 'bad' failed on state")


class Mute(Exception):
    """What foreign code may raise: an error that cannot be shown."""

    def __repr__(self) -> str:
        raise ArithmeticError


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), Mute()], ids=lambda error: type(error).__name__
)
def test_a_processor_that_ends_its_thread_does_not(opened: Opening, error: BaseException) -> None:
    seen: list[int] = []

    class Evictions(Processor):
        name = "leaving"

        def process(self, captured: CapturedState) -> None:
            seen.append(captured.state.step)
            raise error

        def close(self) -> None:
            raise error

    with opened(Evictions()) as repo:
        run, weight = begin(repo)
        captures = [capture(run, weight) for _ in range(2)]
        run.close()
    assert seen == [1, 2]
    assert all(isinstance(each.error, ProcessorFailed) for each in captures)


def test_an_interrupt_while_a_processor_is_slow_loses_no_state_and_gives_up_what_the_processor_has_not_seen(
    opened: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processor = Noting()
    repo = opened(processor)
    run, weight = begin(repo)
    captures = [capture(run, weight) for _ in range(3)]
    state = captures[-1].wait("durable")
    host = repo.core.runner()
    drain = host.drain

    def interrupted(
        on_wait: Callable[[int], None] | None = None, *, copies_s: float | None = None
    ) -> None:
        def wait_and_raise(pending: int) -> None:
            assert pending == 3
            raise KeyboardInterrupt

        drain(wait_and_raise)

    monkeypatch.setattr(host, "drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.close()
    monkeypatch.undo()
    repo.close()
    processor.go_on.set()
    threads = [thread for thread in threading.enumerate() if thread.name == "datastates-processors"]
    for thread in threads:
        thread.join(60)
    assert processor.log == ["noting 1", "noting closed"]
    assert "3 states were given up before every processor had seen them" in caplog.text
    with opened() as again:
        assert again.state("main") == state


def test_a_captured_state_can_not_be_read_after_its_turn(opened: Opening) -> None:
    kept: list[CapturedState] = []

    class Keeping(Processor):
        name = "keeping"

        def process(self, captured: CapturedState) -> None:
            kept.append(captured)

    with opened(Keeping()) as repo:
        run, weight = begin(repo)
        state = capture(run, weight).wait()
        run.close()
        with pytest.raises(Closed, match="before process returns"):
            kept[0].tree()
    assert kept[0].state.uid == state.uid


def test_of_a_state_that_left_memory_before_it_was_recorded_the_facts_are_left() -> None:
    processor, failed = Noting.running(), list[ProcessorFailed]()
    own = Processors([ProcessorSwitch(processor)], MemoryTier(Arena(CHUNK_BYTES)), lambda: None)
    # no time
    state = datastates.State(
        "a" * 24,
        "",
        7,
        0,
        {},
        {},
        None,
        None,  # type: ignore[arg-type]
        Status.CAPTURED,
        (),
        (),
        None,
        0,
        0,
        0,
    )
    own.put(lambda: state, "main", failed.append)
    own.close()
    own.join()
    assert processor.log == ["noting 7", "noting closed"]
    assert isinstance(failed[0].__cause__, Unavailable)


@pytest.mark.parametrize(
    ("processors", "said"),
    [
        (Noting(), "processors is .*give a list"),
        (
            [Noting],
            r"processors has the class Noting: give an object of it, as processors=\[Noting\(\)\]",
        ),
        ([object()], "give an object with a method process"),
        ([Noting(name="")], "the name of the processor"),
        # what is tested
        ([Noting(priority="first")], "the priority of the processor 'noting'"),  # type: ignore[arg-type]
        ([Noting(), Noting()], "noting, noting: give each a name of its own"),
    ],
)
def test_what_is_no_processor_is_refused(processors: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Config(processors=processors)
