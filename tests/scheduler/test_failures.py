"""One failure ends one thing: an error in a decision, a worker that lies, one that beats and does nothing."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import numpy as np
import pytest

from lorrery.scheduler.core.facts import Event
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.service.faults.kinds import MAX_RULES
from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from tests.cluster.harness import PATIENCE_SECONDS
from tests.scheduler.harness import OVERRIDES, Harness, Router, Worker, tokens_of


@pytest.fixture
async def scheduler() -> AsyncIterator[Harness]:
    overrides = (
        *OVERRIDES,
        "adapters.disk_gb_per_second=0.1",
    )
    async with Harness(load(None, overrides)) as harness:
        yield harness


def break_once(monkeypatch: pytest.MonkeyPatch, act: str, worker: str, *, skip: int = 0) -> None:
    """Let one of a worker's decisions or commits raise, as a fault of ours would; `skip` so many before."""
    left = [skip]
    sound = getattr(Member, act)

    def broken(self: Member, *args: object, **more: object) -> Plan | Idle | list[Event]:
        if self.name == worker:
            left[0] -= 1
            if left[0] == -1:
                raise ZeroDivisionError("the price of sugar")
        return sound(self, *args, **more)

    monkeypatch.setattr(Member, act, broken)


async def status_of(worker: Worker) -> grpc.aio.AioRpcError:
    """Read to the end of the stream."""
    try:
        while await asyncio.wait_for(worker.call.read(), PATIENCE_SECONDS) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the stream ended well")


async def served_by(worker: Worker, router: Router, handle: int) -> tuple[list[int], pb.Finished]:
    """Let a worker run all that it is given until a request has ended."""

    async def run() -> None:
        while True:
            plan = await worker.plan()
            for _ in range(plan.max_steps):
                await worker.step(plan)

    running = asyncio.create_task(run())
    try:
        return await tokens_of(router, handle)
    finally:
        running.cancel()


@pytest.mark.parametrize("adapter", ["", "a"], ids=["decided soon", "decided by a timer"])
async def test_an_error_in_a_decision_ends_its_workers_stream_and_the_sequence_goes_elsewhere(
    scheduler: Harness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], adapter: str
) -> None:
    break_once(monkeypatch, "plan", "first", skip=1 if adapter else 0)
    first, router = await scheduler.attach("first"), await scheduler.route()
    await router.submit(1, max_new=3, adapter=adapter)
    error = await status_of(first)
    assert (error.code(), "sugar" in (error.details() or "")) == (grpc.StatusCode.ABORTED, False)
    second = await scheduler.attach("second")
    tokens, finished = await served_by(second, router, 1)
    assert (tokens, finished.usage.worker_id) == ([100, 101, 102], "second")
    assert scheduler.value("workers_given_up_total", reason="error") == 1
    assert scheduler.value("workers_lost_total") == 1
    said = capsys.readouterr()
    assert (said.out + said.err).count("worker_given_up") == 1
    assert "the price of sugar" in said.out + said.err


