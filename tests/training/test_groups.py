"""Several ranks track one training together: what they agree about at ``track``, and what
becomes of one that disagrees, fails or dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.errors import DatastatesError, InvalidInput, Unavailable, Unsupported
from datastates.ranks import SoloGroup
from datastates.training import collective
from datastates.training.collective import using
from tests.support.jobs import Kind, Say, job, need_mpi, run

HERE = "tests.training.test_groups"


def model_of(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(64, 64)


def rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))


class Stubborn:
    """Cannot be put back on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.zeros(3)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if rank() == 1:
            raise RuntimeError("rank 1 will not have it")


def try_each(call: Callable[..., object], tries: Mapping[str, Mapping[str, Any]], say: Say) -> None:
    """Call it with each of these arguments, and say which error that raises."""
    for name, given in tries.items():
        try:
            call(**given)
            say(name, "no error")
        except DatastatesError as exc:
            say(name, type(exc).__name__, str(exc))


def disagreements(folder: str, say: Say) -> None:
    """Each of these is refused on every rank; then the same repository is tracked as it should
    be."""
    me, model = rank(), model_of()
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        tries: dict[str, dict[str, Any]] = {
            "branch": {"branch": f"b{me}", "model": model},
            "names": {"model": model, **({"extra": torch.zeros(1)} if me else {})},
            "shapes": {"model": torch.nn.Linear(3, 3 + me)},
            "start": {"branch": "new", "start": "nowhere", "model": model},
            "objects": {"model": object() if me else model},
            "replicas": {"model": model_of(me)},
            "reduce": {"model": model, "reduce": "max" if me else "mean"},
        }
        try_each(repo.track, tries, say)
        with repo.track(model=model) as run, pytest.raises(Unsupported, match=r"run\.guard"):
            run.guard()
        with repo.track(branch="unlike", model=model_of(me), check=None) as run:
            say("unlike", [(found.path, found.ranks) for found in run.check_replicas()])
        say("at last", run.group.rank, run.group.size)


def test_ranks_that_disagree_all_raise_and_none_waits(tmp_path: Path) -> None:
    first, second = run(2, f"{HERE}:disagreements", folder=str(tmp_path))
    refused = [
        "branch InvalidInput",
        "names InvalidInput",
        "shapes InvalidInput",
        "start NotFound",
        "objects Unsupported",
    ]
    assert [" ".join(line.split()[:2]) for line in first] == [
        *refused,
        "replicas InvalidInput",
        "reduce InvalidInput",
        "unlike [('model/bias',",
        "at last",
    ]
    assert [line.split()[:2] for line in second] == [line.split()[:2] for line in first]
    assert "branch is b0 on rank 0 and b1 on rank 1" in first[0]
    assert first[0] == second[0]
    assert "model/bias (rank 1), model/weight (rank 1)" in first[5]
    assert "rank 1 of 2 could not" in first[4]
    assert "rank 1" not in second[4]  # its own error is raised as itself


def in_one_story(folder: str, say: Say) -> None:
    """Capture, go back, fork, resume; with errors of one rank between."""
    stubborn = Stubborn()
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        model = model_of()
        with repo.track(
            model=model, stubborn=stubborn, rng=False, reduce={"loss": "mean"}, durable_every=1
        ) as run:
            for number in range(4):
                with torch.no_grad():
                    model.weight.fill_(number)
                newest = run.capture(metrics={"loss": number + run.group.rank})
            say(
                "captured",
                newest.uid,
                newest.wait("durable").metrics["loss"],
                newest.wait().world_size,
            )
            for rev in ("main~1", "nowhere"):
                try:
                    run.restore(rev, only="model" if rev == "main~1" else None)
                    say("restored", float(model.weight[0, 0]), run.head and run.head.step)
                except DatastatesError as exc:
                    say("not restored", type(exc).__name__)
            try:
                run.restore("main")
                say("restored all")
            except (DatastatesError, RuntimeError) as exc:
                say("not restored", type(exc).__name__, "rank 1" in str(exc))
            with torch.no_grad():
                model.weight.fill_(9.0)
            say("again", run.capture().wait("durable").step)
        with repo.track(
            branch="fork", start="main", only="model", model=model_of(1), rng=False
        ) as run:
            say("forked", run.resumed_from and run.resumed_from.step, run.capture().wait().step)
        model = model_of(2)
        with repo.track(branch="fork", model=model, rng=False) as run:
            say("resumed", float(model.weight[0, 0]), run.step)
        say("runs", [(found.branch, found.config["datastates.ranks"]) for found in repo.runs()])
        say("refs", [ref.name for ref in repo.refs()])


