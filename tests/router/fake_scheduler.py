"""A SchedulerService whose every frame a test decides, on a real loopback port."""

import asyncio
import struct
import time
from collections.abc import Sequence

import grpc
import grpc.aio

from lorrery.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog

STEP_PS = 10**10
"""10 ms."""


def u32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def from_u32(data: bytes) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<I", data)]


class Route:
    """One Route stream as the scheduler sees it."""

    def __init__(self, hello: scheduler_pb2.RouterHello, log: AdapterLog) -> None:
        self.hello = hello
        self._log = log
        self.submits: asyncio.Queue[scheduler_pb2.Submit] = asyncio.Queue()
        self.num_submits = 0
        self.cancelled: list[int] = []
        self._out: asyncio.Queue[scheduler_pb2.RouteResponse | None] = asyncio.Queue()

    def send(
        self,
        tokens: Sequence[tuple[int, int]] = (),
        finished: Sequence[tuple[int, int]] = (),
        *,
        late_seconds: float = 0.0,
        usage: types_pb2.Usage | None = None,
    ) -> None:
        """Send one frame of (handle, token id) and (handle, finish reason)."""
        frame = scheduler_pb2.Tokens(
            sent_ps=int((time.monotonic() - late_seconds) * 10**12),
            step_ps=STEP_PS,
            handles_u32=u32([handle for handle, _ in tokens]),
            token_ids_u32=u32([token_id for _, token_id in tokens]),
            finished=[
                scheduler_pb2.Finished(handle=handle, reason=types_pb2.FinishReason.ValueType(reason), usage=usage)
                for handle, reason in finished
            ],
        )
        self.send_raw(frame)

    def send_raw(self, frame: scheduler_pb2.Tokens) -> None:
        self._out.put_nowait(scheduler_pb2.RouteResponse(tokens=frame))

    def refuse(self, handle: int, reason: int, message: str = "") -> None:
        refused = scheduler_pb2.Refused(
            handle=handle, reason=scheduler_pb2.RefusalReason.ValueType(reason), message=message
        )
        self._out.put_nowait(scheduler_pb2.RouteResponse(refused=refused))

    def say_changes(self, *changes: AdapterChange) -> None:
        """Decide changes, and tell this router."""
        self._log.merge(changes)
        message = scheduler_pb2.AdapterChanges(
            changes=[
                scheduler_pb2.AdapterChange(version=c.version, adapter_id=c.adapter_id, rank=c.rank) for c in changes
            ]
        )
        self._out.put_nowait(scheduler_pb2.RouteResponse(adapter_changes=message))

    def say_pinned(self, handle: int, adapter: types_pb2.Adapter) -> None:
        pinned = scheduler_pb2.AdapterPinned(handle=handle, adapter=adapter)
        self._out.put_nowait(scheduler_pb2.RouteResponse(adapter_pinned=pinned))

    def say_load(self, load: scheduler_pb2.SchedulerLoad) -> None:
        self._out.put_nowait(scheduler_pb2.RouteResponse(load=load))

    def say_draining(self) -> None:
        self._out.put_nowait(scheduler_pb2.RouteResponse(draining=scheduler_pb2.SchedulerDraining()))

    def break_off(self) -> None:
        self._out.put_nowait(None)

    async def next_out(self) -> scheduler_pb2.RouteResponse | None:
        return await self._out.get()


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Collects what the router says; `routes` are its streams in order."""

    def __init__(self, time_scale: float = 1.0) -> None:
        self.time_scale = time_scale
        self.routes: asyncio.Queue[Route] = asyncio.Queue()
        self.listed = {"lora-0": 8}
        self.log = AdapterLog(self.listed)
        self.address = ""
        self.num_hellos = self.num_statuses = 0
        self.num_bytes = 0  # of what routers say after their hellos, and of answers to them
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        server = self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def Route(self, request_iterator, context):  # noqa: N802  gRPC's name for it
        first = await anext(aiter(request_iterator))
        self.num_hellos += 1
        await self.may_answer.wait()
        route = Route(first.hello, self.log)
        self._learn(first.hello.adapter_changes)
        await context.write(
            scheduler_pb2.RouteResponse(
                hello=scheduler_pb2.SchedulerHello(
                    model="Llama-2-7B", time_scale=self.time_scale, adapter_changes=self._whole()
                )
            )
        )
        reader = asyncio.create_task(self._read(route, request_iterator))
        self.routes.put_nowait(route)
        try:
            while (message := await route.next_out()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            await asyncio.wait([reader])
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken off by the test")

    async def _read(self, route: Route, request_iterator) -> None:
        async for message in request_iterator:
            self.num_bytes += message.ByteSize()
            if message.HasField("adapter_changes"):
                self._learn(message.adapter_changes)
            elif message.HasField("submit"):
                route.num_submits += 1
                route.submits.put_nowait(message.submit)
            else:
                route.cancelled += from_u32(message.cancel_handles_u32)

    async def Attach(self, request_iterator, context):  # noqa: N802  gRPC's name for it
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no workers here")

    @property
    def adapters(self) -> dict[str, int]:
        """Rank by id."""
        ranks = self.listed | {change.adapter_id: change.rank for change in self.log.changes}
        return {name: rank for name, rank in ranks.items() if rank}

    def change(self, adapter_id: str, rank: int, version: int = 0) -> AdapterChange:
        """Decide a change, or take one over; tell the routers nothing."""
        change = AdapterChange(version or self.log.next_version(1), adapter_id, rank)
        self.log.merge([change])
        return change

    def _learn(self, message: scheduler_pb2.AdapterChanges) -> None:
        changes = [AdapterChange(change.version, change.adapter_id, change.rank) for change in message.changes]
        if message.whole:
            self.log.merge_all(changes, message.forgotten)
        else:
            self.log.merge(changes)

    def _whole(self) -> scheduler_pb2.AdapterChanges:
        changes = [
            scheduler_pb2.AdapterChange(version=version, adapter_id=name, rank=rank)
            for version, name, rank in self.log.changes
        ]
        return scheduler_pb2.AdapterChanges(changes=changes, whole=True, forgotten=self.log.forgotten)

    async def RegisterAdapter(self, request, context):  # noqa: N802  gRPC's name for it
        adapter, when_known = request.adapter, request.when_known
        known, replace = self.adapters.get(adapter.adapter_id), when_known == scheduler_pb2.WHEN_KNOWN_REPLACE
        keeps = known == adapter.rank and when_known != scheduler_pb2.WHEN_KNOWN_REFUSE
        if not (adapter.version or known is None or replace or keeps):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"adapter {adapter.adapter_id!r} has another rank")
        if adapter.version or known is None or replace:
            self.change(adapter.adapter_id, adapter.rank, adapter.version)
        latest = self.log.latest(adapter.adapter_id)
        return self._counted(
            request,
            scheduler_pb2.RegisterAdapterResponse(
                adapter=types_pb2.Adapter(
                    adapter_id=adapter.adapter_id, rank=adapter.rank, version=0 if latest is None else latest.version
                )
            ),
        )

    async def UnregisterAdapter(self, request, context):  # noqa: N802  gRPC's name for it
        if not request.version and request.adapter_id not in self.adapters:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"adapter {request.adapter_id!r} is not known")
        version = self.change(request.adapter_id, 0, request.version).version
        return self._counted(request, scheduler_pb2.UnregisterAdapterResponse(version=version))

    async def GetStatus(self, request, context):  # noqa: N802  gRPC's name for it
        self.num_statuses += 1
        known, name = self.adapters, request.adapter_id
        shown = known.keys() & {name} if name else () if request.no_adapters else known
        answer = scheduler_pb2.GetStatusResponse(
            model="Llama-2-7B",
            time_scale=self.time_scale,
            max_req_input_len=100,
            max_req_total_len=200,
            num_unplaced=3,
            adapters=[types_pb2.Adapter(adapter_id=name, rank=known[name]) for name in shown],
            workers=[
                types_pb2.Worker(worker_id="w0", num_running=2, resident_adapters=["beta-0", "acme-0"]),
            ],
            adapter_figures=types_pb2.AdapterFigures(adapter_ids=["beta-0"]) if request.adapter_figures else None,
        )
        return self._counted(request, answer)

    def _counted(self, request, answer):
        self.num_bytes += request.ByteSize() + answer.ByteSize()
        return answer
