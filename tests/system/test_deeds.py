"""What a thread is doing, and since when it has made no progress."""

from __future__ import annotations

import threading
from pathlib import Path

from datastates.system.threads import at, io_hook, thread_work, work_of

ME = threading.current_thread


def test_a_deed_is_where_its_last_call_was_and_over_at_the_end_of_the_block() -> None:
    assert work_of(ME()) is None
    with thread_work("writing a state") as one:
        assert work_of(ME()) is one
        assert one.describe(one.since + 3.0) == "writing a state has made no progress for 3 s"
        at("write", Path("/packs/one"), 5)
        with thread_work("asking the lineage") as inner:
            assert work_of(ME()) is inner
        assert work_of(ME()) is one
        assert one.describe(one.since + 40.0) == "write of /packs/one has made no progress for 40 s"
    assert work_of(ME()) is None


def test_a_call_about_many_bytes_is_given_longer() -> None:
    with thread_work("writing a state") as one:
        at("sync", Path("/packs/one"))
        assert not one.is_stalled(one.since + 29.9, 30.0)
        assert one.is_stalled(one.since + 30.1, 30.0)
        at("sync", Path("/packs/one"), 10_000_000_000)
        assert not one.is_stalled(one.since + 529.9, 30.0)
        assert one.is_stalled(one.since + 530.1, 30.0)


def test_calls_outside_of_a_deed_are_hindered_too_and_only_as_long_as_somebody_is_in_the_way() -> (
    None
):
    seen: list[tuple[str, Path, int]] = []
    with io_hook(lambda call, path, size: seen.append((call, path, size))):
        at("write", Path("one"), 5)
    at("write", Path("two"), 5)
    assert seen == [("write", Path("one"), 5)]
