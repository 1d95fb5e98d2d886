"""A capture is never torn in silence: what is restored is what was live at the call, or the capture
failed with ``Torn``.

In *held* rounds the copy starts only after the edit was made (or when somebody waits on the fence),
so that every edit that no fence covers does come first. In *free* rounds the race is run as it
falls.
"""

from __future__ import annotations

import copy
import importlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import datastates
from datastates.engine.handle import Capture
from datastates.errors import Torn
from datastates.repository import Repository
from datastates.training.tracker import Tracker

from .build import Gate, differing, held_back, leaves_of, live
from .optimizers import FORMS, Form, Net, large_weights, train_step

if TYPE_CHECKING:
    from torch.optim import Optimizer

SEGMENTS = 2
"""Trackers of each form and mode; each takes one capture an edit."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    yield counts
    # what the file is there to say
    print(f"\ncaptures: {counts.total()}, of which", dict(counts))  # noqa: T201


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder: Path = tmp_path_factory.mktemp("torn")
    with datastates.open(
        folder,
        memory_bytes=24 << 22,
        config=datastates.Config(durable_interval_s=None, memory_bytes=24 << 22),
    ) as opened:
        yield opened


class Scene:
    """A tracked training, and edits to make right after a capture.

    An edit runs up to its ``yield`` before the copy can begin."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.extra = torch.randn(200, 200)
        self.ema = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        }
        train_step(model, optimizer)
        self.saved = copy.deepcopy(model.state_dict())
        self.run: Tracker

    def live(self) -> dict[str, object]:
        return live(self.model, {"optimizer": self.optimizer}, extra=self.extra, ema=self.ema)

    def update_ema(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.ema[name].lerp_(parameter, 0.1)

    # --- covered: these must be exact -------------------------------------------------------------

    def step(self) -> Generator[None]:
        train_step(self.model, self.optimizer)
        yield

    def buffers(self) -> Generator[None]:
        with torch.no_grad():
            self.model(torch.randn(4, 128))
        yield

    def plain_tensor(self) -> Generator[None]:
        self.extra.add_(1)
        yield

    def plain_tensor_data(self) -> Generator[None]:
        self.extra.data[3] += 1
        yield

    def ema_update(self) -> Generator[None]:
        self.update_ema()
        yield

    def small_parameter(self) -> Generator[None]:
        for buffer in (
            *self.model.buffers(),
            *(p for p in self.model.parameters() if p.numel() < 1000),
        ):
            buffer.data.add_(1)
        yield

    def load_model(self) -> Generator[None]:
        self.model.load_state_dict(self.saved)
        yield

    def load_optimizer(self) -> Generator[None]:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        yield

    def learning_rate(self) -> Generator[None]:
        self.optimizer.param_groups[0]["lr"] *= 0.9
        yield

    def fenced_row(self) -> Generator[None]:
        self.run.fence()
        large_weights(self.model)[0].data[5] += 1
        yield

    def fenced_update(self) -> Generator[None]:
        self.run.fence()
        with torch.no_grad():
            large_weights(self.model)[1].add_(1)
        yield

    def swapped_pointer(self) -> Generator[None]:
        weight = large_weights(self.model)[0]
        mine, weight.data = weight.data, torch.randn_like(weight)
        yield
        weight.data = mine

    def child_loaded(self) -> Generator[None]:
        weight = large_weights(self.model)[3]
        (child,) = (
            module for module in self.model.modules() if getattr(module, "weight", None) is weight
        )
        child.load_state_dict(
            {name: torch.randn_like(leaf) for name, leaf in child.state_dict().items()}
        )
        yield

    # --- not covered: these may tear, in the open -------------------------------------------------

    def no_grad_update(self) -> Generator[None]:
        with torch.no_grad():
            large_weights(self.model)[0][5, 7] += (
                1  # only the version says so: no sample of its elements has this one
            )
        yield

    def data_update(self) -> Generator[None]:
        large_weights(self.model)[1].data.mul_(1.5)  # only the sample says so
        yield

    def ema_swapped_in_and_back(self) -> Generator[None]:
        weight = large_weights(self.model)[2]
        mine = weight.detach().clone()
        weight.data.copy_(torch.randn_like(weight))
        yield
        weight.data.copy_(mine)

    def optimizer_state(self) -> Generator[None]:
        for _, leaf in leaves_of(self.optimizer.state.get(large_weights(self.model)[3], {})):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.layout is torch.strided
                and leaf.numel() >= 128 * 128
            ):
                leaf.add_(1)
                break
        yield


COVERED = (
    *(
        Scene.step,
        Scene.buffers,
        Scene.plain_tensor,
        Scene.plain_tensor_data,
        Scene.ema_update,
        Scene.small_parameter,
        Scene.load_model,
    ),
    *(
        Scene.load_optimizer,
        Scene.learning_rate,
        Scene.fenced_row,
        Scene.fenced_update,
        Scene.swapped_pointer,
        Scene.child_loaded,
    ),
)
UNCOVERED = (
    Scene.no_grad_update,
    Scene.data_update,
    Scene.ema_swapped_in_and_back,
    Scene.optimizer_state,
)


