"""Files that ship with the package: default settings, excerpts of traces, golden records, a corpus, rules, dashboards.

A wheel holds them in `lorrery/data`. In a checkout that folder has links to where they lie, under deploy/ and tests/:
each exists once, and a checkout and a wheel find it in the same way.
"""

from importlib.resources import files
from pathlib import Path

_DATA = Path(str(files("lorrery") / "data"))

DEFAULT_SETTINGS = _DATA / "cluster.toml"
"""The cluster that commands describe, start or simulate unless told otherwise."""

TRACES = {
    "azure": _DATA / "traces" / "azure_llm_2023_conv_excerpt.csv",
    "mooncake": _DATA / "traces" / "mooncake_conversation_excerpt.jsonl",
}
"""Excerpt by the name of the workload that plays it; README.md beside them has sources and licences."""

CORPUS = _DATA / "corpora" / "prompts.txt"
"""Made-up prompts, one a line, for a static prefix cache."""

PROMETHEUS = _DATA / "prometheus"
"""Scrape configurations, recording rules, alerts."""

GRAFANA = _DATA / "grafana"
"""Dashboards, and the provisioning that makes Grafana show them."""


def golden_excerpts() -> list[Path]:
    """Return the excerpts of golden records, by name."""
    return sorted((_DATA / "golden").glob("*.jsonl"))
