"""What Accelerate prepared is tracked as what it wraps, and every loader of its finds its place
again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config, PermutationSampler, Repository
from datastates.engine.fence import Fence
from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.restore import restore_into
from datastates.state.tree import flatten
from tests.integrations.accelerating import forget
from tests.support import effort

# torchdata 0.11 on torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")

CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)
EPOCHS, BATCHES = 3, 4


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _fresh_states() -> Iterator[None]:
    yield
    forget()


def accelerator(**loading: Any) -> Accelerator:
    forget()
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**loading))


class Items(Dataset[torch.Tensor]):
    """``noise`` draws from that library's global generator whenever an item is read."""

    def __init__(self, noise: str = "") -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 4 * BATCHES - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = {
            "": 0.0,
            "torch": lambda: float(torch.rand(())),
            "numpy": lambda: float(np.random.rand()),
        }[self.noise]
        return torch.tensor([index + 0.0, drawn() if callable(drawn) else drawn])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (
            torch.tensor([index + 0.0, float(torch.rand(()))])
            for index in torch.randperm(15).tolist()
        )


def shuffled(workers: int, noise: str = "") -> DataLoader[torch.Tensor]:
    return DataLoader(Items(noise), batch_size=4, shuffle=True, num_workers=workers)


def stateful(workers: int, noise: str = "") -> Any:
    return StatefulDataLoader(Items(noise), batch_size=4, shuffle=True, num_workers=workers)


def permuted(workers: int, noise: str = "") -> DataLoader[torch.Tensor]:
    return DataLoader(
        Items(noise), batch_size=4, sampler=PermutationSampler(15, seed=3), num_workers=workers
    )


Make = Callable[[int], Any]
LOADERS: dict[str, tuple[dict[str, Any], Make]] = {
    "default": ({}, shuffled),
    "default, noise of torch": ({}, lambda workers: shuffled(workers, "torch")),
    "default, noise of numpy": ({}, lambda workers: shuffled(workers, "" if workers else "numpy")),
    "seedable": ({"use_seedable_sampler": True}, lambda workers: shuffled(workers, "torch")),
    "seedable, with a seed": ({"use_seedable_sampler": True, "data_seed": 5}, shuffled),
    "stateful": ({"use_stateful_dataloader": True}, shuffled),
    "stateful and seedable": (
        {"use_stateful_dataloader": True, "use_seedable_sampler": True},
        shuffled,
    ),
    "stateful of a stateful": ({"use_stateful_dataloader": True}, stateful),
    "not tracked": ({"use_stateful_dataloader": True}, lambda workers: shuffled(workers, "torch")),
    "dispatched": ({"dispatch_batches": True}, lambda workers: shuffled(workers, "torch")),
    "a stream": (
        {},
        lambda workers: DataLoader(Stream(), batch_size=4, num_workers=min(workers, 1)),
    ),
    "our sampler": ({}, lambda workers: permuted(workers, "torch")),
}


class Stopped(Exception):
    """The training was stopped."""


def train(
    repo: Repository,
    branch: str,
    kind: str,
    workers: int,
    *,
    by_epochs: bool,
    seed: int,
    stop: int | None = None,
) -> list[Any]:
    """What a process sees that makes all objects anew, from where the branch stands until it is
    stopped."""
    loading, make = LOADERS[kind]
    torch.manual_seed(seed)
    np.random.seed(seed)
    loader = accelerator(**loading).prepare(make(workers))
    tracked = {"loader": loader} if "stateful" in kind else {}
    if kind == "our sampler":
        tracked = {"sampler": loader.batch_sampler.sampler}
    seen: list[Any] = []
    with suppress(Stopped), repo.track(branch=branch, weight=torch.zeros(1), **tracked) as run:

        def passes() -> Iterator[object]:
            if by_epochs:
                yield from run.epochs(EPOCHS)
            else:
                while run.step < EPOCHS * BATCHES:
                    yield None

        for _ in passes():
            for batch in run.steps(loader):
                if run.step == stop:
                    raise Stopped
                # as dropout draws
                seen.append((run.step, batch.tolist(), torch.rand(()).item(), np.random.rand()))
                run.capture()
    return seen


CASES = [
    (kind, workers, by_epochs)
    for kind in LOADERS
    for workers, by_epochs in ((0, True), (0, False), (2, True))
]
STOPS = {
    0: (2, 5, 7, 12) if effort.IS_THOROUGH else (5, 7),
    2: (3, 5) if effort.IS_THOROUGH else (7,),
}


