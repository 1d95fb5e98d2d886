"""What kind of device a run is on; known without torch."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("cuda", "cpu", "late")
"""CUDA or ROCm; the CPU; late devices, which show whether things happen in order, and are for
tests."""


@dataclass(frozen=True, slots=True)
class Where:
    """A kind of device, and whether everything is to be tiny."""

    kind: str
    is_quick: bool = False

    @property
    def is_accelerator(self) -> bool:
        """Whether what is found there is true of an accelerator."""
        return self.kind == "cuda"

    @property
    def is_tiny(self) -> bool:
        """Whether what is measured is tiny: without an accelerator figures show that they can be
        taken, and no more."""
        return self.is_quick or not self.is_accelerator
