"""The branches and tags of all states: read again as far as they changed, they are those that
are read anew."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from datastates.lineage import Database, State
from datastates.lineage.views import branch_rows
from datastates.lineage.views.branch_rows import Names, names
from datastates.lineage.write import refs
from tests.lineage.conftest import Grow
from tests.support.effort import seeds


def read(database: Database, old: Names | None = None) -> Names:
    with database.read() as session:
        return names(session, old)


@pytest.mark.parametrize("few", [1, 100])
@pytest.mark.parametrize("seed", seeds(4))
def test_what_changed_is_read_again(
    database: Database, grow: Grow, seed: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch_rows, "_FEW", few)
    rng, tips = random.Random(seed), {"main": grow(branch="main", count=3)}
    states, tags = [*tips.values()], dict[str, State]()
    known = read(database)
    assert known.branches == ("main",)
    for number in range(30):
        for _ in range(rng.choice((0, 1, 1, 3))):
            change(database, grow, rng, tips, tags, states, str(number))
        known, before = read(database, known), known
        assert known == read(database)
        assert (known is before) == (known.stamp == before.stamp)


def change(
    database: Database,
    grow: Grow,
    rng: random.Random,
    tips: dict[str, State],
    tags: dict[str, State],
    states: list[State],
    label: str,
) -> None:
    """One change of a random kind."""
    kind = rng.choice(("capture", "capture", "fork", "tag", "move", "delete", "again"))
    with database.write() as session:
        if kind == "tag":
            name = f"tag-{label}-{len(tags)}"
            tags[name] = rng.choice(states)
            refs.tag(session, name, tags[name].uid)
        elif kind in ("move", "delete") and tags:
            name = rng.choice(sorted(tags))
            if kind == "delete":
                refs.delete_ref(session, name)
                del tags[name]
            else:
                to = rng.choice(states)
                refs.move(session, name, to.uid, expected=tags[name].uid)
                tags[name] = to
        elif kind == "again" and tags:  # the same name, at another state
            name = rng.choice(sorted(tags))
            refs.delete_ref(session, name)
            tags[name] = rng.choice(states)
            refs.tag(session, name, tags[name].uid)
    if kind in ("capture", "fork"):
        parent = rng.choice([*tips.values()])
        branch = (
            next(name for name, tip in tips.items() if tip is parent)
            if kind == "capture"
            else f"fork-{label}-{len(tips)}"
        )
        tips[branch] = grow(parent, branch=branch)
        states.append(tips[branch])


def test_a_change_whose_event_was_late_is_seen(database: Database, grow: Grow) -> None:
    """PostgreSQL may commit a lower id after a higher one, which was read already."""
    first, second = grow(branch="main"), grow(branch="other")
    with database.write() as session:
        refs.tag(session, "v1", first.uid)
    known = read(database)
    with database.write() as session:
        refs.move(session, "v1", second.uid, expected=first.uid)
    early = replace(known, stamp=(known.stamp[0] + 1, *known.stamp[1:]))
    assert read(database, early) == read(database)
