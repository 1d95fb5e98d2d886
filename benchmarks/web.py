"""The speed of the API with many clients while trainings capture, and of the page, compared with
MLflow.

    python benchmarks/web.py [--states N ...] [--readers 32] [--seconds S] [--rounds N]
    [--mlflow-python PATH] [--folder DIR]
                             [--no-page] [--json FILE]

Each size is built once in DIR, and copied for each run. Clients send a request, read the response,
and pause for half a second on average. Routes take turns, round after round, first alone and then
while four processes capture. Then the same clients run without pauses. The floor is a server that
only sends a response. MLflow is measured at 2,000 runs in the same run if PATH names a Python that
has it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import web_mlflow
from common import machine, out, short, table
from web_curves import cold_curves
from web_load import Asked, Load, percentile, saturate, think
from web_page import pages
from web_parts import bare, capturing, copied, repository, served, uids

GOALS_MS = {"graph window": 20.0, "search, rare filter": 60.0, "search, sorted": 60.0}
RUNS = "/api/v1/repositories/runs"
FLOORS = ("floor: bare Starlette", "floor: /healthz")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--readers", type=int, default=32)
    parser.add_argument(
        "--think",
        type=float,
        default=0.5,
        help="seconds between answer and next question, on average",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each route in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--captures", type=int, default=4, help="processes that capture")
    parser.add_argument(
        "--interval", type=float, default=0.2, help="seconds between two captures of each"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "datastates-benchmark"
    )
    parser.add_argument("--mlflow-python", default=sys.executable)
    parser.add_argument("--no-page", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    out(machine())
    found: dict[str, object] = {}
    why = web_mlflow.missing(arguments.mlflow_python)
    with ExitStack() as stack:
        mlflow = (
            None
            if why
            else stack.enter_context(web_mlflow.serving(arguments.mlflow_python, arguments.folder))
        )
        for count in arguments.states:
            found[str(count)] = measure(count, mlflow, arguments)
        if not arguments.no_page:
            with (
                copied(repository(arguments.folder, min(arguments.states))) as root,
                served(root) as base,
            ):
                found["page"] = pages(
                    f"{base}/", min(arguments.states), mlflow, rounds=max(3, arguments.rounds)
                )
            found["curves"] = cold_curves(
                arguments.folder, max(arguments.states), 10, rounds=max(3, arguments.rounds)
            )
    if why:
        out(f"MLflow was not measured: {why}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    return 0


def measure(
    count: int, mlflow: str | None, arguments: argparse.Namespace
) -> dict[str, dict[str, dict[str, float]]]:
    """All phases of one size: by phase and route, milliseconds and rates."""
    with copied(repository(arguments.folder, count)) as root, served(root) as base, bare() as floor:
        asked = {FLOORS[0]: (floor, [Asked("/")]), FLOORS[1]: (base, [Asked("/healthz")])}
        cold = {"graph window": first(base, Asked(f"{RUNS}/graph?count=100"))}
        asked |= {
            name: (base, requests) for name, requests in routes(base, uids(root, 200)).items()
        }
        if mlflow:
            asked |= {
                f"MLflow: {name}": (mlflow, requests)
                for name, requests in web_mlflow.requests(mlflow).items()
            }
        cold = {name: first(where, requests[0]) for name, (where, requests) in asked.items()} | cold
        phases = {"alone": paced(asked, arguments)}
        with capturing(root, processes=arguments.captures, interval_s=arguments.interval) as done:
            before, began = done.value, time.monotonic()
            phases["beside captures"] = paced(asked, arguments)
            rate = (done.value - before) / (time.monotonic() - began)
        phases["saturated"], loader = saturated(asked, arguments)
    out(report(count, cold, phases, arguments, rate, loader))
    return {
        phase: {name: numbers(load) for name, load in loads.items()}
        for phase, loads in phases.items()
    }


def routes(base: str, some: Sequence[str]) -> dict[str, list[Asked]]:
    """The requests of the clients to each route, with many different values if possible."""
    rng = random.Random(2)
    total = json.loads(fetch(f"{base}{RUNS}/graph?first=0&count=1"))["total"]
    firsts = [rng.randrange(max(1, total - 100)) for _ in range(200)]
    sort = quote("metrics.loss < 0.1 and metrics.acc > 0.5 order by metrics.loss")
    branches = [rng.sample(range(1, 50), 2) for _ in range(20)]
    return {
        "graph window": [Asked(f"{RUNS}/graph?first={first}&count=100") for first in firsts],
        "search, rare filter": [Asked(f"{RUNS}/states?q={quote('metrics.rare > 0.5')}&limit=50")],
        "search, sorted": [Asked(f"{RUNS}/states?q={sort}&limit=50")],
        "newest states": [Asked(f"{RUNS}/states?limit=50")],
        "state": [Asked(f"{RUNS}/states/{uid}") for uid in some],
        "series": [
            Asked(f"{RUNS}/series?head=branch-{a}&head=branch-{b}&key=loss&points=500")
            for a, b in branches
        ],
        "stats": [Asked(f"{RUNS}/stats")],
        "refs": [Asked(f"{RUNS}/refs")],
    }


def first(base: str, asked: Asked) -> float:
    """Seconds of the very first response, before anything is cached."""
    began = time.perf_counter()
    fetch(base + asked.path, asked.body)
    return time.perf_counter() - began


def paced(
    asked: Mapping[str, tuple[str, list[Asked]]], arguments: argparse.Namespace
) -> dict[str, Load]:
    """Clients with pauses, route by route in turns."""
    loads = {name: Load() for name in asked}
    for number in range(arguments.rounds):
        for name, (base, requests) in asked.items():
            load = think(
                base,
                requests,
                readers=arguments.readers,
                think_s=arguments.think,
                seconds=arguments.seconds,
                seed=number,
            )
            loads[name].seconds += load.seconds
            loads[name].refused += load.refused
            loads[name].bytes += load.bytes
            loads[name].rate += load.rate / arguments.rounds
    return loads


def saturated(
    asked: Mapping[str, tuple[str, list[Asked]]], arguments: argparse.Namespace
) -> tuple[dict[str, Load], str]:
    """Clients without pauses: the highest throughput of the server."""
    loads, loaders = {}, set()
    for name, (base, requests) in asked.items():
        loads[name], loader = saturate(
            base, requests, readers=arguments.readers, seconds=arguments.seconds
        )
        loaders.add(loader)
    return loads, " and ".join(sorted(loaders, reverse=True))


def numbers(load: Load) -> dict[str, float]:
    return {
        "p50_ms": percentile(load.seconds, 0.5) * 1e3,
        "p99_ms": percentile(load.seconds, 0.99) * 1e3,
        "rate": load.rate,
        "refused": load.refused,
        "answers": len(load.seconds),
    }


def report(
    count: int,
    cold: Mapping[str, float],
    phases: Mapping[str, Mapping[str, Load]],
    arguments: argparse.Namespace,
    rate: float,
    loader: str,
) -> str:
    """The table of all routes of one size."""
    rows = []
    for name, first_s in cold.items():
        alone, beside, full = (
            phases[phase][name] for phase in ("alone", "beside captures", "saturated")
        )
        goal = GOALS_MS.get(name)
        is_met = goal is None or percentile(beside.seconds, 0.5) * 1e3 <= goal
        judged = "" if goal is None else f"{goal:g}: {'met' if is_met else 'MISSED'}"
        refused = alone.refused + beside.refused + full.refused
        times = (both(alone), both(beside), f"{full.rate:.0f}/s, {both(full)}")
        rows.append(
            [name, short(first_s * 1e3), *times, judged, f"{refused} refused" if refused else ""]
        )
    head = [
        "route",
        "first",
        "alone",
        f"beside {arguments.captures} captures",
        "no thinking",
        "goal (p50 beside captures)",
        "",
    ]
    asked = arguments.readers / arguments.think if arguments.think else float("inf")
    said = (
        f"\n{count:,} states, {5 * count:,} metrics; milliseconds, p50 / p99; {arguments.readers}"
        f" readers, about {asked:.0f} requests a second; {arguments.rounds} rounds of"
        f" {arguments.seconds:g} s a route; {rate:.0f} captures a second; without thinking:"
        f" {loader}"
    )
    return f"{said}\n\n{table(head, rows)}"


def both(load: Load) -> str:
    """Two percentiles in milliseconds."""
    return " / ".join(short(percentile(load.seconds, share) * 1e3) for share in (0.5, 0.99))


def fetch(url: str, body: bytes | None = None) -> bytes:
    """One response, for the benchmark itself."""
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=600
    ) as answer:
        said: bytes = answer.read()
        return said


if __name__ == "__main__":
    sys.exit(main())