@pytest.mark.parametrize(
    ("kind", "workers", "by_epochs"),
    CASES,
    ids=[
        f"{kind}-{workers}-{'epochs' if counts else 'by hand'}" for kind, workers, counts in CASES
    ],
)
@pytest.mark.exact("accelerate", "iterable", "stateful")
def test_a_prepared_loader_goes_on_where_it_was_stopped(
    kind: str, workers: int, by_epochs: bool, repo: Repository
) -> None:
    never = train(repo, "never", kind, workers, by_epochs=by_epochs, seed=1)
    assert len(never) == EPOCHS * BATCHES
    for count, stop in enumerate(STOPS[workers]):
        seen = train(repo, f"stopped-{stop}", kind, workers, by_epochs=by_epochs, seed=1, stop=stop)
        seen += train(repo, f"stopped-{stop}", kind, workers, by_epochs=by_epochs, seed=90 + count)
        assert seen == never, f"stopped before step {stop}"
    if not workers:
        seen = []
        for stop in (
            *range(2, 8),
            None,
        ):
            # after each batch: what a process has not seen for itself it has from the state
            seen += train(
                repo,
                "again-and-again",
                kind,
                workers,
                by_epochs=by_epochs,
                seed=stop if seen and stop else 1,
                stop=stop,
            )
        assert seen == never


def test_the_order_of_a_prepared_loader_is_that_of_accelerate_alone(repo: Repository) -> None:
    for loading in ({}, {"use_seedable_sampler": True}):
        torch.manual_seed(1)
        alone = accelerator(**loading).prepare(shuffled(0))
        expected = [batch.tolist() for _ in range(2) for batch in alone]
        torch.manual_seed(1)
        loader = accelerator(**loading).prepare(shuffled(0))
        with repo.track(branch=f"b{len(loading)}", weight=torch.zeros(1)) as run:
            assert [
                batch.tolist() for _ in run.epochs(2) for batch in run.steps(loader)
            ] == expected


@pytest.mark.inexact(
    "accelerate",
    "stateful",
    "a dataset that draws random numbers, in a loader with `use_stateful_dataloader` and without"
    " workers (it is exact without `use_stateful_dataloader`)",
)
def test_a_loader_that_keeps_its_own_place_says_that_it_cannot_repeat_draws_ahead(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    loader = accelerator(use_stateful_dataloader=True).prepare(shuffled(0, "torch"))
    with repo.track(loader=loader) as run:
        for _ in run.steps(loader):
            run.capture()
    assert caplog.text.count("draws random numbers in this process") == 1


# --- under the names and bytes of what is wrapped -------------------------------------------------


def parts(seed: int = 0, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), stateful(0)


def named(found: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("model", "optimizer", "scheduler", "loader"), found, strict=True))


def steps(objects: dict[str, Any], count: int) -> tuple[list[str], dict[str, Any]]:
    """The losses of so many steps, and the tree within the body of the last."""
    losses = []
    for batch in objects["loader"]:
        objects["optimizer"].zero_grad()
        loss = objects["model"](batch).square().mean()
        loss.backward()
        objects["optimizer"].step()
        objects["scheduler"].step()
        losses.append(float(loss.detach()).hex())
        if len(losses) == count:
            return losses, Adapted(objects).tree()
    raise AssertionError("the data ended")


def as_stored(tree: dict[str, Any]) -> Any:
    flat = flatten(tree)
    return repr(flat.values), [
        (leaf.path, leaf.tensor.detach().clone().tolist()) for leaf in flat.tensors
    ]


@pytest.mark.parametrize("count", [2, BATCHES], ids=["within a pass", "with its last batch"])
def test_prepared_objects_have_the_names_and_bytes_of_bare_ones_and_each_goes_on_with_the_others_state(
    count: int,
) -> None:
    def bare(seed: int) -> dict[str, Any]:
        return named(parts(seed))

    def prepared(seed: int) -> dict[str, Any]:
        return named(accelerator(use_stateful_dataloader=True).prepare(*parts(seed)))

    trees = {make: steps(make(0), count)[1] for make in (bare, prepared)}
    assert as_stored(trees[bare]) == as_stored(trees[prepared])
    if count == BATCHES:
        return
    expected = steps(bare(0), BATCHES)[0][count:]
    for make in (bare, prepared):
        for tree in trees.values():
            there = make(7)
            assert restore_into(there, tree)
            assert as_stored(Adapted(there).tree()) == as_stored(tree), "before the next batch too"
            assert steps(there, BATCHES - count)[0] == expected


