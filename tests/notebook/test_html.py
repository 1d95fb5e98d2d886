"""What a notebook shows: states, lists of them and repositories, whatever others wrote into
them."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import datastates
from datastates import Ref, Repository, State, Status
from datastates.lineage import Edge, EdgeKind, RefKind
from datastates.lineage.views.cards import state_html
from datastates.lineage.views.html import graph_html, states_html
from datastates.lineage.write import record
from datastates.notebook import States
from tests.support.lineages import told

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></text></svg><script>alert(1)</script>",
    "</code></td></table><iframe src=javascript:alert(1)>",
    "&lt;script&gt;",
    "\u202egnp.exe\u0000\u001b[31m",
)
TAGS = {
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "p",
    "span",
    "strong",
    "code",
    "br",
    "svg",
    "path",
    "circle",
    "text",
    "tspan",
    "title",
}
ATTRIBUTES = {
    "style",
    "title",
    "xmlns",
    "width",
    "height",
    "role",
    "aria-label",
    "fill",
    "d",
    "stroke",
    "stroke-width",
    "x",
    "y",
    "cx",
    "cy",
}
ATTRIBUTES |= {"r", "font-weight", "xml:space"}


class Seen(HTMLParser):
    """What a browser would find: elements, their attributes, all text; fails where an element is
    not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"{self._open} are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.titles += [value or "" for name, value in attrs if name == "title"]
        if tag != "br":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def look(html: str) -> Seen:
    """The parsed page, which has nothing in it but what we put there."""
    seen = Seen(html)
    assert set(seen.tags) <= TAGS
    assert seen.attributes <= ATTRIBUTES
    assert not any(letter in html for letter in "\u202e\u0000\u001b")
    return seen


