"""Accelerate: one line tracks everything that an ``Accelerator`` prepared.

    from datastates.integrations.accelerate import track

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with track(accelerator, repo, branch="main") as run:
        for epoch in run.epochs(3):
            for batch in run.steps(loader):
                with accelerator.accumulate(model):
                    loss = train_step(batch)
                run.capture(metrics={"loss": loss})

A state has the same names and bytes as one of a training without Accelerate. Each of the two can
resume the other's states.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from datastates import values
from datastates.errors import InvalidInput, Unsupported
from datastates.repository import Repository
from datastates.state.adapters import has_state
from datastates.state.loaders import mark_of, put_mark, sampler_of
from datastates.training.tracker import Tracker

try:
    import accelerate as installed
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as exc:
    raise ImportError(
        "datastates.integrations.accelerate needs Accelerate: pip install 'datastates[accelerate]'"
    ) from exc

__all__ = ["track"]

_logger = logging.getLogger(__name__)

_PREPARED = {
    "model": "_models",
    "optimizer": "_optimizers",
    "scheduler": "_schedulers",
    "loader": "_dataloaders",
}
"""The attributes in which an accelerator keeps what it prepared, by the name under which that is
tracked. ``save_state`` reads the same attributes; there is no other way to the objects.
"""

_REGISTERED = "_custom_objects"
_OWN = "accelerator"

_ALIKE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Types in which each process has the whole model: it trains alone, or under
DistributedDataParallel."""


def track(
    accelerator: Accelerator,
    repo: Repository,
    *,
    gradients: bool | None = None,
    objects: Mapping[str, object] | None = None,
    **options: Any,
) -> Tracker:
    """``repo.track`` of everything that the accelerator prepared, and of the accelerator's own
    count.

    Each kind of object is named ``model``, ``optimizer``, ``scheduler`` or ``loader``; a second one
    is ``model_1`` and so on, in the order in which they were prepared. Objects that were given to
    ``register_for_checkpointing`` are in the list ``registered``; a scaler is ``scaler``. Loaders
    are tracked if they keep their place themselves (``use_stateful_dataloader``). Loop over
    ``run.steps(loader)``, which finds the place in every other loader. ``run.step`` counts the
    updates that ``accelerator.accumulate`` completes.

    Several processes under DistributedDataParallel capture each state together; ``track`` is then
    collective. Within an accumulation each process has separate gradients, which no state has:
    capture where ``accelerator.sync_gradients`` is true.

    :param accelerator: the accelerator, after its ``prepare`` and ``register_for_checkpointing``.
    :param repo: the repository that gets the states.
    :param gradients: whether gradients are captured. None captures them if the accelerator
        accumulates in one process. A training then resumes exactly from a state within an
        accumulation. If ``optimizer.zero_grad()`` follows each update, states between two
        accumulations capture none.
    :param objects: further objects to track, by name.
    :param options: as for ``repo.track``: ``branch``, ``start``, ``config``, …, and further
        objects.
    :raises InvalidInput: nothing was prepared, or a name is taken.
    :raises Unsupported: DeepSpeed, FSDP, Megatron-LM or XLA divides the training among processes.
    """
    _check(accelerator, repo)
    prepared, besides = _prepared(accelerator), values.named(objects or {}, "objects")
    if not prepared:
        raise InvalidInput(
            "the accelerator has prepared nothing yet: call accelerator.prepare(...) before track"
        )
    more = {**prepared, **besides}
    if taken := sorted(prepared.keys() & (besides.keys() | options.keys())):
        raise InvalidInput(
            f"{', '.join(taken)}: the name of what the accelerator prepared: rename your own object"
        )
    steps = accelerator.gradient_accumulation_steps
    own = more[_OWN] = _Own(
        accelerator, is_whole=gradients is None and accelerator.num_processes > 1
    )
    is_accumulating = steps > 1 and accelerator.num_processes == 1
    run = repo.track(
        objects=more, gradients=is_accumulating if gradients is None else gradients, **options
    )
    if steps > 1 and gradients is False:
        _logger.warning(
            "branch %s: gradients are not tracked, and %d batches make a step. A state between two"
            " steps lacks the gradients accumulated so far. Capture where"
            " accelerator.sync_gradients is true, or leave gradients=False out",
            run.branch,
            steps,
        )
    run.training.completes = partial(_completes, accelerator)
    own.run = run
    return run


