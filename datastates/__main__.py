"""``python -m datastates``: the terminal."""

from __future__ import annotations

from .cli import main

main()
