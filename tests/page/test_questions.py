"""What a person asks first, answered by the page within three presses of the opening view, by hand
and by keys alone.

What the page says is compared with what Python finds by walking the states, not with the API that
the page asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

import datastates
from tests.page.conftest import serving
from tests.page.large import BRANCHES, METRICS, RUNS, STATES, populate
from tests.page.site import ROOT, new_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from datastates import Repository, State
    from datastates.lineage.views.branch_rows import Branch

pytestmark = pytest.mark.long

PRESSES = 3
TABS = 700
LIVE = "now"
SHOWN = "val_loss"
"""The metric that the page shows first: of validation, if there is one."""
AXE = ROOT / "api" / "ui" / "node_modules" / "axe-core" / "axe.min.js"


@dataclass(frozen=True)
class Asked:
    """A served lineage of which everything is known by its states, and a training that goes on
    in it."""

    repo: Repository
    folder: Path
    address: str

    @cached_property
    def branches(self) -> dict[str, Branch]:
        """By name."""
        return {branch.name: branch for branch in self.repo.overview()}

    @cached_property
    def paths(self) -> dict[str, list[State]]:
        """The states of each branch and all before it, the newest first."""
        return {name: self.repo.log(name) for name in self.branches}

    @cached_property
    def own(self) -> dict[str, list[State]]:
        """The states of each branch behind its fork, the newest first: it is the newest of its
        path that it shares with an older branch."""
        found: dict[str, list[State]] = {}
        seen: set[str] = set()
        for name in sorted(self.branches, key=lambda name: (name != "main", name)):
            # each forks from one before it
            found[name] = [state for state in self.paths[name] if state.uid not in seen]
            seen |= {state.uid for state in found[name]}
        return found

    @cached_property
    def best(self) -> str:
        """The branch of the state with the least validation loss of all."""
        return min(self.own, key=lambda name: min(map(shown, measured(self.own[name]))))


def shown(state: State) -> float:
    """What the page says of a state."""
    return state.metrics[SHOWN]


def measured(states: list[State]) -> list[State]:
    """Those that have it."""
    return [state for state in states if SHOWN in state.metrics]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    if not (ROOT / "api" / "static" / "index.html").exists():
        pytest.skip("the page is not built: make ui")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = tmp_path_factory.mktemp("questions") / "runs"
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        populate(repo)
        with repo.track(
            model=model, optimizer=optimizer, branch=LIVE, durable_every=1, config={"lr": 0.001}
        ) as run:
            for step in range(4):
                loss = 3.0 - step / 10
                last = run.capture(metrics={"loss": loss, SHOWN: loss})
            last.wait("durable")
            with serving(repo) as address:
                asked = Asked(repo, folder, address)
                assert len({state.uid for path in asked.paths.values() for state in path}) >= STATES
                assert (
                    len({key for state in asked.paths["main"] for key in state.metrics})
                    == len(METRICS)
                    == 30
                )
                assert (len(asked.branches), len(repo.runs())) == (BRANCHES, RUNS)
                yield asked


class Person:
    """Presses what is seen, and counts; with ``keys`` only those."""

    def __init__(self, page: Page, *, keys: bool) -> None:
        self.page, self.keys, self.presses = page, keys, 0

    def begin(self, address: str) -> None:
        """The opening view."""
        self.page.goto(address)
        expect(self.row(LIVE)).to_be_visible()
        self.presses = 0

    def row(self, name: str) -> Locator:
        return self.page.locator(f"[data-branch='{name}']")

    def press(self, what: Locator) -> None:
        """A button or a link."""
        self.presses += 1
        if self.keys:
            self.reach(what)
            self.page.keyboard.press("Enter")
        else:
            what.click()

    def choose(self, select: Locator, option: str) -> None:
        """An option of a list."""
        self.presses += 1
        if not self.keys:
            select.select_option(option)
            return
        self.reach(select)
        for _ in range(TABS):
            if select.input_value() == option:
                return
            self.page.keyboard.press("ArrowDown")
        raise AssertionError(f"no key leads to {option!r}")

    def search(self, query: str) -> None:
        """Write into the filter."""
        self.presses += 1
        if self.keys:
            self.page.keyboard.press("/")
        else:
            self.page.get_by_role("combobox", name="Filter").click()
        self.page.keyboard.type(query)
        self.page.keyboard.press("Enter")

    def reach(self, what: Locator) -> None:
        """Press the tabulator until it has the focus."""
        expect(what).to_be_attached()
        for _ in range(TABS):
            if what.evaluate("one => one === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the tabulator never comes to {what}")


@pytest.fixture(params=["mouse", "keys"])
def person(request: pytest.FixtureRequest, page: Page, asked: Asked) -> Iterator[Person]:
    person = Person(page, keys=request.param == "keys")
    person.begin(asked.address)
    yield person
    assert person.presses <= PRESSES


def header(person: Person, title: str) -> Locator:
    return person.page.get_by_role("columnheader", name=title, exact=True).get_by_role("button")


def test_which_branch_is_best(person: Person, asked: Asked) -> None:
    best = asked.best
    person.press(header(person, "Best"))
    expect(person.page.locator("[data-branch]").first).to_have_attribute("data-branch", best)
    expect(person.row(best).locator(".best")).to_contain_text("★")
    least = min(map(shown, measured(asked.own[best])))
    assert float(person.row(best).locator(".best").inner_text().split()[-1]) == pytest.approx(
        least, rel=1e-3
    )


def test_where_did_it_fork(person: Person, asked: Asked) -> None:
    fork = asked.own[asked.best][-1].parents[0]
    assert fork in {
        state.uid for name, path in asked.paths.items() if name != asked.best for state in path
    }
    person.press(person.row(asked.best).locator(".fork button"))
    expect(person.page.locator(f"#state-{fork}")).to_have_attribute("aria-selected", "true")
    expect(person.page.locator(f"#state-{fork}")).to_be_in_viewport()


def test_what_changed_in_its_configuration(person: Person, asked: Asked) -> None:
    best = asked.best
    fork = asked.own[best][-1].parents[0]
    ours, theirs = asked.repo.state(best).config, asked.repo.state(fork).config
    changed = [key for key in ours if ours[key] != theirs.get(key)]
    # settings in which it only differs from other branches come after what it changed itself
    texts = person.row(best).locator(".config .chip").all_inner_texts()
    chips = [text for text in texts if "→" in text]
    assert changed
    assert texts[: len(chips)] == chips
    assert [chip.split()[0] for chip in chips] == sorted(changed)
    for key, chip in zip(sorted(changed), chips, strict=True):
        _, old, _, new = chip.split()
        for said, value in ((old, theirs[key]), (new, ours[key])):
            assert (
                said == value
                if isinstance(value, str)
                else float(said) == pytest.approx(value, rel=1e-3)
            )


def test_what_did_the_loss_do_after_the_fork(person: Person, asked: Asked) -> None:
    best = asked.best
    own = asked.own[best]
    last = person.row(best).locator(".last").inner_text()
    assert float(last) == pytest.approx(shown(measured(own)[0]), rel=1e-3)
    expect(person.row(best).locator(".line path")).to_be_visible()
    person.press(person.row(best).get_by_role("button", name=best))
    chart = person.page.locator(f"[data-panel=branch] [data-key={SHOWN}]")
    expect(chart.locator("canvas").first).to_be_visible()
    expect(chart.locator("tbody tr").filter(has_text=best).locator("td").first).to_have_text(last)
    expect(chart.locator("header")).to_contain_text(f"fork at step {own[-1].step - 1}")


def test_what_can_still_be_restored(person: Person, asked: Asked) -> None:
    best = asked.best
    kept = [state for state in asked.own[best] if state.status.is_restorable]
    expect(person.row(best).locator(".states")).to_have_text(
        f"{len(asked.own[best])} / {len(kept)}"
    )
    person.press(person.row(best).locator(".restorable button"))
    uid = min(measured(kept), key=shown).uid
    expect(person.page.locator("[data-panel=detail] .uid")).to_have_text(uid)
    expect(person.page.locator("[data-panel=detail] [data-status=durable]")).to_be_visible()


def test_how_big_it_all_is(person: Person, asked: Asked) -> None:
    states = {state.uid for path in asked.paths.values() for state in path}
    stored = sum(path.stat().st_size for path in asked.folder.rglob("*.safetensors"))
    whole = person.page.locator(".branches .whole")
    thin = f"{len(states):,}".replace(",", "\u2009")
    expect(whole).to_have_text(re.compile(f"^{thin} states, {RUNS} runs, [0-9.]+ KiB on disk$"))
    assert float(whole.inner_text().split()[-4]) == pytest.approx(stored / 1024, rel=0.01)


def test_what_is_running_now(person: Person, asked: Asked) -> None:
    rows = person.page.locator("[data-branch]")
    expect(rows).to_have_count(BRANCHES)
    running = rows.evaluate_all(
        "rows => rows.filter((row) => row.querySelector('.lamp.running')).map((row) =>"
        " row.dataset.branch)"
    )
    assert running == [LIVE]
    assert running == [run.branch for run in asked.repo.runs() if run.finished_at is None]


def test_how_one_goes_on_from_here(person: Person, asked: Asked) -> None:
    person.press(person.row(LIVE).locator(".restorable button"))
    lines = person.page.locator("[data-panel=detail] .command code")
    line = lines.filter(has_text="repo.track(")
    expect(line).to_be_visible()
    uid = person.page.locator("[data-panel=detail] .uid").inner_text()
    assert uid == min(asked.own[LIVE], key=shown).uid
    model = torch.nn.Linear(64, 64)
    restored = asked.repo.load(uid)
    assert "run = repo.track(model=model, optimizer=optimizer, branch=" in line.inner_text()
    model.load_state_dict(restored["model"])


def test_who_ran_it_where_and_how_it_is_loaded(person: Person, asked: Asked) -> None:
    person.press(person.row(LIVE).get_by_role("button", name=LIVE))
    shown = person.page.locator("[data-panel=branch]")
    run = next(run for run in asked.repo.runs() if run.branch == LIVE)
    expect(shown).to_contain_text(f"{run.user}@{run.host}")
    found: dict[str, Any] = {}
    exec(shown.locator(".command code").first.inner_text(), found)
    loaded = asked.repo.load(LIVE)["model"]["weight"]
    assert torch.equal(found["tree"]["model"]["weight"], loaded)


def test_which_branches_have_a_setting(person: Person, asked: Asked) -> None:
    # ours are numbers
    matching = [name for name, path in asked.paths.items() if float(path[0].config["lr"]) >= 0.05]  # type: ignore[arg-type]
    assert 0 < len(matching) < BRANCHES
    person.search("config.lr >= 0.05")
    expect(person.page.get_by_role("status").filter(has_text="branches")).to_contain_text(
        f"{len(matching)} of {BRANCHES} branches"
    )
    names = person.page.locator("[data-branch]").evaluate_all(
        "rows => rows.map((row) => row.dataset.branch)"
    )
    assert sorted(names) == sorted(matching)


def test_which_optimizer_is_best_by_another_metric(person: Person, asked: Asked) -> None:
    found: dict[str, list[tuple[float, str]]] = {}
    for name, own in asked.own.items():
        values = [state.metrics["val/accuracy"] for state in own if "val/accuracy" in state.metrics]
        if values:
            found.setdefault(str(own[0].config["optimizer"]), []).append((max(values), name))
    person.choose(person.page.get_by_role("combobox", name="by", exact=True), "val/accuracy")
    person.choose(person.page.get_by_role("combobox", name="grouped by"), "config.optimizer")
    for optimizer, reached in found.items():
        group = person.page.locator("tr.group").filter(has_text=f"config.optimizer {optimizer}")
        expect(group).to_contain_text(f"{len(reached)} branches")
        expect(group).to_contain_text(f"of {max(reached)[1]}")


VIEWS: dict[str, tuple[str, str]] = {
    "branches": ("", "[data-branch]"),
    "branches grouped": ("?view=branches&group=config.optimizer&by=best", "tr.group"),
    "branch": (f"?view=branch&head={LIVE}", "[data-kept]"),
    "branches filtered": (
        f"?view=branches&q=metrics.loss+exists&metric={METRICS[5]}",
        "[data-branch]",
    ),
    "graph": ("?view=graph", ".row"),
    "states": ("?view=states", ".row"),
    "curves": ("?view=graph&panel=curves", "[data-panel=curves] canvas"),
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_any_view(asked: Asked, browser: Browser, theme: str) -> None:
    with new_page(browser, color_scheme=theme, reduced_motion="reduce") as page:
        serious = [
            f"{name}: {fault}"
            for name, (query, awaited) in VIEWS.items()
            for fault in _faults(page, asked.address + "/" + query, awaited)
        ]
    assert not serious, "\n".join(serious)


def _faults(page: Page, address: str, awaited: str) -> list[str]:
    page.goto(address)
    page.locator(awaited).first.wait_for()
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [
        f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes']][:3]}"
        for one in serious
    ]
