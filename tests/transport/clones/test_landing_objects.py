"""A state that arrives chunk by chunk in live objects: by a shadow or in place, whole or not at
all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from datastates.errors import Closed, InvalidInput, Unavailable
from datastates.state import in_place
from datastates.state.generators import RngState
from datastates.state.manifest import CHUNK_BYTES
from datastates.state.restore import restore_into
from datastates.transport.receive_buffers import StreamMemoryCache
from datastates.transport.receive_objects import ObjectsSink
from tests.state.test_optimizer_state import stored
from tests.support.cloning import feed, fill, sent

torch.set_num_threads(1)

Objects = dict[str, Any]


def mlp(seed: int, *, steps: int = 2, width: int = 1024, **options: Any) -> Objects:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.Linear(width, 8),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 + seed, **options)
    train(model, optimizer, range(seed, seed + steps))
    return {"model": model, "optimizer": optimizer}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(
            next(model.parameters()).device
        )
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Gpt(nn.Module):
    """An embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        self.body = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        self.head = nn.Linear(128, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.embed((x[:, :16].abs() * 100).long() % 1000)))
        return found


def gpt(seed: int) -> Objects:
    torch.manual_seed(seed)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    train(model, optimizer, range(seed, seed + 2))
    return {"model": model, "optimizer": optimizer}


def low(seed: int) -> Objects:
    torch.manual_seed(seed)
    return {"model": nn.Linear(600, 700).to(torch.bfloat16), "half": nn.Linear(300, 20).half()}


def images(seed: int) -> Objects:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Conv2d(64, 300, 3), nn.BatchNorm2d(300))
    model = model.to(memory_format=torch.channels_last)
    return {"model": model, "mean": torch.randn(1, 3, 1, 1).expand(4, 3, 5, 5)}


def odds(seed: int) -> Objects:
    """What is no plain tensor."""
    torch.manual_seed(seed)
    return {
        "box": {
            "array": np.full(40_000, seed, np.float32),
            "sparse": torch.eye(5).mul(seed).to_sparse(),
            "csr": torch.eye(4).mul(seed).to_sparse_csr(),
            "list": [seed, torch.randn(300, 300), "x"],
            "empty": torch.empty(0, 3),
        },
        "rng": RngState(),
    }


def scheduled(seed: int) -> Objects:
    objects = mlp(seed, width=64)
    objects["scheduler"] = LinearLR(objects["optimizer"], total_iters=5 + seed)
    return objects


KINDS: dict[str, Callable[[int], Objects]] = {
    "AdamW": lambda seed: mlp(seed, foreach=False),
    "AdamW foreach": lambda seed: mlp(seed, foreach=True),
    "AdamW fused": lambda seed: mlp(seed, fused=True),
    "tied GPT": gpt,
    "bf16": low,
    "channels_last": images,
    "odds": odds,
    "scheduler": scheduled,
}

MODES = {
    "atomic": {"atomic": True},
    "in place": {"atomic": False},
    "kept": {"atomic": False, "keep": True},
}


def digest(objects: Objects) -> str:
    return sent(objects).manifest.digest


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_bit_arrives(make: Callable[[int], Objects], options: Any) -> None:
    there, here = make(1), make(2)
    state = sent(there)
    sink = ObjectsSink(state.checked, here, **options)
    assert sorted(feed(sink, state.chunks)) == list(range(len(state.chunks)))
    assert sink.missing() == []
    for index, chunk in enumerate(state.chunks) if options.get("keep") else ():
        assert b"".join(sink.pieces(index) or ()) == chunk
    report = sink.commit()
    sink.close()
    assert report
    assert not in_place.is_any()
    assert digest(here) == state.manifest.digest
    assert str(report) == str(restore_into(make(2), stored(there)))


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_training_goes_on_bit_for_bit_after_a_clone_into_a_fresh_optimizer(
    options: Any, how: str
) -> None:
    there, here = mlp(1, **{how: True}), mlp(2, steps=0, **{how: True})
    state = sent(there)
    sink = ObjectsSink(state.checked, here, **options)
    feed(sink, state.chunks)
    assert sink.commit()
    sink.close()
    assert train(here["model"], here["optimizer"], range(50, 55)) == train(
        there["model"], there["optimizer"], range(50, 55)
    )
    assert digest(here) == digest(there)


