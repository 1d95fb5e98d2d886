"""A training that goes wrong goes back to where it went well, and on from there; nothing that
was tried is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

# it has no stubs
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config, Guard, PermutationSampler, Repository, Tracker, Unavailable
from datastates.errors import InvalidInput
from datastates.lineage.states import RefKind
from datastates.training import guard as guard_module
from datastates.training.guard import Spikes

CONFIG = Config(memory_bytes=128 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


@dataclass
class Training:
    """Digits, a small network with dropout and batch norm, everything tracked that decides how
    it goes on."""

    repo: Repository
    data: tuple[torch.Tensor, torch.Tensor]
    branch: str = "main"
    broken: frozenset[int] = frozenset()
    hot: frozenset[int] = frozenset()
    losses: list[float] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    seen: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 50, 0.9)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=4.0, growth_factor=1.01, growth_interval=7
        )
        self.sampler = PermutationSampler(len(self.data[0]), seed=5)

    def track(self, **options: Any) -> Tracker:
        named = ("model", "optimizer", "scheduler", "scaler", "sampler")
        return self.repo.track(
            branch=self.branch, **{name: getattr(self, name) for name in named}, **options
        )

    def step(self, rows: list[int]) -> torch.Tensor:
        """One update; batches are counted as they come, whatever the step."""
        self.seen += 1
        inputs, labels = self.data[0][rows], self.data[1][rows]
        if self.seen in self.broken:
            inputs = inputs * math.nan
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs), labels)
        self.scaler.scale(loss).backward()
        # and let NaN through, as a training without a scaler does
        self.scaler.unscale_(self.optimizer)
        found: Any = self.scaler._per_optimizer_states[id(self.optimizer)]
        found["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}
        rate = self.optimizer.param_groups[0]["lr"]
        if self.seen in self.hot:
            self.optimizer.param_groups[0]["lr"] = 30.0
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.param_groups[0]["lr"] = rate
        self.scheduler.step()
        return loss.detach()

    def run(
        self,
        steps: int,
        *,
        after: Callable[[Tracker, Guard], None] = lambda run, guard: None,
        **options: Any,
    ) -> Guard:
        """Until ``steps`` are done."""
        with self.track() as run:
            guard = run.guard(**options)
            for rows in run.steps(self.sampler.batches(64, epochs=None)):
                self.rows.append(rows)
                loss = self.step(rows)
                if guard.rewound(loss):
                    after(run, guard)
                    continue
                self.losses.append(float(loss))
                run.capture(metrics={"loss": float(loss)})
                if run.step >= steps:
                    break
        return guard


def test_training_goes_on_to_a_normal_loss_after_a_batch_of_nan(
    repo: Repository, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    training = Training(repo, digits, broken=frozenset({60}))
    guard = training.run(120)
    (rewind,) = guard.rewinds
    assert (rewind.step, rewind.problem, rewind.branch) == (60, "is nan", "abandoned/main/60")
    assert math.isnan(rewind.loss)
    assert rewind.good.step == 58, "the state of step 59 was never tried by a loss"
    assert all(map(math.isfinite, training.losses))
    assert training.losses[-1] < 0.3
    assert repo.state("main").step == 120


def test_training_goes_on_to_a_normal_loss_after_an_update_that_was_far_too_large(
    repo: Repository, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    training = Training(repo, digits, hot=frozenset({70}))
    guard = training.run(120)
    (rewind,) = guard.rewinds
    assert (rewind.step, rewind.good.step) == (
        72,
        69,
    ), "its own loss was normal: those after it tell"
    assert "the median of those before" in rewind.problem
    assert training.losses[-1] < 0.3


def test_without_a_guard_the_same_trainings_do_not_recover(
    repo: Repository, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for branch, trouble in (
        ("nan", {"broken": frozenset({60})}),
        ("hot", {"hot": frozenset({70})}),
    ):
        # by name
        training = Training(repo, digits, branch=branch, **trouble)  # type: ignore[arg-type]
        losses = [
            float(training.step(rows))
            for rows, _ in zip(training.sampler.batches(64, epochs=None), range(120), strict=False)
        ]
        assert not losses[-1] < 0.3, branch


def test_what_was_abandoned_is_a_branch_that_can_be_restored_and_is_written(
    tmp_path: Path, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        Training(repo, digits, broken=frozenset({30})).run(40)
        stretch = [state.step for state in repo.log("abandoned/main/30", limit=3)]
        assert stretch == [30, 29, 28], "it branches off at the good state"
        assert repo.log("main~10", limit=3)[0].step == 30
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        head = repo.state("abandoned/main/30")
        assert head.status == "durable"
        assert head.message == "abandoned: the loss of step 30 is nan"
        assert math.isnan(head.metrics["loss"])
        assert {ref.name: ref.kind for ref in repo.refs()}["abandoned/main/30"] is RefKind.BRANCH
        assert repo.load("abandoned/main/30", only="model")["model"]["0.weight"].isnan().any()
        reasons = [event.reason for event in repo.reflog("main")]
        assert reasons.count("rewind") == 1


def test_everything_but_the_place_in_the_data_is_put_back(
    repo: Repository, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    training = Training(repo, digits, broken=frozenset({30}))
    checked = []

    def after(run: Tracker, guard: Guard) -> None:
        good = repo.load(guard.rewinds[-1].good.uid)
        checked.append(good["sampler"]["position"])
        assert run.step == good["scheduler"]["last_epoch"] == training.scheduler.last_epoch == 28
        assert training.scaler.state_dict() == good["scaler"]
        assert all(
            torch.equal(value, good["model"][name])
            for name, value in training.model.state_dict().items()
        )
        assert torch.get_rng_state().numpy().tobytes() == good["rng"]["torch"]
        assert all(parameter.grad is None for parameter in training.model.parameters())
        assert training.sampler.epoch * 1797 + training.sampler.position > 29 * 62
        assert training.sampler.position != good["sampler"]["position"]

    training.run(35, after=after)
    assert len(checked) == 1
    assert training.rows[30] != training.rows[29]
    assert len({tuple(rows) for rows in training.rows}) == len(training.rows), "no batch came twice"


@pytest.mark.parametrize("options", [{}, {"data": "reshuffle"}, {"back": 4}])
def test_the_same_training_is_the_same_to_the_bit(
    tmp_path: Path, digits: tuple[torch.Tensor, torch.Tensor], options: Any
) -> None:
    found = []
    for name in ("one", "two"):
        with datastates.open(tmp_path / name, config=CONFIG) as repo:
            training = Training(repo, digits, broken=frozenset({30, 33}), hot=frozenset({50}))
            guard = training.run(80, **options)
            weights = [value.clone() for value in training.model.state_dict().values()]
            found.append(
                (
                    training.losses,
                    training.rows,
                    [(each.step, each.good.step) for each in guard.rewinds],
                    weights,
                )
            )
    assert found[0][:3] == found[1][:3]
    assert all(map(torch.equal, found[0][3], found[1][3]))
    assert len(found[0][2]) == 3


def test_reshuffle_takes_the_same_samples_again_in_another_order(
    repo: Repository, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    training = Training(repo, digits, broken=frozenset({20}))
    guard = training.run(28, data="reshuffle")
    assert guard.rewinds[0].good.step == 18
    assert training.seen == 30
    first, again = training.rows[18:20], training.rows[20:]
    assert training.rows[18] != again[0]
    epoch = sorted(row for rows in (*training.rows[:18], *again) for row in rows)
    assert len(epoch) == len(set(epoch)), "each sample once an epoch"
    assert {row for rows in first for row in rows} <= {
        *epoch,
        *training.sampler._permutation()[28 * 64 :].tolist(),
    }


def test_reshuffle_begins_a_new_iteration_of_a_loader(repo: Repository) -> None:
    sampler, weight = PermutationSampler(40, seed=1), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loader = DataLoader(_Numbers(), batch_size=4, sampler=sampler, generator=torch.Generator())
    seen: list[list[int]] = []
    with repo.track(weight=weight, optimizer=optimizer, sampler=sampler) as run:
        guard = run.guard(data="reshuffle")
        for batch in run.steps(loader):
            seen.append(batch.tolist())
            weight.grad = torch.ones(1)
            if guard.rewound(math.nan if len(seen) == 5 else 1.0):
                assert weight.grad is None, "what only the optimizer knows too"
                continue
            run.capture()
        assert run.step == 10
    assert len(seen) == 12
    assert sorted(number for batch in (*seen[:3], *seen[5:]) for number in batch) == list(range(40))
    assert seen[5:7] != seen[3:5]


def test_reshuffle_never_tries_the_same_order_twice(repo: Repository) -> None:
    sampler = PermutationSampler(40, seed=1)
    orders: list[list[int]] = []
    with repo.track(model=nn.Linear(1, 1), sampler=sampler) as run:
        guard = run.guard(data="reshuffle", limit=4)
        for rows in run.steps(sampler.batches(4)):
            if guard.rewound(math.nan if sampler.position == 12 and len(orders) < 4 else 1.0):
                orders.append(sampler._permutation().tolist())
                continue
            run.capture(attributes={"first": rows[0]})
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(40)) for order in orders)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")  # by torchdata
def test_a_stateful_loader_goes_on_where_it_is(repo: Repository) -> None:
    weight = nn.Parameter(torch.zeros(1))
    loader = StatefulDataLoader(_Numbers(), batch_size=4, shuffle=True)
    seen: list[list[int]] = []
    with repo.track(weight=weight, loader=loader) as run:
        guard = run.guard()
        for batch in run.steps(loader):
            seen.append(batch.tolist())
            if not guard.rewound(math.nan if len(seen) == 5 else 1.0):
                run.capture()
    assert sorted(number for batch in seen for number in batch) == list(range(40))
    assert run.step == 8


def test_a_plain_iterable_and_a_loop_without_steps_will_do(repo: Repository) -> None:
    weight = nn.Parameter(torch.zeros(1))
    with repo.track(weight=weight) as run:
        guard = run.guard()
        for number in range(10):
            with torch.no_grad():
                weight.fill_(number)
            if guard.rewound(math.inf if number == 6 else 1.0):
                assert weight.item() == 4
                continue
            run.capture()
        assert run.step == 8, "5 kept, 3 after"
        assert guard.rewinds[0].branch == "abandoned/main/7"
        assert guard.rewinds[0].good.step == 5


def test_a_state_that_was_spoilt_unseen_is_not_good(repo: Repository) -> None:
    """Part of the model is used now and then: its NaN is met long after it came."""
    rare = nn.Linear(2, 2)
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "rare": rare})
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    with repo.track(model=model) as run:
        guard = run.guard()
        for step in range(1, 10):
            if step == 4:
                with torch.no_grad():
                    rare.weight[0, 0] = math.inf
            if guard.rewound(math.nan if step == 9 else 1.0):
                continue
            run.capture()
        assert guard.rewinds[0].good.step == 3
        assert rare.weight.isfinite().all()


def test_trouble_that_returns_sends_further_back_each_time_and_in_the_end_is_an_error(
    repo: Repository,
) -> None:
    weight = nn.Parameter(torch.zeros(1))
    with repo.track(weight=weight) as run:
        guard = run.guard(limit=3)

        def train() -> None:
            for number in range(100):
                if not guard.rewound(math.nan if number >= 30 else 1.0):
                    run.capture()

        with pytest.raises(Unavailable) as caught:
            train()
        assert [rewind.good.step for rewind in guard.rewinds] == [29, 28, 25, 18]
        assert run.step == 18
        assert run.head == guard.rewinds[-1].good
        for rewind in guard.rewinds:
            assert rewind.branch in str(caught.value)
        assert caught.value.nearest == guard.rewinds[-1].good.uid
        assert "lower the learning rate" in str(caught.value)
        assert {ref.name for ref in repo.refs()} == {
            "main",
            *(rewind.branch for rewind in guard.rewinds),
        }


def test_calm_losses_in_between_make_trouble_the_first_again(repo: Repository) -> None:
    weight = nn.Parameter(torch.zeros(1))
    with repo.track(weight=weight) as run:
        guard = run.guard(limit=1, window=8)
        for number in range(60):
            if not guard.rewound(math.nan if number % 20 == 19 else 1.0):
                run.capture()
    assert len(guard.rewinds) == 3


def test_the_first_step_has_something_to_go_back_to(repo: Repository) -> None:
    weight = nn.Parameter(torch.zeros(1))
    with repo.track(weight=weight) as run:
        guard = run.guard()
        with torch.no_grad():
            weight.fill_(math.nan)
        assert guard.rewound(math.nan)
        assert weight.item() == 0
        assert run.step == 0


def test_a_fork_never_goes_back_beyond_its_start(repo: Repository) -> None:
    weight = nn.Parameter(torch.zeros(1))
    with repo.track(weight=weight) as run:
        for _ in range(5):
            run.capture()
        repo.tag("warm", run.head)
    with repo.track(weight=weight, branch="fork", start="warm") as run:
        guard = run.guard(back=50)
        for _ in range(3):
            assert not guard.rewound(1.0)
            run.capture()
        assert guard.rewound(math.nan)
        assert guard.rewinds[0].good.uid == repo.state("warm").uid
        assert run.step == 5


def test_a_run_that_is_resumed_on_a_spoilt_head_goes_back_before_it(repo: Repository) -> None:
    model = nn.Linear(1, 1)
    with repo.track(model=model) as run:
        for _ in range(3):
            run.capture()
        with torch.no_grad():
            model.weight.fill_(math.nan)
        run.capture()
    with repo.track(model=model, branch="main") as run:
        guard = run.guard()
        assert guard.rewound(math.nan)
        assert guard.rewinds[0].good.step == 3


def test_no_good_state_at_all_is_an_error_that_says_where_the_bad_one_is(repo: Repository) -> None:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(math.nan)
    with repo.track(model=model) as run:
        guard = run.guard()
        with pytest.raises(
            Unavailable, match=r"no good state before it can be restored.*'abandoned/main/1'"
        ):
            guard.rewound(math.nan)


def test_a_loss_that_comes_late_is_judged_a_call_later_and_the_last_one_on_demand(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on a CUDA device; here only the order of things."""

    class Event:
        def synchronize(self) -> None:
            pass

    event: Any = Event()
    of = guard_module._Loss.of
    monkeypatch.setattr(
        guard_module._Loss, "of", lambda loss, run: replace(of(loss, run), is_copied=event)
    )
    with repo.track(weight=nn.Parameter(torch.zeros(1))) as run:
        guard = run.guard()
        for number in range(1, 10):
            if guard.rewound(math.nan if number == 6 else 1.0):
                assert number == 7
                continue
            run.capture()
        (rewind,) = guard.rewinds
        assert (rewind.step, rewind.good.step, rewind.branch) == (6, 4, "abandoned/main/6")
        assert [state.step for state in repo.log(rewind.branch, limit=4)] == [7, 6, 5, 4]
        assert not guard.rewound(math.inf)
        assert guard.rewound()
        assert not guard.rewound()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_on_a_device_is_read_without_stopping_it(repo: Repository) -> None:
    model = nn.Linear(8, 1).cuda()
    with repo.track(model=model) as run:
        guard = run.guard()
        for number in range(1, 10):
            loss = model(torch.ones(4, 8, device="cuda")).square().mean() * (
                math.nan if number == 6 else 1.0
            )
            torch.cuda.set_sync_debug_mode("error")
            try:
                is_late = number != 7 and guard.rewound(loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not is_late
            if number == 7:
                assert guard.rewound(loss)
                continue
            run.capture()
        assert (guard.rewinds[0].step, guard.rewinds[0].good.step) == (6, 4)


def test_a_half_accumulated_step_is_no_place_to_go_back_to(repo: Repository) -> None:
    model = nn.Linear(1, 1)
    with repo.track(model=model) as run:
        guard = run.guard()
        for batch in run.steps(range(12), accumulate=4):
            if guard.rewound(math.nan if batch == 10 else 1.0):
                assert (run.step, run.micro_step) == (2, 0)
                continue
            run.capture()


def test_what_the_user_names_stays_too(repo: Repository) -> None:
    model = nn.Linear(1, 1)
    with repo.track(model=model, batches=0, other=0) as run:
        guard = run.guard(keep=("batches",))
        for number in range(8):
            run.values.update(batches=number, other=number)
            if not guard.rewound(math.nan if number == 6 else 1.0):
                run.capture()
            else:
                assert run.values == {"batches": 6, "other": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "repeat"}, "choose 'skip' or 'reshuffle'"),
        ({"data": "reshuffle"}, "none is tracked"),
        ({"back": 0}, "count from 1"),
        ({"limit": 0}, "count from 1"),
        ({"spike": 0}, "deviations above the median"),
        ({"window": 3}, "at least 4"),
        ({"patience": 0}, "in a row"),
        ({"keep": ("modell",)}, "nothing of that name is tracked"),
    ],
)
def test_what_means_nothing_is_refused(repo: Repository, options: Any, message: str) -> None:
    with repo.track(model=nn.Linear(1, 1)) as run, pytest.raises(InvalidInput, match=message):
        run.guard(**options)


