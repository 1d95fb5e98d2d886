"""Operators on tensors of late devices: queued, with results that are poison until they have run.

After the rules of CUDA: what the host reads without waiting is old or poison; memory that is freed
while another stream still works with it, and that nobody holds, is somebody else's; a copy to or
from pageable host memory holds the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .streams import Op, Stream

if TYPE_CHECKING:
    from .device import LateDevices

_COPIES = ("aten::copy_", "aten::_foreach_copy_")
_METADATA = {
    f"aten::{name}"
    for name in (
        "is_set_to",
        "is_same_size",
        "stride",
        "size",
        "sym_size",
        "sym_stride",
        "sym_numel",
    )
}


class Hazard(RuntimeError):
    """What a device would have done wrong without a word."""


@dataclass(slots=True)
class Home:
    """The memory of a tensor on a device, and which stream it was given out for."""

    storage: StorageWeakRef
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Loose:
    """A tensor that nothing keeps until it is looked at."""

    storage: StorageWeakRef
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Loose:
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(
            storage, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        )

    def look(self, name: str) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise Hazard(
                f"{name} uses memory that was freed before it ran: hold it until it was used"
            )
        return torch.empty(0, dtype=self.dtype).set_(
            storage, self.offset, tuple(self.size), tuple(self.stride)
        )


class Operators(TorchDispatchMode):
    """While it is active on a thread, operators on device tensors are queued there; on host
    tensors they run at once."""

    def __init__(self, late: LateDevices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._late = late

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema, late = kwargs or {}, func._schema, self._late
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        home = next(filter(None, map(late.home, tensors)), None)
        if home is None or schema.name in _METADATA or _is_view(schema):
            return func(*args, **kwargs)
        stream = late.current_for(home.stream.device)
        if schema.name == "aten::set_":
            # another memory for a tensor, as in its deep copy: the host does that
            func(*args, **kwargs)
            return late.adopt(args[0], stream)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return self._at_once(func, args, kwargs, stream)
        writes = [
            each.name
            for each in schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        ]
        if not writes and not any("Tensor" in str(each.type) for each in schema.returns):
            # ``item``: the host wants to know
            late.finish(stream)
            return func(*args, **kwargs)
        if writes:
            bound = {
                **dict(zip((each.name for each in schema.arguments), args, strict=False)),
                **kwargs,
            }
            written = [leaf for name in writes for leaf in tree_leaves(bound[name])]
            op = self._queue(func, args, kwargs, stream, None, written)
            if schema.name in _COPIES and self._holds_the_host(
                tensors, is_blocking=not bound.get("non_blocking")
            ):
                late.hold_for(op)
            outs = [bound[name] for name in writes]
            return (
                None if not schema.returns else outs[0] if len(schema.returns) == 1 else tuple(outs)
            )
        try:
            made = func(
                *tree_map(_outline, args),
                **{
                    **tree_map(_outline, kwargs),
                    **({"device": "meta"} if "device" in kwargs else {}),
                },
            )
        except (NotImplementedError, RuntimeError):  # the shape depends on the data
            return self._at_once(func, args, kwargs, stream)
        if any(
            leaf.layout is not torch.strided
            for leaf in tree_leaves(made)
            if isinstance(leaf, torch.Tensor)
        ):
            return self._at_once(func, args, kwargs, stream)
        outputs = tree_map(lambda each: late.adopt(_poisoned(each), stream), made)
        self._queue(func, args, kwargs, stream, outputs)
        return outputs

    def _at_once(self, func: Any, args: Any, kwargs: Any, stream: Stream) -> Any:
        """What makes or reads sparse tensors, or has to look at numbers to know how many there
        are, waits for them."""
        self._late.finish(stream)
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and self._late.home(leaf) is None:
                self._late.adopt(leaf, stream)
        return made

    def _queue(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        stream: Stream,
        outputs: Any,
        written: Sequence[object] = (),
    ) -> Op:
        name, ids = str(func), set(map(id, written))
        inputs = tree_map(
            lambda each: self._seen_by(stream, each, is_written=id(each) in ids), (args, kwargs)
        )
        results = [leaf.data for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]

        def run() -> None:
            with _plainly():
                given, named = tree_map(
                    lambda each: each.look(name) if isinstance(each, _Loose) else each, inputs
                )
                made = func(*given, **named)
                for result, value in zip(
                    results,
                    [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)],
                    strict=False,
                ):
                    result.copy_(value)

        return self._late.queue(Op(stream, name, run, launches=max(1, len(written))))

    def _seen_by(self, stream: Stream, given: object, *, is_written: bool) -> object:
        """What an op holds of its argument until it runs.

        Versions count when it is queued, not when it runs."""
        if not isinstance(given, torch.Tensor):
            return given
        home = self._late.home(given)
        if home is not None:
            is_safe = home.stream is stream or not given.untyped_storage().nbytes()
            return given.data if is_safe else _Loose.of(given)
        return given.data if is_written or self._late.is_pinned(given) else given.data.clone()

    def _holds_the_host(self, tensors: list[torch.Tensor], *, is_blocking: bool) -> bool:
        hosts = [tensor for tensor in tensors if self._late.home(tensor) is None]
        return bool(hosts) and (is_blocking or not all(map(self._late.is_pinned, hosts)))


def _is_view(schema: Any) -> bool:
    return any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


def _outline(given: object) -> object:
    if not isinstance(given, torch.Tensor):
        return given
    return torch.empty_strided(given.size(), given.stride(), dtype=given.dtype, device="meta")


def _poisoned(meta: Any) -> Any:
    if not isinstance(meta, torch.Tensor):
        return meta
    return poison(torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype))


def poison(made: torch.Tensor) -> torch.Tensor:
    """The same tensor: what its memory was before shows nowhere, so that a fault is the same
    each time."""
    storage = made.untyped_storage()
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xA5)
    return made


@contextmanager
def _plainly() -> Iterator[None]:
    """As a device does it: outside of whatever mode the thread that runs it is in."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield
