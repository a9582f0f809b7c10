"""What a running cluster shows to Prometheus is what the tables of series say."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.harness import PATIENCE_SECONDS
from tests.deploy.exported import Entry, entry, in_table, shown_name

PEERS = ("vllm:", "sglang:")
"""Names of other programs, which have tests of their own."""


def scraped(address: str) -> dict[str, Entry]:
    """Return every metric that a process shows."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {shown_name(family): entry(family) for family in families if not family.name.startswith(PEERS)}


async def check_series(cluster: LocalCluster, *, unseen: frozenset[str] = frozenset()) -> None:
    """Check names, types, labels and help texts of all processes.

    Args:
        cluster: whose routers serve HTTP, after requests have run.
        unseen: series that this cluster has no sample of.
    """
    for name, process in cluster.processes.items():
        shown = await asyncio.to_thread(scraped, cluster.metrics_address(name))
        wanted = in_table(process.service) | in_table("process")
        if process.service == "router":
            wanted |= in_table("http")
        assert shown.keys() == wanted.keys(), name
        for series, said in shown.items():
            expected = wanted[series]._replace(labels=frozenset()) if series in unseen else wanted[series]
            assert said == expected, f"{name} {series}"