def test_ranks_capture_go_back_fork_and_resume_as_one(tmp_path: Path) -> None:
    first, second = run(2, f"{HERE}:in_one_story", folder=str(tmp_path))
    assert first[0].split()[0] == "captured"
    assert first[0].split()[2:] == ["3.5", "2"]
    told = ["restored 2.0 3", "not restored NotFound"]
    assert first[1:3] == told
    assert first[4:] == [
        "again 4",
        "forked 4 5",
        "resumed 9.0 5",
        "runs [('fork', 2), ('fork', 2), ('main', 2)]",
        "refs ['fork', 'main']",
    ]
    assert [first[3], second[3]] == ["not restored InvalidInput True"] * 2
    assert second[:3] + second[4:] == first[:3] + first[4:]


def unlike_restores(folder: str, say: Say) -> None:
    """Each of these is refused on every rank and changes nothing; then all restore one state, by
    its name or by its uid."""
    me, weight = rank(), torch.zeros(3)
    with (
        datastates.open(folder, memory_bytes=64 << 20) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        for number in range(3):
            weight.fill_(number)
            newest = run.capture().wait()
        tries: dict[str, dict[str, Any]] = {
            "states": {"rev": f"main~{me}"},
            "only": {"rev": "main~2", "only": "weight" if me else None},
            "strict": {"rev": "main~2", "strict": not me},
            "nowhere": {"rev": "nowhere" if me else "main~2"},
        }
        try_each(run.restore, tries, say)
        say("untouched", weight.tolist())
        run.restore(newest if me else "main")
        say("restored", run.head == newest)


def test_ranks_that_restore_unlike_states_or_on_unlike_terms_all_raise(tmp_path: Path) -> None:
    first, second = run(2, f"{HERE}:unlike_restores", folder=str(tmp_path))
    assert first[:3] == second[:3]
    assert "the ranks of this job do not restore the same: the state is" in first[0]
    assert "only is None on rank 0 and ['weight'] on rank 1" in first[1]
    assert "strict is True on rank 0 and False on rank 1" in first[2]
    assert first[3].startswith("nowhere NotFound rank 1 of 2 could not find the state")
    assert first[4:] == second[4:] == ["untouched [2.0, 2.0, 2.0]", "restored True"]


def one_dies(folder: str, say: Say) -> None:
    """Rank 1 dies before it comes to ``track``."""
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        model = model_of()
        repo.track(model=model).close()
        say("tracked")
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            repo.track(model=model)
        except Unavailable:
            say("unavailable")


def test_a_rank_that_dies_before_it_comes_to_track_makes_the_others_raise(tmp_path: Path) -> None:
    with job(3, f"{HERE}:one_dies", folder=str(tmp_path)) as ranks:
        assert ranks.lines() == [
            ["tracked", "unavailable"],
            ["tracked"],
            ["tracked", "unavailable"],
        ]


def which_group(say: Say) -> None:
    """What ``find`` finds, before and after the ranks met, and as ``using`` says."""
    try:
        collective.find()
        say("no error")
    except InvalidInput as exc:
        say("refused", "init_process_group" in str(exc))
    torch.distributed.init_process_group("gloo")
    found = collective.find()
    say(type(found).__name__, found.size, collective.find() is found)
    with using(SoloGroup()):
        say(type(collective.find()).__name__)
    say(collective.find() is found)
    torch.distributed.destroy_process_group()


def of_mpi(folder: str, say: Say) -> None:
    """Ranks of MPI find each other by themselves."""
    with (
        datastates.open(folder, memory_bytes=64 << 20) as repo,
        repo.track(model=model_of()) as run,
    ):
        say(type(run.group).__name__, run.capture().wait().world_size)


def test_a_process_of_a_job_is_refused_until_the_ranks_have_met() -> None:
    assert (
        run(2, f"{HERE}:which_group", kind="env")
        == [["refused True", "TorchGroup 2 True", "SoloGroup", "True"]] * 2
    )


@need_mpi
def test_ranks_of_mpi_find_each_other(tmp_path: Path) -> None:
    kind: Kind = "mpi"
    assert run(2, f"{HERE}:of_mpi", kind=kind, folder=str(tmp_path)) == [["MPIGroup 2"]] * 2


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("SLURM_STEP_NUM_TASKS", "srun"), ("PMI_SIZE", "mpiexec"), ("WORLD_SIZE", "torchrun")],
)
def test_the_launcher_is_named(monkeypatch: pytest.MonkeyPatch, name: str, launcher: str) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(InvalidInput, match=f"{launcher} began 4 processes"):
        collective.find()
    monkeypatch.setenv(name, "1")
    assert collective.find().size == 1


def test_a_single_process_has_nothing_to_agree_about(tmp_path: Path) -> None:
    with datastates.open(tmp_path, memory_bytes=64 << 20) as repo:
        with pytest.raises(InvalidInput, match="own names nothing"):
            repo.track(model=model_of(), own=["nothing"])
        with pytest.raises(InvalidInput, match="give a datastates"):
            repo.track(model=model_of(), group=2)  # type: ignore[arg-type]  # what is refused
        with repo.track(model=model_of(), own="model", group=SoloGroup()) as tracker:
            assert tracker.capture().wait().world_size == 1
