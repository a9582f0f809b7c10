"""A worker attached to a scheduler that the test plays, over a real socket."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import grpc
import pytest
from prometheus_client import CollectorRegistry

from lorrery.chassis.channel import Dialler
from lorrery.chassis.errors import SettingsError
from lorrery.chassis.metrics import new_registry
from lorrery.settings import Settings
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.worker.attachment import StreamBrokenError
from lorrery.worker.hosted import REFUSED_RETRY_SECONDS
from lorrery.worker.service import WorkerService
from tests.worker.fake_scheduler import (
    PATIENCE_SECONDS,
    FakeScheduler,
    Stream,
    fake_scheduler,
    from_u32,
    join,
    prefill_plan,
    u32,
)

STEP_PS = 60_000_000_000
"""llm-mock's step with next to no tokens."""
TIME_SCALE = 0.1
"""A tenth: such a step takes 6 ms."""
HEARTBEAT_SECONDS = 0.02


class Worker:
    def __init__(self, scheduler: FakeScheduler, faults: tuple[str, ...] = (), **worker: object) -> None:
        self.registry = new_registry("worker")
        settings = Settings.model_validate(
            {
                "time_scale": scheduler.time_scale,
                "faults": faults,
                "worker": {
                    "scheduler": scheduler.address,
                    "step_time": "llm-mock",
                    "heartbeat_seconds": HEARTBEAT_SECONDS,
                    "name": "worker-0",
                    **worker,
                },
            }
        )
        self.service = WorkerService(settings, self.registry)
        self.ready = asyncio.Event()
        self.not_ready = asyncio.Event()

    async def set_ready(self, ready: bool) -> None:
        (self.ready if ready else self.not_ready).set()
        (self.not_ready if ready else self.ready).clear()

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"lorrery_worker_{name}", {"worker": "worker-0", **labels})
        assert value is not None, name
        return value


@asynccontextmanager
async def running_worker(
    scheduler: FakeScheduler, faults: tuple[str, ...] = (), **settings: object
) -> AsyncIterator[Worker]:
    worker = Worker(scheduler, faults, **settings)
    running = asyncio.create_task(worker.service.run(worker.set_ready))
    try:
        yield worker
    finally:
        running.cancel()
        (result,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)


@asynccontextmanager
async def attached(**settings: object) -> AsyncIterator[tuple[Worker, Stream]]:
    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler, **settings) as worker:
        yield worker, await scheduler.next_stream()


async def test_worker_announces_itself_and_is_ready_once_welcomed():
    async with attached() as (worker, stream):
        assert stream.hello.worker_id == "worker-0"
        assert stream.hello.gpu == "A100-80-SXM"
        assert stream.hello.model == "Llama-2-7B"
        assert stream.hello.tensor_parallel == 1
        assert stream.hello.max_total_token_num == 107_810
        assert stream.hello.step_time_model == "llm-mock"
        assert stream.hello.adapter_memory_bytes == 0
        assert not stream.hello.needs_prompts
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.ready.wait()
            await stream.heartbeat.wait()
        assert worker.metric("attached") == 1
        assert worker.metric("state", state="attached") == 1


async def test_worker_without_a_name_is_called_by_host_and_process():
    async with attached(name=None) as (_, stream):
        assert stream.hello.worker_id == f"{socket.gethostname()}-{os.getpid()}"