def test_the_state_of_a_fresh_optimizer_is_not_copied_and_stays_after_the_sink_is_gone() -> None:
    there, here = mlp(1), mlp(2, steps=0)
    state = sent(there)
    sink = ObjectsSink(state.checked, here)
    lies = {tensor.data_ptr() for tensor in sink._tensors if tensor is not None}
    feed(sink, state.chunks)
    sink.commit()
    sink.close()
    moments = [entry["exp_avg"] for entry in here["optimizer"].state.values()]
    assert {moment.data_ptr() in lies for moment in moments if moment.nbytes >= 1 << 20} == {True}
    assert {moment.data_ptr() in lies for moment in moments if moment.nbytes < 1 << 10} == {False}
    assert all(moment.untyped_storage().nbytes() == moment.nbytes for moment in moments)
    del sink
    assert digest(here) == digest(there)


def test_in_place_what_is_large_is_received_where_it_belongs() -> None:
    there, here = mlp(1), mlp(2)
    state = sent(there)
    weight = here["model"][3].weight
    begin = weight.data_ptr()
    sink = ObjectsSink(state.checked, here, atomic=False)
    inside = 0
    for index in sink.missing():
        for buffer in sink.buffers(index) or ():
            address = np.frombuffer(buffer, np.uint8).ctypes.data
            inside += len(buffer) if begin <= address < begin + weight.nbytes else 0
            assert (
                not begin <= address < begin + weight.nbytes
                or address + len(buffer) <= begin + weight.nbytes
            )
        sink.forget(index)
    assert inside == weight.nbytes
    in_place.clean(home.live for home in sink._homes.values())


def test_atomic_nothing_is_touched_before_the_commit() -> None:
    state, here = sent(mlp(1)), mlp(2)
    before = digest(here)
    sink = ObjectsSink(state.checked, here)
    feed(sink, state.chunks)
    assert digest(here) == before
    assert not sink.is_dirty
    sink.close()
    with pytest.raises(Closed, match="has ended"):
        sink.commit()
    assert digest(here) == before


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_only_the_chunks_of_what_is_asked_for_are_fetched(options: Any) -> None:
    there, here = mlp(1), mlp(2)
    state = sent(there)
    kept = sent({"optimizer": here["optimizer"]}).chunks
    sink = ObjectsSink(state.checked, here, only="model", **options)
    fetched = feed(sink, state.chunks)
    assert 0 < len(fetched) < len(state.chunks)
    report = sink.commit()
    sink.close()
    assert report
    assert all(path.startswith("model/") for path in report.restored)
    assert sent({"model": here["model"]}).chunks == sent({"model": there["model"]}).chunks
    assert sent({"optimizer": here["optimizer"]}).chunks == kept


@pytest.mark.parametrize("atomic", [True, False])
def test_a_misfit_is_refused_before_any_byte_is_fetched(atomic: bool) -> None:
    state, here = sent(mlp(1)), mlp(2, width=512)
    before = digest(here)
    with pytest.raises(InvalidInput, match="nothing was changed"):
        ObjectsSink(state.checked, here, atomic=atomic)
    with pytest.raises(InvalidInput, match="selects nothing"):
        ObjectsSink(state.checked, mlp(2), only="modle", atomic=atomic)
    assert digest(here) == before


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_without_strict_what_fits_is_cloned(options: Any) -> None:
    there, here = mlp(1), mlp(2)
    here["model"][4] = nn.Linear(1024, 9)
    here["model"][3].to(torch.float64)
    state = sent({"model": there["model"]})
    sink = ObjectsSink(state.checked, here, strict=False, only="model", **options)
    feed(sink, state.chunks)
    report = sink.commit()
    sink.close()
    assert {mismatch.path for mismatch in report.mismatched} == {"model/4.weight", "model/4.bias"}
    assert {mismatch.path for mismatch in report.converted} == {"model/3.weight", "model/3.bias"}
    assert torch.equal(here["model"][3].weight, there["model"][3].weight.double())
    assert torch.equal(here["model"][0].weight, there["model"][0].weight)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_a_chunk_of_wrong_bytes_is_refused_and_asked_for_again(options: Any) -> None:
    state, here = sent(mlp(1)), mlp(2)
    sink = ObjectsSink(state.checked, here, **options)
    for index in sink.missing():
        wrong = bytearray(state.chunks[index])
        wrong[-1] ^= 1
        buffers = sink.buffers(index)
        assert buffers is not None
        fill(buffers, bytes(wrong))
        assert index not in sink.missing()
        assert not sink.accept(index)
        assert index in sink.missing()
        assert sink.pieces(index) is None
    with pytest.raises(Unavailable, match="still missing"):
        sink.commit()
    feed(sink, state.chunks)
    assert sink.commit()
    sink.close()
    assert digest(here) == state.manifest.digest


