"""Stops each service of a cluster for a while, under streams: `python -m tests.cluster.pauses 7 30`.

Every stream must end with the tokens that it has in truth, whatever the pause.
"""

import asyncio
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, Stream, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster

# The shipped time-outs, not those of the harness.
SETTINGS = (
    "scheduler.policy=fcfs",
    "scheduler.worker_timeout_seconds=5",
    "scheduler.worker_wait_seconds=30",
    "worker.heartbeat_seconds=1",
    "router.resume_timeout_seconds=60",
    "time_scale=3",
)
NUM_STREAMS = 24


@dataclass(frozen=True, slots=True)
class Pause:
    """What a pause of one service did.

    Attributes:
        num_streams: all of them exact.
        workers_lost: by the scheduler's count.
        requeued: sequences that moved to another worker, or again to the same.
        resumed: streams that the router submitted again.
        silent_seconds: longest time in which no stream got a token.
        drift_seconds: how much longer a request's first token takes after the pause than before, on the wall clock.
    """

    service: str
    seconds: float
    num_streams: int
    workers_lost: float
    requeued: float
    resumed: float
    silent_seconds: float
    drift_seconds: float


async def first_token_seconds(client: Client, seed: int) -> float:
    """Return how long the quickest of some short requests waits for its first token."""
    waits = []
    for number in range(5):
        started = time.monotonic()
        stream = client.start(Ask(seed + number, 8, 2))
        await stream.at(1)
        waits.append(time.monotonic() - started)
        await stream
    return min(waits)


async def longest_silence(streams: list[Stream]) -> float:
    """Return the longest time in which no stream got a token, up to the end of all."""
    longest, told, since = 0.0, 0, time.monotonic()
    while not all(stream.over for stream in streams):
        await asyncio.sleep(0.01)
        now, num_tokens = time.monotonic(), sum(len(stream.token_ids) for stream in streams)
        if num_tokens > told:
            longest, told, since = max(longest, now - since), num_tokens, now
    return longest


async def pause(cluster: LocalCluster, name: str, seconds: float, seed: int) -> Pause:
    """Stop one process for a while; check every stream that runs meanwhile, and that nothing is left of them."""
    rng = random.Random(seed)

    async def counts() -> tuple[float, float, float]:
        return (
            await scrape(cluster, "scheduler", "lorrery_scheduler_workers_lost_total"),
            await scrape(cluster, "scheduler", "lorrery_scheduler_requeued_sequences_total"),
            await scrape(cluster, "router", "lorrery_router_resumed_total"),
        )

    async with client_of(cluster) as client:
        quiet_seconds = await first_token_seconds(client, rng.getrandbits(32))
        before = await counts()
        num_tokens = int(60 * (seconds + 3))
        streams = [
            client.start(
                Ask(rng.getrandbits(64), rng.randint(1, 200), num_tokens, rng.choice(["", "lora-0", "big"])),
                timeout=10 * (seconds + 10),
            )
            for _ in range(NUM_STREAMS)
        ]
        await asyncio.gather(*(stream.at(5) for stream in streams))
        silence = asyncio.create_task(longest_silence(streams))
        cluster.kill(name, signal.SIGSTOP)
        await asyncio.sleep(seconds)  # the pause itself
        cluster.kill(name, signal.SIGCONT)
        await asyncio.gather(*streams)
        for stream in streams:
            stream.check(cluster.settings)
        after = await counts()
        await nothing_held(cluster)
        drift = await first_token_seconds(client, rng.getrandbits(32)) - quiet_seconds
    lost, requeued, resumed = (late - early for early, late in zip(before, after, strict=True))
    return Pause(name, seconds, len(streams), lost, requeued, resumed, await silence, drift)


async def main(all_seconds: list[float]) -> None:
    """Pause every service for each of these times."""
    print("service     stopped  exact  lost  requeued  resumed   silent     drift")
    with tempfile.TemporaryDirectory() as folder:
        async with running_cluster(Path(folder), *SETTINGS, num_workers=2) as cluster:
            for seconds in all_seconds:
                for seed, name in enumerate(("scheduler", "worker-0", "router")):
                    did = await pause(cluster, name, seconds, seed)
                    print(
                        f"{did.service:<10} {did.seconds:>6.1f} s {did.num_streams:>6} {did.workers_lost:>5.0f}"
                        f" {did.requeued:>9.0f} {did.resumed:>8.0f} {did.silent_seconds:>6.2f} s"
                        f" {did.drift_seconds:>+7.3f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    asyncio.run(main([float(seconds) for seconds in sys.argv[1:] or ("7", "30")]))
