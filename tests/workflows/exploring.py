"""An explorer in a process of its own, for tests that end it: ``python -m tests.workflows.exploring own|pool <url> [<packs>]``."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import datastates
from datastates.workflows import explore
from tests.workflows.studies import EVERY_STATE, train, tree


def main(kind: str, url: str, packs: str | None = None) -> None:
    """Explore the tree in the repository's study ``s``."""
    executor: Any = None
    if kind == "pool":
        executor = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    with datastates.open(url, packs=packs, config=EVERY_STATE) as repo:
        report = explore(repo, "main", tree(), train, executor, study="s")
    sys.exit(0 if report else 1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(*sys.argv[1:])
