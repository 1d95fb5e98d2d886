"""What runs and what lies where, on the page: two trainings while somebody looks, pins, and
eviction by who may."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

import datastates
from datastates import Status
from tests.page.site import READER, TOKEN

if TYPE_CHECKING:
    from tests.page.site import Grown, Site, Training

pytestmark = pytest.mark.long


def test_two_trainings_are_seen_while_they_run(
    site: Site, page: Page, training: Callable[..., Training]
) -> None:
    one, two = training(site.folder, "main"), training(site.folder, "second", "warm")
    one.step()
    two.step()
    page.goto(site.address("view=now"))
    rows = page.get_by_role("table", name="Processes").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(page.get_by_role("status").filter(has_text="2 processes")).to_be_visible()
    for each, branch, step in ((one, "main", "19"), (two, "second", "7")):
        row = page.locator(f"[data-process='{each.process.pid}']")
        expect(row).to_contain_text(branch)
        expect(row.locator("td.number").first).to_have_text(step)
        expect(row.locator("td").first).to_have_text("now")
    newest = one.step()
    expect(page.locator(f"[data-process='{one.process.pid}'] td.number").first).to_have_text("20")
    two.end()
    expect(rows).to_have_count(1)
    rows.get_by_role("button", name="main").click()
    page.get_by_role("button", name="Newest state", exact=True).click()
    expect(page.locator("[data-panel=detail] .uid")).to_have_text(newest)


def test_bytes_by_tier_and_branch_are_those_of_the_lineage(shared: Site, page: Page) -> None:
    page.goto(shared.address("view=now"))
    page.locator("[data-tier]").first.wait_for()
    with datastates.open(shared.folder) as repo:
        states, branches = repo.find("step >= 0"), repo.overview(sort="bytes")
    row = page.locator("[data-tier=local]")
    expect(row.locator("td").nth(1)).to_have_text(str(len(states)))
    rows = page.locator("[data-branch-bytes]")
    expect(rows).to_have_count(len(branches))
    shown = [one.get_attribute("data-branch-bytes") for one in rows.all()]
    assert shown == [branch.name for branch in branches]
    expect(page.get_by_text("no process tracks this repository")).to_be_visible()


def test_what_retention_would_drop_is_listed_with_reasons_and_a_disk_in_trouble_is_told(
    shared: Site, grown: Grown, page: Page
) -> None:
    state = grown["warm~1"]
    drop = {
        "state": state.uid,
        "branch": "main",
        "step": 5,
        "bytes": 4096,
        "reason": "no rule keeps it",
    }
    told = {
        "policy": "latest:1",
        "items": [drop],
        "total": 3,
        "bytes_before": 40960,
        "bytes_after": 20480,
        "kept": {"tag warm leads to it": 2},
    }
    storage = f"{shared.address().partition('?')[0]}api/v1/repositories/runs/storage"
    trouble = (
        "nothing can be written since 12 s, and 3 states wait in memory: No space left on device"
    )
    page.goto(shared.address("view=now"))
    expect(page.locator("[data-forecast='0']")).to_contain_text("Nothing would go now")
    expect(page.get_by_role("alert")).to_have_count(0)
    whole = page.request.get(storage).json()
    page.route("**/storage", lambda route: route.fulfill(json=whole | {"trouble": trouble}))
    page.route("**/retention*", lambda route: route.fulfill(json=told))
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text(trouble)
    expect(page.locator("[data-forecast='3']")).to_contain_text(
        "3 states would go now, 20.0 KiB of 40.0 KiB would be free; 2 states stay."
    )
    row = page.locator(f"[data-dropping='{state.uid}']")
    expect(row).to_contain_text("no rule keeps it")
    page.get_by_text("Why the others stay").click()
    expect(page.get_by_text("tag warm leads to it")).to_be_visible()
    row.get_by_role("button").press("Enter")
    expect(page.locator("[data-panel=detail] .uid")).to_have_text(state.uid)


def test_a_state_is_pinned_listed_and_unpinned(writable: Site, grown: Grown, page: Page) -> None:
    state = grown["warm~1"]
    page.goto(writable.address(f"state={state.uid}&panel=detail", token=TOKEN))
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("button", name="Pinned", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    with datastates.open(writable.folder) as repo:
        assert repo.state(f"pinned/{state.uid[:12]}").uid == state.uid
    page.get_by_role("button", name="Now", exact=True).click()
    pin = page.locator(f"[data-pin='{state.uid}']")
    expect(pin).to_contain_text(state.uid[:8])
    pin.get_by_role("button", name="Unpin").click()
    expect(pin).to_have_count(0)
    with datastates.open(writable.folder) as repo:
        assert not [ref for ref in repo.refs() if ref.name.startswith("pinned/")]


@pytest.mark.parametrize("token", [READER, TOKEN], ids=["who reads", "who writes"])
def test_who_may_not_evict_finds_no_enabled_button(
    writable: Site, grown: Grown, page: Page, token: str
) -> None:
    page.goto(writable.address(f"state={grown['main~1'].uid}&panel=detail", token=token))
    evict = page.get_by_role("button", name="Evict…")
    expect(evict).to_be_disabled()
    expect(evict).to_have_attribute(
        "title",
        "This needs a token of an administrator: --web-tokens FILE with a line 'admin TOKEN'",
    )
    pin = page.get_by_role("button", name="Pin", exact=True)
    if token == READER:
        expect(pin).to_be_disabled()
    else:
        expect(pin).to_be_enabled()


def test_who_may_drops_bytes_after_a_question(administered: Site, grown: Grown, page: Page) -> None:
    state = grown["main~1"]
    page.goto(administered.address(f"state={state.uid}&panel=detail", token=TOKEN))
    page.get_by_role("button", name="Evict…").click()
    dialog = page.locator("[data-panel=evict]")
    dialog.get_by_role("button", name="No").click()
    expect(dialog).to_have_count(0)
    with datastates.open(administered.folder) as repo:
        assert repo.state(state.uid).status is Status.DURABLE
    page.get_by_role("button", name="Evict…").click()
    dialog.get_by_role("button", name="Yes, drop its bytes").click()
    expect(page.get_by_text("are free.")).to_be_visible()
    expect(page.get_by_role("button", name="Evict…")).to_have_count(0)
    with datastates.open(administered.folder) as repo:
        assert repo.state(state.uid).status is Status.EVICTED


def test_what_a_name_keeps_goes_only_when_that_is_said(
    administered: Site, grown: Grown, page: Page
) -> None:
    state = grown["warm"]
    page.goto(administered.address(f"state={state.uid}&panel=detail", token=TOKEN))
    page.get_by_role("button", name="Evict…").click()
    dialog = page.locator("[data-panel=evict]")
    dialog.get_by_role("button", name="Yes, drop its bytes").click()
    expect(dialog.get_by_role("alert")).to_contain_text("'warm'")
    dialog.get_by_label("Even though warm names it").check()
    dialog.get_by_role("button", name="Yes, drop its bytes").click()
    expect(dialog).to_have_count(0)
    with datastates.open(administered.folder) as repo:
        assert repo.state(state.uid).status is Status.EVICTED
