"""The model that the main job trains, a small byte-level GPT, and text that every machine has:
the standard library's own source."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from datastates.errors import NotFound


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a GPT; ``vocabulary`` 256 reads bytes."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128
    vocabulary: int = 256


@dataclass(frozen=True, slots=True)
class Size:
    """How much the main job trains, in steps from the root of the lineage; and the pictures and
    epochs of its last part.

    ``repeated`` is how many steps the resume from a random state takes.
    """

    shape: Shape
    batch: int
    warm: int
    main: int
    variants: int
    resumed: int
    repeated: int
    evaluate_every: int
    pictures: int
    epochs: int


FULL = Size(
    Shape(layers=5),
    batch=8,
    warm=100,
    main=200,
    variants=180,
    resumed=140,
    repeated=10,
    evaluate_every=10,
    pictures=6000,
    epochs=8,
)
SHORT = Size(
    Shape(layers=1, heads=2, width=32, context=32),
    batch=4,
    warm=6,
    main=12,
    variants=10,
    resumed=12,
    repeated=3,
    evaluate_every=2,
    pictures=800,
    epochs=4,
)


class GPT(nn.Module):
    """A decoder that returns its loss; the head is tied to the embedding, so one storage has two
    names."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width,
                shape.heads,
                4 * shape.width,
                dropout,
                functional.gelu,
                batch_first=True,
                norm_first=True,  # GPT-2's order
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss, in nats a token, of predicting ``tokens[:, 1:]`` (batch, time + 1) from
        the tokens before."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.dropout(self.embed(inputs) + self.position.weight[: inputs.shape[1]])
        causal = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, causal, is_causal=True)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes as windows of ``context + 1`` tokens: those for training, and those held out."""

    train: Tensor
    held_out: Tensor


@cache
def read_text(context: int, *, train_bytes: int = 4_000_000, held_out_windows: int = 32) -> Text:
    """The standard library's modules in order of name; the held-out windows are spread over what
    follows.

    :raises NotFound: this Python came without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    windows = torch.frombuffer(bytearray(data), dtype=torch.uint8)[
        : len(data) // (context + 1) * (context + 1)
    ].view(-1, context + 1)
    split = min(train_bytes // (context + 1), len(windows) * 9 // 10)
    if split < held_out_windows:
        raise NotFound(
            f"{folder} holds {len(data)} bytes of Python source: the demo needs the standard"
            " library as *.py files"
        )
    rest = windows[split:]
    return Text(
        windows[:split].long(),
        rest[:: max(1, len(rest) // held_out_windows)][:held_out_windows].long(),
    )