async def test_an_error_in_a_commit_repeats_no_token(scheduler: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    break_once(monkeypatch, "commit", "first", skip=2)
    first, router = await scheduler.attach("first"), await scheduler.route()
    await router.submit(1, max_new=4)
    await first.step(await first.plan())
    decode = await first.plan()
    await first.step(decode)
    await first.step(decode)
    assert (await status_of(first)).code() is grpc.StatusCode.ABORTED
    tokens, finished = await served_by(await scheduler.attach("second"), router, 1)
    assert tokens == [100, 101, 102, 103]
    assert finished.usage.completion_tokens == 4


@pytest.mark.parametrize(
    "lie",
    [
        {"handles_u32": np.array([1, 2], "<u4").tobytes(), "token_ids_u32": np.array([7, 8], "<u4").tobytes()},
        {"handles_u32": np.array([1], "<u4").tobytes(), "token_ids_u32": np.array([7, 8], "<u4").tobytes()},
        {"handles_u32": b"123"},
        {"finished_handles_u32": np.array([99], "<u4").tobytes(), "finish_reasons_u32": np.array([3], "<u4").tobytes()},
        {"finished_handles_u32": np.array([1], "<u4").tobytes()},
    ],
    ids=["another's sequence", "a token too many", "no array", "an end of what does not run", "an end without reason"],
)
async def test_a_worker_that_says_what_cannot_be_ends_its_own_stream_only(
    scheduler: Harness, lie: dict[str, bytes]
) -> None:
    liar, router = await scheduler.attach("liar"), await scheduler.route()
    await router.submit(1, max_new=3)
    plan = await liar.plan()
    honest = await scheduler.attach("honest")
    await router.submit(2, max_new=3)
    other = await honest.plan()
    step = pb.StepDone(plan_id=plan.plan_id, start_ps=plan.start_ps, end_ps=plan.start_ps + 10**9, **lie)
    await liar.call.write(pb.AttachRequest(step=step))
    assert (await status_of(liar)).code() is grpc.StatusCode.ABORTED
    await honest.step(other)
    both = await asyncio.gather(served_by(honest, router, 1))
    assert both[0][0] == [100, 101, 102]


def ids(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


@pytest.mark.parametrize(
    "lie",
    [
        {"handles_u32": ids(1, 1, 2), "token_ids_u32": ids(7, 8, 9)},
        {"handles_u32": ids(1), "token_ids_u32": ids(7)},
        {},
        {"handles_u32": ids(1, 3), "token_ids_u32": ids(7, 8)},
        {"handles_u32": ids(1, 2, 3), "token_ids_u32": ids(7, 8, 9)},
        {
            "handles_u32": ids(1, 2),
            "token_ids_u32": ids(7, 8),
            "finished_handles_u32": ids(1, 1),
            "finish_reasons_u32": ids(1, 1),
        },
        {
            "handles_u32": ids(1, 2),
            "token_ids_u32": ids(7, 8),
            "finished_handles_u32": ids(3),
            "finish_reasons_u32": ids(1),
        },
    ],
    ids=["twice", "left out", "none", "one that waits", "one too many", "ends twice", "an end of one that waits"],
)
async def test_a_step_has_one_token_for_each_sequence_that_it_gives_one(
    scheduler: Harness, lie: dict[str, bytes]
) -> None:
    router = await scheduler.route()
    for handle in (1, 2):
        await router.submit(handle, prompt=20, max_new=5)
    await scheduler.until("unplaced_requests", 2)
    liar = await scheduler.attach("liar", pool=60)
    prefill = await liar.plan()
    assert len(prefill.joins) == 2
    await router.submit(3, prompt=30, max_new=5)
    await liar.step(prefill)
    decode = await liar.plan()
    step = pb.StepDone(plan_id=decode.plan_id, start_ps=liar.clock_ps, end_ps=liar.clock_ps + 10**9, **lie)
    await liar.call.write(pb.AttachRequest(step=step))
    assert (await status_of(liar)).code() is grpc.StatusCode.ABORTED
    assert scheduler.value("workers_given_up_total", reason="protocol") == 1
    assert (await served_by(await scheduler.attach("honest"), router, 2))[0] == [200, 201, 202, 203, 204]


async def test_a_worker_that_makes_more_tokens_than_were_asked_for_is_given_up(scheduler: Harness) -> None:
    liar, router = await scheduler.attach("liar"), await scheduler.route()
    await router.submit(1, max_new=3)
    await liar.step(await liar.plan())
    plan = await liar.plan()
    for number in range(3):  # one too many, and nothing after it: the stream has ended then
        times = {"start_ps": liar.clock_ps + number * 10**9, "end_ps": liar.clock_ps + (number + 1) * 10**9}
        step = pb.StepDone(plan_id=plan.plan_id, **times, handles_u32=ids(1), token_ids_u32=ids(7 + number))
        await liar.call.write(pb.AttachRequest(step=step))
    assert (await status_of(liar)).code() is grpc.StatusCode.ABORTED
    assert scheduler.value("workers_given_up_total", reason="protocol") == 1
    tokens, finished = await served_by(await scheduler.attach("honest"), router, 1)
    assert (len(tokens), finished.usage.completion_tokens) == (3, 3)


async def test_a_worker_that_goes_on_with_a_held_sequence_is_given_up() -> None:
    """Under static batching others go on, so the plan does not end with a sequence that has its tokens."""
    async with Harness(load(None, [*OVERRIDES, "scheduler.batching='static'"])) as scheduler:
        router = await scheduler.route()
        for handle, max_new in ((1, 2), (2, 9)):
            await router.submit(handle, max_new=max_new)
        await scheduler.until("unplaced_requests", 2)
        liar = await scheduler.attach("liar")
        await liar.step(await liar.plan())
        plan = await liar.plan()
        assert plan.max_steps > 1
        start_ps = liar.clock_ps
        step = pb.StepDone(plan_id=plan.plan_id, start_ps=start_ps, end_ps=start_ps + 10**9)
        step.handles_u32, step.token_ids_u32 = ids(1, 2), ids(7, 8)
        await liar.call.write(pb.AttachRequest(step=step))  # the second token of the first, without its end
        assert (await status_of(liar)).code() is grpc.StatusCode.ABORTED
        assert scheduler.value("workers_given_up_total", reason="protocol") == 1


@pytest.mark.parametrize(
    "taken", [(), (10**30,), (0, 0)], ids=["faults that it was not told", "a time that has not come", "twice"]
)
async def test_a_worker_takes_no_faults_but_those_it_was_told(scheduler: Harness, taken: tuple[int, ...]) -> None:
    liar, router = await scheduler.attach("liar"), await scheduler.route()
    if taken:
        rules = ["slow_worker,worker=liar,factor=2"]
        await scheduler.stub.SetClusterFaults(pb.SetClusterFaultsRequest(rules=rules))
        assert list((await liar.call.read()).faults.rules) == rules
    for from_ps in taken or (0,):
        far = 40 * 3600 * 10**12 if from_ps else 10**9
        await liar.call.write(pb.AttachRequest(faults_taken=pb.FaultsTaken(from_ps=far)))
    assert (await status_of(liar)).code() is grpc.StatusCode.ABORTED
    await router.submit(1, max_new=2)
    assert (await served_by(await scheduler.attach("honest"), router, 1))[0] == [100, 101]


async def test_an_operators_fault_of_a_process_is_one_of_each_of_its_gpus() -> None:
    async with Harness(load(None, OVERRIDES)) as scheduler:
        gpus = [await scheduler.attach(f"rack.{number}") for number in range(2)]
        # As many as there may be, each counted once.
        rules = [f"slow_worker,at={n},worker=rack,factor=2,for=1" for n in range(1, MAX_RULES)]
        rules.append("freeze_worker,at=9e5,worker=rack,for=1")
        await scheduler.stub.SetClusterFaults(pb.SetClusterFaultsRequest(rules=rules))
        for gpu in gpus:
            assert list((await gpu.call.read()).faults.rules) == rules
            await gpu.call.write(pb.AttachRequest(faults_taken=pb.FaultsTaken(from_ps=10**9)))
        await scheduler.stub.SetClusterFaults(pb.SetClusterFaultsRequest(rules=rules[:1], add=True))  # it holds
        for more, message in (
            ("slow_worker,worker=rack.1,factor=3", "begins before"),
            ("slow_worker,at=70,worker=rack,factor=3", f"{MAX_RULES} faults hold and 1 are to be added"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=message):
                await scheduler.stub.SetClusterFaults(pb.SetClusterFaultsRequest(rules=[more], add=True))
        both = ["slow_worker,worker=rack,factor=2", "slow_worker,worker=rack.1,factor=3"]
        with pytest.raises(grpc.aio.AioRpcError, match="begins before"):
            await scheduler.stub.SetClusterFaults(pb.SetClusterFaultsRequest(rules=both))
        listed = (await scheduler.stub.ListClusterFaults(pb.ListClusterFaultsRequest())).faults
        assert {(one.num_met, one.waits_for_worker) for one in listed} == {(2, False)}
        loss = pb.SetClusterFaultsRequest(rules=["worker_loss,worker=rack"])
        await scheduler.stub.SetClusterFaults(loss)
        assert [(await status_of(gpu)).code() for gpu in gpus] == [grpc.StatusCode.ABORTED] * 2
        assert scheduler.value("workers_given_up_total", reason="fault") == 2


@pytest.mark.parametrize("promise", [False, True])
async def test_a_worker_that_beats_and_does_nothing_is_lost(promise: bool, capsys: pytest.CaptureFixture[str]) -> None:
    async with Harness(load(None, [*OVERRIDES, "scheduler.worker_timeout_seconds=0.5"])) as scheduler:
        idle, frozen, router = await scheduler.attach("idle"), await scheduler.attach("frozen"), await scheduler.route()
        await idle.call.write(pb.AttachRequest(draining=pb.WorkerDraining()))  # has no plan, and may stay
        await router.submit(1, max_new=2)
        plan = await frozen.plan()

        async def beat() -> None:
            while True:
                # Each promise is later than the one before; only the first counts.
                end_ps = scheduler.service._cluster.clock.now_ps() + 10**11
                held = pb.Heartbeat(plan_id=plan.plan_id, step_end_ps=end_ps) if promise else pb.Heartbeat()
                await asyncio.gather(
                    idle.call.write(pb.AttachRequest(heartbeat=pb.Heartbeat())),
                    frozen.call.write(pb.AttachRequest(heartbeat=held)),
                )
                await asyncio.sleep(0.05)

        beating = asyncio.create_task(beat())
        # Which status it sees is open: where it writes while the stream ends, gRPC's client makes one of its own.
        await status_of(frozen)
        assert "no progress with its plan for 0.5 s" in capsys.readouterr().out
        assert scheduler.value("workers_given_up_total", reason="stalled") == 1
        assert scheduler.value("workers", state="draining") == 1
        beating.cancel()
        tokens, _ = await served_by(await scheduler.attach("other"), router, 1)
        assert tokens == [100, 101]


async def test_a_step_that_takes_longer_than_the_timeout_is_no_stall() -> None:
    async with Harness(load(None, [*OVERRIDES, "scheduler.worker_timeout_seconds=0.5"])) as scheduler:
        slow, router = await scheduler.attach("slow"), await scheduler.route()
        await router.submit(1, max_new=1)
        plan = await slow.plan()
        end_ps = scheduler.service._cluster.clock.now_ps() + 60_000 * 10**9
        for _ in range(10):
            await slow.call.write(pb.AttachRequest(heartbeat=pb.Heartbeat(plan_id=plan.plan_id, step_end_ps=end_ps)))
            await asyncio.sleep(0.12)
        await slow.step(plan)
        assert (await tokens_of(router, 1))[0] == [100]
        assert scheduler.value("workers_lost_total") == 0
