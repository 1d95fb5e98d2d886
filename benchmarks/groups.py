"""What groups of ranks cost: `python benchmarks/groups.py --part commit`, `clone` or `scaling`."""

from __future__ import annotations

import argparse
from pathlib import Path

import groups_clone
import groups_commit
import groups_scaling


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["commit", "clone", "scaling"], default="commit")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--states", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="the size of the state that is cloned")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--pace",
        type=float,
        nargs="+",
        default=[0, 100],
        help="what one source gives at most, in MB/s; 0: what it can",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, to see that all of it runs"
    )
    given = parser.parse_args()
    if given.part == "clone":
        groups_clone.main(given.folder, mib=given.mib, rounds=given.rounds, paces=given.pace)
        return
    if given.part == "scaling":
        groups_scaling.main(given.folder, rounds=given.rounds, is_quick=given.quick)
        return
    groups_commit.main(
        given.folder, ranks=given.ranks, states=given.states, processes=given.processes
    )


if __name__ == "__main__":
    main()
