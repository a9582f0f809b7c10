"""Reference for a worker's lag: how late the machine wakes a process that only sleeps.

`python -m lab.bench.bare_sleeps SECONDS PERIOD_SECONDS` sleeps until successive absolute deadlines, and prints the p50
and p99 of its lateness, in seconds, as JSON.
"""

import json
import sys
import time
from statistics import quantiles


def main(seconds: float, period_seconds: float) -> None:
    """Sleep periodically for `seconds`, and print the lateness."""
    late: list[float] = []
    due = time.monotonic()
    end = due + seconds
    while due < end:
        due += period_seconds
        time.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        late.append(now - due)
        due = max(due, now - period_seconds)
    cuts = quantiles(late, n=100)
    print(json.dumps([cuts[49], cuts[98]]), flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