class _Own:
    """The accelerator's and its loaders' own counts: the batches since the accumulation began, the
    passes over each loader, the seeds of samplers. ``is_whole``: a state within an accumulation is
    refused.
    """

    is_optional = True  # for a restore: states of a training without Accelerate do not have it

    def __init__(self, accelerator: Accelerator, *, is_whole: bool) -> None:
        self._accelerator, self._is_whole = accelerator, is_whole
        self._known = _found(accelerator)
        self._has_warned, self._captures = False, 0
        self.run: Tracker | None = None

    def state_dict(self) -> dict[str, object]:
        if self._is_whole and self.run is not None and not self._accelerator.sync_gradients:
            raise Unsupported(
                f"{self._accelerator.num_processes} processes accumulate gradients, and no state"
                " has the gradients of each: capture where accelerator.sync_gradients is true, or"
                " pass gradients=False"
            )
        self._look()
        marks = [
            [mark_of(part) for part in _of_loader(loader)]
            for loader in getattr(self._accelerator, _PREPARED["loader"])
        ]
        return {"step": self._accelerator.step, "loaders": marks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was taken."""
        self._accelerator.step = state["step"]
        for loader, marks in zip(
            getattr(self._accelerator, _PREPARED["loader"]), state["loaders"], strict=False
        ):
            for part, mark in zip(_of_loader(loader), marks, strict=False):
                if mark is not None:
                    put_mark(part, mark)

    def _look(self) -> None:
        """Warn once about objects that no state has; costs a microsecond at each capture."""
        if self.run is None or self._has_warned:
            return
        self._captures += 1
        if new := [
            kind for kind, count in _found(self._accelerator).items() if count > self._known[kind]
        ]:
            self._has_warned = True
            _logger.warning(
                "a %s was prepared after track, so no state has it: prepare everything before",
                " and a ".join(new),
            )
        elif (
            self._captures > 1
            and not self.run.training.loops.is_used
            and getattr(self._accelerator, _PREPARED["loader"])
        ):
            self._has_warned = True
            _logger.warning(
                "no loader is looped over by run.steps, so a resumed training begins its data"
                " again: use run.steps(loader)"
            )


def _check(accelerator: object, repo: object) -> None:
    if not isinstance(accelerator, Accelerator):
        raise InvalidInput(
            f"accelerator is {values.shown(accelerator)}: give the Accelerator, and the repository"
            " after it"
        )
    if not isinstance(repo, Repository):
        raise InvalidInput(f"repo is {values.shown(repo)}: give what datastates.open returned")
    if missing := [
        name for name in (*_PREPARED.values(), _REGISTERED) if not hasattr(accelerator, name)
    ]:
        raise Unsupported(
            f"the Accelerator of Accelerate {installed.__version__} has no {missing[0]}: datastates"
            " was tested with 1.15, install that version"
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise Unsupported(
            f"{kind.value} keeps the states of models and optimizers itself: train without it"
        )
    if kind not in _ALIKE:
        raise Unsupported(
            f"{accelerator.num_processes} processes train together by {kind.value}, of which states"
            " are not captured: launch them with --multi_gpu or --cpu, so that each has the whole"
            " model, or launch one"
        )


def _prepared(accelerator: Accelerator) -> dict[str, object]:
    """The trackable objects that the accelerator prepared, by name."""
    found: dict[str, object] = {}
    for kind, where in _PREPARED.items():
        for number, each in enumerate(getattr(accelerator, where)):
            if kind != "loader" or has_state(each):
                found[f"{kind}_{number}" if number else kind] = each
    if registered := getattr(accelerator, _REGISTERED):
        found["registered"] = [*registered]
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    return found


def _found(accelerator: Accelerator) -> dict[str, int]:
    return {
        kind: len(getattr(accelerator, where))
        for kind, where in {**_PREPARED, "registered object": _REGISTERED}.items()
    }


def _of_loader(loader: Any) -> Iterator[object]:
    yield loader
    yield sampler_of(loader)


def _completes(accelerator: Accelerator) -> bool:
    """Whether the next ``accelerator.accumulate`` makes an update: after so many batches, and
    with the last batch of a loader."""
    gradients = accelerator.gradient_state
    if gradients.sync_with_dataloader and gradients.end_of_dataloader:
        return True
    return bool((accelerator.step + 1) % gradients.num_steps == 0)
