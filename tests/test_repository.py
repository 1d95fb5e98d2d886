from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, NotFound, OnFailure, Repository, Status, Unavailable
from datastates.errors import InvalidInput
from datastates.lineage.query import grammar, revision
from tests.support.thread_ranks import ThreadGroup, on_threads

SLOT = 4 << 20


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def model_of(width: int, frozen: int) -> nn.Sequential:
    """Square layers of ``width``: one that learns, and ``frozen`` that do not."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(frozen + 1)]
    for layer in layers[1:]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


def test_what_is_loaded_is_writable_and_never_reaches_the_pack(tmp_path: Path) -> None:
    tracked = {"weight": torch.arange(100_000.0)}
    with (
        datastates.open(tmp_path, memory_bytes=4 * SLOT) as repo,
        repo.track(tracked=tracked) as run,
    ):
        run.capture().wait("durable")
    with datastates.open(tmp_path) as repo:
        loaded = repo.load("main")["tracked"]["weight"]
        loaded.zero_()

        assert torch.equal(repo.load("main")["tracked"]["weight"], torch.arange(100_000.0))
        repo.verify("main")


def test_memory_restores_without_the_disk(tmp_path: Path) -> None:
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(tmp_path, memory_bytes=8 * SLOT) as repo,
        repo.track(tracked=tracked) as run,
    ):
        first = run.capture().wait("durable")
        tracked["weight"].add_(1)
        second = run.capture().wait()
        for file in (tmp_path / "packs").glob(f"{first.uid}*"):
            file.unlink()

        assert torch.equal(repo.load(first.uid)["tracked"]["weight"], torch.zeros(1000))
        assert torch.equal(repo.load(second.uid)["tracked"]["weight"], torch.ones(1000))


def test_an_evicted_state_names_the_nearest_that_can_be_restored(tmp_path: Path) -> None:
    tracked = {"weight": torch.zeros(SLOT // 4)}
    with (
        datastates.open(tmp_path, memory_bytes=3 * SLOT) as repo,
        repo.track(tracked=tracked, durable_interval_s=1e9) as run,
    ):
        kept = run.capture().wait("durable")
        captured = []
        for _ in range(6):
            tracked["weight"].add_(1)
            captured.append(run.capture().wait())

        with pytest.raises(Unavailable) as caught:
            repo.load(captured[0].uid)
    assert caught.value.nearest == kept.uid
    with datastates.open(tmp_path) as repo:
        assert repo.state(captured[0].uid).status is Status.EVICTED


def test_what_only_the_memory_of_a_training_holds_names_the_nearest_that_lies_here(
    tmp_path: Path,
) -> None:
    tracked = {"weight": torch.zeros(10)}
    config = Config(durable_interval_s=None)
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(tracked=tracked) as run,
        datastates.open(tmp_path) as other,
    ):
        kept = run.capture().wait("durable")
        run.capture().wait()
        newest = run.capture().wait()

        with pytest.raises(
            Unavailable, match=f"memory of another process, {os.getpid()} on .* {kept.uid[:10]}"
        ) as caught:
            other.load(newest.uid)
        assert caught.value.nearest == kept.uid


def test_fifty_versions_of_a_fine_tuned_model_cost_little_more_than_one(tmp_path: Path) -> None:
    model = model_of(1448, 9)  # about as large as MiniLM; nine tenths stay the same
    learning = next(model.parameters())
    optimizer = torch.optim.SGD([learning], lr=0.1)
    with datastates.open(tmp_path, memory_bytes=200 * SLOT) as repo:
        run = repo.track(model=model, optimizer=optimizer, rng=False, durable_interval_s=1e9)
        states, weights = [], []
        for _ in range(50):
            learning.grad = torch.randn_like(learning)
            optimizer.step()
            weights.append(learning.detach().clone())
            states.append(run.capture().wait())
        held = memory_held(repo)

        assert held <= 7 * states[0].bytes_total
        for state, weight in zip(states, weights, strict=True):
            assert torch.equal(
                repo.load(state.uid, only="model/0.weight")["model"]["0.weight"], weight
            )


def test_of_several_errors_at_the_end_one_is_raised_and_the_others_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def close(self, error: BaseException | None) -> None:
            raise self.error

    repo = datastates.open(tmp_path, memory_bytes=64 << 20)
    same = Unavailable("the lineage is away")
    failing: list[Any] = [Failing(error) for error in (same, same, OSError("no such module"))]
    repo.core.trainings.update(failing)
    with pytest.raises((Unavailable, OSError)) as caught:
        repo.close()
    said = {str(caught.value), *(message.partition(": ")[2] for message in caplog.messages)}
    assert said == {"the lineage is away", "no such module"}
    assert len(caplog.records) == 1


def test_a_write_that_fails_after_its_tracker_ended_is_raised_by_close(tmp_path: Path) -> None:
    written: list[str] = []

    def fail(step: str) -> None:
        written.append(step)
        if written.count("pack-written") > 1:
            raise OSError(errno.EIO, "the disk fails")

    tracked = {"weight": torch.zeros(1000)}
    repo = datastates.open(
        tmp_path,
        config=Config(
            memory_bytes=8 * SLOT, durable_interval_s=None, on_step=fail, on_failure=OnFailure.RAISE
        ),
    )
    with repo.track(tracked=tracked, rng=False) as run:
        first = run.capture().wait()
        tracked["weight"].add_(1)
        run.capture()
    assert repo.state("main").status is Status.DURABLE
    repo.tag("kept", first.uid)
    with pytest.raises(Unavailable, match=rf"state {first.uid} was not written .* the disk fails"):
        repo.close()
    repo.close()


def test_a_folder_that_was_deleted_is_called_gone_and_not_full(tmp_path: Path) -> None:
    tracked = {"weight": torch.zeros(1000)}
    packs = tmp_path / "packs"
    config = Config(memory_bytes=8 * SLOT, durable_interval_s=None, on_failure=OnFailure.RAISE)
    with datastates.open(tmp_path, config=config) as repo, datastates.open(tmp_path) as reader:
        run = repo.track(tracked=tracked)
        first = run.capture().wait("durable")
        packs.rename(tmp_path / "elsewhere")
        second = run.capture()
        with pytest.raises(
            Unavailable, match=rf"state {second.uid} was not written: the folder {packs} is gone"
        ) as caught:
            second.wait("durable")
        assert "make room" not in str(caught.value)
        with pytest.raises(Unavailable, match="is gone"):
            run.capture()
        with pytest.raises(
            Unavailable, match=rf"state {first.uid} cannot be read: the folder {packs} is gone"
        ):
            reader.load(first.uid)
        (tmp_path / "elsewhere").rename(packs)
        assert torch.equal(reader.load(first.uid)["tracked"]["weight"], torch.zeros(1000))


def memory_held(repo: Repository) -> int:
    """The bytes of the arena that are taken."""
    assert repo.core.arena is not None
    return repo.core.arena.capacity - repo.core.arena.available


def test_a_server_keeps_the_lineage_of_local_packs(postgresql_url: str, tmp_path: Path) -> None:
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(postgresql_url, packs=tmp_path, memory_bytes=4 * SLOT) as repo,
        repo.track(tracked=tracked) as run,
    ):
        for _ in range(3):
            tracked["weight"].add_(1)
            run.capture(metrics={"loss": 0.5})
        repo.tag("warm", "main~1")
    with datastates.open(postgresql_url, packs=tmp_path) as repo:
        assert [state.step for state in repo.find("metrics.loss = 0.5 order by step")] == [1, 2, 3]
        assert torch.equal(repo.load("warm")["tracked"]["weight"], torch.full((1000,), 2.0))


def test_ranks_restore_the_state_that_the_branch_had_for_rank_0_though_it_moves(
    tmp_path: Path,
) -> None:
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(tmp_path, memory_bytes=8 * SLOT) as repo,
        repo.track(tracked=tracked) as run,
    ):
        run.capture().wait()
        tracked["weight"].add_(1)
        has_looked = threading.Event()

        class Slow(ThreadGroup):
            """Rank 1 begins once rank 0 has looked the branch up and it has moved."""

            def exchange(self, value: bytes) -> list[bytes]:
                has_looked.set()
                return super().exchange(value)

        def restore(group: ThreadGroup) -> list[float]:
            mine = torch.full((1000,), -1.0)
            if group.rank == 1:
                assert has_looked.wait(30)
                run.capture().wait()
            repo.restore("main", tracked={"weight": mine}, group=Slow(group.hall, group.rank))
            # torch does not say what is in the list
            return mine.unique().tolist()  # type: ignore[no-any-return]

        assert on_threads(2, restore)[0] == [[0.0], [0.0]]


def test_ranks_that_restore_unlike_states_together_all_raise(tmp_path: Path) -> None:
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(tmp_path, memory_bytes=8 * SLOT) as repo,
        repo.track(tracked=tracked) as run,
    ):
        run.capture().wait()
        tracked["weight"].add_(1)
        newest = run.capture().wait()

        def restore(*revs: str) -> list[Any]:
            into = [torch.full((1000,), -1.0) for _ in revs]
            made, _ = on_threads(
                len(revs),
                lambda group: repo.restore(
                    revs[group.rank], tracked={"weight": into[group.rank]}, group=group
                ),
            )
            return [
                each if isinstance(each, Exception) else into[rank].unique().tolist()
                for rank, each in enumerate(made)
            ]

        for refused in restore("main~1", "main"):
            assert isinstance(refused, InvalidInput)
            assert f"and {newest.uid} on rank 1" in str(refused)
        for refused in restore("main", "nowhere"):
            assert isinstance(refused, NotFound)
        assert restore("main", newest.uid, "main") == [[1.0], [1.0], [1.0]]


def test_a_training_that_names_no_state_builds_no_parser(tmp_path: Path) -> None:
    """To build one takes 25 ms, a twentieth of what ``open`` takes in a new process."""
    parsers = (grammar._parser, revision._parser)
    for known in (*parsers, grammar.parse_query, revision._parse):
        known.cache_clear()
    tracked = {"weight": torch.zeros(1000)}
    with (
        datastates.open(tmp_path, memory_bytes=8 * SLOT) as repo,
        repo.track(tracked=tracked) as run,
    ):
        run.capture(metrics={"loss": 1.0}).wait("durable")

        assert [parser.cache_info().currsize for parser in parsers] == [0, 0]
        assert repo.find("branch = main")[0].uid == repo.state("main~0").uid
        assert [parser.cache_info().currsize for parser in parsers] == [1, 1]
