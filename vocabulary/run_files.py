"""The files that a run leaves, by name, and how a summary says what made it: for who writes them and who reads them."""

from typing import Final

SUMMARY_FILE: Final = "summary.json"
REQUESTS_FILE: Final = "requests.csv"
SCALING_FILE: Final = "scaling.csv"
STEPS_FILE: Final = "steps.csv"
REPORT_FILE: Final = "report.html"
SWEEP_FILE: Final = "sweep.csv"
POINTS_FOLDER: Final = "points"
RECORD_FILE: Final = "frames.ndjson.gz"

CPU_SECONDS: Final = "cpu_seconds"
"""The one figure of a sweep's point that is another each time."""

MAX_FRAMES: Final = 2_000
"""Frames of a record whose maker has not said how often."""

LIVE_KIND: Final = "lorrery load"
SIMULATED_KIND: Final = "lorrery simulate"
KINDS: Final = (LIVE_KIND, SIMULATED_KIND, "lorrery load report")
"""`kind` of a summary. The last is how both said it at first."""

FORMAT_VERSION: Final = 1
"""Of summaries. Another number: another meaning of some field."""