def test_wrong_bytes_are_not_spread_over_small_tensors() -> None:
    there, here = (
        {"box": [torch.ones(10), torch.ones(20)]},
        {"box": [torch.zeros(10), torch.zeros(20)]},
    )
    state = sent(there)
    sink = ObjectsSink(state.checked, here, atomic=False)
    fill(sink.buffers(0) or (), b"\x01" * len(state.chunks[0]))
    assert not sink.accept(0)
    assert not any(map(torch.any, here["box"]))


def test_a_clone_goes_on_after_half_of_its_chunks() -> None:
    state, here = sent(mlp(1)), mlp(2)
    sink = ObjectsSink(state.checked, here, atomic=False)
    half = list(sink.missing())[::2]
    feed(sink, state.chunks, half)
    lost = sink.missing()[0]
    sink.buffers(lost)
    sink.forget(lost)
    assert sink.is_dirty
    assert not set(feed(sink, state.chunks)) & set(half)
    assert sink.commit()
    assert not sink.is_dirty
    assert digest(here) == state.manifest.digest


def test_chunks_that_the_objects_hold_already_are_not_fetched() -> None:
    there, here = mlp(1), mlp(1)
    with torch.no_grad():
        there["model"][3].weight[-1, -1] += 1
    state = sent(there)
    for keep in (False, True):
        sink = ObjectsSink(state.checked, here, atomic=False, skip_equal=True, keep=keep)
        missing = sink.missing()
        assert len(missing) == 1
        for index in set(range(len(state.chunks))) - set(missing) if keep else ():
            assert b"".join(sink.pieces(index) or ()) == state.chunks[index]
        sink.close()
    sink = ObjectsSink(state.checked, here, atomic=False, skip_equal=True)
    feed(sink, state.chunks)
    assert sink.commit()
    assert digest(here) == state.manifest.digest


def test_as_many_scratch_buffers_as_were_asked_for_are_used_again_and_again() -> None:
    there = {"box": {str(i): torch.full((50_000,), float(i)) for i in range(200)}}
    here = {"box": {str(i): torch.zeros(50_000) for i in range(200)}}
    state = sent(there)
    sink = ObjectsSink(state.checked, here, atomic=False, scratch=2)
    first, second, third = list(sink.missing())[:3]
    assert sink.buffers(first) is not None
    assert sink.buffers(second) is not None
    assert sink.buffers(third) is None
    assert third in sink.missing()
    sink.forget(first)
    assert sink.buffers(third) is not None
    sink.forget(third)
    sink.forget(second)
    feed(sink, state.chunks)
    assert sink.commit()
    assert digest(here) == state.manifest.digest


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_ten_thousand_tiny_tensors_arrive(options: Any) -> None:
    there = {"box": {str(i): torch.full((10,), float(i)) for i in range(10_000)}}
    here = {"box": {str(i): torch.zeros(10) for i in range(10_000)}}
    held = [id(tensor) for tensor in here["box"].values()]
    state = sent(there)
    sink = ObjectsSink(state.checked, here, **options)
    feed(sink, state.chunks)
    assert sink.commit()
    sink.close()
    assert [id(tensor) for tensor in here["box"].values()] == held
    assert digest(here) == state.manifest.digest


