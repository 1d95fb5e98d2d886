"""States that a policy keeps near: they stay off the further tiers until somebody wants them."""

from __future__ import annotations

from datastates.engine.cadence_stats import CaptureFacts
from datastates.engine.scheduler import Closing, Engine, PassOn, Recorded, Tick, Wanted, Written
from datastates.policy.contract import Cadence, CadenceChoice, Costs, Moment
from tests.support.engines import engine, refs


class EveryThirdFurther(Cadence):
    """Writes each capture, and lets every third of them go on."""

    __slots__ = ()

    def is_due(self, moment: Moment, /) -> bool:
        return True

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        return current or CadenceChoice("mine", "for a test", every=1, further_every=3, costs=costs)


def near(made: Engine, uids: list[str]) -> list[str]:
    """Record and write states a second apart; those that are kept near."""
    kept = []
    for at, uid in enumerate(uids, int(uids[0][1:])):
        made.handle(Recorded(uid, "main", float(at), CaptureFacts(float(at))))
        if made.keeps_near(uid):
            kept.append(uid)
        made.handle(Written((uid,), at + 0.1, at + 0.2))
    return kept


def test_of_what_a_policy_picks_every_nth_state_goes_on_and_whatever_somebody_wants() -> None:
    made = engine(EveryThirdFurther(1, None))
    near(made, [f"s{i}" for i in range(40)])  # until it knows the costs
    kept = near(made, [f"s{i}" for i in range(40, 49)])
    assert kept == [f"s{i}" for i in range(40, 49) if (i + 1) % 3]
    assert made.handle(Wanted("s40")) == [PassOn(("s40",))]
    assert made.handle(Wanted("s40")) == [], "once"
    assert made.handle(refs("s42", main="s48")) == [PassOn(("s42",))]
    made.forget("s43")
    assert made.handle(Wanted("s43")) == [PassOn(("s43",))], (
        "it is on disk, though memory let it go"
    )


def test_a_head_that_was_kept_near_goes_on_when_its_line_closes() -> None:
    made = engine(EveryThirdFurther(1, None))
    near(made, [f"s{i}" for i in range(41)])
    assert made.handle(Closing("main")) == [PassOn(("s40",))]


def test_what_somebody_wants_before_it_is_written_is_not_kept_near() -> None:
    made = engine(EveryThirdFurther(1, None))
    near(made, [f"s{i}" for i in range(40)])
    made.handle(Recorded("s40", "main", 40.0, CaptureFacts(40.0)))
    made.handle(Wanted("s40"))
    made.handle(Tick(99.0))
    assert not made.keeps_near("s40")
