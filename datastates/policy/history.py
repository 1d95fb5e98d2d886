"""What a run's record says of its cadence: costs and choice as plain values. Only this module writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping

from datastates.lineage.states import OURS, Value

from .contract import CadenceChoice, Costs

__all__ = ["noted", "read_choice", "read_costs"]

_CADENCE = f"{OURS}cadence"

_COSTS = ("interval_s", "write_s", "overhead_s", "held_s", "captures", "writes")
_OPTIONAL = ("further_s", "cpu_s", "size")
_CHOICE = ("why", "every", "interval_s", "further_every")


def noted(costs: Costs, choice: CadenceChoice | None) -> dict[str, Value]:
    """Costs and choice, as a run's configuration keeps them."""
    found: dict[str, Value] = {f"{_CADENCE}.costs.{name}": getattr(costs, name) for name in (*_COSTS, *_OPTIONAL)}
    if choice is not None:
        found[_CADENCE] = choice.cadence
        found |= {f"{_CADENCE}.{name}": getattr(choice, name) for name in _CHOICE}
    return found


def read_costs(config: Mapping[str, Value]) -> Costs | None:
    """The costs in a run's record; None if it has none, or not all."""
    found = {name: config.get(f"{_CADENCE}.costs.{name}") for name in _COSTS}
    if not all(isinstance(value, int | float) for value in found.values()):
        return None
    more = {name: value for name in _OPTIONAL if isinstance(value := config.get(f"{_CADENCE}.costs.{name}"), float)}
    return Costs(**found, **more)  # type: ignore[arg-type]  # they are numbers


def read_choice(config: Mapping[str, Value]) -> CadenceChoice | None:
    """The choice in a run's record; None if it has none."""
    cadence, why = config.get(_CADENCE), config.get(f"{_CADENCE}.why")
    if not isinstance(cadence, str) or not isinstance(why, str):
        return None
    every, interval_s, further_every = (config.get(f"{_CADENCE}.{name}") for name in _CHOICE[1:])
    return CadenceChoice(
        cadence,
        why,
        every=every if isinstance(every, int) else None,
        interval_s=interval_s if isinstance(interval_s, float) else None,
        further_every=further_every if isinstance(further_every, int) else 1,
        costs=read_costs(config),
    )