def test_the_rounds_of_this_file_are_2000_and_more() -> None:
    assert len(FORMS) * 2 * SEGMENTS * (len(COVERED) + len(UNCOVERED)) >= 2000
    assert {"SGD", "AdamW", "LBFGS", "SparseAdam", "Adafactor"} <= {form.name for form in FORMS}
    assert {form.name for form in FORMS if form.options.get("fused")} >= {
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
    }


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)
def test_a_capture_is_what_was_live_at_the_call_or_fails_loudly(
    form: Form, repo: Repository, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_back(monkeypatch) as gate:
        for segment in range(SEGMENTS):
            for is_held in (True, False):
                torn = play(
                    Scene(*form.build()),
                    repo,
                    gate,
                    tally,
                    f"{form.id}-{segment}-{is_held}",
                    is_held=is_held,
                    seed=segment,
                )
                if is_held:  # so much was deferred, and changed before it was copied
                    assert torn >= {"no_grad_update", "data_update", "ema_swapped_in_and_back"}
                assert torn <= {edit.__name__ for edit in UNCOVERED}


def play(
    scene: Scene,
    repo: Repository,
    gate: Gate,
    tally: Counter[str],
    branch: str,
    *,
    is_held: bool,
    seed: int,
) -> set[str]:
    """One capture an edit, each compared; the names of the edits that tore.

    After each of those another tracker, that knows of none."""
    edits: list[Callable[[Scene], Generator[None]]] = [*COVERED, *UNCOVERED]
    random.Random(seed).shuffle(edits)
    torn: set[str] = set()

    def track() -> Tracker:
        name = f"{branch}-{len(torn)}"
        return repo.track(
            branch=name,
            model=scene.model,
            optimizer=scene.optimizer,
            extra=scene.extra,
            ema=scene.ema,
        )

    scene.run = track()
    for edit in edits:
        train_step(scene.model, scene.optimizer)
        if is_torn(scene.live, scene.run, repo, gate, edit(scene), is_held=is_held):
            torn.add(edit.__name__)
            scene.run.close()
            scene.run = track()
        tally["torn" if edit.__name__ in torn else "exact"] += 1
    scene.run.close()
    return torn


def is_torn(
    look: Callable[[], dict[str, object]],
    run: Tracker,
    repo: Repository,
    gate: Gate,
    edit: Generator[None],
    *,
    is_held: bool,
) -> bool:
    """Capture, edit, and compare; whether the capture failed with ``Torn``.

    Then it is not recorded, and the next one is."""
    expected = look()
    if is_held:
        gate.hold()
    else:
        gate.open()
    capture = run.capture()
    next(edit)
    gate.open()
    error = torn_error(capture)
    next(edit, None)
    if error is None:
        assert differing(expected, repo.load(capture.uid)) == []
        return False
    assert error.paths
    expected = look()
    after = run.capture().wait(timeout_s=60)
    assert differing(expected, repo.load(after.uid)) == []
    with pytest.raises(datastates.NotFound):
        repo.state(capture.uid)
    return True


def torn_error(capture: Capture) -> Torn | None:
    try:
        capture.wait(timeout_s=60)
    except Torn as error:
        return error
    return None


@pytest.fixture
def in_backward() -> Callable[..., None]:
    """torch's own way to step inside backward; importing it warns about parts of torch that we
    do not use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("torch.distributed.optim")
    return cast("Callable[..., None]", module._apply_optimizer_in_backward)


def backward(model: nn.Module) -> None:
    (model(torch.randn(4, 128)) ** 3).mean().backward()


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "free"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_optimizers_in_backward_wait_for_the_copy(
    make: type[Optimizer],
    is_held: bool,
    in_backward: Callable[..., None],
    repo: Repository,
    tally: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net()
    in_backward(make, model.parameters(), {"lr": 0.01})

    def look() -> dict[str, object]:
        # set by torch
        states = {
            name: [{"state": {name: p._in_backward_optimizers[0].state.get(p, {})}}]  # type: ignore[attr-defined]
            for name, p in model.named_parameters()
        }
        return live(model, {}, in_backward={"model": states})

    def edit() -> Generator[None]:
        backward(model)
        yield

    backward(model)
    with (
        held_back(monkeypatch) as gate,
        repo.track(branch=f"in-backward-{make.__name__}-{is_held}", model=model) as run,
    ):
        for _ in range(20):
            assert not is_torn(look, run, repo, gate, edit(), is_held=is_held)
            tally["exact"] += 1


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "free"])
def test_hand_made_optimizers_in_backward_wait_for_the_copy(
    is_held: bool, repo: Repository, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    optimizers = {
        name: torch.optim.Adam([parameter], fused=True)
        for name, parameter in model.named_parameters()
    }
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: step_and_clear(optimizers[name_of[id(p)]])
        )

    def look() -> dict[str, object]:
        return live(
            model,
            {},
            each={
                name: {"state": dict.fromkeys([name], next(iter(o.state.values())))}
                for name, o in optimizers.items()
            },
        )

    def edit() -> Generator[None]:
        backward(model)
        yield

    backward(model)
    with (
        held_back(monkeypatch) as gate,
        repo.track(branch=f"by-hand-{is_held}", model=model, each=optimizers) as run,
    ):
        for _ in range(20):
            assert not is_torn(look, run, repo, gate, edit(), is_held=is_held)
            tally["exact"] += 1


def step_and_clear(optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_an_averaged_model_updated_right_after_a_capture_is_captured_as_it_was(
    repo: Repository, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    optimizer, average = (
        torch.optim.AdamW(model.parameters()),
        AveragedModel(model, use_buffers=True),
    )

    def look() -> dict[str, object]:
        return live(model, {"optimizer": optimizer}, average=average.state_dict())

    def edit() -> Generator[None]:
        average.update_parameters(model)
        yield

    with (
        held_back(monkeypatch) as gate,
        repo.track(branch="average", model=model, optimizer=optimizer, average=average) as run,
    ):
        for is_held in (True, False) * 10:
            train_step(model, optimizer)
            assert not is_torn(look, run, repo, gate, edit(), is_held=is_held)
            tally["exact"] += 1


def test_layers_unfrozen_and_groups_added_between_captures_are_captured(
    repo: Repository, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    first, *others = model.layers
    first.requires_grad_()
    optimizer = torch.optim.AdamW(first.parameters())
    with (
        held_back(monkeypatch) as gate,
        repo.track(branch="unfrozen", model=model, optimizer=optimizer) as run,
    ):

        def edit() -> Generator[None]:
            train_step(model, optimizer)
            yield

        for layer in (None, *others):
            if layer is not None:
                layer.requires_grad_()
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1})
            for is_held in (True, False, True):
                assert not is_torn(
                    lambda: live(model, {"optimizer": optimizer}),
                    run,
                    repo,
                    gate,
                    edit(),
                    is_held=is_held,
                )
                tally["exact"] += 1


def test_weights_that_a_forward_pass_changes_tear_once_and_are_exact_from_then_on(
    repo: Repository, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = nn.Embedding(256, 128, max_norm=0.5)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def edit() -> Generator[None]:
        with torch.no_grad():
            table.weight[:, 0].add_(9)
        table(torch.arange(256))
        yield

    tore: list[bool] = []
    with (
        held_back(monkeypatch) as gate,
        repo.track(branch="max-norm", model=table, optimizer=optimizer) as run,
    ):
        for _ in range(6):
            tore.append(
                is_torn(
                    lambda: live(table, {"optimizer": optimizer}),
                    run,
                    repo,
                    gate,
                    edit(),
                    is_held=True,
                )
            )
            tally["torn" if tore[-1] else "exact"] += 1
    assert tore == [True, False, False, False, False, False]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_a_fused_or_foreach_optimizer_that_nobody_tracks_is_seen(
    dtype: torch.dtype, repo: Repository, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.randn(300, 300, dtype=dtype))
    tracked = torch.optim.SGD([weight], lr=0.1)
    form = {"foreach": True} if dtype.is_complex else {"fused": True}
    other = torch.optim.AdamW([weight], lr=0.5, **form)  # type: ignore[arg-type]  # a bool

    def edit() -> Generator[None]:
        weight.grad = torch.randn_like(weight)
        other.step()
        yield

    with (
        held_back(monkeypatch) as gate,
        repo.track(branch=f"untracked-{dtype}", weight=weight, optimizer=tracked) as run,
    ):
        assert is_torn(
            lambda: {"/weight": weight.detach().clone()}, run, repo, gate, edit(), is_held=True
        )
        assert not is_torn(
            lambda: {"/weight": weight.detach().clone()}, run, repo, gate, edit(), is_held=True
        )
    tally["torn"] += 1
    tally["exact"] += 1


def test_without_deferring_every_edit_is_harmless(
    repo: Repository, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    scene = Scene(model, torch.optim.AdamW(model.parameters()))
    with (
        held_back(monkeypatch) as gate,
        repo.track(
            branch="eager",
            defer=False,
            model=model,
            optimizer=scene.optimizer,
            extra=scene.extra,
            ema=scene.ema,
        ) as run,
    ):
        scene.run = run
        for edit in (*COVERED, *UNCOVERED, one_element_through_data):
            assert not is_torn(scene.live, run, repo, gate, edit(scene), is_held=True)
            tally["exact"] += 1


def one_element_through_data(scene: Scene) -> Generator[None]:
    large_weights(scene.model)[0].data[5, 7] += 1
    yield


@pytest.mark.xfail(
    reason=(
        "an edit through .data leaves no trace but its bytes, and only a sample of these is"
        " looked at"
    ),
    strict=True,
)
def test_an_unfenced_edit_of_one_element_through_data_is_seen(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    scene = Scene(model, torch.optim.AdamW(model.parameters()))
    with (
        held_back(monkeypatch) as gate,
        repo.track(
            branch="one-element",
            model=model,
            optimizer=scene.optimizer,
            extra=scene.extra,
            ema=scene.ema,
        ) as run,
    ):
        assert is_torn(scene.live, run, repo, gate, one_element_through_data(scene), is_held=True)
