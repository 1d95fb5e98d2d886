"""An explorer in a process of its own, for tests that end it: ``python -m
tests.studies.exploring own|pool|ranks|rungs <url> [<packs>]``."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import datastates
from datastates.studies import Plan, Variant, explore
from tests.studies import parallel
from tests.studies.studies import EVERY_STATE, rungs, train, tree


def pool() -> ProcessPoolExecutor:
    """The standard library's pool, whose workers have torch imported when they begin, and the
    environment as it is now."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["datastates.studies"])
    return ProcessPoolExecutor(
        2, mp_context=context, initializer=take, initargs=(dict(os.environ),)
    )


def take(environ: dict[str, str]) -> None:
    """Have this environment."""
    os.environ.update(environ)


def main(kind: str, url: str, packs: str | None = None) -> None:
    """Explore the tree in the repository's study ``s``."""
    executor: Any = None
    if kind == "pool":
        executor = pool()
    with datastates.open(url, packs=packs, config=EVERY_STATE) as repo:
        if kind == "ranks":
            plan = Plan(
                tuple(
                    Variant(name, None, 2, {"lr": rate})
                    for name, rate in (("low", 1e-3), ("high", 3e-2))
                )
            )
            report = explore(repo, "main", plan, parallel.train, study="s", ranks=2)
        else:
            plan = rungs() if kind == "rungs" else tree()
            report = explore(repo, "main", plan, train, executor, study="s")
    sys.exit(0 if report else 1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(*sys.argv[1:])
