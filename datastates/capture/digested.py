"""Digests of chunks that cross, computed by the device that has them, beside the copies: the host need not read what arrives.

A digest is that of the bytes as they were on the device, so whoever reads the state checks the way from there, too. Digests are computed
only once the kernels are ready. The first ones of a plan are compared with the host's; if a device computes others, or none, the host
digests everything that comes from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from datastates.content.blocks import Part, can_digest, cut
from datastates.content.digester import Digester, is_ready, is_worth
from datastates.content.xxh3 import digests_of

if TYPE_CHECKING:
    import torch

__all__ = ["Digested"]

_logger = logging.getLogger(__name__)


class Digested:
    """The chunks of one plan that one device digests: those that consist of these stretches alone, without those of ``left_out``.

    ``lanes`` belongs to the crossing thread, the rest to the stage thread.
    """

    def __init__(self, stretches: Iterable[tuple[int, torch.Tensor]], lengths: Sequence[int], left_out: Collection[int]) -> None:
        parts: dict[int, list[Part]] = {}
        for start, flat in stretches:
            for chunk, offset, data in cut(start, flat):
                parts.setdefault(chunk, []).append((offset, data))
        fit = {chunk: each for chunk, each in parts.items() if chunk not in left_out and can_digest(lengths[chunk], each)}
        self._chunks = list(fit)
        self._digester = Digester([(lengths[chunk], each) for chunk, each in fit.items()]) if fit else None
        self._is_tried = self._is_given_up = False

    def lanes(self) -> torch.Tensor | None:
        """Queue the digests on the current stream; None if there are none to be had yet."""
        if self._digester is None or self._is_given_up or not is_worth(self._digester.like) or not is_ready(self._digester.like):
            return None
        try:
            return self._digester.lanes()
        except Exception as exc:  # memory may be short there
            self._give_up(f"cannot be digested there ({exc!r})")
            return None

    def learn(self, lanes: torch.Tensor, digest_of: Callable[[int], bytes]) -> Mapping[int, bytes]:
        """The digests by chunk, from lanes that have arrived on the host; none if the device computes others than ``digest_of``."""
        assert self._digester is not None, "it gave the lanes"
        found = dict(zip(self._chunks, digests_of(lanes.numpy(), self._digester.lengths), strict=True))
        if not self._is_tried:
            self._is_tried = True
            if any(digest_of(chunk) != digest for chunk, digest in found.items()):
                self._give_up("had other digests there than on the host")
        return {} if self._is_given_up else found

    def _give_up(self, why: str) -> None:
        self._is_given_up = True
        _logger.warning("chunks of a state on a device %s: the host digests them", why)
