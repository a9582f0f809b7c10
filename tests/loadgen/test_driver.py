import asyncio

import pytest
from prometheus_client import CollectorRegistry

from lorrery.loadgen import client as client_module
from lorrery.loadgen.client import RouterClient
from lorrery.loadgen.driver import Driver, DriveSettings
from lorrery.loadgen.metrics import LoadMetrics
from lorrery.loadgen.workload.outcome import OutcomeTable
from lorrery.loadgen.workload.prompts import prompt_token_ids
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.loadgen.workload.summary import summarise
from lorrery.service.errors import LorreryError
from lorrery.service.settings.sections import TlsSettings
from tests.cluster.harness import wait_until


def workload(count=4, *, gap=0.0, adapter=None, prompt=5, output=6):
    return [WorkloadRequest(index, index * gap, prompt, output, adapter) for index in range(count)]


async def drive(router, requests, *, stop_when=None, registry=None, **settings):
    async with RouterClient(router.target, TlsSettings()) as client:
        cluster = await client.cluster(60.0)
        metrics = LoadMetrics(registry or CollectorRegistry())
        driver = Driver(client, DriveSettings(**settings), cluster.time_scale, metrics)
        if stop_when is None:
            await driver.warm_up(requests)
            await driver.run(requests)
        else:
            running = asyncio.create_task(driver.run(requests))
            await wait_until(lambda: stop_when(router, driver))
            driver.stop()
            await running
        return driver


async def nothing_open(router):
    """Wait until the server, too, knows that every stream has ended."""
    while router.num_open:
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.005, done.set_result, None)
        await done


async def open_gate(router, *, num_requests, later=0.0):
    """Let held streams go on once so many requests have come, or so many seconds later."""
    async with router.opened:
        await router.opened.wait_for(lambda: len(router.requests) >= num_requests)
    asyncio.get_running_loop().call_later(later, router.gate.set)


async def test_every_stream_brings_what_was_asked_for(start_router):
    router = await start_router(tokens_per_message=3)
    driver = await drive(router, workload(5, adapter="lora-1"), seed=3)
    assert [outcome.status for outcome in driver.outcomes] == ["OK"] * 5
    first = driver.outcomes[0]
    assert first.message_tokens.tolist() == [1, 3, 2]
    assert (first.finish_reason, first.cached_tokens, first.queue_seconds, first.worker_id) == (
        "length",
        1,
        0.25,
        "w-0",
    )
    assert (first.adapter_load_seconds, first.prefill_seconds, first.decode_seconds) == (0.125, 0.5, 2)
    assert len({outcome.token_ids_crc32 for outcome in driver.outcomes}) == 5
    assert router.num_open == 0


async def test_a_request_carries_prompt_adapter_lengths_and_seed(start_router):
    router = await start_router()
    requests = [WorkloadRequest(0, 0.0, 7, 3, "lora-2", tenant_id="t", priority=-4)]
    driver = await drive(router, requests, seed=11)
    (sent,) = router.requests
    assert (sent.priority, driver.outcomes[0].priority) == (-4, -4)
    assert list(sent.token_ids.ids) == prompt_token_ids(requests[0], 11).tolist()
    assert (sent.adapter_id, sent.tenant_id, sent.true_output_tokens) == ("lora-2", "t", 3)
    assert (sent.sampling.max_new_tokens, sent.sampling.ignore_eos) == (3, True)
    assert sent.seed


async def test_without_ignore_eos_requests_name_a_limit_and_end_at_their_true_length(start_router):
    router = await start_router()
    driver = await drive(router, workload(2, output=4), ignore_eos=False, max_new_tokens=100)
    assert {sent.sampling.max_new_tokens for sent in router.requests} == {100}
    assert [outcome.output_tokens for outcome in driver.outcomes] == [4, 4]
    assert [outcome.status for outcome in driver.outcomes] == ["OK", "OK"]


async def test_equal_seeds_give_equal_prompts_and_tokens(start_router):
    router = await start_router()
    one, two = [await drive(router, workload(3), seed=5) for _ in range(2)]
    other = await drive(router, workload(3), seed=6)

    def digests(driver):
        return sorted((outcome.index, outcome.token_ids_crc32) for outcome in driver.outcomes)

    assert digests(one) == digests(two)
    assert digests(one) != digests(other)


