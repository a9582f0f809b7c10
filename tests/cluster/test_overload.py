"""More than a cluster can serve: who is let in is served as always, others are told at once, and nothing is left."""

import asyncio
import random
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.cluster.client import Ask, Client, Stream, client_of, error_info
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster, wait_until
from tests.cluster.test_journal import replayed

pytestmark = pytest.mark.cluster

SEATS, MOST = 4, 12
TENANTS = ("loud", "loud", "loud", "a", "b")


def send(client: Client, ask: Ask, tenant_id: str, timeout: float = 60.0) -> Stream:
    message = ask.message()
    message.tenant_id = tenant_id
    stream = Stream(ask, client.stub.Generate(message, timeout=timeout))
    client.streams.append(stream)
    return stream


async def test_ten_times_the_load_that_can_be_served_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    overrides = (
        "scheduler.policy=fcfs",
        f"scheduler.max_num_seqs={SEATS}",
        "scheduler.deadline_admission=true",
        "scheduler.start_within_seconds=1.5",
        f"scheduler.max_waiting_requests_per_tenant={MOST}",
    )
    rng = random.Random(7)
    async with running_cluster(tmp_path, *overrides) as cluster, client_of(cluster) as client:
        streams, most_waiting = list[Stream](), 0.0
        for number in range(300):
            ask = Ask(number, prompt_tokens=rng.randint(1, 40), max_new_tokens=rng.randint(30, 60))
            streams.append(send(client, ask, rng.choice(TENANTS)))
            if number % 50 == 49:
                waiting = await scrape(cluster, "scheduler", "lorrery_scheduler_waiting_requests")
                most_waiting = max(most_waiting, waiting)
            await asyncio.sleep(0.01)
        reasons: dict[str, int] = {}
        for stream in streams:
            await stream
            if stream.error is None:
                stream.check(cluster.settings)
                continue
            assert stream.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not stream.token_ids
            reason, _, retry = error_info(stream.error)
            assert retry
            reasons[reason] = reasons.get(reason, 0) + 1
        num_refused = sum(reasons.values())
        assert set(reasons) <= {"QUEUE_FULL", "SLO_UNATTAINABLE"}
        assert 100 < num_refused < 300 - 2 * SEATS
        assert 0 < most_waiting <= MOST * len(set(TENANTS))
        counted = [
            await scrape(cluster, "router", "lorrery_router_requests_total", outcome=outcome)
            for outcome in ("overloaded", "unattainable", "ok")
        ]
        assert counted == [reasons.get("QUEUE_FULL", 0), reasons.get("SLO_UNATTAINABLE", 0), 300 - num_refused]
        # The scheduler was not asked each time.
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_requests_total", outcome="refused") < num_refused
        await nothing_held(cluster)

        async def comes_in() -> bool:
            return (await send(client, Ask(1), "loud")).error is None

        await wait_until(comes_in, what="the router asks again")
        for number in range(SEATS):
            (await send(client, Ask(number), "loud")).check(cluster.settings)


async def test_who_still_waits_when_it_should_have_started_is_told_and_never_run(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    overrides = (
        "scheduler.policy=fcfs",
        "scheduler.max_num_seqs=1",
        "scheduler.deadline_admission=true",
        "scheduler.start_within_seconds=0.5",
        f"scheduler.journal={journal}",
    )
    async with running_cluster(tmp_path, *overrides) as cluster, client_of(cluster) as client:
        first = send(client, Ask(1, max_new_tokens=3000), "")
        await first.at(1)
        late = send(client, Ask(2), "")
        impatient = send(client, Ask(3), "", timeout=0.2)
        await asyncio.gather(late, impatient)
        assert late.error is not None
        assert late.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_info(late.error)[0] == "SLO_UNATTAINABLE"
        assert "its deadline has passed before it could start" in (late.error.details() or "")
        assert impatient.error is not None
        # Its deadline is the caller's, and the scheduler's word comes within a millisecond of it, before or after.
        if impatient.error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            assert error_info(impatient.error)[0] == "SLO_UNATTAINABLE"
        assert not first.over

        async def gone() -> bool:
            return await scrape(cluster, "scheduler", "lorrery_scheduler_in_flight_requests") == 1

        await wait_until(gone, what="the scheduler has let go of both")
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_queue_seconds_count") == 1
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_requests_total", outcome="dropped") >= 1
        first.cancel()
        await nothing_held(cluster)
    _, result = replayed(journal)
    assert result.differences == []
