"""Pictures of samples from a user's function: what it returns is checked before it is sent, and a few are kept."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from datastates.errors import DatastatesError, Unavailable
from datastates.lineage.show.reports import ReportDetail
from datastates.show.thumbnails import image_of

from .problems import Refusal

__all__ = ["TYPES", "Pictures", "Show", "shown"]

TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""The only formats that are served as pictures: SVG may contain scripts."""

Show = Callable[[int], object]
"""Returns the picture of a sample for its index: an array, or bytes of an encoded picture."""

_KEPT_BYTES = 16 << 20
_WAIT_S = 10.0
_logger = logging.getLogger(__name__)


class Pictures:
    """Calls the user's function for one picture at a time, so that it need not be safe from several threads."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._asking, self._lock = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes = 0

    def of(self, index: int) -> bytes:
        """The picture of a sample, encoded.

        :raises Refusal: the function failed, returned something else, or is busy.
        """
        with self._lock:
            if index in self._kept:
                self._kept.move_to_end(index)
                return self._kept[index]
        if not self._asking.acquire(timeout=_WAIT_S):
            raise _refusal("is busy with other pictures: try again")
        try:
            image = image_of(self._show(index), index)
        except Exception as error:  # the user's function may raise anything; the log tells all of it to the person who started the server
            _logger.exception("the function that shows samples failed for sample %d", index)
            said = str(error) if isinstance(error, DatastatesError) else f"it raised {type(error).__name__}"
            raise _refusal(f"gave none of sample {index}: {said}") from error
        finally:
            self._asking.release()
        self._keep(index, image)
        return image

    def _keep(self, index: int, image: bytes) -> None:
        with self._lock:
            if self._kept.setdefault(index, image) is image:
                self._kept_bytes += len(image)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])


def shown(found: ReportDetail) -> ReportDetail:
    """The report with every sample marked as having a picture, since the function draws any."""
    return replace(found, samples=tuple(replace(sample, has_picture=True) for sample in found.samples))


def _refusal(why: str) -> Refusal:
    return Refusal(503, Unavailable.kind, f"the function that shows samples {why}")
