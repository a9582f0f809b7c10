"""What a cluster shows about itself when nothing is left in it."""

import asyncio
from collections.abc import Iterable

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.harness import PATIENCE_SECONDS, metric, wait_until

HELD: dict[str, tuple[str, ...]] = {
    "router": (
        "lorrery_router_open_handlers",
        "lorrery_router_in_flight_requests",
        "lorrery_router_waiting_for_shard_requests",
    ),
    "scheduler": (
        "lorrery_scheduler_in_flight_requests",
        "lorrery_scheduler_waiting_requests",
        "lorrery_scheduler_unplaced_requests",
        "lorrery_scheduler_held_requests",
        "lorrery_scheduler_running_requests",
        "lorrery_scheduler_adapter_pins",
        "lorrery_scheduler_worker_kv_tokens",
        "lorrery_scheduler_worker_running_sequences",
        "lorrery_scheduler_worker_waiting_sequences",
    ),
    "worker": (
        "lorrery_worker_kv_tokens",
        "lorrery_worker_running_sequences",
    ),
}
"""Per service, the gauges of what requests hold."""


async def scrape(cluster: LocalCluster, process: str, name: str, **labels: str) -> float:
    """Return one metric of a process; the loop runs on meanwhile."""
    return await asyncio.to_thread(metric, cluster.metrics_address(process), name, **labels)


async def held(cluster: LocalCluster, without: Iterable[str] = ()) -> dict[str, float]:
    """Return every gauge of `HELD` that is not zero, of all processes but `without`."""
    found: dict[str, float] = {}
    for name, process in cluster.processes.items():
        if name in without:
            continue
        for gauge in HELD[process.service]:
            value = await scrape(cluster, name, gauge)
            if value:
                found[f"{name} {gauge}"] = value
    return found


async def nothing_held(
    cluster: LocalCluster, without: Iterable[str] = (), timeout_seconds: float = PATIENCE_SECONDS
) -> None:
    """Return once KV tokens, adapter pins, queue entries, open requests and handlers are zero everywhere.

    Raises:
        AssertionError: they were not in time; says which.
    """
    last: dict[str, float] = {}

    async def none() -> bool:
        nonlocal last
        last = await held(cluster, without)
        return not last

    try:
        await wait_until(none, timeout_seconds, "nothing held")
    except AssertionError:
        raise AssertionError(f"still held after {timeout_seconds:g} s: {last}") from None