def test_a_loader_among_other_things_is_refused(repo: Repository) -> None:
    parts = {"model": nn.Linear(1, 1), "sampler": PermutationSampler(3)}
    with repo.track(all=parts) as run, pytest.raises(InvalidInput, match="under a separate name"):
        run.guard()


def test_a_branch_whose_name_leaves_no_room_is_refused_at_once(repo: Repository) -> None:
    with (
        repo.track(model=nn.Linear(1, 1), branch="b" * 195) as run,
        pytest.raises(InvalidInput, match="at most 200"),
    ):
        run.guard()


def test_a_real_training_has_no_false_alarm(
    repo: Repository, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """From the first step to where the loss is next to nothing, with every loss judged; the last
    batch of an epoch has five samples."""
    training = Training(repo, digits)
    spikes = Spikes(6, 64, 2)
    steps = zip(training.sampler.batches(64, epochs=None), range(1000), strict=False)
    assert [
        problem for rows, _ in steps if (problem := spikes.problem(float(training.step(rows))))
    ] == []


def test_losses_are_judged_by_those_before() -> None:
    spikes = Spikes(6, 8, 1)
    assert spikes.problem(900.0) is None, "nothing is known yet"
    for loss in (1.0, 1.1, 0.9, *[1.0] * 8):
        assert spikes.problem(loss) is None
    assert spikes.problem(1.25) is None, "within six times a twentieth of the median"
    assert spikes.problem(1.5) == "is 1.5, and the median of those before is 1"
    assert spikes.problem(-5.0) is None
    assert spikes.problem(-math.inf) == "is -inf"
    assert Spikes(None, 8, 1).problem(1e30) is None


def test_a_single_high_loss_is_no_spike_and_the_next_one_clears_it() -> None:
    spikes = Spikes(6, 8, 2)
    for loss in (*[1.0] * 8, 50.0):
        assert spikes.problem(loss) is None
    assert not spikes.is_calm
    assert spikes.problem(1.0) is None
    assert spikes.is_calm
    assert spikes.problem(50.0) is None
    assert spikes.problem(60.0) == "is 60, and the median of those before is 1"


def test_losses_near_zero_may_scatter_over_orders_of_magnitude() -> None:
    spikes = Spikes(6, 64, 1)
    for number in range(200):
        assert spikes.problem(10 ** -(2 + number * 7 % 13 / 6)) is None
    assert spikes.problem(0.5) is None, (
        "far above on the linear scale, not so far above as they scatter"
    )
    assert spikes.problem(500.0) is not None


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index