def test_chunks_may_be_accepted_by_several_threads_at_once() -> None:
    state, here = sent(mlp(1)), mlp(2)
    sink = ObjectsSink(state.checked, here, atomic=False)
    indices = list(sink.missing())
    threads = [
        threading.Thread(target=feed, args=(sink, state.chunks, indices[part::4]))
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sink.commit()
    assert digest(here) == state.manifest.digest


def test_the_memory_of_one_clone_serves_the_next() -> None:
    memory_cache, here, addresses = StreamMemoryCache(), mlp(9), set()
    for seed in (1, 2, 3):
        state = sent(mlp(seed))
        sink = ObjectsSink(state.checked, here, memory_cache=memory_cache)
        addresses.add(sink._stream_memory.tensor(0, 1).data_ptr())
        feed(sink, state.chunks)
        assert sink.commit()
        assert digest(here) == state.manifest.digest
    assert len(addresses) == 1
    fresh = mlp(5, steps=0)
    sink = ObjectsSink(state.checked, fresh, memory_cache=memory_cache)
    feed(sink, state.chunks)
    sink.commit()  # gives its memory to the optimizer
    assert sink._stream_memory is not memory_cache.take(1)
    assert digest(fresh) == digest(here)


class Failing(torch.Generator):
    """A generator, which is restored last, that does not take its state."""

    def set_state(self, new_state: Tensor) -> Any:
        raise RuntimeError("not this one")


def test_memory_that_a_clone_gave_away_before_it_failed_serves_no_other() -> None:
    def make(seed: int) -> Objects:
        torch.manual_seed(seed)
        model = nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if seed < 3:
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
        return {"optimizer": optimizer, "model": model, "generator": Failing()}

    def moments(objects: Objects) -> list[Tensor]:
        return [entry["exp_avg"] for entry in objects["optimizer"].state.values()]

    memory_cache, first, second, failed = StreamMemoryCache(), sent(make(1)), sent(make(2)), make(3)
    for state, here in ((first, failed), (second, make(4))):
        sink = ObjectsSink(state.checked, here, memory_cache=memory_cache)
        feed(sink, state.chunks)
        with pytest.raises(InvalidInput, match="not this one"):
            sink.commit()
        sink.close()
    assert all(map(torch.equal, moments(failed), moments(make(1))))
    assert moments(failed)


# --- live tensors that share memory ---------------------------------------------------------------


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_live_tensors_over_each_other_are_written_in_the_order_of_a_restore(options: Any) -> None:
    def make(seed: int) -> Objects:
        flat = torch.full((200_000,), float(seed))
        return {"box": {"flat": flat, "part": flat[100_000:], "other": torch.full((100_000,), 7.0)}}

    there = make(1)
    there["box"]["part"] = torch.full((100_000,), 5.0)
    state = sent(there)
    here = make(2)
    sink = ObjectsSink(state.checked, here, **options)
    feed(sink, state.chunks)
    sink.commit()
    sink.close()
    expected = make(3)
    restore_into(expected, stored(there))
    assert digest(here) == digest(expected)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_tied_weights_arrive_in_untied_ones_and_differing_ones_are_refused_by_tied_ones(
    options: Any,
) -> None:
    def heads(seed: int, *, is_tied: bool) -> Objects:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(400, 400, bias=False), nn.Linear(400, 400, bias=False))
        if is_tied:
            model[1].weight = model[0].weight
        return {"model": model}

    tied, free = heads(1, is_tied=True), heads(2, is_tied=False)
    state = sent(tied)
    sink = ObjectsSink(state.checked, free, **options)
    feed(sink, state.chunks)
    assert sink.commit()
    sink.close()
    assert torch.equal(free["model"][0].weight, tied["model"][0].weight)
    assert torch.equal(free["model"][1].weight, tied["model"][0].weight)
    state = sent(heads(3, is_tied=False))
    sink = ObjectsSink(state.checked, tied, **options)
    before = digest(tied)
    feed(sink, state.chunks)
    with pytest.raises(InvalidInput, match="one tensor for"):
        sink.commit()
    sink.close()
    assert digest(tied) == before


