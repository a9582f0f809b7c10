"""Records the series of a vLLM server in `data/engine_series.json`: `python -m tests.cluster.record_series URL`.

Names, types, labels and buckets of a freshly started server replace those in the file. Series that only older versions,
other programs or pull requests have stay as they are, and so do SGLang's. Series of features that a mock cluster does
not have (`ABSENT`) are left out.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

FILE = Path(__file__).parent / "data" / "engine_series.json"
ABSENT = ("vllm:spec_decode_", "vllm:mm_cache_", "vllm:kv_offload_", "vllm:estimated_")
KINDS = ("vllm:", "sglang:", "http_")
LENGTHS = {
    f"vllm:request_{name}"
    for name in (
        *("prompt_tokens", "generation_tokens", "prefill_kv_computed_tokens", "max_num_generation_tokens"),
        "params_max_tokens",
    )
}
"""Their buckets are 1, 2, 5 and so on, up to the longest request."""


def shown(url: str) -> dict[str, Metric]:
    """Return the series of an engine, and those of its HTTP server, by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
        found = {f"{one.name}_total" if one.type == "counter" else one.name: one for one in families}
    return {name: one for name, one in found.items() if name.startswith(KINDS) and not name.endswith("_created")}


def described(family: Metric) -> dict[str, Any]:
    """Return a series' type, labels and buckets; `le` is no label."""
    labels = {label for sample in family.samples for label in sample.labels}
    found: dict[str, Any] = {"type": family.type, "labels": sorted(labels - {"le"})}
    if family.type == "histogram":
        first = {k: v for k, v in family.samples[0].labels.items() if k != "le"}
        bounds = [s.labels["le"] for s in family.samples if "le" in s.labels and first.items() <= s.labels.items()]
        found["buckets"] = [float(bound) for bound in bounds if bound != "+Inf"]
    return found


def record(url: str) -> None:
    """Replace the entries of the file by those of a server."""
    kept = json.loads(FILE.read_text())
    for name, family in shown(url).items():
        if name.startswith(ABSENT):
            continue
        entry = described(family)
        if name in LENGTHS:
            entry["buckets"] = "lengths"
        kept[name] = entry
    rows = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in kept.items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    record(sys.argv[1])
