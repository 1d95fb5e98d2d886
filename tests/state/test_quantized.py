"""Models of torch's quantization, before, while and after they are quantized, take states as
torch's own loading does; nothing is lent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.restore import check_into, restore_into
from datastates.state.tree import flatten, unflatten
from tests.engine.build import leaves_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("_quantization")]


@pytest.fixture(scope="module")
def _quantization() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.ao.quantization

    if "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no engine for quantized layers here")
    return torch.ao.quantization


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch.ao import quantization

        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.bn, self.relu, self.fc = (
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Linear(144, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dequant(
            self.fc(self.relu(self.bn(self.conv(self.quant(x)))).flatten(1))
        )
        return out


def aware() -> nn.Module:
    """Trained with what quantization will do to it."""
    from torch.ao import quantization

    model: Any = Net().train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    return quantization.prepare_qat(model)  # type: ignore[no-any-return]  # it has no types


def observed() -> nn.Module:
    """About to be quantized: observers look at what goes by."""
    from torch.ao import quantization

    model: Any = Net().eval()
    model.qconfig = quantization.get_default_qconfig("x86")
    return quantization.prepare(model)  # type: ignore[no-any-return]  # it has no types


def quantized() -> nn.Module:
    from torch.ao import quantization

    model = observed()
    model(torch.randn(3, 1, 8, 8))
    return quantization.convert(model)  # type: ignore[no-any-return]  # it has no types


def dynamic() -> nn.Module:
    from torch.ao import quantization

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    # it has no types
    return quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "aware": aware,
    "observed": observed,
    "quantized": quantized,
    "dynamic": dynamic,
}


def contents(model: nn.Module) -> dict[str, object]:
    """Every number of a model's state; quantized tensors by their integers and scales."""
    found: dict[str, object] = {}
    for path, leaf in leaves_of(model.state_dict()):
        if isinstance(leaf, torch.Tensor) and leaf.is_quantized:
            is_each = leaf.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
            scales = leaf.q_per_channel_scales().tolist() if is_each else leaf.q_scale()
            found[path] = leaf.int_repr().tolist(), scales
        else:
            found[path] = leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
    return found


def lent(tree: object) -> tuple[Any, list[torch.Tensor]]:
    """The tree as a state gives it, over memory that somebody else has again afterwards."""
    flat = flatten(tree)
    memory = [leaf.tensor.detach().clone() for leaf in flat.tensors]
    return unflatten(flat.skeleton, flat.values, memory), memory


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_takes_the_state_of_another_and_keeps_nothing_that_was_lent(
    kind: str, is_used: bool
) -> None:
    torch.manual_seed(1)
    there, here = KINDS[kind](), KINDS[kind]()
    batch = torch.randn(3, 1, 8, 8)
    there(batch)
    if is_used:
        here(2 * batch)
    expected = contents(there)
    tree, memory = lent(Adapted({"model": there}).tree())
    assert restore_into({"model": here}, tree)
    del tree
    for tensor in memory:
        tensor.zero_()
    assert contents(here) == expected
    assert torch.equal(there.eval()(batch), here.eval()(batch))


def test_before_the_bytes_are_there_nothing_is_asked() -> None:
    there, here = aware(), aware()
    there(torch.randn(3, 1, 8, 8))
    before = repr(contents(here))
    check_into({"model": here}, Adapted({"model": there}).tree(), has_values=False)
    check_into({"model": here}, Adapted({"model": there}).tree())
    assert repr(contents(here)) == before


class Noting(nn.Linear):
    """Loading of its own that takes no more than torch's."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state, prefix, *args)


def test_what_a_part_does_not_take_is_refused_before_anything_is_changed() -> None:
    there, here = (
        nn.Sequential(nn.Linear(2, 2), Noting(3, 3)),
        nn.Sequential(nn.Linear(2, 2), Noting(4, 4)),
    )
    before = [parameter.detach().clone() for parameter in here.parameters()]
    with pytest.raises(
        InvalidInput,
        match=r"nothing was changed(.|\n)*model/1\.weight: the state has float32 \(3, 3\)",
    ):
        restore_into({"model": here}, Adapted({"model": there}).tree())
    assert all(map(torch.equal, before, here.parameters()))
    assert restore_into(
        {"model": nn.Sequential(nn.Linear(2, 2), Noting(3, 3))}, Adapted({"model": there}).tree()
    )


def test_a_model_with_sparse_buffers_can_be_measured() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse_csr())
    assert Adapted({"model": model}).size_bytes() == 24