class Swapping(nn.Linear):
    """A module whose loading does more than copying."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"].T
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_a_module_that_changes_what_it_loads_gets_what_is_stored(options: Any) -> None:
    there, here = Swapping(400, 400, bias=False), Swapping(400, 400, bias=False)
    state = sent({"model": there})
    sink = ObjectsSink(state.checked, {"model": here}, **options)
    feed(sink, state.chunks)
    sink.commit()
    sink.close()
    assert torch.equal(here.weight, there.weight.T)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_another_order_in_memory_is_converted(options: Any) -> None:
    there, here = images(1), images(2)
    here["model"].to(memory_format=torch.contiguous_format)
    state = sent(there)
    sink = ObjectsSink(state.checked, here, **options)
    feed(sink, state.chunks)
    sink.commit()
    sink.close()
    assert here["model"][0].weight.is_contiguous()
    assert torch.equal(here["model"][0].weight, there["model"][0].weight)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_what_the_objects_do_not_have_is_theirs_afterwards(options: Any) -> None:
    there: Objects
    wide = torch.randn(1, 20_000).expand(3, 20_000)
    there = {
        "ema": OrderedDict(a=torch.randn(300, 300), b=[torch.randn(100_000)]),
        "wide": {"w": wide},
        "step": 3,
        "pair": (1, torch.randn(70_000)),
    }
    here: Objects = {"ema": OrderedDict(), "wide": {}, "step": 0, "pair": (0, torch.zeros(1))}
    state = sent(there)
    sink = ObjectsSink(state.checked, here, **options)
    feed(sink, state.chunks)
    report = sink.commit()
    sink.close()
    here = {**here, **report.values}
    assert torch.equal(here["wide"]["w"], wide)
    here["wide"]["w"].add_(1)  # as after a restore: each element of its own
    here["ema"]["a"].add_(1)
    there["ema"]["a"].add_(1)
    assert digest({**here, "wide": {}}) == digest({**there, "wide": {}})


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_gradients_arrive(options: Any) -> None:
    there, here = mlp(1), mlp(2)
    for parameter in list(here["model"].parameters())[:2]:
        parameter.grad = None
    state = sent(there, gradients=True)
    sink = ObjectsSink(state.checked, here, **options)
    feed(sink, state.chunks)
    assert sink.commit()
    sink.close()
    assert sent(here, gradients=True).manifest.digest == state.manifest.digest


# --- devices --------------------------------------------------------------------------------------


def test_a_meta_tensor_takes_no_state() -> None:
    state = sent({"model": nn.Linear(500, 500)})
    with pytest.raises(InvalidInput, match="meta"):
        ObjectsSink(state.checked, {"model": nn.Linear(500, 500, device="meta")}, atomic=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_clone_into_a_device_goes_on_bit_for_bit(options: Any, steps: int) -> None:
    def on_device(seed: int, steps: int) -> Objects:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 1024)
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        train(model, optimizer, range(seed, seed + steps))
        return {"model": model, "optimizer": optimizer}

    there, here = on_device(1, 2), on_device(2, steps)
    state = sent(there)
    sink = ObjectsSink(state.checked, here, **options)
    feed(sink, state.chunks)
    assert sink.commit()
    sink.close()
    assert digest(here) == state.manifest.digest
    assert train(here["model"], here["optimizer"], range(9, 12)) == train(
        there["model"], there["optimizer"], range(9, 12)
    )


def test_a_chunk_is_asked_for_in_few_pieces() -> None:
    state, here = sent(mlp(1)), mlp(2)
    sink = ObjectsSink(state.checked, here, atomic=False)
    for index in sink.missing():
        pieces = sink.buffers(index)
        assert pieces is not None
        assert len(pieces) <= 33
        assert CHUNK_BYTES >= sum(map(len, pieces)) == sink.lengths[index]
        sink.forget(index)