def test_a_prepared_loader_without_a_state_is_refused_like_the_one_it_wraps(
    repo: Repository,
) -> None:
    loader = accelerator().prepare(shuffled(0))
    with pytest.raises(
        InvalidInput,
        match=(
            r"loader is a DataLoader.*, which does not know its position: leave it out and loop"
            r" over run\.s"
        ),
    ):
        repo.track(loader=loader)


def test_a_sampler_of_others_under_a_loader_that_reads_ahead_is_refused(repo: Repository) -> None:
    class Own(torch.utils.data.SequentialSampler):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loader = accelerator().prepare(DataLoader(Items(), sampler=Own(Items())))
    with (
        repo.track(sampler=loader.batch_sampler.sampler) as run,
        pytest.raises(
            InvalidInput,
            match=(
                r"Own is tracked, and a prepared loader reads a batch ahead of what was handed out"
            ),
        ),
    ):
        next(iter(run.steps(loader)))


def test_the_learning_rate_of_a_fork_moves_a_prepared_scheduler(repo: Repository) -> None:
    objects = named(accelerator(use_stateful_dataloader=True).prepare(*parts()))
    with repo.track(objects=objects) as run:
        steps(objects, 3)
        run.capture()
    forked = named(accelerator(use_stateful_dataloader=True).prepare(*parts(1, lr=0.4)))
    with repo.track(branch="fork", start="main", objects=forked):
        assert forked["optimizer"].param_groups[0]["lr"] == pytest.approx(0.2), "after three steps"
        assert forked["scheduler"].get_last_lr() == [pytest.approx(0.2)]


# --- adapters of PEFT -----------------------------------------------------------------------------


def test_an_adapted_model_has_the_names_of_its_base_and_those_of_its_adapters(
    repo: Repository,
) -> None:
    from peft import LoraConfig, get_peft_model

    def base(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def adapted(model: nn.Module) -> Any:
        return get_peft_model(model, LoraConfig(target_modules=["0"], modules_to_save=["2"], r=2))

    plain = base(0)
    with repo.track(branch="base", model=plain) as run:
        run.capture()
    model = adapted(base(1))
    report = repo.restore("base", model=model, strict=False)
    assert not report.unexpected
    assert {name.partition("/")[2] for name in report.missing} == {
        *("0.lora_A.default.weight", "0.lora_B.default.weight"),
        *("2.modules_to_save.default.weight", "2.modules_to_save.default.bias"),
    }
    # it is a dict
    names = set(Adapted({"model": model}).tree()["model"])  # type: ignore[call-overload]
    assert names == {*plain.state_dict(), *(name.partition("/")[2] for name in report.missing)}
    x = torch.randn(3, 4)
    with model.disable_adapter():
        assert torch.equal(model(x), plain(x))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    model(x).square().mean().backward()
    optimizer.step()
    with repo.track(
        branch="tuned", start="base", strict=False, model=model, optimizer=optimizer
    ) as run:
        run.capture()
    again = adapted(base(2))
    repo.restore("tuned", model=again)
    assert torch.equal(again(x), model(x))
    assert "0.lora_A.default.weight" in repo.load("tuned")["optimizer"]["state"]


def test_nothing_is_said_of_a_prepared_training(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "datastates"):
        for seed in (0, 0):
            objects = named(accelerator(use_stateful_dataloader=True).prepare(*parts(seed)))
            with repo.track(**objects) as run:
                for batch in run.steps(objects["loader"]):
                    objects["model"](batch).square().mean().backward()
                    objects["optimizer"].step()
                    objects["scheduler"].step()
                    objects["optimizer"].zero_grad()
                    run.capture()
                    if run.step % 3 == 0:
                        break
    assert not caplog.text


class Averaging(torch.optim.SGD):
    """As schedule-free ones do: to evaluate, the weights are exchanged for their average, in
    place."""

    def eval(self) -> None: ...
    def train(self) -> None: ...


@pytest.mark.parametrize(("kind", "is_waiting"), [(torch.optim.SGD, False), (Averaging, True)])
def test_a_prepared_optimizer_waits_to_train_and_to_evaluate_where_the_one_inside_changes_weights_for_that(
    kind: type[torch.optim.SGD], is_waiting: bool
) -> None:
    model, waited = nn.Linear(2, 2), list[str]()
    optimizer: Any = accelerator().prepare(kind(model.parameters(), lr=0.1))
    fence = Fence(lambda: waited.append(""))
    fence.install([optimizer], [model])
    for change in (optimizer.train, optimizer.eval):
        waited.clear()
        change()
        assert bool(waited) is is_waiting
    waited.clear()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert waited, "an update always does"
    fence.remove()
