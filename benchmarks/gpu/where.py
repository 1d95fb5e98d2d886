"""The kind of device of a run, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("cuda", "cpu", "late")
"""CUDA or ROCm, the CPU, or late devices, which test the order of operations."""


@dataclass(frozen=True, slots=True)
class Where:
    """A kind of device, and whether all sizes are tiny."""

    kind: str
    is_quick: bool = False

    @property
    def is_accelerator(self) -> bool:
        """Whether results there are valid for an accelerator."""
        return self.kind == "cuda"

    @property
    def is_tiny(self) -> bool:
        """Whether sizes are tiny. Without an accelerator, figures only show that they can be
        measured."""
        return self.is_quick or not self.is_accelerator
