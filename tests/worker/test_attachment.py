"""Plans that a worker gets, and what it tells of them, over a real socket."""

from itertools import pairwise

import pytest

from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary.endings import FinishReason
from tests.worker.fake_scheduler import (
    fake_scheduler,
    from_u32,
    join,
    prefill_plan,
    u32,
)
from tests.worker.harness import STEP_PS, TIME_SCALE, attached, running_worker


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
        at_ps = first.end_ps + STEP_PS * 101 // 2  # three seconds: the interrupt does not come after it
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
        assert steps[-1].end_ps - start_ps < 50 * 10**12  # of 100 device seconds by which the clock has jumped
        assert worker.metric("attachments_total") == (2 if jump_seconds > 0 else 1)
