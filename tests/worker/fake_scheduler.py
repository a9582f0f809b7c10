"""A scheduler that says what a test tells it to, on a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import numpy as np

from lorrery.service.clocks import DeviceClock
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc as pb_grpc
from lorrery.v1 import types_pb2

PATIENCE_SECONDS = 60.0
"""How long a test waits for what must come."""


class Stream:
    """One worker's stream as the scheduler holds it."""

    def __init__(self, hello: pb.WorkerHello, context: grpc.aio.ServicerContext, clock: DeviceClock) -> None:
        self.hello = hello
        self.clock = clock
        self._context = context
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self.steps: asyncio.Queue[pb.StepDone] = asyncio.Queue()
        self.heartbeat = asyncio.Event()
        self._beats: asyncio.Queue[None] = asyncio.Queue()
        self.num_heartbeats = 0
        self.draining = asyncio.Event()
        self.half_closed = asyncio.Event()
        self.ended = asyncio.Event()
        self.linger_seconds = 0.0  # before the stream is ended, once the worker has closed its side
        self.cut = False  # meanwhile, by the worker
        self._close = asyncio.Event()

    async def send_plan(self, plan: pb.Plan) -> pb.Plan:
        plan.sent_ps = self.clock.now_ps()
        await self._write(pb.AttachResponse(plan=plan))
        return plan

    async def send_interrupt(self, plan_id: int, at_ps: int) -> None:
        await self._write(pb.AttachResponse(interrupt=pb.Interrupt(plan_id=plan_id, at_ps=at_ps)))

    async def _write(self, message: pb.AttachResponse) -> None:
        async with self._writing:
            await self._context.write(message)

    async def step(self) -> pb.StepDone:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.steps.get()

    async def heartbeat_after(self) -> None:
        """Wait until a heartbeat of now has been answered."""
        while not self._beats.empty():
            self._beats.get_nowait()
        async with asyncio.timeout(PATIENCE_SECONDS):
            for _ in range(2):
                await self._beats.get()

    async def whole_plan(self) -> list[pb.StepDone]:
        """Steps up to the hand-back."""
        steps = [await self.step()]
        while not steps[-1].hand_back:
            steps.append(await self.step())
        return steps

    def close(self) -> None:
        self._close.set()

    async def receive(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "step":
                    self.steps.put_nowait(request.step)
                case "heartbeat":
                    self.num_heartbeats += 1
                    self.heartbeat.set()
                    self._beats.put_nowait(None)
                    answer = pb.HeartbeatAnswer(number=request.heartbeat.number, sent_ps=self.clock.now_ps())
                    await self._write(pb.AttachResponse(heartbeat_answer=answer))
                case "draining":
                    self.draining.set()
                case other:
                    raise AssertionError(other)
        self.half_closed.set()

    async def serve(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        receiving = asyncio.ensure_future(self.receive(requests))
        closing = asyncio.ensure_future(self._close.wait())
        try:
            await asyncio.wait((receiving, closing), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(self.linger_seconds)
        except asyncio.CancelledError:
            self.cut = True
            raise
        finally:
            self.ended.set()
            for task in (receiving, closing):
                task.cancel()
            await asyncio.gather(receiving, closing, return_exceptions=True)


class FakeScheduler(pb_grpc.SchedulerServiceServicer):
    """Answers Attach; `refuse` names the model it serves, if not the worker's, and `slow` a worker that has to wait."""

    def __init__(self, time_scale: float) -> None:
        self.time_scale = time_scale
        self.clock = DeviceClock(time_scale)
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.refuse: str | None = None
        self.refused = asyncio.Event()
        self.slow: str | None = None
        self.asked, self.answer = asyncio.Event(), asyncio.Event()  # of the slow one: it has said hello; welcome it
        self.address = ""

    async def next_stream(self) -> Stream:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.streams.get()

    async def Attach(self, request_iterator, context) -> None:  # noqa: N802
        first = await anext(aiter(request_iterator))
        assert first.WhichOneof("message") == "hello"
        if self.refuse is not None:
            self.refused.set()
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this cluster serves {self.refuse}")
        if first.hello.worker_id == self.slow:
            self.asked.set()
            await self.answer.wait()
        await context.write(
            pb.AttachResponse(
                welcome=pb.WorkerWelcome(time_scale=self.time_scale, sent_ps=self.clock.now_ps()),
            )
        )
        stream = Stream(first.hello, context, self.clock)
        self.streams.put_nowait(stream)
        await stream.serve(request_iterator)

    async def Route(self, request_iterator, context):  # noqa: N802
        raise AssertionError("a worker does not call this")

    RegisterAdapter = UnregisterAdapter = GetStatus = Route


@asynccontextmanager
async def fake_scheduler(time_scale: float) -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler(time_scale)
    server = grpc.aio.server()
    pb_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    scheduler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield scheduler
    finally:
        await server.stop(0)


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def from_u32(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u4").tolist()


def join(handle: int, prompt_tokens: int, max_new_tokens: int, **sampling: object) -> pb.Join:
    return pb.Join(
        handle=handle,
        prompt_tokens=prompt_tokens,
        sampling=pb.Sampling(seed=handle, max_new_tokens=max_new_tokens, **{"ignore_eos": True, **sampling}),
        adapter=types_pb2.Adapter(adapter_id="lora-0", rank=8),
    )


def prefill_plan(plan_id: int, start_ps: int, *joins: pb.Join, max_steps: int = 1, decode: bool = False) -> pb.Plan:
    """A plan whose first step prefills the sequences it brings."""
    whole = [j.prompt_tokens + len(j.produced_token_ids_u32) // 4 for j in joins]
    return pb.Plan(
        plan_id=plan_id,
        start_ps=start_ps,
        max_steps=max_steps,
        joins=joins,
        prefill_handles_u32=u32(*(j.handle for j in joins)),
        prefill_new_tokens_u32=u32(*whole),
        prefill_past_tokens_u32=u32(*(0 for _ in joins)),
        prefill_samples_u32=u32(*(1 for _ in joins)),
        decode=decode,
    )