@pytest.mark.parametrize(
    ("adapter", "status", "detail"),
    [
        ("fail:NOT_FOUND", "NOT_FOUND", "refused"),
        ("fail:RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", "refused"),
        ("short", "WRONG_TOKEN_COUNT", "received 5 tokens; 6 were to come"),
        ("liar", "WRONG_TOKEN_COUNT", "received 6 tokens; usage says 7"),
        ("endless", "NO_FINISH", ""),
    ],
)
async def test_failures_are_told_apart(start_router, adapter, status, detail):
    router = await start_router()
    driver = await drive(router, [*workload(1), WorkloadRequest(1, 0.0, 5, 6, adapter)])
    good, bad = sorted(driver.outcomes, key=lambda outcome: outcome.index)
    assert good.status == "OK"
    assert bad.status == status
    assert detail in bad.detail
    assert (driver.tally.num_completed, driver.tally.num_failed) == (1, 1)


async def test_a_deadline_ends_a_request_and_its_stream(start_router):
    router = await start_router()
    driver = await drive(router, workload(1, adapter="held"), timeout_seconds=0.1)
    assert driver.outcomes[0].status == "DEADLINE_EXCEEDED"
    await nothing_open(router)


async def test_the_open_loop_keeps_its_schedule_however_slow_the_answers_are(start_router):
    router = await start_router()
    requests = workload(10, gap=0.02, adapter="held")
    opening = asyncio.create_task(open_gate(router, num_requests=10))
    driver = await drive(router, requests)
    await opening
    assert router.max_open == 10
    for outcome in driver.outcomes:
        at = requests[outcome.index].at_seconds
        assert outcome.intended_seconds == pytest.approx(at, abs=1e-9)
        # None was answered before the last, due at 0.18 s, had been sent.
        assert outcome.first_token_seconds - outcome.intended_seconds > 0.18 - at


async def test_a_client_that_is_held_up_does_not_hide_the_wait(start_router):
    router = await start_router()
    opening = asyncio.create_task(open_gate(router, num_requests=1, later=0.5))
    requests = [WorkloadRequest(0, 0.0, 5, 2, "held"), *(WorkloadRequest(i, 0.01 * i, 5, 2) for i in range(1, 8))]
    driver = await drive(router, requests, max_in_flight=1)
    await opening
    assert router.max_open == 1
    summary = summarise(OutcomeTable.of(outcome for outcome in driver.outcomes if outcome.index > 0))
    # The stall of request 0 made all others late: seen from the intended time, not from the sent one.
    assert summary.from_intended.ttft_ms.p50 > 400
    assert summary.from_sent.ttft_ms.p50 < summary.from_intended.ttft_ms.p50 / 2
    assert summary.send_delay_ms.p50 > 300


async def test_time_scale_stretches_the_schedule_and_figures_are_device_seconds(start_router):
    router = await start_router(time_scale=100.0, gap=0.04)
    driver = await drive(router, workload(2, gap=0.005, output=11))
    second = max(driver.outcomes, key=lambda outcome: outcome.index)
    assert second.intended_seconds == pytest.approx(0.005, abs=1e-6)
    # 40 ms on the wall are 0.4 ms on the device; a busy machine makes them longer, but not a hundred times.
    assert 0.36 < summarise(OutcomeTable.of(driver.outcomes)).tpot_ms.p50 < 36


async def test_a_closed_loop_ends_and_a_late_send_is_measured_in_device_seconds(start_router):
    router = await start_router(time_scale=0.01, gap=0.002)
    # 20 device seconds are 0.2 s here, in which not all of these can be sent one after the other.
    driver = await drive(router, workload(200, output=2), concurrency=1, duration_seconds=20.0)
    assert 0 < len(driver.outcomes) < 200
    # The time is read before a send and, for its outcome, at it: the end may lie between, but then no other follows.
    assert sum(outcome.sent_seconds >= 20.0 for outcome in driver.outcomes) <= 1
    slow = await start_router(time_scale=0.01, first_gap=0.1)
    registry = CollectorRegistry()
    late = await drive(slow, workload(2), max_in_flight=1, registry=registry)
    # The second waits 0.1 s on the wall for the first, which are 10 s on the device.
    assert max(outcome.sent_seconds - outcome.intended_seconds for outcome in late.outcomes) > 9
    assert registry.get_sample_value("lorrery_loadgen_send_delay_seconds_sum") > 9


async def test_the_closed_loop_keeps_its_number_of_clients(start_router):
    router = await start_router(gap=0.002)
    driver = await drive(router, workload(20), concurrency=3)
    assert router.max_open == 3
    assert len(driver.outcomes) == 20
    assert all(outcome.intended_seconds == outcome.sent_seconds for outcome in driver.outcomes)


