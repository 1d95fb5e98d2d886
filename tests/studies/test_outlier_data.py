"""Loaders of every kind as the samples of ``outliers``: what is read, and what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import datastates
from datastates import Repository
from datastates.errors import InvalidInput
from datastates.studies import OutlierReport, outliers

from .planted import COUNT, EPOCHS, build, digits, loss, make, plan

CLASSES = tuple(f"digit {each}" for each in range(10))
Batch = tuple[Tensor, Any]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("planted")
    make(folder)
    with datastates.open(folder) as opened:
        yield opened


def batches(targets: Any = None, inputs: Tensor | None = None) -> list[Batch]:
    """Batches of 250, the last one smaller."""
    labels = digits().labels if targets is None else targets
    taken = digits().inputs if inputs is None else inputs
    parts = [slice(at, at + 250) for at in range(0, len(taken), 250)]
    return [(taken[part], labels[part]) for part in parts]


def report_of(repo: Repository, data: Any, **options: Any) -> OutlierReport:
    arguments = {"branches": "seed-0", "model": build(), **options}
    return outliers(repo, data=data, **arguments)


def found_among_all(scores: Any) -> float:
    return float(roc_auc_score(digits().is_flipped, scores))


@pytest.fixture(scope="module")
def both(repo: Repository) -> OutlierReport:
    data = DataLoader(TensorDataset(digits().inputs, digits().labels), batch_size=128)
    return report_of(
        repo, data, study="study", plan=plan(), classes=CLASSES, names=lambda at: f"#{at}"
    )


def test_defaults_of_classes_are_computed_and_find_wrong_labels(both: OutlierReport) -> None:
    assert list(both.scores.columns) == [
        *("margin", "normalized margin", "loss"),
        *("held-out loss", "held-out margin", "distance", "neighbours"),
    ]
    for name in ("margin", "normalized margin", "loss", "held-out loss", "held-out margin"):
        assert found_among_all(both.scores.columns[name]) > 0.95, name
    assert set(both.selections) == set(both.scores.columns)


def test_loader_gives_the_losses_that_a_loss_by_index_gives(
    repo: Repository, both: OutlierReport
) -> None:
    by_index = outliers(
        repo, "seed-0", study="study", plan=plan(), model=build(), loss=loss, count=COUNT
    )

    np.testing.assert_allclose(both.scores.lineage, by_index.scores.lineage, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(both.scores.held_out, by_index.scores.held_out, rtol=1e-3, atol=1e-6)
    features = 2  # the references of two states
    assert both.cost.passes == pytest.approx(by_index.cost.passes + features)


def test_margin_is_the_mean_of_the_given_output_less_the_largest_other(repo: Repository) -> None:
    report = report_of(repo, batches(), scores=["margin"], states=2)
    rows = torch.arange(COUNT)
    expected = torch.zeros(COUNT)
    for state in report.sources[0].states:
        model = build()
        repo.restore(state.uid, model=model, only="model")
        with torch.no_grad():
            outputs = model.eval()(digits().inputs)
        own = outputs[rows, digits().labels].clone()
        outputs[rows, digits().labels] = -torch.inf
        expected += (own - outputs.max(dim=1).values) / 2

    order = np.argsort(expected.numpy(), kind="stable")[:50]
    assert [sample.index for sample in report.top(50)] == order.tolist()


def test_each_sample_has_name_classes_and_losses_along_the_lineage(both: OutlierReport) -> None:
    suspects = both.suspects()
    wrong = [sample for sample in suspects if digits().is_flipped[sample.index]]

    assert len(wrong) > 70
    for sample in wrong:
        assert sample.name == f"#{sample.index}"
        assert sample.given == CLASSES[digits().labels[sample.index]]
        assert len(sample.curve) == EPOCHS
    assert np.mean([sample.predicted != sample.given for sample in wrong]) > 0.95


def test_rate_is_calibrated_on_small_data_and_false_suspects_are_expected(
    both: OutlierReport,
) -> None:
    selection = both.selection
    false = int((selection.suspects & ~digits().is_flipped).sum())

    assert selection.noise_rate == pytest.approx(0.1, abs=0.025)
    assert (selection.suspects & digits().is_flipped).sum() / 90 > 0.85
    assert selection.false_suspects is not None
    assert false / 3 - 3 < selection.false_suspects < 3 * false + 10


def one_hot(labels: Tensor) -> Tensor:
    return nn.functional.one_hot(labels, 10)


@pytest.mark.parametrize(
    "turn",
    [
        lambda labels: labels.float(),
        lambda labels: labels.to(torch.uint8),
        lambda labels: labels.numpy(),
        lambda labels: labels[:, None],
        one_hot,
        lambda labels: one_hot(labels).float(),
        lambda labels: one_hot(labels).bool(),
        lambda labels: [CLASSES[label] for label in labels],
    ],
)
def test_labels_of_every_type_are_the_same_classes(
    repo: Repository, turn: Callable[[Tensor], Any]
) -> None:
    plain = report_of(repo, batches(), states=1, scores=["margin"])
    report = report_of(
        repo, batches(turn(digits().labels)), states=1, classes=CLASSES, scores=["margin"]
    )

    np.testing.assert_array_equal(report.scores.score, plain.scores.score)
    assert report.top(1)[0].given in CLASSES


def trained(folder: Path, inputs: Tensor, targets: Tensor, width: int) -> Repository:
    """A repository with a branch of a linear model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs.shape[1], 16), nn.ReLU(), nn.Linear(16, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    repo = datastates.open(folder, config=datastates.Config(durable_every=1))
    with repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(5):
            for _ in range(20):
                optimizer.zero_grad()
                outputs = model(inputs)
                if targets.dtype == torch.int64 and width > 1:
                    value = nn.functional.cross_entropy(outputs, targets)
                elif targets.dtype == torch.int64:
                    value = nn.functional.binary_cross_entropy_with_logits(
                        outputs[:, 0], targets.float()
                    )
                else:
                    value = nn.functional.mse_loss(outputs[:, 0], targets)
                value.backward()
                optimizer.step()
            run.capture().wait()
    return repo


def model_of(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, width))


