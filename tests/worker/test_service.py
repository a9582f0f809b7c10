"""A worker attaches, is lost and drains, over a real socket to a scheduler that the test plays."""

import asyncio
import os
import socket
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from lorrery.service.errors import SettingsError
from lorrery.service.network.channel import Dialler
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.metrics import expose
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.worker.attachment import StreamBrokenError
from lorrery.worker.hosted import REFUSED_RETRY_SECONDS
from lorrery.worker.service import WorkerService
from tests.worker.fake_scheduler import (
    PATIENCE_SECONDS,
    fake_scheduler,
    join,
    prefill_plan,
    u32,
)
from tests.worker.harness import HEARTBEAT_SECONDS, TIME_SCALE, attached, running_worker


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
    at_seconds, for_seconds = 30, 5
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
        text = expose(worker.registry, "")[1].decode()
        assert text.count("# TYPE lorrery_worker_attachments_total") == 1
        assert 'lorrery_worker_attachments_total{worker="worker-0.0"} 1.0\n' in text
        assert 'lorrery_worker_attachments_total{worker="worker-0.1"} 2.0\n' in text
        assert 'vllm:num_requests_running{engine="1",model_name="Llama-2-7B"} 0.0' in text


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


async def test_steps_outside_the_log_that_they_are_fitted_to_are_logged_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "steps.csv"
    log.write_text("step_ms,prefill_tokens,decode_seqs\n10,0,1\n20,100,0\n")
    async with attached(step_time="fitted", profile=log, heartbeat_seconds=HEARTBEAT_SECONDS) as (_, stream):
        await stream.send_plan(prefill_plan(1, stream.clock.now_ps(), join(1, 100, 2), max_steps=2, decode=True))
        assert (await stream.step()).end_ps
        await stream.step()
        for plan_id in (2, 3):
            await stream.send_plan(prefill_plan(plan_id, stream.clock.now_ps(), join(plan_id, 170, 1)))
            await stream.step()
        captured = ""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "step_times_extrapolated" not in captured:
                stream.heartbeat.clear()
                await stream.heartbeat.wait()
                read = capsys.readouterr()
                captured += read.out + read.err
        for _ in range(2):
            stream.heartbeat.clear()
            await stream.heartbeat.wait()
        read = capsys.readouterr()
        captured += read.out + read.err
    assert captured.count("step_times_extrapolated") == 1
    assert "up to 170 tokens in a step with prefill (measured: 100)" in captured


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
