"""The loaders on which a Trainer trains, each in a wrapper that counts the batches that it
returned, and finds that place again.

Lightning makes iterators early, and fetches one batch ahead if a loader has no length. A pass
therefore begins with its first batch. The place of a loader without a length is one batch behind
the fetched one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils import _pytree as pytree

from datastates.errors import InvalidInput
from datastates.state.adapters import has_state
from datastates.state.generators import RngState
from datastates.state.passes import Pass, keeping_generators

_PASSED_ON = frozenset({"worker_init_fn", "_iterator"})
"""The attributes that Lightning sets on a loader."""


class ResumableLoader:
    """A loader that Lightning iterates over. All other attributes are the inner loader's."""

    def __init__(self, loader: Any, data: Data, place: Mapping[str, Any] | None) -> None:
        self.loader = loader
        self._data, self._place = data, place
        self._is_stateful = has_state(loader)
        self._is_ahead = _length(loader) is None
        self._turn: Pass | None = None
        self._before: dict[str, Any] | None = None
        self.is_new = True
        if self._is_stateful and place is not None and "loader" in place:
            loader.load_state_dict(place["loader"])

    @property
    def is_catching_up(self) -> bool:
        """Whether the next batch had been fetched, and not handed out, when the state was taken."""
        return self.is_new and self._place is not None and "before" in self._place

    def __iter__(self) -> Iterator[Any]:
        self.is_new = True
        return self._batches()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # being copied
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _PASSED_ON:
            setattr(self.loader, name, value)
        else:
            object.__setattr__(self, name, value)

    def claim(self, *, is_resumable: bool) -> None:
        """Offer the methods that Lightning looks for on loaders; it warns if there are none,
        though the place was found without them."""
        for name in ("state_dict", "load_state_dict"):
            vars(self).pop(name, None)
            if is_resumable and not self._is_stateful:
                vars(self)[name] = dict

    def place(self, *, is_between: bool) -> dict[str, object]:
        """Plain values that lead back to this place. With ``is_between`` they lead to the beginning
        of another pass."""
        turn = self._turn
        if self.is_new or is_between or turn is None:
            turn = self._pass() if turn is None else turn
            left = turn.left_behind
            place: dict[str, object] = {
                "is_over": True,
                "is_left": turn.is_left,
                **({"begin": left} if left else {}),
            }
            return (
                {**place, "loader": self.loader.state_dict()}
                if self._is_stateful and self._turn is not None
                else place
            )
        place = dict(turn.place)
        if self._before is not None:
            return {**place, "batches": turn.batches - 1, **self._before}
        return {**place, "loader": self.loader.state_dict()} if self._is_stateful else place

    def _batches(self) -> Iterator[Any]:
        self._data.batch_requested(self)
        iterator = self._begin()
        while True:
            if self._is_ahead:
                self._note()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch
            self._data.batch_requested(self)

    def _begin(self) -> Iterator[Any]:
        place, self._place = self._place, None
        self.is_new, self._before = False, None
        turn = self._turn = self._pass()
        if place is None or place["is_over"]:
            self._drop_rest(place or {})
            turn.recall({} if place is None else place.get("begin", {}))
            return turn.begin(None)
        iterator = turn.resume_at(place, None)
        if "before" in place:
            RngState().load_state_dict(place["before"])
        return iter(()) if iterator is None else iterator

    def _drop_rest(self, place: Mapping[str, Any]) -> None:
        """Make and drop the iterator that restoring a loader prepared, if Lightning did not
        use it up: another pass follows."""
        if "loader" in place and place["is_left"]:
            with keeping_generators([]):
                iter(self.loader)

    def _pass(self) -> Pass:
        loader = self.loader
        return Pass(loader, lambda part: self._is_stateful and part is loader, [loader])

    def _note(self) -> None:
        """Note what is needed to fetch the next batch again."""
        self._before = {
            "before": RngState().state_dict(),
            **({"loader": self.loader.state_dict()} if self._is_stateful else {}),
        }


class Data:
    """The loaders of a fit, as one object with a state.

    ``batch_requested`` is called before each batch."""

    is_optional = True  # a state that another loop captured does not have it

    def __init__(self, trainer: Any, on_request: Callable[[bool], None]) -> None:
        self.trainer, self._on_request = trainer, on_request
        self._waiting: list[Mapping[str, Any]] = []
        self.is_between = False

    @property
    def loaders(self) -> list[ResumableLoader]:
        """The loaders that the Trainer has now."""
        return [
            each
            for each in pytree.tree_leaves(self.trainer.train_dataloader)
            if isinstance(each, ResumableLoader)
        ]

    def keep(self, loader: object) -> ResumableLoader:
        """The loader, wrapped; it takes the next of the restored places."""
        return ResumableLoader(loader, self, self._waiting.pop(0) if self._waiting else None)

    def batch_requested(self, loader: ResumableLoader) -> None:
        """Called when Lightning requests a batch of a loader. A request to the first of several
        loaders means that a step is over."""
        loaders = self.loaders
        if loaders and loaders[0] is loader:
            self._on_request(loader.is_catching_up)

    def state_dict(self) -> dict[str, object]:
        places: dict[str, object] = {
            "loaders": [each.place(is_between=self.is_between) for each in self.loaders]
        }
        return (
            places
            if self.trainer.world_size == 1
            else {**places, "processes": self.trainer.world_size}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the loaders that are made from now on continue where the stored ones stood.

        :raises InvalidInput: a different number of processes shared an epoch that is not over.
        """
        processes, now = state.get("processes", 1), self.trainer.world_size
        if processes != now and not all(place["is_over"] for place in state["loaders"]):
            raise InvalidInput(
                f"the state is from within an epoch that {processes} processes shared, and this"
                f" Trainer has {now}: use devices={processes}, or begin with a state from the end"
                " of an epoch"
            )
        self._waiting = list(state["loaders"])


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