def blobs(count: int) -> tuple[Tensor, Tensor]:
    """Two classes that a model learns, of which every tenth sample has the other label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    inputs = torch.randn(count, 4, generator=generator) + 4 * labels[:, None]
    labels = torch.where(torch.arange(count) % 10 == 3, 1 - labels, labels)
    return inputs, labels


def test_one_output_is_the_second_of_two_classes(tmp_path: Path) -> None:
    inputs, labels = blobs(200)
    with trained(tmp_path, inputs, labels, 1) as repo:
        report = report_of(repo, [(inputs, labels.bool())], branches="main", model=model_of(4, 1))
    assert {sample.index % 10 for sample in report.top(15, "margin")} == {3}


def test_fifty_samples_give_a_result(tmp_path: Path) -> None:
    inputs, labels = blobs(50)
    with trained(tmp_path, inputs, labels, 2) as repo:
        report = report_of(repo, [(inputs, labels)], branches="main", model=model_of(4, 2))
    assert sum(sample.index % 10 == 3 for sample in report.top(6)) >= 4
    assert len(report.suspects()) <= 8


@pytest.mark.parametrize("width", [1, 3])
def test_one_class_and_a_class_that_is_never_predicted_give_a_result(
    tmp_path: Path, width: int
) -> None:
    inputs, _ = blobs(60)
    labels = torch.zeros(60, dtype=torch.int64)
    with trained(tmp_path, inputs, labels, width) as repo:
        report = report_of(repo, [(inputs, labels)], branches="main", model=model_of(4, width))
    assert len(report) == 60
    assert len(report.suspects()) <= 3
    assert report.to_html(tmp_path / "r.html").exists()


def test_wrong_targets_of_a_regression_are_found(tmp_path: Path) -> None:
    inputs, _ = blobs(300)
    targets = inputs.sum(dim=1) / 8
    targets[:15] += 3.0
    data = [(inputs[part], targets[part]) for part in torch.arange(300).split(100)]
    with trained(tmp_path, inputs, targets, 1) as repo:
        report = report_of(repo, data, branches="main", model=model_of(4, 1))
    assert list(report.scores.columns) == ["loss", "last loss", "distance"]
    assert {sample.index for sample in report.top(15)} == set(range(15))
    assert report.top(1)[0].predicted is None


def test_unknown_inputs_are_found_without_targets(repo: Repository) -> None:
    inputs = digits().inputs.clone()
    inputs[:10] = 5 * torch.rand(10, 64, generator=torch.Generator().manual_seed(0))
    report = report_of(repo, list(inputs.split(200)), task="unknown inputs")

    assert list(report.scores.columns) == ["distance", "neighbours"]
    assert {sample.index for sample in report.top(10)} == set(range(10))
    assert len(report.suspects()) >= 10
    assert report.top(1)[0].lineage_loss is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sample_that_is_not_finite_comes_first_by_every_score(
    repo: Repository, value: float
) -> None:
    inputs = digits().inputs.clone()
    inputs[7, 3] = value
    report = report_of(repo, batches(inputs=inputs))

    assert not report.skipped
    for name in report.scores.columns:
        assert report.top(1, name)[0].index == 7, name
        assert report.selections[name].suspects[7] or name == "neighbours", name
    assert report.top(2)[1].strength is not None


def test_million_samples_are_streamed_and_only_numbers_are_kept(repo: Repository) -> None:
    count, size = 1_000_000, 10_000

    class Stream:
        """Batches that are made when they are read."""

        def __iter__(self) -> Iterator[Batch]:
            for at in range(0, count, size):
                rows = torch.arange(at, at + size)
                yield digits().inputs[rows % COUNT], digits().labels[rows % COUNT]

    tracemalloc.start()
    report = report_of(repo, Stream(), scores=["margin", "loss"], states=1, noise_rate=0.1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(report) == count
    assert peak < 60 * 8 * count, "the inputs alone have 64 * 4 * count bytes"
    assert report.top(1)[0].index % COUNT == report.top(2)[1].index % COUNT


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(digits().inputs, digits().labels), batch_size=100, shuffle=True)


class Shrinking:
    """A loader that loses its last batch after the first pass."""

    def __init__(self, more: int) -> None:
        self.passes, self.more = 0, more

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        kept = batches()[: None if self.passes == 1 else -1]
        yield from kept * (2 if self.passes > 1 and self.more else 1)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "shuffled": (shuffled, {}, "changed between two passes: samples 0 to 99"),
    "shorter": (lambda: Shrinking(0), {}, "changed between two passes: 750 samples instead of 900"),
    "longer": (lambda: Shrinking(1), {}, "changed between two passes"),
    "unlabelled and shuffled": (shuffled, {"task": "unknown inputs"}, "changed between"),
    "empty": (list, {}, "no samples: give a loader that has at least one batch"),
    "an iterator": (lambda: iter(batches()), {}, "read only once: give a DataLoader"),
    "inputs alone": (lambda: [digits().inputs], {}, "a batch is .inputs, targets."),
    "unequal": (
        lambda: [(digits().inputs, digits().labels[:5])],
        {},
        "900 inputs and 5 targets: give one target a sample",
    ),
    "strings": (
        lambda: batches([CLASSES[each] for each in digits().labels]),
        {},
        "is no class: pass classes=",
    ),
    "too high": (lambda: batches(digits().labels + 5), {}, "from 5 to 14.*has 10 outputs: number"),
    "negative": (lambda: batches(digits().labels - 1), {}, "from -1 to 8"),
    "fractions": (
        lambda: batches(digits().labels + 0.5),
        {"task": "classification"},
        "no classes: pass task='regression'",
    ),
    "a value for ten outputs": (lambda: batches(digits().labels + 0.5), {}, "10 outputs a sample"),
    "too few names": (batches, {"names": ["a"]}, "1 names for 900 samples"),
    "an unknown score": (batches, {"scores": ["best"]}, "a score is 'best'"),
    "held-out without a study": (batches, {"scores": ["held-out loss"]}, "needs study= and plan="),
    "margin of a regression": (
        lambda: batches(digits().labels + 0.5),
        {"scores": ["margin"]},
        "needs data= whose targets are classes",
    ),
    "loss of unknown inputs": (
        batches,
        {"scores": ["loss"], "task": "unknown inputs"},
        "needs data= with targets",
    ),
    "data and loss": (batches, {"loss": loss, "count": COUNT}, "or both loss= and count="),
    "nothing": (lambda: None, {}, "or both loss= and count="),
    "loss without count": (lambda: None, {"loss": loss}, "or both loss= and count="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_with_what_would(repo: Repository, case: str) -> None:
    data, options, message = REFUSED[case]
    with pytest.raises(InvalidInput, match=message):
        report_of(repo, data(), **options)


def test_inputs_may_be_a_mapping_or_a_list_and_outputs_may_have_logits(repo: Repository) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for place, layer in enumerate(build().children()):
                self.add_module(str(place), layer)

        def forward(self, pixels: Any) -> Any:
            found = torch.stack(pixels) if isinstance(pixels, list) else pixels
            for layer in self.children():
                found = layer(found)
            return SimpleNamespace(logits=found)

    plain = report_of(repo, batches(), states=2, study="study", plan=plan())
    turns: list[Callable[[Tensor], Any]] = [lambda inputs: {"pixels": inputs}, list]
    for turn in turns:
        data = [(turn(inputs), labels) for inputs, labels in batches()]
        report = report_of(repo, data, model=Named(), states=2, study="study", plan=plan())
        np.testing.assert_allclose(report.scores.score, plain.scores.score)
