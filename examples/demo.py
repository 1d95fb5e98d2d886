"""The main job: capture every step of a real training, fork three variants of it, and prove that a
resume is bit-exact.

A small byte-level GPT learns the Python standard library's own source. The end of a shared prefix
is tagged ``warm``; ``main`` continues after it, and three variants fork from it. Every state is
kept on disk (``durable_every=1``). A fresh process resumes from the tag and must repeat the losses
of ``main``. A second one resumes from a random step of a random branch and must repeat the losses
of that branch. At the end, the lineage of two runs on pictures, some with labels that are wrong on
purpose, shows which labels are wrong.

    python -m datastates.demo [FOLDER] [--short]
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

# Absolute, so that this file also runs as examples/demo.py.
import datastates
from datastates import Config, PermutationSampler, Repository
from datastates.demo.model import FULL, GPT, SHORT, Size, Text, read_text
from datastates.demo.outliers import find_outliers
from datastates.demo.report import Cost, Outcome, examine, show
from datastates.errors import DatastatesError, InvalidInput, Unsupported

MARKER = "made-by-datastates-demo"
EXTRA = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
"""The packages of the extra ``demo``, by module."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a branch differs from ``main``."""

    branch: str
    learning_rate_factor: float = 1.0
    dropout: float = 0.1
    order: int = 0


MAIN = Variant("main")
VARIANTS = (
    Variant("low-lr", learning_rate_factor=0.3),
    Variant("no-dropout", dropout=0.0),
    Variant("other-order", order=1),
)

CONFIG = Config(durable_every=1, retention="all")
"""Every state is written to disk and stays there."""

