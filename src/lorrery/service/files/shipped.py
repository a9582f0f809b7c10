"""Files that ship with the package: default settings, trace excerpts, golden records, a corpus, rules, dashboards.

A wheel has them in `lorrery/data`. In a checkout that folder has links to their locations under deploy/ and tests/, so
each file exists once and is found in the same way.
"""

from importlib.resources import files
from pathlib import Path

_DATA = Path(str(files("lorrery") / "data"))

DEFAULT_SETTINGS = _DATA / "cluster.toml"
"""The cluster that commands describe, start or simulate by default."""

TRACES = {
    "azure": _DATA / "traces" / "azure_llm_2023_conv_excerpt.csv.gz",
    "mooncake": _DATA / "traces" / "mooncake_conversation_excerpt.jsonl",
}
"""Trace excerpts by the name of the workload that plays them; README.md beside them has sources and licences."""

CORPUS = _DATA / "corpora" / "prompts.txt"
"""Made-up prompts, one per line, for a static prefix cache."""

PROMETHEUS = _DATA / "prometheus"
"""Scrape configurations, recording rules, alerts."""

GRAFANA = _DATA / "grafana"
"""Dashboards, and the provisioning that loads them into Grafana."""


def golden_excerpts() -> list[Path]:
    """Return the excerpts of golden records, sorted by name."""
    return sorted((_DATA / "golden").glob("*.jsonl"))
