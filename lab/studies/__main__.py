"""`python -m lab.studies` lists the studies; with names, or `all`, it runs them one after another."""

import argparse
import importlib
import time
from collections.abc import Sequence

from lab.studies.figure import DEFAULT_FOLDER

STUDIES = {
    "llm_mock": "llm-mock's two charts: prefix cache and batch size against throughput, TTFT and TPOT (7 s)",
    "batch_sizes": "what a larger batch buys and costs: static batches of 1 to 128 (2 s)",
    "static_continuous": "static against continuous batching: the passes of 32 requests in 8 places (1 s)",
    "long_tail": "does a short request wait for a long one? for each way to batch (2 s)",
    "adapters": "S-LoRA's figures: throughput over adapters, skew and bursts, beside measured runs (25 s)",
    "mixed_fleet": "one H100 beside two L40S: round robin, least loaded, adapter hash, predicted finish (15 s)",
    "shards": "2 and 4 routers and schedulers that do not talk, beside one with the same workers: regret (2 min)",
    "affinity": "where an adapter is, or where little waits? placements by adapters, skew and load (2 min)",
    "referee": "the gateway smg and rules of ours route LoRA requests: live runs as recorded, and virtual ones (1 min)",
    "autoscaling": "a day of chat: GPU hours against service level for five autoscaling rules (2 min)",
    "intervals": "do the intervals of `lorrery report A B` hold? equal runs, and slower ones (10 min)",
    "fair_tenants": "one tenant at ten times its share: what the others notice, by policy (25 s)",
}
"""Name -> the question it answers, and its approximate duration on one core. docs/policies.md shows all of them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """List the studies, or run the named ones."""
    parser = argparse.ArgumentParser(prog="python -m lab.studies", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a study, or all")
    parser.add_argument("--out", default=str(DEFAULT_FOLDER), help="folder for figures and tables")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in ("all", *STUDIES):
            parser.error(f"no study {name!r}; there are {', '.join(STUDIES)}")
    if not options.names:
        for name, what in STUDIES.items():
            print(f"python -m lab.studies.{name:18} {what}")
        print(f"python -m lab.studies {'all':18} all of them, into {DEFAULT_FOLDER}/")
        return
    for name in STUDIES if "all" in options.names else options.names:
        started = time.perf_counter()
        importlib.import_module(f"lab.studies.{name}").main(["--out", options.out])
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
