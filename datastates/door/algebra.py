"""The methods of a repository that take several states: comparisons, differences, merges, ensembles."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from datastates import values
from datastates.lineage.states import State

if TYPE_CHECKING:
    import torch

    from datastates.algebra.bisection import Bisection
    from datastates.algebra.blame import Blame
    from datastates.algebra.diff import Diff
    from datastates.algebra.ensemble import Ensemble
    from datastates.lineage.show.comparison import Comparison


from .opened import Opened

__all__ = ["Algebra"]


class MergeNames(TypedDict, total=False):
    """The names of a merged state, and its message; see ``Repository.merge``."""

    into: str | None
    tag: str | None
    message: str | None


class Algebra(Opened):
    """The methods that take several states."""

    @values.takes(revs=values.several(values.revision))
    def compare(self, revs: Sequence[str | State]) -> Comparison:
        """Several states side by side: configuration, metrics, attributes and code, differences first; and where each can be restored.

        No payload is read, so states whose bytes are gone can be compared as well.

            for row in repo.compare(["main~3", "main"]).metrics:
                print(row.key, row.values)

        :param revs: 2 to 32 states.
        """
        from datastates.show.overview import comparison

        return comparison(self.core, values.revisions(revs))

    @values.takes(
        old=values.revision, new=values.revision, only=values.patterns, stat=values.flag, on_progress=values.optional(values.callback)
    )
    def diff(
        self,
        old: str | State,
        new: str | State,
        *,
        only: str | Sequence[str] | None = None,
        stat: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Diff:
        """What changed between two states: each tensor's norms, distance, cosine, largest change, changed fraction; metrics, config, code.

        It needs memory for a few tensors only, and does not read what both states hold in the same chunks. If the bytes of one of them are
        gone, everything but the tensors is compared, and ``lacking`` says why and which state can be restored instead.

            for change in repo.diff("main~3", "main").tensors:
                print(change.path, change.relative)

        :param old: the state before the changes.
        :param new: the state after them.
        :param only: which tensors are compared, as in ``load``.
        :param stat: read no payload: tensors are ``same`` by their digests, or ``unread``.
        :param on_progress: called with the bytes of ``new`` that have been compared, and their total.
        """
        from datastates.algebra.diff import diff

        return diff(self.core, old, new, only=only, stat=stat, on_progress=on_progress)

    @values.takes(rev=values.revision, only=values.patterns, size=values.flag, on_progress=values.optional(values.callback))
    def blame(
        self,
        rev: str | State,
        *,
        only: str | Sequence[str] | None = None,
        size: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Blame]:
        """For each tensor, in the order of the tree, the state that last changed any bit of it, along first parents.

        It reads manifests. Of the payload it reads only changed chunks that several tensors share.

            for found in repo.blame("main", only="model"):
                print(found.path, found.state.step, found.change)

        :param rev: the state whose tensors are asked about.
        :param only: which tensors, as in ``load``.
        :param size: also compute by how much each tensor changed there, which reads both versions of it.
        :param on_progress: called with the number of states looked at so far, and the most that there can be.
        :raises Unavailable: the bytes of the state itself are gone; names the nearest ancestor that has them.
        """
        from datastates.algebra.blame import blame

        return blame(self.core, rev, only=only, size=size, on_progress=on_progress)

    @values.takes(
        good=values.revision,
        bad=values.revision,
        only=values.patterns,
        verdicts=values.optional(values.path),
        on_progress=values.optional(values.callback),
    )
    def bisect(
        self,
        good: str | State,
        bad: str | State,
        predicate: Callable[[Any], object] | str,
        *,
        only: str | Sequence[str] | None = None,
        verdicts: str | os.PathLike[str] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Bisection:
        """The first state on the path from ``good`` to ``bad`` for which a predicate holds; at most ceil(log2(n)) + 1 of n are restored.

        States whose bytes are gone are not tried. If one of them may be the first, ``candidates`` lists all that may.
        ``repo.bisect("warm", "main", lambda tree: tree["model"]["weight"].abs().max() > 100, only="model").bad`` is such a state.

        :param good: a state for which the predicate does not hold yet.
        :param bad: a descendant of ``good`` for which it holds.
        :param predicate: a function that takes a state's containers, as ``load`` returns them, and returns True if the state is bad, False
            if it is good, None if it cannot tell. Or a condition on a metric, ``"loss > 5"``: then nothing is restored, and NaN is bad.
        :param only: what is loaded for the predicate, as in ``load``.
        :param verdicts: a file that keeps the results so far, so that an interrupted bisection can go on. Use one file for each question.
        :param on_progress: called with the number of states tried so far, and the most that will be tried.
        :raises InvalidInput: ``bad`` does not descend from ``good``, or the predicate does not tell the two apart.
        """
        from datastates.algebra.bisection import bisect

        if not isinstance(predicate, str):
            values.callback(predicate, "predicate")
        return bisect(self.core, good, bad, predicate, only=only, verdicts=verdicts, on_progress=on_progress)

    @values.takes(
        revs=values.several(values.revision),
        method=values.string,
        weights=values.optional(values.several(values.number)),
        only=values.patterns,
        rest=values.string,
        decay=values.optional(values.number),
        into=values.optional(values.string),
        tag=values.optional(values.string),
        message=values.optional(values.message),
    )
    @values.unpacks(MergeNames, into=None, tag=None, message=None)
    def merge(
        self,
        revs: Sequence[str | State],
        *,
        method: str = "mean",
        weights: Sequence[float] | None = None,
        only: str | Sequence[str] | None = "model",
        rest: str = "keep",
        decay: float | None = None,
        **names: Unpack[MergeNames],
    ) -> State:
        """Make a state whose floating-point tensors are combined from those of ``revs``, and whose parents they are.

            soup = repo.merge(["main~2", "main"], method="mean", into="soup")

        - ``mean``: weighted by ``weights``.
        - ``ema``: an exponential moving average by ``decay``, from the oldest of ``revs`` to the newest, which is the first parent.

        Statistics of BatchNorm are averaged like weights.

        :param revs: the parents.
        :param method: one of the above.
        :param weights: the members' shares, which sum to 1; None: equal shares.
        :param only: which tensors are combined. Integers, counters and everything else are the first parent's.
        :param rest: ``"drop"`` leaves out objects of which ``only`` selects nothing.
        :param decay: for ``ema``: how much of the average each newer state leaves, from 0 to below 1.
        :param into: a branch: a new one, or one whose head is the first parent. It makes the state durable.
        :param tag: a tag, which makes the state durable too. With neither, the state stays in memory.
        :param message: a text for the state.
        :raises InvalidInput: the states do not fit together (lists what does not), or an argument makes no sense.
        :raises Unavailable: the bytes of a parent are gone; names the nearest ancestor that has them.
        :raises Conflict: a name is taken, or the branch's head is not the first parent.
        """
        from datastates.algebra.merge import Names, merge

        given = Names(names["into"], names["tag"], names["message"])
        return merge(self.core, revs, method=method, weights=weights, only=only, rest=rest, decay=decay, names=given)

    @values.takes(rev=values.revision)
    def verify_merge(self, rev: str | State) -> State:
        """The merged state, once it has been merged again from its parents and each tensor is the same. The parents' bytes must be here.

        :raises Corrupt: a tensor is not what merging the parents gives; names it.
        """
        from datastates.algebra.merge import verify_merge

        return verify_merge(self.core, rev)

    @values.takes(revs=values.several(values.revision), only=values.string, pick=values.optional(values.callback))
    def ensemble(
        self,
        revs: Sequence[str | State],
        model: torch.nn.Module,
        *,
        only: str = "model",
        pick: Callable[[Any], torch.Tensor] | None = None,
    ) -> Ensemble:
        """Predictions from several states, each loaded once.

            prediction = repo.ensemble(["main~2", "main"], model)(inputs)
            print(prediction.mean.shape, prediction.spread.max())

        :param revs: the members.
        :param model: the module that computes, with the weights and buffers of each state in turn. Its own are not touched.
        :param only: the name under which the module was tracked.
        :param pick: chooses the tensor from an output that is not a tensor.
        :raises InvalidInput: a state does not fit the module; lists what does not.
        """
        from datastates.algebra.ensemble import load_ensemble

        return load_ensemble(self.core, revs, model, only=only, pick=pick)
