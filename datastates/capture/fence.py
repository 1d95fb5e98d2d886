"""The fence: nothing that a deferred copy still reads may be changed before the copy is done.

Weights and optimizer state do not change between two ``optimizer.step()`` calls, so their copy overlaps the next forward
and backward; hooks make whatever changes them next wait (CheckFreq's observation, with the wait put on the update).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

__all__ = ["Fence"]


class Fence:
    """Hooks on optimizers and modules that call ``wait`` before a change.

    ``wait`` runs on the thread that makes the change (for optimizer-in-backward that is autograd's). It must be cheap
    when no copy is pending. On CUDA it makes the current stream wait, not the host.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._handles: dict[int, list[RemovableHandle]] = {}

    def install(self, optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module]) -> None:
        """Hook what is not hooked yet; call again when the layout of what is tracked changed."""
        for optimizer in optimizers:
            if id(optimizer) not in self._handles:
                # Optimizers in backward call `step` of their own from post-accumulate-grad hooks: this covers them too.
                self._handles[id(optimizer)] = [
                    optimizer.register_step_pre_hook(self._on_step),
                    optimizer.register_load_state_dict_pre_hook(self._on_load),
                ]
        for module in modules:
            if id(module) not in self._handles:
                self._handles[id(module)] = [module.register_load_state_dict_pre_hook(self._on_module_load)]

    def remove(self) -> None:
        """Take every hook off again; idempotent."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Fence:
        # deepcopy(model), as EMA helpers do, copies the model's hooks: the copy waits on the same fence.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.save(model) pickles hooks: what is loaded has a fence that never waits.
        return Fence, (_nothing,)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._wait()

    def _on_load(self, optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
        self._wait()

    def _on_module_load(self, *args: Any) -> None:
        self._wait()

    # A restore asks: such a hook changes nothing of what is loaded.
    _on_load.only_waits = _on_module_load.only_waits = True  # type: ignore[attr-defined]


def _nothing() -> None:
    pass
