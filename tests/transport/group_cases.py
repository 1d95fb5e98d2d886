"""What a group promises, whatever its ranks meet over: each case is what one rank does.

All of them run in one launch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from datastates.collective import EXCHANGE_BYTES, Group, MPIGroup, SoloGroup, TorchGroup
from datastates.errors import Closed, InvalidInput, Unavailable
from tests.support.jobs import Say


def exchanges_values_of_any_length(group: Group) -> None:
    """Values of different lengths, empty ones and the largest too."""
    sizes = [(0, 5, EXCHANGE_BYTES, 17)[rank % 4] for rank in range(group.size)]
    given = bytes([65 + group.rank]) * sizes[group.rank]
    for _ in range(3):
        assert group.exchange(given) == [
            bytes([65 + rank]) * size for rank, size in enumerate(sizes)
        ]
    assert group.exchange(b"") == [b""] * group.size


def refuses_more_than_an_exchange_takes(group: Group) -> None:
    """On every rank here, so that none waits."""
    with pytest.raises(InvalidInput, match="pass on what is large"):
        group.exchange(bytes(EXCHANGE_BYTES + 1))


def passes_bytes_on_from_each_root(group: Group) -> None:
    """To all; more than one exchange takes; from memory that is read-only, too."""
    for root in range(group.size):
        for size in (0, 1, 3 * EXCHANGE_BYTES + 5):
            expected = bytes([root + 1]) * size
            buffer = expected if group.rank == root else bytearray(size)
            group.pass_on(buffer, root)
            assert buffer == expected


def passes_tensors_on(group: Group) -> None:
    """Tensors of bytes, in place."""
    import torch

    tensor = torch.full((3, 1000), group.rank, dtype=torch.uint8)
    group.pass_on(tensor, group.size - 1)
    assert tensor.eq(group.size - 1).all()


def passes_bytes_on_to_some(group: Group) -> None:
    """Who is not named keeps what it has, and need not call; transfers follow on each other in
    one order."""
    buffer = bytearray([group.rank] * 100)
    for root in range(group.size):
        to = [rank for rank in range(group.size) if rank != root and rank % 2]
        if group.rank == root or group.rank in to:
            own = bytes([200 + root] * 100) if group.rank == root else buffer
            group.pass_on(own, root, to)
    senders = [root for root in range(group.size) if root != group.rank]
    assert buffer == bytes([200 + senders[-1] if group.rank % 2 and senders else group.rank] * 100)


def waits_asleep(group: Group) -> None:
    """Rank 0 comes late; the others see what it did before, and sleep until then."""
    began = time.process_time()
    if group.rank == 0 and group.size > 1:
        time.sleep(0.5)  # the wait itself is what the others are watched in
    stamp = time.monotonic()
    group.barrier()
    after, cpu = time.monotonic(), time.process_time() - began
    assert after >= float(group.exchange(repr(stamp).encode())[0])
    assert cpu < 0.3


def says_that_it_is_closed(group: Group) -> None:
    """Closed twice, then used. The last case."""
    group.close()
    group.close()
    for use in (group.barrier, lambda: group.pass_on(bytearray(1), 0)):
        with pytest.raises(Closed, match="make another one"):
            use()


CASES: tuple[Callable[[Group], None], ...] = (
    exchanges_values_of_any_length,
    refuses_more_than_an_exchange_takes,
    passes_bytes_on_from_each_root,
    passes_tensors_on,
    passes_bytes_on_to_some,
    waits_asleep,
    says_that_it_is_closed,
)


def group_of(over: str, timeout_s: float = 60) -> Group:
    """A new group of all ranks."""
    if over == "solo":
        return SoloGroup()
    return TorchGroup(timeout_s=timeout_s) if over == "torch" else MPIGroup(timeout_s=timeout_s)


def all_cases(over: str, say: Say) -> None:
    """Every case, and what is particular to the kind."""
    group = group_of(over)
    say(group.rank, "of", group.size)
    for case in CASES:
        case(group)
    _leaves_the_program_alone(over, group_of(over))
    _can_be_a_part(over)
    say("all cases")


def _leaves_the_program_alone(over: str, group: Group) -> None:
    """A collective of the program is under way on rank 0, and only comes on the others, while
    they exchange."""
    if group.rank:
        assert group.exchange(str(group.rank).encode()) == [
            str(rank).encode() for rank in range(group.size)
        ]
    if over == "mpi":
        from mpi4py import MPI

        began: Any = MPI.COMM_WORLD.Ibarrier()
    else:
        import torch
        import torch.distributed as dist

        began = dist.all_reduce(torch.ones(1), async_op=True)
    if not group.rank:
        assert group.exchange(b"0") == [str(rank).encode() for rank in range(group.size)]
    began.Wait() if over == "mpi" else began.wait()
    group.close()


def _can_be_a_part(over: str) -> None:
    """The even ranks are a group of their own, and so are the odd ones."""
    if over == "mpi":
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        group: Group = MPIGroup(MPI.Intracomm(MPI.COMM_WORLD.Split(rank % 2)))
    else:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        rank, size = dist.get_rank(), dist.get_world_size()
        of = [dist.new_group([each for each in range(size) if each % 2 == odd]) for odd in range(2)]
        group = TorchGroup(of[rank % 2])
    mine = [each for each in range(size) if each % 2 == rank % 2]
    assert (group.rank, group.size) == (mine.index(rank), len(mine))
    buffer = bytearray(f"{rank}", "ascii")
    group.pass_on(buffer, len(mine) - 1)
    assert group.exchange(str(rank).encode()) == [str(each).encode() for each in mine]
    assert buffer == str(mine[-1]).encode()
    if over == "torch":
        _can_be_made_again(of[rank % 2])
        for wrong in (init_device_mesh("cpu", (size,)), 3, "world"):
            with pytest.raises(
                InvalidInput,
                match=r"is no group of torch\.distributed: give one that .* mesh\.get_group\(\)",
            ):
                TorchGroup(wrong)  # type: ignore[arg-type]


def _can_be_made_again(of: Any) -> None:
    """Each meets at once; one rank keeps a group that the others close, and is the last to make
    the next."""
    kept: list[Group] = []
    for _ in range(4):
        group = TorchGroup(of, timeout_s=20)
        assert group.exchange(str(group.rank).encode()) == [
            str(rank).encode() for rank in range(group.size)
        ]
        if group.rank:
            kept.append(group)
            time.sleep(0.02)  # by then the first rank looks for this one
        else:
            group.close()
    for each in kept:
        each.close()


def one_dies(over: str, how: str, say: Say) -> None:
    """The last rank dies, or hangs, before an exchange; what the others say of it, and how long
    that took."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    group = group_of(over, timeout_s=6 if how == "hangs" else 60)
    group.barrier()
    if group.rank == group.size - 1:
        say("gone")
        if how == "hangs":
            signal.sigwait({signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    for _ in range(2):
        try:
            group.exchange(b"x" * 1000)
            say("no error")
        except Unavailable as exc:
            say(
                "unavailable",
                "lost" in str(exc) or "waited" in str(exc) or "another group" in str(exc),
            )
    say("soon" if time.monotonic() - began < 40 else f"after {time.monotonic() - began} s")
    signal.sigwait({signal.SIGTERM})  # none learns of the death by the end of another
    os._exit(0)  # the ends of MPI and of torch wait for whoever died
