"""What the scheduler makes of a worker's steps: which count, from when, and what a late clock or a loss changes."""

from collections.abc import AsyncIterator

import numpy as np
import pytest

from lorrery.scheduler.core.admission import AdmissionPass, BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.batching.whole_prompts import Continuous
from lorrery.scheduler.core.protocols import Batching
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from tests.scheduler.harness import OVERRIDES, Harness, tokens_of

MS = 10**9


class Watched(Batching):
    """Continuous batching that remembers when its batch became empty; a compiled class cannot be derived from."""

    emptied_ps: list[int] = []  # noqa: RUF012  each test that reads it brings its own

    def __init__(self, limits: BatchLimits) -> None:
        self._continuous = Continuous(limits)

    @property
    def limits(self) -> BatchLimits:
        return self._continuous.limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        return self._continuous.choose(context, at_ps)

    def advanced(self, num_decode_steps: int) -> None:
        self._continuous.advanced(num_decode_steps)

    def emptied(self, at_ps: int) -> None:
        self.emptied_ps.append(at_ps)

    def arrivals_matter(self, context: BatchContext) -> bool:
        return self._continuous.arrivals_matter(context)


class RaisesOnce(Fifo):
    """First come first served; raises when it tries a request of three tokens."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        if any(sequence.max_new_tokens == 3 for sequence in self):
            raise ZeroDivisionError("the price of sugar")
        return super().admit(admission, running, at_ps)


@pytest.fixture
async def scheduler() -> AsyncIterator[Harness]:
    overrides = (
        *OVERRIDES,
        "scheduler.worker_wait_seconds=2",  # two tests wait for it; in two others a worker comes before
        "scheduler.batching='tests.scheduler.test_workers:Watched'",
        "adapters.disk_gb_per_second=0.0001",  # rank 8 has 16.8 MB: 168 s
    )
    async with Harness(load(None, overrides)) as harness:
        yield harness


async def test_a_request_that_a_worker_has_gives_up_no_more(scheduler: Harness) -> None:
    router = await scheduler.route()
    await router.submit(1, max_new=2)
    worker = await scheduler.attach()
    plan = await worker.plan()
    await worker.call.write(pb.AttachRequest(draining=pb.WorkerDraining()))
    await worker.step(plan)
    assert (await router.read()).WhichOneof("message") == "tokens"
    await router.submit(2)
    refused = (await router.read()).refused
    assert (refused.handle, refused.reason) == (2, pb.REFUSAL_REASON_NO_WORKER)  # later than 1 would have been
    await worker.step(await worker.plan())
    assert (await tokens_of(router, 1))[0] == [101]


async def test_a_step_of_an_earlier_plan_is_ignored(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=3)
    prefill = await worker.plan()
    await worker.step(prefill)
    decode = await worker.plan()
    stale = pb.StepDone(
        plan_id=prefill.plan_id,
        start_ps=worker.clock_ps,
        end_ps=worker.clock_ps + MS,
        handles_u32=np.array([1], "<u4").tobytes(),
        token_ids_u32=np.array([999], "<u4").tobytes(),
    )
    await worker.call.write(pb.AttachRequest(step=stale))
    await worker.step(decode)
    await worker.step(decode)
    assert (await tokens_of(router, 1))[0] == [100, 101, 102]
    assert scheduler.value("output_tokens_total") == 3


async def test_a_gap_is_the_time_from_the_boundary_before_a_step_to_its_start(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=3)
    plan = await worker.plan()
    worker.clock_ps = plan.start_ps + 2 * MS
    await worker.step(plan)
    plan = await worker.plan()
    assert plan.start_ps == worker.clock_ps
    worker.clock_ps += 30 * MS
    await worker.step(plan)
    worker.clock_ps += 400 * MS
    await worker.step(plan)
    await tokens_of(router, 1)
    assert scheduler.value("gap_seconds_total") == pytest.approx(0.432)


async def test_time_in_the_queue_is_that_before_the_first_admission_also_after_a_loss(scheduler: Harness) -> None:
    first, router = await scheduler.attach("first"), await scheduler.route()
    await router.submit(1, max_new=4)
    plan = await first.plan()
    await first.step(plan)
    await router.read()
    second = await scheduler.attach("second")
    first.call.cancel()
    again = await second.plan()
    assert again.start_ps > plan.start_ps
    await second.step(again)
    decode = await second.plan()
    for _ in range(decode.max_steps):
        await second.step(decode)
    _, finished = await tokens_of(router, 1)
    assert finished.usage.num_requeues == 1
    assert scheduler.value("queue_seconds_count") == 1
    assert scheduler.value("queue_seconds_sum") == pytest.approx(finished.usage.queue_seconds)
    assert scheduler.value("prompt_tokens_total") == 10


async def test_a_loss_comes_no_earlier_than_the_end_of_the_last_step(
    scheduler: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "emptied_ps", [])
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1)
    plan = await worker.plan()
    worker.clock_ps = plan.start_ps + 60_000 * MS  # its clock is a minute ahead of the scheduler's
    await worker.step(plan)
    await worker.plan()
    worker.call.cancel()
    assert (await router.read()).WhichOneof("message") == "tokens"
    assert (await router.read()).refused.reason == pb.REFUSAL_REASON_NO_WORKER
    assert Watched.emptied_ps == [worker.clock_ps]


async def test_what_a_late_timer_should_have_started_starts_when_it_was_due(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, adapter="a", max_new=1)
    await router.submit(2, adapter="unknown")
    assert (await router.read()).refused.handle == 2  # so the first has begun to wait for its adapter
    scheduler.skip_to(1_000 * 10**12)
    await router.submit(3, max_new=1)
    plan = await worker.plan()
    assert [join.adapter.adapter_id for join in plan.joins] == ["a"]
    await worker.step(plan)
    _, finished = await tokens_of(router, 1)
    assert finished.usage.adapter_load_seconds == pytest.approx(167.8, abs=0.1)
    for phase in ("queue", "adapter_load", "prefill", "decode"):
        seconds = scheduler.value("request_phase_seconds_sum", phase=phase)
        assert seconds == pytest.approx(getattr(finished.usage, f"{phase}_seconds")), phase
        assert scheduler.value("request_phase_seconds_count", phase=phase) == 1
    plan = await worker.plan()
    assert plan.start_ps >= 1_000 * 10**12
    assert len(plan.joins) == 1


async def test_a_policy_that_raises_ends_its_requests_with_internal_and_one_log_line_and_serves_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = (
        *OVERRIDES,
        "scheduler.policy='tests.scheduler.test_workers:RaisesOnce'",
    )
    async with Harness(load(None, overrides)) as scheduler:
        worker, router = await scheduler.attach(), await scheduler.route()
        for handle in (1, 2):
            await router.submit(handle, max_new=3)
            refused = (await router.read()).refused
            assert (refused.handle, refused.reason) == (handle, pb.REFUSAL_REASON_INTERNAL)
            assert "sugar" not in refused.message
        await router.submit(3, max_new=1)
        await worker.step(await worker.plan())
        assert len((await tokens_of(router, 3))[0]) == 1
        assert scheduler.value("requests_total", outcome="failed") == 2
        assert scheduler.value("in_flight_requests") == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("policy_raised") == 1