async def test_one_gpu_of_a_process_is_lost_and_comes_back_while_the_other_goes_on():
    at_seconds, for_seconds = 5, 5
    loss = f"worker_loss,at={at_seconds},worker=worker-0.1,for={for_seconds}"
    whole = "worker_loss,at=1,worker=worker-0,for=1"  # of the process: whoever runs it kills it
    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler, (whole, loss), gpus=2) as worker:
        first, second = sorted(
            [await scheduler.next_stream(), await scheduler.next_stream()], key=lambda stream: stream.hello.worker_id
        )
        assert (first.hello.worker_id, second.hello.worker_id) == ("worker-0.0", "worker-0.1")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.ready.wait()
        plan = prefill_plan(1, first.clock.now_ps(), join(1, 1, 5000), max_steps=5000, decode=True)
        await first.send_plan(plan)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await second.ended.wait()
            lost_ps = scheduler.clock.now_ps()
            await worker.not_ready.wait()  # not all of its GPUs are attached
        assert lost_ps >= at_seconds * 1e12
        again = await scheduler.next_stream()
        assert again.hello.worker_id == "worker-0.1"
        assert scheduler.clock.now_ps() >= (at_seconds + for_seconds) * 1e12
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.ready.wait()
        assert (await first.step()).start_ps >= plan.start_ps
        assert not first.ended.is_set()
        text = worker.registry.text(openmetrics=False).decode()
        assert text.count("# TYPE lorrery_worker_attachments_total") == 1
        assert 'lorrery_worker_attachments_total{worker="worker-0.0"} 1\n' in text
        assert 'lorrery_worker_attachments_total{worker="worker-0.1"} 2\n' in text
        assert 'vllm:num_requests_running{engine="1",model_name="Llama-2-7B"} 0' in text


async def test_new_certificates_wait_for_the_streams_that_other_gpus_open(monkeypatch):
    renew = Dialler.renew
    renewed = 0

    async def renew_after_a_change(dialler: Dialler) -> bool:
        nonlocal renewed
        renewed += 1
        monkeypatch.setattr(dialler, "_opened_with", None)
        return await renew(dialler)

    monkeypatch.setattr(Dialler, "renew", renew_after_a_change)
    async with fake_scheduler(TIME_SCALE) as scheduler:
        scheduler.slow = "worker-0.0"
        async with running_worker(scheduler, gpus=2) as worker:
            quick = await scheduler.next_stream()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await scheduler.asked.wait()
            quick.close()
            again = await scheduler.next_stream()
            assert (quick.hello.worker_id, again.hello.worker_id) == ("worker-0.1", "worker-0.1")
            scheduler.answer.set()
            greeted = await scheduler.next_stream()
            assert greeted.hello.worker_id == "worker-0.0"
            async with asyncio.timeout(PATIENCE_SECONDS):
                await worker.ready.wait()
            assert renewed == 1
        async with running_worker(scheduler):
            (await scheduler.next_stream()).close()
            await scheduler.next_stream()
        assert renewed == 3, "where no other stream is open, at each dial"


async def test_plan_gives_one_step_after_another():
    async with attached() as (worker, stream):
        start_ps = stream.clock.now_ps()
        await stream.send_plan(prefill_plan(1, start_ps, join(7, 3, 6), join(9, 2, 6), max_steps=4, decode=True))
        steps = await stream.whole_plan()
        assert [step.plan_id for step in steps] == [1] * 4
        assert steps[0].start_ps >= start_ps
        assert all(after.start_ps >= before.end_ps for before, after in pairwise(steps))
        assert all(from_u32(step.handles_u32) == [7, 9] for step in steps)
        assert all(len(from_u32(step.token_ids_u32)) == 2 for step in steps)
        assert [step.hand_back for step in steps] == [False, False, False, True]
        assert worker.metric("running_sequences") == 2
        assert worker.metric("kv_tokens") == 3 + 2 + 2 * 3
        assert worker.metric("steps_total", kind="prefill") == 1
        assert worker.metric("steps_total", kind="decode") == 3
        assert worker.metric("output_tokens_total") == 8
        assert worker.metric("prefill_tokens_total") == 5


async def test_no_step_is_told_before_its_end():
    async with attached() as (_, stream):
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 1, 50), max_steps=5, decode=True))
        for _ in range(5):
            step = await stream.step()
            assert stream.clock.now_ps() >= step.end_ps


async def test_late_plan_makes_a_gap_and_not_a_longer_step():
    async with attached() as (worker, stream):
        start_ps = stream.clock.now_ps() - 100 * STEP_PS
        await stream.send_plan(prefill_plan(1, start_ps, join(1, 1, 50), max_steps=3, decode=True))
        steps = await stream.whole_plan()
        boundaries = [start_ps, *(step.end_ps for step in steps)]
        gaps = [step.start_ps - boundary for step, boundary in zip(steps, boundaries, strict=False)]
        assert gaps[0] >= 99 * STEP_PS
        assert all(STEP_PS < step.end_ps - step.start_ps < 1.001 * STEP_PS for step in steps)
        assert worker.metric("gaps_total") == sum(gap > 0 for gap in gaps)
        assert worker.metric("gap_seconds_total") == pytest.approx(sum(gaps) / 1e12)