SEED = 0
"""Chooses the branch and the step of the second resume."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """The task of a fresh process: on a new branch, repeat the steps of branch ``of`` from step
    ``start`` to ``until``."""

    branch: str
    of: str
    start: int
    until: int


def train(
    repo: Repository,
    size: Size,
    variant: Variant,
    until: int,
    tick: Callable[[], object],
    *,
    start: str | None = None,
) -> Cost:
    """Train a branch up to step ``until`` and capture every step; with ``start`` it forks from
    there."""
    text, cost = read_text(size.shape.context), Cost()
    torch.manual_seed(0)
    model = GPT(size.shape, variant.dropout)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=size.warm // 3)
    sampler = PermutationSampler(len(text.train))
    with repo.track(
        branch=variant.branch,
        start=start,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
    ) as run:
        # All objects are restored to ``start``. Change what is different in this variant.
        optimizer.param_groups[0]["lr"] *= variant.learning_rate_factor
        sampler.seed = variant.order
        began = time.perf_counter()
        for rows in run.steps(sampler.batches(size.batch, epochs=None)):
            loss = model(text.train[rows])
            optimizer.zero_grad()
            loss.backward()
            # `step` would wait without this call; here the wait is timed
            cost.blocked_s += _timed(run.fence)
            optimizer.step()
            scheduler.step()
            metrics = {"loss": loss.item()}
            if run.step % size.evaluate_every == 0:
                metrics["val_loss"] = evaluate(model, text)
            cost.blocked_s += _timed(partial(run.capture, metrics=metrics))
            cost.captures += 1
            if run.step == size.warm and not start:
                repo.tag("warm", run.head, message="end of the shared prefix")
            tick()
            if run.step == until:
                break
        cost.wall_s = time.perf_counter() - began
    return cost


@torch.no_grad()
def evaluate(model: GPT, text: Text) -> float:
    """The loss on the held-out text; without dropout, so that no random number is drawn."""
    model.eval()
    loss = float(model(text.held_out))
    model.train()
    return loss


def run_demo(root: Path, *, short: bool = False, console: Console | None = None) -> Outcome:
    """Run the whole demo in ``root``: a new or empty folder, or the folder of an earlier demo,
    which is emptied first.

    :raises Unsupported: a package for the last part is not installed.
    :raises InvalidInput: ``root`` holds other files.
    """
    console, size = console or Console(), SHORT if short else FULL
    check_extra()
    begin(root)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    again = choose_resumption(size)
    console.print("durable_every=1: each state is written to disk, and all are kept")
    console.print(
        f"random resume (seed {SEED}): from step {again.start} of {again.of},"
        f" {again.until - again.start} steps"
    )
    with datastates.open(root, config=CONFIG) as repo:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("main", total=size.main)
            costs = [train(repo, size, MAIN, size.main, partial(progress.advance, bar))]
            for variant in VARIANTS:
                bar = progress.add_task(variant.branch, total=size.variants - size.warm)
                costs.append(
                    train(
                        repo,
                        size,
                        variant,
                        size.variants,
                        partial(progress.advance, bar),
                        start="warm",
                    )
                )
            resumptions = (Resumption("resumed", "main", size.warm, size.resumed), again)
            for each in resumptions:
                bar = progress.add_task(each.branch, total=each.until - each.start)
                resume_afresh(root, each, partial(progress.advance, bar), short=short)
        outcome = examine(
            repo, root / "losses.png", costs, {each.branch: each.of for each in resumptions}
        )
        show(outcome, repo, console)
    find_outliers(root / "pictures", size, console)
    return outcome


def choose_resumption(size: Size, seed: int = SEED) -> Resumption:
    """A random branch, and a random step that it does not share with ``main``."""
    choose = random.Random(seed)
    branch = choose.choice([each.branch for each in (MAIN, *VARIANTS)])
    first, last = (1, size.main) if branch == "main" else (size.warm + 1, size.variants)
    start = choose.randint(first, last - size.repeated)
    return Resumption("random", branch, start, start + size.repeated)


def resume_afresh(root: Path, what: Resumption, tick: Callable[[], object], *, short: bool) -> None:
    """Resume in a fresh process, which prints a line for each step."""
    words = [what.branch, what.of, str(what.start), str(what.until)]
    command = [
        sys.executable,
        "-m",
        "datastates.demo",
        str(root),
        "--resume",
        *words,
        *(["--short"] if short else []),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            for _ in process.stdout or ():
                tick()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def resume(root: Path, size: Size, what: Resumption) -> None:
    """The work of the fresh process: fork from a state of a branch and repeat the steps that the
    branch took after it."""
    settings = next(each for each in (MAIN, *VARIANTS) if each.branch == what.of)
    # the state has the branch's learning rate
    variant = replace(settings, branch=what.branch, learning_rate_factor=1.0)
    with datastates.open(root, config=CONFIG) as repo:
        train(
            repo,
            size,
            variant,
            what.until,
            partial(Console().print, "step"),
            start=f"{what.of}@step:{what.start}",
        )


def check_extra() -> None:
    """Check for the packages that the last part needs, minutes before they are used.

    :raises Unsupported: a package is not installed.
    """
    lacking = [name for module, name in EXTRA.items() if find_spec(module) is None]
    if lacking:
        raise Unsupported(f"the demo needs {' and '.join(lacking)}: pip install 'datastates[demo]'")


def begin(root: Path) -> None:
    """Make the folder. The folder of an earlier demo is emptied. Any other folder must be empty.

    :raises InvalidInput: the folder holds other files.
    """
    if (root / MARKER).exists():
        shutil.rmtree(root)
    elif root.exists() and any(root.iterdir()):
        raise InvalidInput(
            f"{root} holds something that is not of an earlier demo: name a new or an empty folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).write_text(
        "`datastates demo` made this folder, and empties it when it runs here again\n"
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 0, or 1 if the resumed run diverged, or 130 after an
    interrupt."""
    parser = argparse.ArgumentParser(
        prog="datastates demo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument("--short", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--resume", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # sums are then added in one order, and the other core is free for the engine
    torch.set_num_threads(1)
    if options.resume:
        branch, of, start, until = options.resume
        resume(
            options.folder,
            SHORT if options.short else FULL,
            Resumption(branch, of, int(start), int(until)),
        )
        return 0
    try:
        return 0 if run_demo(options.folder, short=options.short).is_bit_exact else 1
    except KeyboardInterrupt:
        Console(stderr=True).print(f"interrupted; what was captured so far is in {options.folder}")
        return 130


def script() -> int:
    """``main`` for Python's command line: an error is one line, as in the terminal's commands."""
    try:
        return main()
    except DatastatesError as error:
        # the terminal is imported only for an error
        from datastates.cli.app import Globals, complain

        return complain(error, Globals())


if __name__ == "__main__":
    sys.exit(script())
