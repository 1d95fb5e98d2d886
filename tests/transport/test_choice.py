"""Which data plane two sides come to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from datastates.errors import InvalidInput, Unsupported
from datastates.transport import handshake
from datastates.transport.handshake import agree, has_rdma, offer
from datastates.transport.protocol import Ready

OURS, BOTH = ("tcp",), ("tcp", "ucx")


def ready(planes: tuple[str, ...], wish: str = "") -> Ready:
    return Ready(planes, b"", 1000, wish=wish)


@pytest.mark.parametrize(
    ("one", "other", "plane"),
    [
        (ready(BOTH), ready(BOTH), "tcp"),
        (ready(BOTH, "ucx"), ready(BOTH), "ucx"),
        (ready(BOTH, "rdma"), ready(BOTH, "rdma"), "ucx"),
        (ready(BOTH, "rdma"), ready(BOTH), "tcp"),
        (ready(BOTH, "rdma"), ready(OURS), "tcp"),
        (ready(OURS), ready(BOTH), "tcp"),
        (ready(("tcp", "ipc")), ready(("tcp", "ipc")), "ipc"),
        (ready(("tcp", "ipc")), ready(BOTH), "tcp"),
        (ready(("memory",)), ready(("memory",)), "memory"),
    ],
)
def test_both_sides_come_to_the_same(one: Ready, other: Ready, plane: str) -> None:
    assert agree(one, other, "peer") == agree(other, one, "peer") == plane


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (ready(BOTH, "ucx"), ready(OURS), "this side has data='ucx', and peer"),
        (ready(OURS), ready(BOTH, "ucx"), "peer has data='ucx', and this side"),
        (ready(("memory",)), ready(OURS), "peer moves bytes over tcp, this side over memory"),
        (ready(BOTH), ready(()), "over nothing"),
    ],
)
def test_what_cannot_be_is_said(one: Ready, other: Ready, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        agree(one, other, "peer")


def test_ucx_is_never_used_at_a_url_that_rules_it_out() -> None:
    with pytest.raises(InvalidInput, match="tcp://, which never uses UCX"):
        offer(OURS, "tcp", "ucx")


def test_memory_of_devices_is_offered_only_where_it_was_asked_for() -> None:
    assert offer(BOTH, "ucx", "ipc") == offer(OURS, "tcp", "ipc") == (("tcp", "ipc"), "")
    assert "ipc" not in offer(BOTH, "ucx", "auto")[0]
    with pytest.raises(InvalidInput, match="tcp://"):
        offer(("memory",), "memory", "ipc")


def test_what_a_side_offers_follows_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert offer(BOTH, "ucx", "tcp") == (OURS, "")
    assert offer(BOTH, "ucx", "ucx") == (BOTH, "ucx")
    assert offer(BOTH, "ucx", "auto") == (BOTH, "")
    monkeypatch.setattr(handshake, "has_rdma", lambda: True)
    assert offer(BOTH, "ucx", "auto") == (BOTH, "rdma")
    assert offer(BOTH, "ucx", "auto", is_secret=True) == (BOTH, "")


def test_an_adapter_counts_only_with_a_ucx_that_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    assert not has_rdma(tmp_path)
    monkeypatch.setenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "true")
    assert has_rdma(tmp_path)
    assert not has_rdma(tmp_path / "nothing")