async def test_heartbeats_go_on_while_a_worker_looks_for_stop_sequences_ahead():
    async with attached() as (_, stream):
        # Every token may begin a stop sequence, and the eighth of its kind in a row would end it.
        words = [u32(*[token_id] * 8) for token_id in range(3, 1908)]
        plan = prefill_plan(1, stream.clock.now_ps(), join(1, 1, 2_000_000, stop_sequences_u32=words), max_steps=1)
        num_before = stream.num_heartbeats
        await stream.send_plan(plan)
        await stream.whole_plan()
        assert stream.num_heartbeats - num_before > 3  # one each 20 ms; the look takes a second or so


async def test_finish_hands_back_before_max_steps():
    async with attached() as (worker, stream):
        plan = prefill_plan(1, stream.clock.now_ps(), join(1, 1, 50), join(2, 1, 3), max_steps=100, decode=True)
        await stream.send_plan(plan)
        steps = await stream.whole_plan()
        assert len(steps) == 3
        assert from_u32(steps[-1].finished_handles_u32) == [2]
        assert from_u32(steps[-1].finish_reasons_u32) == [FinishReason.LENGTH]
        assert worker.metric("running_sequences") == 1


async def test_until_hands_back_at_the_first_boundary_at_or_after_it():
    async with attached() as (_, stream):
        start_ps = stream.clock.now_ps()
        plan = prefill_plan(1, start_ps, join(1, 1, 50), max_steps=100, decode=True)
        plan.until_ps = start_ps + STEP_PS * 5 // 2
        await stream.send_plan(plan)
        *earlier, last = await stream.whole_plan()
        assert all(step.end_ps < plan.until_ps for step in earlier)
        assert last.end_ps >= plan.until_ps


async def test_interrupt_in_the_future_stops_at_the_first_boundary_after_it():
    async with fake_scheduler(1.0) as scheduler, running_worker(scheduler):
        stream = await scheduler.next_stream()
        start_ps = stream.clock.now_ps()
        await stream.send_plan(prefill_plan(1, start_ps, join(1, 1, 500), max_steps=400, decode=True))
        first = await stream.step()
        at_ps = first.end_ps + STEP_PS * 7 // 2
        await stream.send_interrupt(1, at_ps)
        *earlier, last = [first, *await stream.whole_plan()]
        assert earlier[-1].end_ps < at_ps <= last.end_ps


async def test_interrupt_in_the_past_drops_the_step_under_way():
    async with fake_scheduler(1.0) as scheduler, running_worker(scheduler) as worker:
        stream = await scheduler.next_stream()
        start_ps = stream.clock.now_ps()
        # The second step takes 1,000 times the first one: the interrupt cannot miss it.
        await stream.send_plan(prefill_plan(1, start_ps, join(1, 1, 500)))
        (first,) = await stream.whole_plan()
        plan = prefill_plan(2, first.end_ps, join(2, 3000, 500), max_steps=400, decode=True)
        await stream.send_plan(plan)
        await stream.send_interrupt(2, first.end_ps)
        (none,) = await stream.whole_plan()
        assert (none.plan_id, none.start_ps, none.end_ps) == (2, first.end_ps, first.end_ps)
        assert not none.handles_u32
        assert not none.finished_handles_u32
        # Nothing of the dropped step was done: the same prefill is asked for again, without its join.
        again = prefill_plan(3, first.end_ps, join(2, 1, 500))
        again.ClearField("joins")
        again.leaves_u32 = u32(2)
        again.ClearField("prefill_handles_u32")
        for name in ("new_tokens", "past_tokens", "samples"):
            again.ClearField(f"prefill_{name}_u32")
        again.decode = True
        await stream.send_plan(again)
        (last,) = await stream.whole_plan()
        assert from_u32(last.handles_u32) == [1]
        assert worker.metric("kv_tokens") == 2