async def test_a_closed_loop_bounded_by_time_repeats_the_workload_with_new_prompts(start_router):
    router = await start_router(gap=0.002)
    driver = await drive(router, workload(2), concurrency=2, duration_seconds=3.0, repeat=True)
    assert len(driver.outcomes) > 4
    assert len({tuple(sent.token_ids.ids) for sent in router.requests}) == len(router.requests)


async def test_warm_up_is_in_no_figure_and_shares_no_prompt_with_the_run(start_router):
    router = await start_router()
    driver = await drive(router, workload(5, output=50), warmup_requests=3)
    assert len(router.requests) == 8
    assert len(driver.warmup_outcomes) == 3
    assert [outcome.index for outcome in sorted(driver.outcomes, key=lambda outcome: outcome.index)] == list(range(5))
    assert {outcome.output_tokens for outcome in driver.warmup_outcomes} == {16}
    assert len({tuple(sent.token_ids.ids) for sent in router.requests}) == 8
    assert driver.tally.num_sent == 5


async def test_warm_up_shares_no_prefix_with_the_run(start_router):
    router = await start_router()
    # Prompts of equal hash ids are equal, whatever their indices.
    await drive(router, [WorkloadRequest(0, 0.0, 600, 2, hash_ids=(7, 8))], warmup_requests=1)
    warmup, run = (list(sent.token_ids.ids) for sent in router.requests)
    assert len(warmup) == len(run) == 600
    assert warmup[:16] != run[:16]


async def test_stop_keeps_what_is_done_and_cancels_what_is_open(start_router):
    router = await start_router()
    requests = [*workload(2), *(WorkloadRequest(i, 0.05, 5, 6, "held") for i in range(2, 5))]
    requests.append(WorkloadRequest(5, 3600.0, 5, 6))
    driver = await drive(
        router, requests, stop_when=lambda router, driver: (len(router.requests), len(driver.outcomes)) == (5, 2)
    )
    assert driver.interrupted
    by_status = summarise(OutcomeTable.of(driver.outcomes)).by_status
    assert by_status == {"INTERRUPTED": 3, "OK": 2}
    await nothing_open(router)


async def test_streams_spread_over_connections(start_router, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_STREAMS_PER_CHANNEL", 2)
    router = await start_router()
    async with RouterClient(router.target, TlsSettings()) as client:
        driver = Driver(client, DriveSettings(), 1.0, LoadMetrics(CollectorRegistry()))
        running = asyncio.create_task(driver.run(workload(5, adapter="held")))
        async with router.opened:
            await router.opened.wait_for(lambda: router.num_open == 5)
        assert len(client._connections) == 3
        router.gate.set()
        await running
    assert {outcome.status for outcome in driver.outcomes} == {"OK"}


async def test_metrics_count_requests_tokens_and_latencies(start_router):
    router = await start_router()
    registry = CollectorRegistry()
    await drive(router, [*workload(2), WorkloadRequest(2, 0.0, 5, 6, "fail:UNAVAILABLE")], registry=registry)

    def value(name, **labels):
        return registry.get_sample_value(f"lorrery_loadgen_{name}", labels)

    assert value("sent_requests_total") == 3
    assert value("in_flight_requests") == 0
    assert value("outcomes_total", status="OK") == 2
    assert value("outcomes_total", status="UNAVAILABLE") == 1
    assert value("prompt_tokens_total") == 15
    assert value("output_tokens_total") == 12
    for name in ("ttft_seconds_count", "tpot_seconds_count", "e2e_seconds_count"):
        assert value(name) == 2


async def test_a_router_that_has_answered_is_not_said_to_be_silent(start_router, monkeypatch):
    router = await start_router()
    router.connected = False
    answer, num_asked = router.GetClusterStatus, 0

    async def answer_once(request, context):
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            await asyncio.Event().wait()
        return await answer(request, context)

    monkeypatch.setattr(router, "GetClusterStatus", answer_once)
    await router.start()
    async with RouterClient(router.target, TlsSettings()) as client:
        with pytest.raises(LorreryError, match=r"within 2 s: no scheduler is connected"):
            await client.cluster(2.0)
    assert num_asked == 2


async def test_a_cluster_that_is_not_there_is_one_clear_error(start_router):
    router = await start_router()
    router.connected = False
    async with RouterClient(router.target, TlsSettings()) as client:
        with pytest.raises(LorreryError, match=r"within 2 s: no scheduler is connected"):
            await client.cluster(2.0)
    await router.server.stop(None)
    async with RouterClient(router.target, TlsSettings()) as client:
        with pytest.raises(LorreryError, match="nothing answers there"):
            await client.cluster(0.3)
