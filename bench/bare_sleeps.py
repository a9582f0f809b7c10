"""The yardstick of a worker's lag: how late the machine wakes a process that does nothing but sleep.

`python -m bench.bare_sleeps SECONDS PERIOD_SECONDS` sleeps until one absolute deadline after another, and prints how
late it woke, at p50 and p99, in seconds, as JSON.
"""

import json
import sys
import time
from statistics import quantiles


def main(seconds: float, period_seconds: float) -> None:
    """Sleep for so long, and print."""
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
