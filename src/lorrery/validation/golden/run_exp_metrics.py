"""`run_exp_metrics`: S-LoRA's summary of a benchmark run, against `loadgen.workload.slora_summary`.

Compared to 1e-9 relative: the figures are means of some dozen doubles, whose last bits depend on the order of sums.
"""

import math

from lorrery.loadgen.workload.slora_summary import slora_summary
from lorrery.validation.golden.kind import Mismatch, Record, compare, compare_close

RELATIVE_TOLERANCE = 1e-9


class RunExpMetrics:
    """One run's per-request times, and the figures computed from them."""

    name = "run_exp_metrics"

    def detect(self, record: Record) -> bool:
        """Whether the record has per-request times and their summary."""
        return record.keys() >= {"per_request", "benchmark_time", "req_rate", "result"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Summarise the run and compare every figure in the record."""
        summary = slora_summary(
            [[math.nan if one is None else one for one in row] for row in record["per_request"]],
            record["benchmark_time"],
            req_rate=record["req_rate"],
            warmup_time=record["warmup_time"],
            warmup_num=record["warmup_num"],
        )
        found: list[Mismatch] = []
        for name, expected in record["result"].items():
            got = getattr(summary, name)
            if expected is None or got is None:
                found += compare(name, expected, got)
            else:
                found += compare_close(name, expected, got, RELATIVE_TOLERANCE)
        return found
