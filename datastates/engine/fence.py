"""The fence: memory that a deferred copy still reads does not change before the copy is done.

Weights and optimizer state do not change between two ``optimizer.step()`` calls, so their copy
overlaps the next forward and backward. Hooks make the next change to them wait (CheckFreq's
observation, with the wait put on the update).
"""

from __future__ import annotations

import functools
import os
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from datastates.state.loaders import passes_on
from datastates.state.optimizer import has_hooks, with_inner

if TYPE_CHECKING:
    from .copy import CopyJob

_Hooked = TypeVar("_Hooked", bound=object)


class _Handle(Protocol):
    def remove(self) -> None: ...


_UNTRACED = (
    "it waits for a copy of what the step changes: compile optimizer.step() without fullgraph=True"
)

_fences: weakref.WeakSet[Fence] = weakref.WeakSet()


class Pending:
    """The copies of captures that may still be reading, oldest first. A fence waits for them.

    It keeps no tracker alive.
    """

    def __init__(self, fence: Callable[[CopyJob], None]) -> None:
        self._jobs: list[CopyJob] = []
        self._fence, self._pid = fence, os.getpid()

    def add(self, job: CopyJob) -> None:
        """Add a copy; there may be several since the last change."""
        self._jobs = [*self._left(), job]

    def wait(self) -> None:
        """Wait until no copy reads any more.

        Returns at once in a forked child, where nothing copies and changes are to its own
        memory."""
        if self._jobs and self._pid == os.getpid():
            for job in self._jobs:
                self._fence(job)
            self._jobs = self._left()

    def _left(self) -> list[CopyJob]:
        return [job for job in self._jobs if not job.is_copied.is_set()]


class Fence:
    """Hooks on optimizers and modules that call ``wait`` before a change.

    ``wait`` runs on the thread that makes the change (for optimizer-in-backward that is
    autograd's). It must be cheap when no copy is pending. On CUDA it makes the current stream wait,
    not the host. ``on_step`` is called before each step with the optimizer. The next fence that is
    installed removes the hooks of one that ``is_over``, because a tracker that is not closed may be
    dropped on any thread, at any moment.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self.is_over = wait, False
        self.on_step: Callable[[object], None] = _nothing
        _fences.add(self)
        self._handles: dict[int, tuple[weakref.ref[object], list[_Handle]]] = {}
        self._counts: dict[int, int] = {}

    def steps_of(self, optimizer: torch.optim.Optimizer) -> int:
        """How many steps an optimizer has begun since it was hooked, or since ``restart_count``.
        Steps of an optimizer inside it are not counted."""
        return self._counts.get(id(optimizer), 0)

    def restart_count(self) -> None:
        """Count the steps of every optimizer from 0 again."""
        self._counts.clear()

    def install(
        self, optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module]
    ) -> None:
        """Hook these, and the optimizers and modules inside them, unless they are hooked already.

        Call it again when the layout changed."""
        for fence in [each for each in list(_fences) if each.is_over]:
            fence.remove()
            _fences.discard(fence)
        for optimizer in (each for tracked in optimizers for each in with_inner(tracked)):
            # Optimizers in backward call their own `step` from post-accumulate-grad hooks: this
            # covers them too.
            self._hook(optimizer, self._hooks_of_optimizer)
        for module in (part for tracked in modules for part in tracked.modules()):
            self._hook(module, self._hooks_of_module)

    def _hook(self, found: _Hooked, make: Callable[[_Hooked], list[_Handle]]) -> None:
        known = self._handles.get(id(found))
        if known is None or known[0]() is not found:
            self._counts.pop(id(found), None)  # those of an object that had this id before
            self._handles[id(found)] = weakref.ref(found), make(found)

    def _hooks_of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[_Handle]:
        # Optimizers that average weights in place for evaluation, such as schedule-free ones, do so
        # in `eval` and `train`.
        own = [
            name
            for name in ("eval", "train")
            if callable(getattr(optimizer, name, None)) and not passes_on(optimizer)
        ]
        if not has_hooks(optimizer):
            return [self._waiting(optimizer, name) for name in ("step", "load_state_dict", *own)]
        # Compiled steps call the hook untraced each time: tracing it would cause recompilation and
        # a warning.
        on_step = torch.compiler.disable(self._on_step, reason=_UNTRACED)
        hooks = [
            optimizer.register_step_pre_hook(on_step),
            optimizer.register_load_state_dict_pre_hook(self._on_call),
        ]
        return [*hooks, *(self._waiting(optimizer, name) for name in own)]

    def _hooks_of_module(self, module: torch.nn.Module) -> list[_Handle]:
        if isinstance(module, torch.jit.ScriptModule):  # it takes no such hook
            return [self._waiting(module, "load_state_dict")]
        return [module.register_load_state_dict_pre_hook(self._on_call)]

    def _waiting(self, owner: object, name: str) -> _Handle:
        """Put a method that waits first in front of an object's own of that name, as torch's
        schedulers do."""
        method = getattr(owner, name)
        function = getattr(method, "__func__", None)

        @functools.wraps(function or method)
        def wait_first(self_: object, *args: object, **kwargs: object) -> object:
            if name == "step":
                self._count(self_)
            self._wait()
            return method(*args, **kwargs) if function is None else function(self_, *args, **kwargs)

        # for code that is about to write in another way
        wait_first.waits = self._on_call  # type: ignore[attr-defined]
        members = vars(owner)
        before = members.get(name)
        members[name] = bound = types.MethodType(wait_first, owner)
        return _Method(members, name, bound, before)

    def remove(self) -> None:
        """Remove every hook; idempotent."""
        for _, handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._wait = _nothing  # if foreign code wrapped our method in one of its own, ours stays

    def __deepcopy__(self, memo: dict[int, Any]) -> Fence:
        # deepcopy(model), which EMA helpers call, copies the model's hooks: the copy waits on the
        # same fence.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.save(model) pickles hooks: a loaded model has a fence that never waits.
        return Fence, (_nothing,)

    def _on_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        self._count(optimizer)
        if callable(closure := args[1] if len(args) > 1 else kwargs.get("closure")) and type(
            optimizer
        ).__module__.startswith("torch.optim."):
            # A step of torch's own changes nothing before it has called its closure.
            waiting = self._after(closure)
            return (
                ((args[0], waiting, *args[2:]), kwargs)
                if len(args) > 1
                else (args, {**kwargs, "closure": waiting})
            )
        self._wait()
        return None

    def _count(self, optimizer: object) -> None:
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        self.on_step(optimizer)

    def _after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that waits after the step's own, which runs forward and backward: the copy
        overlaps them here too."""

        is_first = True

        def wait_then() -> Any:
            nonlocal is_first
            try:
                return closure()
            finally:
                if is_first:
                    is_first = False
                    self._wait()

        return wait_then

    def _on_call(self, *_: object) -> None:
        self._wait()

    # A restore checks this: such a hook does not change what is loaded.
    _on_call.only_waits = True  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Method:
    """A method that was put into an object's ``__dict__``, and what was there before."""

    members: dict[str, Any]
    name: str
    bound: object
    before: object

    def remove(self) -> None:
        """Remove it, unless another method was put in front of it."""
        if self.members.get(self.name) is not self.bound:
            return
        if self.before is None:
            del self.members[self.name]
        else:
            self.members[self.name] = self.before


def _nothing(*_: object) -> None:
    pass