async def test_interrupt_for_a_finished_plan_is_ignored():
    async with attached() as (_, stream):
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 1, 50)))
        (first,) = await stream.whole_plan()
        await stream.send_interrupt(1, 0)
        await stream.send_plan(pb.Plan(plan_id=2, start_ps=first.end_ps, max_steps=2, decode=True))
        await stream.send_interrupt(1, 0)
        assert len(await stream.whole_plan()) == 2


async def test_leaving_sequence_is_forgotten():
    async with attached() as (worker, stream):
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 4, 50), join(2, 5, 50)))
        (first,) = await stream.whole_plan()
        await stream.send_plan(pb.Plan(plan_id=2, start_ps=first.end_ps, max_steps=1, leaves_u32=u32(1), decode=True))
        (second,) = await stream.whole_plan()
        assert from_u32(second.handles_u32) == [2]
        assert worker.metric("running_sequences") == 1
        assert worker.metric("kv_tokens") == 6


async def test_plan_without_steps_only_forgets():
    async with attached() as (worker, stream):
        plan = prefill_plan(1, stream.clock.now_ps(), join(1, 4, 50))
        plan.adapter_loads.add(adapter_id="a", rank=8)
        await stream.send_plan(plan)
        (first,) = await stream.whole_plan()
        await stream.send_plan(pb.Plan(plan_id=2, start_ps=first.end_ps, leaves_u32=u32(1), adapter_evictions=["a"]))
        # It is over at once and answers nothing: the next plan is welcome.
        await stream.send_plan(prefill_plan(3, first.end_ps, join(2, 5, 50)))
        (step,) = await stream.whole_plan()
        assert step.plan_id == 3
        assert from_u32(step.handles_u32) == [2]
        assert worker.metric("kv_tokens") == 5
        assert worker.metric("resident_adapters") == 0


async def test_plan_without_sequences_takes_a_step():
    async with attached() as (worker, stream):
        start_ps = stream.clock.now_ps()
        await stream.send_plan(pb.Plan(plan_id=1, start_ps=start_ps, max_steps=1))
        (step,) = await stream.whole_plan()
        assert step.start_ps >= start_ps
        assert step.end_ps - step.start_ps == STEP_PS
        assert worker.metric("steps_total", kind="empty") == 1


async def test_resumed_sequence_goes_on_where_it_was():
    async with attached() as (_, stream):
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 4, 8), max_steps=20, decode=True))
        steps = await stream.whole_plan()
        tokens = [token for step in steps for token in from_u32(step.token_ids_u32)]
        assert len(tokens) == 8
        resumed = join(1, 4, 8)
        resumed.produced_token_ids_u32 = u32(*tokens[:3])
        await stream.send_plan(prefill_plan(2, steps[-1].end_ps, resumed, max_steps=20, decode=True))
        steps = await stream.whole_plan()
        assert [token for step in steps for token in from_u32(step.token_ids_u32)] == tokens[3:]
        assert from_u32(steps[-1].finish_reasons_u32) == [FinishReason.LENGTH]


async def test_echo_worker_asks_for_prompts_and_repeats_them():
    async with attached(output={"mode": "echo"}) as (_, stream):
        assert stream.hello.needs_prompts
        joining = join(1, 4, 100, ignore_eos=False)
        joining.prompt_token_ids_u32 = u32(5, 6, 7, 8)
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), joining, max_steps=100, decode=True))
        steps = await stream.whole_plan()
        assert [from_u32(step.token_ids_u32) for step in steps] == [[5], [6], [7], [8]]
        assert from_u32(steps[-1].finish_reasons_u32) == [FinishReason.EOS]


async def test_adapters_told_by_plans_are_counted():
    async with attached() as (worker, stream):
        plan = prefill_plan(1, stream.clock.now_ps(), join(1, 1, 9))
        plan.adapter_loads.add(adapter_id="a", rank=8)
        plan.adapter_loads.add(adapter_id="b", rank=8)
        await stream.send_plan(plan)
        (step,) = await stream.whole_plan()
        assert worker.metric("resident_adapters") == 2
        await stream.send_plan(
            pb.Plan(plan_id=2, start_ps=step.end_ps, max_steps=1, decode=True, adapter_evictions=["a"])
        )
        await stream.whole_plan()
        assert worker.metric("resident_adapters") == 1
        assert worker.metric("adapter_loads_total") == 2


