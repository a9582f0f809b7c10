"""Names that the writers and readers of a run's files share: of files, of kinds of summaries and of workers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

SUMMARY_FILE: Final = "summary.json"
REQUESTS_FILE: Final = "requests.csv"
ADAPTERS_FILE: Final = "adapters.csv"
SCALING_FILE: Final = "scaling.csv"
STEPS_FILE: Final = "steps.csv"
REPORT_FILE: Final = "report.html"
SWEEP_FILE: Final = "sweep.csv"
POINTS_FOLDER: Final = "points"
COMPARE_FILE: Final = "compare.json"
COMPARE_TABLE: Final = "compare.csv"
RECORDED_FOLDER: Final = "recorded"
PAIRED_FILE: Final = "paired.csv"
DIFFERENCES_FILE: Final = "differences.csv"
RECORD_FILE: Final = "frames.ndjson.gz"

CPU_SECONDS: Final = "cpu_seconds"
"""The only figure of a sweep's point that differs between repetitions."""

MAX_FRAMES: Final = 2_000
"""Default number of frames of a record."""

LIVE_KIND: Final = "lorrery load"
SIMULATED_KIND: Final = "lorrery simulate"
COMPARE_KIND: Final = "lorrery compare"
KINDS: Final = (LIVE_KIND, SIMULATED_KIND, "lorrery load report")
"""`kind` of a summary. The last was used for both in early versions."""

FORMAT_VERSION: Final = 1
"""Of summaries. Another number means that some field changed its meaning."""


def repeated(columns: Sequence[str]) -> str:
    """Return the columns that stand more than once in a header, in its order, for an error; empty: none."""
    return ", ".join(name for name in dict.fromkeys(columns) if columns.count(name) > 1)


def count_kinds(workers: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Count workers by kind: the GPU's name, with ` (TP n)` if the degree is more than one.

    Args:
        workers: GPU and tensor-parallel degree of each.
    """
    names = (f"{gpu} (TP {degree})" if degree > 1 else gpu for gpu, degree in workers)
    return tuple(sorted(Counter(names).items()))
