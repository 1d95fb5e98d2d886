"""Trainings by transformers' Trainer that tests interrupt: each says the loss of each step
before it goes on."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from datastates import Cadence, Config, Repository
from datastates import open as open_repository
from datastates.errors import NotFound
from datastates.integrations.transformers import DatastatesCallback

Say = Callable[..., object]
Lines = list[tuple[object, ...]]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"dataloader_num_workers": 2},
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation in workers": {"gradient_accumulation_steps": 3, "dataloader_num_workers": 2},
    "bf16": {"bf16": True},
    "bf16 in workers": {
        "bf16": True,
        "dataloader_num_workers": 2,
        "gradient_accumulation_steps": 2,
    },
    "evaluated": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "logging_steps": 4,
        "optim": "sgd",
        "lr_scheduler_type": "cosine",
    },
    "by length": {"train_sampling_strategy": "group_by_length"},
    "qlora": {"optim": "adamw_8bit", "max_steps": 8},
    "8-bit optimizer": {"optim": "adamw_torch_8bit", "max_steps": 8},
}


class Noisy(Dataset[dict[str, Any]]):
    """Items with random numbers of every library, drawn where the data is read."""

    def __init__(self, length: int = 42) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.length:
            raise IndexError(index)  # a sampler by length iterates over it
        noise = torch.randn(8) * 0.1 + random.random() * 0.01 + float(np.random.rand()) * 0.01
        return {
            "input_ids": [0] * (1 + index % 5),
            "x": torch.full((8,), index / 41).sin() + noise,
            "y": torch.tensor([index / 41]).cos(),
        }


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Lengths are for the sampler alone."""
    return {name: torch.stack([item[name] for item in items]) for name in ("x", "y")}


class Stream(IterableDataset[dict[str, Any]]):
    """Ends within the training, so that it is begun again."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        data = Noisy()
        for index in range(42):
            yield data[index]


class Net(nn.Module):
    """With dropout, so that a loss tells whether random numbers are the same."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.BatchNorm1d(width),
            nn.Linear(width, 1),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out.float(), y), "logits": out}


class Told(Trainer):  # type: ignore[misc]  # mypy is told to skip transformers
    """Says each micro-batch's loss."""

    say: Say = staticmethod(lambda *_: None)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **options)
        self.say("loss", self.state.global_step, float(loss).hex())
        return loss


class Saying(TrainerCallback):  # type: ignore[misc]  # as above
    """Says what is logged."""

    def __init__(self, say: Say) -> None:
        self.say = say

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        numbers = {
            name: float(value).hex() for name, value in (logs or {}).items() if not is_timed(name)
        }
        if len(numbers) > 1:
            self.say("log", state.global_step, str(sorted(numbers.items())).replace(" ", ""))


class Awaited(TrainerCallback):  # type: ignore[misc]  # as above
    """At the end of this step, waits until a state is durable: a process that is killed later
    leaves something to go on from."""

    def __init__(self, repo: Repository, step: int) -> None:
        self.repo, self.step = repo, step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        while state.global_step == self.step and not self._has_durable():
            time.sleep(0.01)

    def _has_durable(self) -> bool:
        with suppress(NotFound):  # another rank has not reported its part of the first state
            return any(found.status == "durable" for found in self.repo.log("main"))
        return False


class StopAt(TrainerCallback):  # type: ignore[misc]  # as above
    """Breaks a training off, as Ctrl-C does, when it begins a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Words(Dataset[dict[str, Any]]):
    """Items of six tokens."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = [(index * 7 + place * place) % 40 for place in range(6)]
        return {"input_ids": tokens, "labels": tokens}


def qlora(folder: Path, *, seed: int = 0, is_4bit: bool = True) -> nn.Module:
    """Adapters over a small random LLaMA that bitsandbytes quantized; made in ``folder``, so
    that nothing is downloaded."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **sizes)).save_pretrained(
        folder
    )
    bits: dict[str, Any] = {"load_in_8bit": True}
    if is_4bit:
        bits = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        }
    config = BitsAndBytesConfig(**bits, bnb_4bit_compute_dtype=torch.float32)
    base = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    made: nn.Module = get_peft_model(
        base,
        LoraConfig(
            r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
    return made


def arguments(folder: str | Path, **options: Any) -> TrainingArguments:
    """Quiet ones, for a processor."""
    quiet: dict[str, Any] = {
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 5,
        "label_names": ["y"],
    }
    sizes: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **{**quiet, **sizes, **options})


def trainer(
    folder: str | Path,
    say: Say = lambda *_: None,
    callbacks: Any = (),
    kind: type[Told] = Told,
    **options: Any,
) -> Told:
    """A training of two epochs of 11 batches."""
    given = ("model", "model_init", "train_dataset", "optimizers", "data_collator")
    parts = {name: options.pop(name) for name in given if name in options}
    args = arguments(folder, **options)
    torch.manual_seed(7)
    if "model_init" not in parts:
        parts.setdefault("model", Net())
    parts.setdefault("train_dataset", Noisy())
    parts.setdefault("data_collator", collate)
    made = kind(args=args, eval_dataset=Noisy(9), callbacks=[Saying(say), *callbacks], **parts)
    made.remove_callback(PrinterCallback)
    made.say = say
    return made


def losses(made: Told, **options: Any) -> Lines:
    """What each step's loss was; as far as it comes."""
    said: Lines = []
    made.say = lambda *words: said.append(words)
    with suppress(KeyboardInterrupt):
        made.train(**options)
    return said


def train(
    folder: str,
    case: str,
    say: Say,
    *,
    is_tracked: bool = True,
    awaited: int | None = None,
    **more: Any,
) -> None:
    """A training on branch main of ``folder``, each of whose states is durable, one of them by the
    end of step ``awaited``.

    Where it is not tracked: as if there were no callback.
    """
    torch.set_num_threads(1)
    options = {**CASES[case], **more}
    if case == "qlora":
        parts = {
            "model": qlora(Path(folder) / "base"),
            "train_dataset": Words(),
            "data_collator": default_data_collator,
        }
        options |= {**parts, "label_names": ["labels"], "learning_rate": 1e-2}
    elif case == "8-bit optimizer":
        options["model"] = Net(512)  # smaller parameters are not quantized
    if not is_tracked:
        end(trainer(f"{folder}/out", say, **options), say)
        return
    with open_repository(
        f"{folder}/runs", config=Config(cadence=Cadence(every=1, interval_s=None))
    ) as repo:
        last = [] if awaited is None else [Awaited(repo, awaited)]
        end(trainer(f"{folder}/out", say, [DatastatesCallback(repo), *last], **options), say)


def end(made: Told, say: Say) -> None:
    """Train; says how the Trainer's own state and the weights ended."""
    made.train()
    state = made.state
    entries = [
        {name: value for name, value in entry.items() if not is_timed(name)}
        for entry in state.log_history
    ]
    said = [
        state.global_step,
        state.epoch,
        state.best_metric,
        [entry for entry in entries if len(entry) > 2],
    ]
    found = hashlib.blake2b(digest_size=8)
    for value in made.model.state_dict().values():
        found.update(value.numpy().tobytes())
    say("end", found.hexdigest(), json.dumps(said).replace(" ", ""))


def is_timed(name: str) -> bool:
    """Whether a number that is logged depends on the clock, or is of one call of ``train``."""
    return any(part in name for part in ("runtime", "per_second", "train_loss", "total_flos"))
