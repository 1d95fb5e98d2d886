"""Places for connections: who is let in, who gives way, and that the training keeps its
descriptors."""

from __future__ import annotations

import os
import resource

from hypothesis import given
from hypothesis import strategies as st

from datastates.system.admission import Admission, Descriptors, Limits, Place, process_descriptors

FAR, FARTHER = "192.0.2.7", "192.0.2.8"


def admission(
    connections: int = 8,
    per_address: int = 4,
    *,
    descriptors: int = 1024,
    unlimited: tuple[str, ...] = (),
) -> Admission:
    return Admission(
        Limits(connections, per_address), descriptors=Descriptors(descriptors), unlimited=unlimited
    )


class Visitor:
    """A connection that is told when to go."""

    def __init__(self, door: Admission, address: str, descriptor: int = 5) -> None:
        self.is_gone = False
        self.place: Place | None = door.admit(address, descriptor, self.go)

    def go(self) -> None:
        self.is_gone = True
        if self.place is not None:
            self.place.release()  # as the closed connection does


def held(door: Admission, address: str) -> Visitor:
    visitor = Visitor(door, address)
    assert visitor.place is not None
    visitor.place.hold()
    return visitor


def test_who_says_nothing_gives_way_to_the_next_of_its_address() -> None:
    door = admission()
    other = Visitor(door, FARTHER)
    idle = [Visitor(door, FAR) for _ in range(4)]

    assert Visitor(door, FAR).place is not None
    assert [each.is_gone for each in idle] == [True, False, False, False]
    assert not other.is_gone
    assert (door.of(FAR), door.of(FARTHER), door.displaced) == (4, 1, 1)


def test_address_that_holds_all_its_places_gets_no_more_and_others_do() -> None:
    door = admission()
    visitors = [held(door, FAR) for _ in range(4)]

    assert Visitor(door, FAR).place is None
    assert Visitor(door, FARTHER).place is not None
    assert (door.refused, door.connections) == (1, 5)
    visitors[0].go()
    assert Visitor(door, FAR).place is not None


def test_full_house_sends_away_the_oldest_of_who_has_most_idle_connections() -> None:
    door = admission()
    kept = [held(door, f"192.0.2.{n}") for n in range(20, 25)]
    one = Visitor(door, FARTHER)
    two = [Visitor(door, FAR) for _ in range(2)]

    assert Visitor(door, "192.0.2.99").place is not None
    assert [each.is_gone for each in (one, *two, *kept)] == [False, True, False, *[False] * 5]
    assert door.connections == 8


def test_full_house_of_connections_that_are_used_refuses() -> None:
    door = admission(connections=3)
    visitors = [held(door, f"192.0.2.{n}") for n in range(20, 23)]

    assert Visitor(door, FAR).place is None
    assert visitors[0].place is not None
    visitors[0].place.release_hold()
    assert Visitor(door, FAR).place is not None
    assert visitors[0].is_gone


def test_this_machine_and_proxies_have_no_limit_of_their_own() -> None:
    door = admission(connections=20, unlimited=("10.0.0.1",))

    for address in ("127.0.0.1", "::1", "10.0.0.1", ""):
        assert all(held(door, address).place for _ in range(5)), address


def test_addresses_that_one_host_has_are_one() -> None:
    door = admission()

    assert all(held(door, f"2001:db8::{n}").place for n in range(1, 5))
    assert Visitor(door, "2001:db8::ffff:5").place is None
    assert Visitor(door, "2001:db8:0:1::5").place is not None
    assert all(held(door, "::ffff:192.0.2.7").place for _ in range(4))
    assert Visitor(door, FAR).place is None


def test_all_servers_together_use_a_quarter_of_the_descriptors() -> None:
    descriptors = Descriptors(32)
    one, other = (Admission(Limits(100, 100), descriptors=descriptors) for _ in range(2))
    visitors = [held(door, FAR) for door in (one, other) for _ in range(4)]

    assert Visitor(one, FAR).place is None
    assert descriptors.taken == descriptors.limit == 8
    visitors[-1].go()
    assert Visitor(one, FAR).place is not None


def test_crowds_at_other_servers_leave_one_its_share() -> None:
    descriptors = Descriptors(96)
    doors = [Admission(Limits(100, 100), descriptors=descriptors) for _ in range(3)]
    for door in doors[:2]:
        assert all(Visitor(door, FAR).place for _ in range(50))

    assert all(held(doors[2], FARTHER) for _ in range(8))
    assert descriptors.taken == descriptors.limit == 24


def test_last_quarter_of_the_descriptors_is_the_trainings() -> None:
    door = admission(descriptors=1024)

    assert Visitor(door, FAR, descriptor=767).place is not None
    assert Visitor(door, FAR, descriptor=768).place is None


def test_place_is_released_once() -> None:
    door = admission()
    visitor = Visitor(door, FAR)
    assert visitor.place is not None
    for _ in range(3):
        visitor.place.release()

    assert (door.connections, door.of(FAR)) == (0, 0)


def test_descriptors_are_those_of_the_process() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < process_descriptors().limit <= max(1, soft // 4)
    assert process_descriptors() is process_descriptors()
    visitor = held(Admission(), FAR)
    taken = process_descriptors().taken
    assert taken >= 1
    child = os.fork()
    if child == 0:
        os._exit(process_descriptors().taken)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (
        "a child has none of its parent's connections"
    )
    assert process_descriptors().taken == taken
    visitor.go()
    assert process_descriptors().taken == taken - 1


_ADDRESSES = st.sampled_from([FAR, FARTHER, "2001:db8::1", "127.0.0.1"])
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "hold", "release_hold", "leave"]),
        _ADDRESSES,
        st.integers(0, 30),
    ),
    max_size=120,
)


@given(_STEPS)
def test_limits_hold_whatever_happens(steps: list[tuple[str, str, int]]) -> None:
    descriptors = Descriptors(24)
    door = Admission(Limits(7, 3), descriptors=descriptors)
    visitors: list[Visitor] = []
    for what, address, number in steps:
        here = [each for each in visitors if each.place is not None and not each.place.is_released]
        place = here[number % len(here)].place if here else None
        if what == "come":
            visitors.append(Visitor(door, address))
        elif place is not None:
            {"hold": place.hold, "release_hold": place.release_hold, "leave": place.release}[what]()
        here = [each for each in visitors if each.place is not None and not each.place.is_released]
        assert door.connections == descriptors.taken == len(here) <= 6
        assert all(door.of(far) <= 3 for far in (FAR, FARTHER, "2001:db8::1"))
        assert not any(each.is_gone and each in here for each in visitors)