async def test_broken_stream_drops_every_sequence_and_the_worker_dials_again():
    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler) as worker:
        stream = await scheduler.next_stream()
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 1, 5000), max_steps=5000, decode=True))
        await stream.step()
        stream.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.not_ready.wait()
        assert worker.metric("running_sequences") == 0
        assert worker.metric("kv_tokens") == 0
        again = await scheduler.next_stream()
        assert again.hello.worker_id == stream.hello.worker_id
        # The handle is free again, and so is the pacer.
        await again.send_plan(prefill_plan(1, again.clock.now_ps(), join(1, 1, 2), max_steps=9, decode=True))
        assert len(await again.whole_plan()) == 2
        assert worker.metric("attachments_total") == 2


async def test_impossible_plan_ends_the_stream_and_not_the_worker():
    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler):
        stream = await scheduler.next_stream()
        await stream.send_plan(pb.Plan(plan_id=1, start_ps=0, max_steps=1, leaves_u32=u32(4)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await stream.ended.wait()
        await scheduler.next_stream()


async def test_refused_worker_stays_up_and_asks_again(monkeypatch):
    monkeypatch.setitem(REFUSED_RETRY_SECONDS, grpc.StatusCode.FAILED_PRECONDITION, 0.01)
    async with fake_scheduler(TIME_SCALE) as scheduler:
        scheduler.refuse = "Llama-3-8B"
        async with running_worker(scheduler) as worker:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await scheduler.refused.wait()
            assert not worker.ready.is_set()
            assert worker.metric("attached") == 0
            scheduler.refuse = None
            await scheduler.next_stream()


async def test_stream_too_slow_for_the_steps_counts_as_broken(monkeypatch):
    monkeypatch.setattr("lorrery.worker.attachment.MAX_OUTGOING", 3)
    stuck = asyncio.Event()

    async def write_nothing(_call: object, _message: object) -> None:
        await stuck.wait()

    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler):
        stream = await scheduler.next_stream()
        monkeypatch.setattr("grpc.aio._call.StreamStreamCall.write", write_nothing)
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 1, 90), max_steps=90, decode=True))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await stream.ended.wait()
        monkeypatch.undo()
        await scheduler.next_stream()


async def test_draining_worker_finishes_its_sequences_and_closes_the_stream():
    async with attached() as (worker, stream):
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 1, 6), max_steps=3, decode=True))
        first = await stream.step()
        draining = asyncio.create_task(worker.service.drain())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await stream.draining.wait()
        steps = [first, *await stream.whole_plan()]
        assert not draining.done()
        await stream.send_plan(pb.Plan(plan_id=2, start_ps=steps[-1].end_ps, max_steps=9, decode=True))
        steps += await stream.whole_plan()
        assert len(steps) == 6
        async with asyncio.timeout(PATIENCE_SECONDS):
            await stream.half_closed.wait()
            await draining
        assert worker.metric("state", state="draining") == 1


async def test_drained_worker_says_nothing_more_and_waits_until_its_scheduler_has_read_to_the_end():
    async with attached() as (worker, stream):
        stream.linger_seconds = 5 * HEARTBEAT_SECONDS
        async with asyncio.timeout(PATIENCE_SECONDS):
            await stream.heartbeat.wait()
            await worker.service.drain()
        assert stream.half_closed.is_set()
        assert not stream.cut


