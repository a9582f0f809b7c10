"""Runs of a whole cluster in virtual time, by seed: the services' own code, with connections and processes that fail.

python -m tests.virtual.fuzz --first 41 --cases 1 --verbose        plays seed 41 again, and tells what happens
"""

import argparse
import os
import sys

from tests.seeds import check_all
from tests.virtual.scenario import run


def check(seed: int) -> str | None:
    """Return what is wrong with a run, and how to play it again; None: nothing."""
    try:
        played = run(seed)
        wrong, title = played.wrong, played.title
    except Exception as error:
        wrong, title = [f"{type(error).__name__}: {error}"], ""
    if not wrong:
        return None
    again = f"{os.path.relpath(sys.executable)} -m tests.virtual.fuzz --first {seed} --cases 1 --verbose"
    return "\n  ".join([f"seed {seed} ({title}):", *wrong, again])


def main() -> int:
    """Play a part of the seeds on all cores; 1 if one of them goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=None, help="processes; unset: one a core")
    parser.add_argument("--verbose", action="store_true", help="print what happens in each run, with virtual times")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.cases)
    if options.verbose:
        for seed in seeds:
            played = run(seed)
            print("\n".join([*played.timeline, f"seed {seed} ({played.title}): {played.digest}", *played.wrong]))
        return 0
    return check_all(check, seeds, jobs=options.jobs, chunk=10, noun="runs")


if __name__ == "__main__":
    sys.exit(main())
