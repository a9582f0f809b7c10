"""Quotas of API keys, in real processes: counted by the scheduler for all its routers."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.network.credentials import bearer
from tests.cluster.client import Ask, Client, Stream, client_of, error_info
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import metric, running_cluster, wait_until
from tests.cluster.test_journal import replayed
from tests.router.test_access import entry, replace

pytestmark = pytest.mark.cluster

LONG = 3000


def start(client: Client, ask: Ask, secret: str) -> Stream:
    stream = Stream(ask, client.stub.Generate(ask.message(), metadata=bearer(secret), timeout=60))
    client.streams.append(stream)
    return stream


async def refusal(stream: Stream) -> tuple[str, str, float]:
    """Return the reason, the field, and after how long to try again."""
    await stream
    assert stream.error is not None
    assert stream.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reason, facts, retry = error_info(stream.error)
    assert retry
    status, info = rpc_status.from_call(stream.error), error_details_pb2.RetryInfo()
    assert status is not None
    assert status.details[1].Unpack(info)
    return reason, facts["field"], info.retry_delay.ToNanoseconds() / 1e9


def gauge(cluster: LocalCluster, name: str, value: float) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        return await scrape(cluster, "scheduler", f"lorrery_scheduler_{name}") == value

    return is_so


async def test_two_routers_count_together_and_the_refusal_says_when_there_is_more(tmp_path: Path):
    keys = tmp_path / "keys.toml"
    few, tokens = entry("few", name="few", tenant="a", requests_per_minute=2), ""
    tokens = entry("tokens", name="tokens", tenant="b", tokens_per_minute=100)
    replace(keys, few + tokens)
    async with running_cluster(tmp_path, f"router.keys={keys}") as cluster, client_of(cluster) as one:
        await cluster.add("router-1", "router", [f'router.schedulers=["{cluster.scheduler_address}"]'])
        await cluster.serving("router-1")
        async with Client(cluster.processes["router-1"].grpc) as other:
            for client in (one, other):
                (await start(client, Ask(1), "few")).check(cluster.settings)
            for client in (one, other):
                reason, field, seconds = await refusal(start(client, Ask(1), "few"))
                assert (reason, field) == ("QUOTA_EXCEEDED", "requests_per_minute")
                assert 10 < seconds <= 30
            # 8 + 92 tokens are charged, and 76 of them come back when only 16 are made.
            ask = Ask(2, max_new_tokens=92, ignore_eos=False, true_output_tokens=16)
            (await start(one, ask, "tokens")).check(cluster.settings)
            (await start(other, Ask(3, max_new_tokens=60), "tokens")).check(cluster.settings)
            reason, field, _ = await refusal(start(one, Ask(4, max_new_tokens=60), "tokens"))
            assert (reason, field) == ("QUOTA_EXCEEDED", "tokens_per_minute")
            refused = partial(metric, cluster.metrics_address("router"), "lorrery_router_requests_total")
            await wait_until(lambda: refused(outcome="over_quota") == 2, what="two refusals, counted apart")
            assert refused(outcome="overloaded") == 0
            replace(keys, few.replace("= 2", "= 6000") + tokens)

            async def comes_in() -> bool:
                return (await start(one, Ask(5), "few")).error is None

            await wait_until(comes_in, what="the new quota holds")


async def test_over_max_running_requests_wait_their_turn_and_the_run_can_be_replayed(tmp_path: Path):
    keys, journal = tmp_path / "keys.toml", tmp_path / "journal.jsonl"
    replace(
        keys,
        entry("narrow", name="narrow", tenant="a", max_running=2, max_waiting=2) + entry("b", name="b", tenant="b"),
    )
    overrides = (f"router.keys={keys}", f"scheduler.journal={journal}", "scheduler.worker_timeout_seconds=60")
    async with running_cluster(tmp_path, *overrides) as cluster, client_of(cluster) as client:
        running = [start(client, Ask(number, max_new_tokens=LONG), "narrow") for number in range(2)]
        for stream in running:
            await stream.at(1)
        held = [start(client, Ask(number), "narrow") for number in (2, 3)]
        await wait_until(gauge(cluster, "held_requests", 2))
        reason, field, _ = await refusal(start(client, Ask(4), "narrow"))
        assert (reason, field) == ("QUOTA_EXCEEDED", "max_waiting")
        (await start(client, Ask(5), "b")).check(cluster.settings)  # another key is not held
        assert not any(stream.token_ids for stream in held)
        held[0].cancel()
        await wait_until(gauge(cluster, "held_requests", 1))
        running[0].cancel()
        (await held[1]).check(cluster.settings)
        running[1].cancel()
        await nothing_held(cluster)
    _, result = replayed(journal)
    assert result.differences == []