async def test_gpus_of_a_process_drain_to_their_ends_whatever_becomes_of_the_others(monkeypatch):
    async def broken() -> None:
        raise StreamBrokenError("too slow")

    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler, gpus=2) as worker:
        first, second = sorted(
            [await scheduler.next_stream(), await scheduler.next_stream()], key=lambda stream: stream.hello.worker_id
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.ready.wait()
        await second.send_plan(prefill_plan(1, second.clock.now_ps(), join(1, 1, 6), max_steps=9, decode=True))
        started = await second.step()  # else there would be nothing to drain yet
        monkeypatch.setattr(worker.service._gpus[0], "drain", broken)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.service.drain()
        assert second.half_closed.is_set()
        assert len([started, *await second.whole_plan()]) == 6
        assert not first.draining.is_set()


async def test_a_gpu_that_is_just_attaching_when_its_process_drains_takes_leave_instead():
    async with fake_scheduler(TIME_SCALE) as scheduler:
        scheduler.slow = "worker-0"
        async with running_worker(scheduler) as worker, asyncio.timeout(PATIENCE_SECONDS):
            await scheduler.asked.wait()
            draining = asyncio.create_task(worker.service.drain())
            await asyncio.sleep(0)
            scheduler.answer.set()
            await draining
            stream = await scheduler.next_stream()
            assert stream.draining.is_set()
            assert stream.half_closed.is_set()
            assert not stream.cut, "which a scheduler counts as a loss"
            assert not worker.ready.is_set()
            assert worker.metric("attachments_total") == 0


async def test_a_gpu_that_is_still_dialling_when_its_process_drains_says_no_hello(monkeypatch):
    dialling, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    written: list[object] = []

    class Silent:
        """A stream to a scheduler that says nothing."""

        async def write(self, message: object) -> None:
            written.append(message)

        async def read(self) -> None:
            await asyncio.get_running_loop().create_future()

        def cancel(self) -> None:
            ended.set()

    async def slow(_schedulers: object, _address: str) -> Silent:
        dialling.set()
        await go_on.wait()
        return Silent()

    monkeypatch.setattr("lorrery.worker.schedulers.Schedulers.open_stream", slow)
    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler) as worker:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await dialling.wait()
            await worker.service.drain()
            go_on.set()
            await ended.wait()
    assert not written


async def test_a_process_does_not_drain_for_long_where_its_scheduler_does_not_answer(monkeypatch):
    monkeypatch.setattr("lorrery.worker.hosted.CLOSE_SECONDS", 0.05)
    async with fake_scheduler(TIME_SCALE) as scheduler:
        scheduler.slow = "worker-0"
        async with running_worker(scheduler) as worker, asyncio.timeout(PATIENCE_SECONDS):
            await scheduler.asked.wait()
            await worker.service.drain()
            assert scheduler.streams.empty()
            scheduler.answer.set()


async def test_idle_worker_drains_at_once():
    async with attached() as (worker, stream):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.ready.wait()
            await worker.service.drain()
            await stream.half_closed.wait()


async def test_worker_that_is_not_attached_drains_at_once():
    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler, startup_seconds=3600.0) as worker:
        assert worker.metric("attached") == 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.service.drain()
        assert scheduler.streams.empty()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"worker": {"gpu": "A1000X"}}, "GPU 'A1000X' is not known"),
        ({"model": "GPT"}, "model 'GPT' is not known"),
        ({"worker": {"gpu": "A10G", "tensor_parallel": 1}, "model": "Llama-2-13B"}, "does not fit"),
        ({"worker": {"tensor_parallel": 3}}, "tensor_parallel 3 must divide"),
    ],
)
def test_settings_that_name_no_possible_gpu_are_refused(overrides, message):
    with pytest.raises(SettingsError, match=message):
        WorkerService(Settings.model_validate(overrides), CollectorRegistry())


@pytest.mark.parametrize("jump_seconds", [-10.0, 10.0])
async def test_a_jump_of_one_hosts_clock_leaves_no_drift(jump_seconds: float):
    async with fake_scheduler(TIME_SCALE) as scheduler, running_worker(scheduler) as worker:
        stream = await scheduler.next_stream()
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 1, 600), max_steps=600, decode=True))
        await stream.step()
        # Against the worker's, that is; the stream is of the same clock.
        scheduler.clock._start_seconds += jump_seconds
        if jump_seconds > 0:  # the worker is ahead: what it has was put at times that are still to come
            stream = await scheduler.next_stream()
        else:
            await stream.heartbeat_after()
            await stream.send_interrupt(1, 0)
            await stream.whole_plan()
        start_ps = stream.clock.now_ps()
        plan = prefill_plan(2, start_ps, join(2, 1, 6), max_steps=3, decode=True)
        plan.leaves_u32 = b"" if jump_seconds > 0 else u32(1)
        await stream.send_plan(plan)
        steps = await stream.whole_plan()
        assert steps[0].start_ps >= start_ps
        assert steps[-1].end_ps - start_ps < 5 * 10**12
        assert worker.metric("attachments_total") == (2 if jump_seconds > 0 else 1)
