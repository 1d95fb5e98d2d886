"""Small trainings, one for each way to step, with their tracked objects and expected states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

import datastates
from tests.engine.build import live
from tests.engine.optimizers import WIDTH, Form, Net, SparseNet

from .case import Skip
from .place import Place

WARM_UP = 3
"""Steps before a graph capture, which allocate memory."""


@dataclass(slots=True)
class Training:
    """The tracked objects by name, and a function that makes the step of a given number.

    ``before`` runs before each step."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[int], object]
    others: Mapping[str, Any]
    before: Callable[[datastates.Tracker], object] = lambda run: None
    inside: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def objects(self) -> dict[str, Any]:
        """For ``track``."""
        return {"model": self.model, "optimizer": self.optimizer, **self.others}

    def copies(self) -> dict[str, object]:
        """The live tensors by path, as copies that are queued on the device.

        The host does not wait."""
        others: dict[str, Any] = {}
        for name, each in self.others.items():
            is_scaler = isinstance(each, torch.amp.GradScaler)
            others[name] = (
                {"scale": each._scale, "_growth_tracker": each._growth_tracker}
                if is_scaler
                else each.state_dict()
            )
        return live(self.model, {"optimizer": self.optimizer}, **others)

    def on_host(self, found: Mapping[str, object]) -> dict[str, object]:
        """Copies as in a state: numbers of a scaler are numbers."""
        brought = {
            path: each.cpu() if isinstance(each, Tensor) else each for path, each in found.items()
        }
        return {
            path: each.item() if path.startswith("/scaler/") and isinstance(each, Tensor) else each
            for path, each in brought.items()
        }

    def tree(self, found: Mapping[str, object]) -> dict[str, object]:
        """The same in one dict with paths as keys."""
        return {path.removeprefix("/"): each for path, each in self.on_host(found).items()}


def by_form(form: Form, place: Place) -> Training:
    """A stock optimizer in one of its forms, with sparse gradients if it needs them."""
    torch.manual_seed(0)
    model = place.put(SparseNet() if form.name == "SparseAdam" else Net(bias=form.name != "Muon"))
    optimizer = form.make(model.parameters(), **form.options)
    return _plain(place, model, optimizer)


def _net(place: Place) -> nn.Module:
    torch.manual_seed(0)
    return place.put(Net())


def _fused(place: Place, model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, fused=place.is_accelerator)


def _loss(place: Place, model: nn.Module) -> Tensor:
    x = place.draw(4, WIDTH)
    found: Tensor = (model(x) ** 2).mean() + (model(x)[:, 0] ** 3).mean()
    return found


def _plain(place: Place, model: nn.Module, optimizer: Optimizer, **others: Any) -> Training:
    def step(number: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = _loss(place, model)
            loss.backward()
            return loss

        # torch wants a float, its own examples give the loss
        optimizer.step(closure)  # type: ignore[arg-type]

    return Training(model, optimizer, step, others)


def _with_scaler(place: Place) -> Training:
    """Every third step overflows, and is skipped."""
    model = _net(place)
    optimizer, scaler = (
        _fused(place, model),
        torch.amp.GradScaler(place.device.type, init_scale=1024.0, growth_interval=2),
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(_loss(place, model) * (float("inf") if number % 3 == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    return Training(model, optimizer, step, {"scaler": scaler})


def _accumulating(place: Place) -> Training:
    model = _net(place)
    optimizer = _fused(place, model)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            _loss(place, model).backward()
        optimizer.step()

    return Training(model, optimizer, step, {})


def _unfreezing(place: Place) -> Training:
    """Every second step adds a layer, in a separate group."""
    model = _net(place)
    layers: list[nn.Module] = list(model.layers)  # type: ignore[arg-type]  # a ModuleList
    for layer in layers[:-1]:
        layer.requires_grad_(requires_grad=False)
    frozen, optimizer = layers[:-1], AdamW(layers[-1].parameters(), lr=0.01)

    def step(number: int) -> None:
        if number % 2 and frozen:
            layer = frozen.pop().requires_grad_()
            optimizer.add_param_group({"params": list(layer.parameters())})
        optimizer.zero_grad()
        _loss(place, model).backward()
        optimizer.step()

    return Training(model, optimizer, step, {})


def _averaging(place: Place) -> Training:
    """No optimizer changes the average, so its copy must not be deferred."""
    model = _net(place)
    optimizer, average = _fused(place, model), AveragedModel(model)

    def step(number: int) -> None:
        optimizer.zero_grad()
        _loss(place, model).backward()
        optimizer.step()
        average.update_parameters(model)

    return Training(model, optimizer, step, {"average": average})


def _on_a_stream(place: Place) -> Training:
    model = _net(place)
    training = _plain(place, model, _fused(place, model))
    stream = torch.cuda.Stream()

    def inside() -> AbstractContextManager[object]:
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    training.inside = inside
    return training


def _compiled_model(place: Place) -> Training:
    model = _net(place)
    # it is a module
    training = _plain(place, torch.compile(model), _fused(place, model))  # type: ignore[arg-type]
    training.model = model
    return training


def _compiled_step(place: Place) -> Training:
    model = _net(place)
    optimizer = AdamW(model.parameters(), lr=0.01, capturable=True)
    update = torch.compile(optimizer.step)

    def step(number: int) -> None:
        optimizer.zero_grad()
        _loss(place, model).backward()
        update()

    return Training(model, optimizer, step, {})


def _recorded(place: Place, *, is_tracked: bool) -> Training:
    """A whole step as a CUDA graph. A replay runs no hook, so the caller fences before it."""
    model = _net(place)
    optimizer, static = AdamW(model.parameters(), lr=0.01, capturable=True), place.draw(16, WIDTH)
    graph, is_recorded = torch.cuda.CUDAGraph(), False

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(static) ** 2).mean().backward()
        optimizer.step()

    def record() -> None:
        nonlocal is_recorded
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                update()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            update()
        is_recorded = True

    if not is_tracked:
        record()

    def step(number: int) -> None:
        static.copy_(place.draw(16, WIDTH))
        if not is_recorded and number == 2:
            record()
        if is_recorded:
            graph.replay()
        else:
            update()

    return Training(model, optimizer, step, {}, before=lambda run: run.fence())


def _two_devices(place: Place) -> Training:
    if place.devices < 2:
        raise Skip("there is one device")
    layers = [place.put(nn.Linear(512, 512), index) for index in range(2)]
    model = nn.ModuleList(layers)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for index, layer in enumerate(layers):
            layer(place.put(torch.randn(4, 512), index)).square().mean().backward()
        optimizer.step()

    return Training(model, optimizer, step, {})


WAYS: dict[str, Callable[[Place], Training]] = {
    "scaler that leaves steps out": _with_scaler,
    "accumulated gradients": _accumulating,
    "layers that are frozen at first": _unfreezing,
    "an average of the weights": _averaging,
    "two devices": _two_devices,
}
ACCELERATED: dict[str, Callable[[Place], Training]] = {
    "on a stream of the training's": _on_a_stream,
    "compiled model": _compiled_model,
    "compiled step": _compiled_step,
    "graph, recorded before it is tracked": partial(_recorded, is_tracked=False),
    "graph, recorded between captures": partial(_recorded, is_tracked=True),
}
