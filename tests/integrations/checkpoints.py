"""What is saved with torch.distributed.checkpoint in the tests: a model and its optimizer; what
was saved, and whether it is the same."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import nn

import datastates
from datastates import Repository, State


def build(seed: int = 0, *, is_stepped: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer that has a state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 + seed)
    if is_stepped:
        model(torch.randn(3, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(repo: Repository, rev: str | State = "main") -> Any:
    """What was saved, as it was given."""
    return datastates.load(rev, repo=repo)


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{path}/{index}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype, path
        assert torch.equal(found, expected), path
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, path
        assert np.array_equal(found, expected), path
    elif isinstance(expected, io.BytesIO):
        assert found.getvalue() == expected.getvalue(), path
    else:
        assert found == expected, path
