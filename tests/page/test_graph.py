"""Graph and table: the same rows, in the lanes that the server gives them, also far down, also
while states are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.page.conftest import Wood

pytestmark = pytest.mark.long

ROW, HEAD = 28, 31
Open = Callable[[str], Page]

SCROLL = "(element, rows) => { element.scrollTop = rows * 28; }"
OFFSET = "(element) => element.scrollTop"
INK = """([x, y]) => {
    const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect(), scale = canvas.width / box.width;
    const [red, green, blue, alpha] = canvas.getContext("2d").getImageData((x - box.left) * scale, (y - box.top) * scale, 1, 1).data;
    return alpha < 128 ? null : [red, green, blue];
}"""


def grid(page: Page) -> Locator:
    """Where one scrolls."""
    return page.get_by_role("grid")


def row(page: Page, uid: str) -> Locator:
    """The row of a state."""
    return page.locator(f"#state-{uid}")


def height_of(page: Page, uid: str) -> float:
    """Where the row of a state is; asked at once, as the same element shows another state when
    rows appear above."""
    row(page, uid).wait_for()
    return float(
        page.evaluate("id => document.getElementById(id).getBoundingClientRect().y", f"state-{uid}")
    )


def graph_of(wood: Wood, **query: Any) -> dict[str, Any]:
    """What the API says of the whole graph."""
    found: dict[str, Any] = httpx.get(
        f"{wood.address}/api/v1/repositories/wood/graph", params={"count": 1000, **query}
    ).json()
    return found


def test_rows_stand_in_the_order_of_the_history(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    rows = graph_of(woods)["rows"]
    shown = page.locator("[role=row][id^=state-]").evaluate_all(
        "rows => rows.map(row => [row.id, +row.ariaRowIndex]).sort((a, b) => a[1] - b[1]).map(one"
        " => one[0])"
    )
    assert len(shown) > 25
    assert shown == [f"state-{one['state']['uid']}" for one in rows[: len(shown)]]


def test_every_state_has_its_dot_in_its_lane(woods: Wood, open_page: Open) -> None:
    rows = graph_of(woods)["rows"]
    widest = max(
        range(len(rows) - 24),
        key=lambda index: len({one["lane"] for one in rows[index : index + 24]}),
    )
    page = open_page(woods.at())
    grid(page).evaluate(SCROLL, widest)
    row(page, rows[widest + 5]["state"]["uid"]).wait_for()
    seen = set()
    for one in rows[widest : widest + 24]:
        box = row(page, one["state"]["uid"]).bounding_box()
        assert box is not None
        seen.add(one["lane"])
        at = [box["x"] + 15 + 14 * one["lane"] + 3, box["y"] + ROW / 2]
        assert page.evaluate(INK, at) is not None, f"no dot at {at} for {one['lane']}"
        assert page.evaluate(INK, [box["x"] + 15 + 14 * 9, box["y"] + ROW / 2]) is None
    assert len(seen) > 2


def test_lines_of_two_lanes_have_two_colours(woods: Wood, open_page: Open) -> None:
    rows = graph_of(woods)["rows"]
    place = next(
        index
        for index, one in enumerate(rows)
        if {0, 1} <= set(one["above"]) and not one["joins"] and index > 40
    )
    page = open_page(woods.at())
    grid(page).evaluate(SCROLL, place - 3)
    row(page, rows[place]["state"]["uid"]).wait_for()
    box = row(page, rows[place]["state"]["uid"]).bounding_box()
    assert box is not None
    first, second = (
        page.evaluate(INK, [box["x"] + 15 + 14 * lane, box["y"] + 2]) for lane in (0, 1)
    )
    assert None not in (first, second)
    assert first != second


def test_rows_far_down_are_fetched_when_they_come_in_sight(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    total = graph_of(woods)["total"]
    grid(page).evaluate(SCROLL, total)
    root = woods.uid("warm~39")
    expect(row(page, root)).to_be_in_viewport()
    expect(grid(page)).to_have_attribute("aria-rowcount", str(total + 1))
    assert page.locator("[role=row]").count() < 100, "rows out of sight are not in the page"


def test_pointing_at_a_line_names_its_branch(woods: Wood, open_page: Open) -> None:
    rows = graph_of(woods)["rows"]
    place = next(
        index
        for index, one in enumerate(rows)
        if one["lane"] == 1 and one["state"]["attributes"]["variant"].startswith("round-3/")
    )
    page = open_page(woods.at())
    grid(page).evaluate(SCROLL, place - 3)
    there = row(page, rows[place]["state"]["uid"])
    there.wait_for()
    there.hover(position={"x": 15 + 14, "y": 5})
    expect(page.locator(".tip")).to_have_text(rows[place]["state"]["attributes"]["variant"])


def test_only_the_chosen_heads_are_shown(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    page.get_by_role("button", name="Branches and tags to show").click()
    page.get_by_role("checkbox", name="round-1/lr-0.03").check()
    total = graph_of(woods, head="round-1/lr-0.03")["total"]
    expect(grid(page)).to_have_attribute("aria-rowcount", str(total + 1))
    assert "head=round-1" in page.url


def test_a_link_to_a_state_far_down_shows_it_in_the_middle(woods: Wood, open_page: Open) -> None:
    uid = woods.uid("main@step:45")
    page = open_page(woods.at(f"state={uid}"))
    expect(row(page, uid)).to_be_in_viewport()
    expect(row(page, uid)).to_have_attribute("aria-selected", "true")
    box = row(page, uid).bounding_box()
    assert box is not None
    assert 300 < box["y"] < 550


def test_new_states_appear_at_the_top(wood: Wood, open_page: Open) -> None:
    page = open_page(wood.at())
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    made = wood.capture("main", 3)
    expect(row(page, made[-1])).to_be_in_viewport()
    expect(row(page, made[-1])).to_have_attribute("aria-rowindex", "2")
    expect(row(page, made[-1])).to_contain_text("main")
    assert grid(page).evaluate(OFFSET) == 0


def test_what_one_reads_stays_where_it_is_while_states_are_captured(
    wood: Wood, open_page: Open
) -> None:
    page = open_page(wood.at())
    grid(page).evaluate(SCROLL, 60)
    known = wood.history()
    before = height_of(page, known[70])
    made = wood.capture("main", 4)
    pill = page.get_by_role("button", name="4 new")
    expect(pill).to_be_visible()
    assert height_of(page, known[70]) == before
    # below are rows that are not here: they come from the longer history
    grid(page).evaluate(SCROLL, 180)
    before = height_of(page, known[190])
    expect(row(page, known[190])).to_have_attribute("aria-rowindex", str(190 + 2 + 4))
    assert height_of(page, known[190]) == before
    grid(page).evaluate(SCROLL, 0)
    expect(row(page, made[-1])).to_be_in_viewport()
    expect(pill).to_have_count(0)


def test_the_pill_leads_to_what_is_new(wood: Wood, open_page: Open) -> None:
    page = open_page(wood.at())
    grid(page).evaluate(SCROLL, 60)
    made = wood.capture("main", 2)
    page.get_by_role("button", name="2 new").click()
    expect(row(page, made[-1])).to_be_in_viewport()


PAN = """async (element) => {
    for (let frames = 0; frames < 60; frames += 1) {
        await new Promise(requestAnimationFrame);
        element.scrollTop += 60;
    }
}"""


def test_panning_over_many_states_keeps_its_frames(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def processor_s() -> float:
        """What the page's main thread has used so far: what runs beside this test does not
        count."""
        return float(
            next(
                one["value"]
                for one in session.send("Performance.getMetrics")["metrics"]
                if one["name"] == "TaskDuration"
            )
        )

    before = processor_s()
    grid(page).evaluate(PAN)
    assert 0 < processor_s() - before < 60 / 30, "thirty frames a second"


def folded_of(wood: Wood) -> dict[str, Any]:
    """The folded graph with the best state on its own, as the page shows it."""
    best = wood.repo.find("order by metrics.loss limit 1")[0].uid
    return graph_of(wood, fold="true", alone=best)


def test_stretches_of_states_are_one_row_until_they_are_opened(
    woods: Wood, open_page: Open
) -> None:
    page = open_page(woods.at("view=graph"))
    every, folded = graph_of(woods), folded_of(woods)
    assert folded["total"] * 10 < every["total"] == folded["states"]
    expect(grid(page)).to_have_attribute("aria-rowcount", str(folded["total"] + 1))
    wide = next(one for one in folded["rows"] if one["count"] > 20)
    there = row(page, wide["state"]["uid"])
    expect(there).to_contain_text(f"{wide['count']} states")
    there.click()
    expect(grid(page)).to_have_attribute("aria-rowcount", str(folded["total"] + wide["count"]))
    assert f"open={wide['oldest']}" in page.url
    expect(there).to_be_in_viewport()
    page.get_by_role("button", name="Fold all again").click()
    expect(grid(page)).to_have_attribute("aria-rowcount", str(folded["total"] + 1))


def test_a_stretch_is_opened_by_keys(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at("view=graph"))
    folded = folded_of(woods)["rows"]
    place = next(index for index, one in enumerate(folded) if one["count"] > 1)
    for _ in range(place + 1):
        page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(row(page, folded[place]["state"]["uid"])).not_to_contain_text("states")
    expect(page.locator("[data-panel=detail]")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.locator("[data-panel=detail] code.uid")).to_have_text(folded[place]["state"]["uid"])


def test_a_state_within_a_stretch_gets_a_row_of_its_own_when_it_is_asked_for(
    woods: Wood, open_page: Open
) -> None:
    uid = woods.uid("main@step:45")
    page = open_page(woods.at(f"view=graph&state={uid}"))
    expect(row(page, uid)).to_be_in_viewport()
    expect(row(page, uid)).not_to_contain_text("states")


def test_the_best_state_has_a_row_of_its_own_in_the_folded_graph(
    woods: Wood, open_page: Open
) -> None:
    page = open_page(woods.at("view=graph"))
    best = woods.repo.find("order by metrics.loss limit 1")[0]
    grid(page).evaluate("element => element.scrollTop = 0")
    chip = page.locator(".chip.best")
    expect(chip).to_have_text("★ loss")
    expect(row(page, best.uid).locator(".chip.best")).to_be_visible()


COLOUR = "chip => getComputedStyle(chip).color"


def test_a_branch_has_one_colour_in_chips_graph_and_curves(woods: Wood, open_page: Open) -> None:
    name = "round-3/lr-0.1"
    page = open_page(woods.at(f"view=graph&panel=curves&head={name}&head=main"))
    chip = page.locator(".chip.branch", has_text=name).first
    colour = chip.evaluate(COLOUR)
    box = page.locator(f"#state-{woods.uid(name)}").bounding_box()
    assert box is not None
    best = woods.repo.find("order by metrics.loss limit 1")[0].uid
    rows = graph_of(woods, fold="true", head=[name, "main"], alone=best)["rows"]
    lane = next(one["lane"] for one in rows if one["state"]["uid"] == woods.uid(name))
    dot = page.evaluate(INK, [box["x"] + 15 + 14 * lane, box["y"] + ROW / 2])
    stroke = page.locator("[data-panel=curves] .legend tr", has_text=name).locator(".stroke line")
    assert (
        f"rgb({', '.join(map(str, dot))})"
        == colour
        == stroke.first.evaluate("one => getComputedStyle(one).stroke")
    )


def test_main_stands_in_the_first_column_in_its_own_colour(woods: Wood) -> None:
    for query in ({}, {"fold": "true"}):
        page = graph_of(woods, **query)
        keys = {name: int(key) for key, name in page["branches"].items()}
        assert {one["lane"] for one in page["rows"] if one["branch"] == keys["main"]} == {0}
        assert {one["branch"] for one in page["rows"] if one["lane"] == 0} == {keys["main"]}


def test_the_overview_leads_to_where_it_is_clicked(woods: Wood, open_page: Open) -> None:
    page = open_page(woods.at())
    box = page.locator(".overview .all").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 30, box["y"] + box["height"] - 3)
    expect(row(page, woods.uid("warm~39"))).to_be_in_viewport()


def test_the_graph_is_zoomed_by_keys_wheel_and_link(
    woods: Wood, open_page: Callable[[str], Page]
) -> None:
    page = open_page(woods.at("view=states"))
    grid = page.get_by_role("grid")
    row = page.locator("[role=row][id^=state-]").first
    tall = page.evaluate(
        "() => document.querySelector('[role=row][id^=state-]').getBoundingClientRect().height"
    )

    def height() -> float:
        return float(row.bounding_box()["height"])  # type: ignore[index]  # it is shown

    grid.focus()
    page.keyboard.press("-")
    page.keyboard.press("-")
    page.wait_for_url("**graph.zoom=0.67*")
    assert height() == pytest.approx(0.67 * tall, abs=1)
    grid.evaluate("grid => grid.scrollTo(0, 28 * 100)")
    expect(page.locator("[role=row][aria-rowindex='103']")).to_be_visible()
    box = grid.bounding_box()
    assert box is not None
    x, y = box["x"] + 300, box["y"] + 300
    under = "([x, y]) => document.elementFromPoint(x, y).closest('[role=row]').id"
    before = page.evaluate(under, [x, y])
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -120)
    page.keyboard.up("Control")
    page.wait_for_url("**graph.zoom=0.8*")
    # what the pointer is on stays there
    page.wait_for_function(f"({under})([{x}, {y}]) === '{before}'")
    page.mouse.click(x, y)
    expect(page.locator(f"#{before}")).to_have_attribute("aria-selected", "true")
    page.goto(page.url)
    page.get_by_role("button", name="Scale 80 %: back to 100 %").click()
    page.wait_for_function("() => !location.search.includes('graph.zoom')")
    assert height() == pytest.approx(tall, abs=1)
