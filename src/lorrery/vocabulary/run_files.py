"""File names of a run's output, and the kinds of summary, for its writers and readers."""

from typing import Final

SUMMARY_FILE: Final = "summary.json"
REQUESTS_FILE: Final = "requests.csv"
ADAPTERS_FILE: Final = "adapters.csv"
SCALING_FILE: Final = "scaling.csv"
STEPS_FILE: Final = "steps.csv"
REPORT_FILE: Final = "report.html"
SWEEP_FILE: Final = "sweep.csv"
POINTS_FOLDER: Final = "points"
RECORD_FILE: Final = "frames.ndjson.gz"

CPU_SECONDS: Final = "cpu_seconds"
"""The only figure of a sweep's point that differs between repetitions."""

MAX_FRAMES: Final = 2_000
"""Default number of frames of a record."""

LIVE_KIND: Final = "lorrery load"
SIMULATED_KIND: Final = "lorrery simulate"
KINDS: Final = (LIVE_KIND, SIMULATED_KIND, "lorrery load report")
"""`kind` of a summary. The last was used for both in early versions."""

FORMAT_VERSION: Final = 1
"""Of summaries. Another number means that some field changed its meaning."""