def state(step: int, *parents: str, **changes: object) -> State:
    made = State(
        uid=f"{step:024x}",
        digest="0" * 64,
        step=step,
        micro_step=0,
        metrics={"loss": 1 / (1 + step)},
        attributes={},
        message=None,
        created_at=NOW - timedelta(minutes=step),
        status=Status.DURABLE,
        parents=parents,
        edges=(),
        run=None,
        generation=step,
        bytes_total=3 << 20,
        bytes_new=1 << 20,
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # changes are of a test's own making


def chain(count: int) -> list[State]:
    return [state(step, *([f"{step - 1:024x}"] if step else [])) for step in reversed(range(count))]


def capture(repo: Repository, branch: str, parent: str | None, step: int, **more: object) -> str:
    uid = secrets.token_hex(12)
    with repo.core.database.write() as session:
        # as above
        record.record(session, told(uid, secrets.token_hex(32), parent, branch, None, step, **more))  # type: ignore[arg-type]
    return uid


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_others_wrote_becomes_markup(attack: str) -> None:
    hostile = state(
        3,
        metrics={attack: 0.5},
        attributes={attack: attack},
        config={attack: attack},
        message=f"{attack}\nand\n{attack}",
        run=attack,
    )
    ref = Ref(attack, RefKind.BRANCH, hostile.uid, 1)

    for html in (state_html(hostile), states_html([hostile]), graph_html([hostile], [ref])):
        seen = look(html)
        assert "alert" not in "".join(seen.attributes)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_repository_is_shown_as_text(attack: str, tmp_path: Path) -> None:
    folder = tmp_path / "<b>runs" if "script" in attack else tmp_path
    with datastates.open(folder) as repo:
        capture(
            repo,
            "a<b>&x",
            None,
            1,
            metrics={attack.replace("\0", ""): 0.5},
            message=attack.replace("\0", ""),
        )
        seen = look(repo._repr_html_())

    assert "a<b>&x" in seen.text
    assert "1 state, 1 branch, 0 tags" in seen.text


def test_a_state_says_all_that_it_knows() -> None:
    merged = state(
        12,
        "a" * 24,
        "b" * 24,
        micro_step=2,
        metrics={"loss": 0.123456789123, "val/acc": 0.5},
        attributes={"seed": 3, "note": "plain"},
        config={"optimizer.lr": 0.25, "name": "tiny"},
        message="first\nsecond",
        edges=(Edge("b" * 24, EdgeKind.SOUP, 0.25),),
        world_size=4,
        run="c" * 24,
    )

    seen = look(state_html(merged, now=NOW))

    for said in (
        merged.uid,
        "12+2",
        "durable",
        "12 minutes ago",
        "first",
        "second",
        "metrics.loss",
        "0.123456789",
        "metrics.val/acc",
    ):
        assert said in seen.text
    for said in ("config.optimizer.lr", "0.25", "config.name", "'tiny'"):
        assert said in seen.text
    for said in (
        "attr.seed",
        "'plain'",
        "soup, weight 0.25",
        "aaaaaaaaaa",
        "3.0 MiB, 1.0 MiB of it new",
        "ranks4",
        "cccccccccc",
    ):
        assert said in seen.text


def test_numbers_that_are_none_are_shown() -> None:
    odd = state(1, metrics={"loss": float("nan"), "norm": float("inf"), "low": float("-inf")})

    for html in (state_html(odd), states_html([odd]), graph_html([odd], ())):
        text = look(html).text
        assert all(word in text for word in ("nan", "inf", "-inf"))


def test_a_table_has_columns_for_the_metrics_that_most_have_and_leaves_gaps() -> None:
    keys = [f"m{number}" for number in range(8)]
    states = [
        state(1, metrics=dict.fromkeys(keys, 0.5)),
        state(2, metrics={"m7": 0.25}),
        state(3, metrics={"m6": 0.125, "m7": 0.5}),
    ]

    text = look(states_html(states, now=NOW)).text

    assert text.startswith("statestepm0m1m2m3m6m7status"), "six, by name"
    assert "0.125" in text


def test_ten_thousand_states_make_a_small_table_quickly() -> None:
    states = States(chain(10_000))

    began = time.perf_counter()
    html = states._repr_html_()

    assert time.perf_counter() - began < 10
    assert len(html) < 50_000
    assert html.count("<tr>") == 51
    assert "the first 50 of 10,000 states: .frame() has them all" in look(html).text


def test_no_states_make_an_empty_table() -> None:
    assert look(states_html([])).tags.count("tr") == 1
    assert graph_html([], ()) == ""


def test_the_graph_has_a_dot_a_state_and_lines_that_meet() -> None:
    root, left, right = (
        state(1),
        state(2, f"{1:024x}"),
        state(3, f"{1:024x}", status=Status.EVICTED),
    )
    refs = [Ref("main", RefKind.BRANCH, right.uid, 1), Ref("warm", RefKind.TAG, root.uid, 1)]

    html = graph_html([right, left, root], refs)
    svg = ElementTree.fromstring(html)

    names = [element.tag.rpartition("}")[2] for element in svg]
    assert names.count("circle") == names.count("text") == 3
    dots = [element.attrib for element in svg if element.tag.endswith("circle")]
    assert [dot["fill"] == "none" for dot in dots] == [
        True,
        False,
        False,
    ], "the bytes of the evicted one are gone"
    assert dots[0]["cx"] == dots[2]["cx"] != dots[1]["cx"], "the fork stands in a lane of its own"
    ends = {line.attrib["d"].split()[-1] for line in svg if line.tag.endswith("path")}
    assert max(float(end.rpartition("V")[2]) for end in ends) <= 3 * 22
    assert "[main]" in html
    assert "[tag: warm]" in html
    assert 'fill="currentColor"' in html, "text takes the notebook's colour"


def test_a_graph_of_many_lanes_stays_narrow() -> None:
    states = [state(number, f"{0:024x}") for number in range(40, 0, -1)] + [state(0)]

    svg = ElementTree.fromstring(graph_html(states, ()))

    assert int(svg.attrib["width"]) < 900
    assert all(float(dot.attrib["cx"]) < 12 * 14 for dot in svg if dot.tag.endswith("circle"))


def test_a_repository_shows_its_branches_and_its_newest_states(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        assert "nothing was captured yet" in look(repo._repr_html_()).text
        main = None
        for step in range(40):
            main = capture(repo, "main", main, step, metrics={"loss": 0.5})
        for number in range(25):
            capture(repo, f"fork-{number:02}", main, 41, metrics={"loss": 0.25})
        repo.tag("warm", main)
        seen = look(repo._repr_html_())
        listed = look(repo.find("step > 30 order by step")[:2]._repr_html_())

    assert str(tmp_path) in seen.text
    assert "65 states, 26 branches, 1 tag" in seen.text
    assert "and 6 more branches" in seen.text
    assert "fork-05" in seen.text
    assert "fork-04" not in seen.text.partition("and 6 more")[0], "those that moved last come first"
    assert "[main] [tag: warm]" in seen.text
    assert seen.tags.count("circle") == 30
    assert "and 35 older states" in seen.text
    assert listed.tags.count("tr") == 3


def test_a_closed_repository_is_shown_by_name_only(tmp_path: Path) -> None:
    repo = datastates.open(tmp_path)
    repo.close()

    assert "closed" in look(repo._repr_html_()).text
