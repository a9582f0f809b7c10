"""One run of a whole cluster in virtual time, drawn from a seed: who is there, what is asked, and what goes wrong.

Routers, schedulers and workers are the services' own code on hosts of their own (`processes.py`), joined by connections
that are slow and break (`network.py`). Clients ask, cancel, read slowly and load adapters; processes are killed,
drained and begun again; hosts stand still and clocks jump. Afterwards everything heals; `oracle.py` says what is wrong.
"""

import asyncio
import gc
import hashlib
import logging
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from lorrery.settings import Settings, load
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2
from tests.cluster.client import Ask
from tests.virtual.clock import HOST, Host, VirtualLoop, virtual_time
from tests.virtual.network import Call, Channel, Network
from tests.virtual.processes import Process, read_disk_once

COMMON = (
    "model='Llama-2-7B'",
    "worker.gpu='A10G'",
    "worker.heartbeat_seconds=0.5",
    "worker.drain_seconds=3",
    "scheduler.worker_timeout_seconds=2",
    "scheduler.worker_wait_seconds=6",
    "scheduler.router_timeout_seconds=3",
    "scheduler.drain_seconds=3",
    "scheduler.max_req_total_len=400",
    "scheduler.max_req_input_len=300",
    "router.http=",
    "router.resume_timeout_seconds=8",
    "router.reader_timeout_seconds=3",
    "router.drain_seconds=3",
    "adapters.registry=[{id='a', rank=8, count=3}, {id='big', rank=64}]",
)
WAYS: dict[str, tuple[str, ...]] = {
    "req_queue": (),
    "req_queue strict": ("scheduler.strict=true",),
    "fcfs": ("scheduler.policy='fcfs'", "scheduler.max_num_seqs=3"),
    "fcfs loads": ("scheduler.policy='fcfs'", "adapters.max_loras=2", "adapters.load_failure_ratio=0.2"),
    "mixed": ("scheduler.policy='fcfs'", "scheduler.batching='mixed'", "scheduler.max_num_seqs=4"),
    "chunked blocks": (
        "scheduler.policy='fcfs'",
        "scheduler.batching='chunked'",
        "scheduler.max_num_batched_tokens=64",
        "scheduler.memory='paged'",
        "scheduler.max_total_token_num=640",
        "scheduler.prefix_cache={kind='blocks'}",
    ),
    "static": ("scheduler.policy='fcfs'", "scheduler.batching='static'", "scheduler.max_num_seqs=3"),
    "vtc_fair": ("scheduler.policy='vtc_fair'", "scheduler.running_max_req_size=4"),
    "two choices": ("scheduler.policy='fcfs'", "scheduler.placement='power_of_two'", "scheduler.max_num_seqs=2"),
}
LISTED = ("", "a-0", "a-1", "a-2", "big")
LATE = ("late-1", "late-2")
HEALED_SECONDS = 40.0
"""Within so long after the last fault every stream has ended: all that services wait for, one after the other."""


@cache
def _settings(way: str, kind: str, name: str, others: tuple[str, ...]) -> Settings:
    own: tuple[str, ...] = ()
    if kind == "router":
        own = (f"router.schedulers={list(others)}",)
    elif kind == "worker":
        own = (f"worker.name='{name}'", f"worker.scheduler='{others[0]}'")
    return load(None, [*COMMON, *WAYS[way], *own])


class Request:
    """One request of a client, and what came of it."""

    def __init__(self, number: object, ask: Ask, settings: Settings, call: Call, note: Callable[..., None]) -> None:
        self.number, self.ask, self.call, self.note = number, ask, call, note
        self.expected = ask.expected(settings)
        self.token_ids: list[int] = []
        self.finish: router_pb2.Finish | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self.slow_seconds = 0.0
        self.cancelled = False
        self.cut = False
        self.has_deadline = False
        self.over = False

    async def read(self) -> None:
        try:
            while isinstance(message := await self.call.read(), router_pb2.GenerateResponse):
                assert self.finish is None, "a message after the last"
                self.token_ids += message.token_ids
                self.finish = message.finish if message.HasField("finish") else None
                if self.slow_seconds:
                    await asyncio.sleep(self.slow_seconds)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            if not self.cancelled:
                raise
        finally:
            self.over = True
            how = "" if self.error is None else f"{self.error.code().name} {self.error.details()}"
            self.note("client has the end of", self.number, self.token_ids, how)


class Scenario:
    """What happens in one run.

    Attributes:
        calm: whether nothing goes wrong in it, so that no request may fail.
        timeline: what happened, a line each.
    """

    def __init__(self, seed: int, loop: VirtualLoop, rng: random.Random) -> None:
        self.seed, self._loop, self.rng = seed, loop, rng
        self.way = rng.choice(list(WAYS))
        self.overrides = WAYS[self.way]
        self.network = Network(loop, rng, rng.choice([0.0003, 0.003, 0.02]))
        self.timeline: list[str] = []
        self.errors: list[str] = []
        self.requests: list[Request] = []
        self.processes: list[Process] = []
        self.client = Host(loop, "client")
        self.calm = rng.random() < 0.15
        schedulers = [f"scheduler{n}:1" for n in range(rng.choice([1, 1, 2]))]
        routers = [f"router{n}:1" for n in range(rng.choice([1, 1, 2]))]
        num_workers = max(len(schedulers), rng.choice([1, 2, 2, 3]))
        workers = [f"worker{n}" for n in range(num_workers)]
        for name in schedulers:
            self._add("scheduler", name, ())
        for n, name in enumerate(workers):
            self._add("worker", name, (schedulers[n % len(schedulers)],))
        for name in routers:
            self._add("router", name, tuple(schedulers))
        self.settings = _settings(self.way, "scheduler", schedulers[0], ())
        self.has_late_adapters = False
        self.faults: list[str] = []

    def _add(self, kind: str, name: str, others: tuple[str, ...]) -> None:
        settings = _settings(self.way, kind, name, others)
        offset = self.rng.choice([0.0, 0.0, self.rng.uniform(-900, 900)])
        self.processes.append(Process(kind, name, settings, self.network, self._loop, offset))

    def of(self, kind: str) -> list[Process]:
        """Return the processes of a kind."""
        return [process for process in self.processes if process.kind == kind]

    def note(self, *what: object) -> None:
        """Put a line into the timeline."""
        self.timeline.append(f"{self._loop.clock.now - 1000:10.6f} {' '.join(map(str, what))}")

    # --- the run ----------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Let it happen, and heal."""
        rng = self.rng
        for process in rng.sample(self.processes, len(self.processes)):
            if rng.random() < 0.15 and not self.calm:
                self._later(rng.random(), process.begin)
            else:
                process.begin()
        await asyncio.sleep(rng.choice([0.0, 0.3, 0.6]))
        span = rng.choice([0.1, 1.0, 3.0])
        for number in range(rng.randint(2, 9)):
            self._later(rng.random() * span, self._ask, number)
        if rng.random() < 0.35:
            self.has_late_adapters = True
            for _ in range(rng.randint(1, 4)):
                self._later(rng.random() * span, self._change_adapter)
        if not self.calm:
            for _ in range(rng.randint(1, 5)):
                self._later(rng.random() * (span + 1), self._fault)
        await asyncio.sleep(span + 1.5)
        for process in self.processes:
            if not process.runs:
                process.begin()
        self.note("healed")
        try:
            async with asyncio.timeout(HEALED_SECONDS):
                await self.all_over()
        except TimeoutError:
            for request in self.requests:
                if not request.over:
                    self.errors.append(f"a stream does not end: {request.ask}, {len(request.token_ids)} tokens")

    async def all_over(self) -> None:
        """Return once every stream has ended."""
        while not all(request.over for request in self.requests):  # noqa: ASYNC110  costs no time
            await asyncio.sleep(0.05)

    def _later(self, seconds: float, what: Callable[..., Any], *arguments: Any) -> None:
        self._loop.call_later(seconds, what, *arguments)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _ask(self, number: int) -> None:
        rng = self.rng
        most = rng.choice([1, 3, rng.randint(2, 40)])
        by_eos = rng.random() < 0.3
        ask = Ask(
            seed=rng.getrandbits(64),
            prompt_tokens=rng.choice([1, rng.randint(1, 60), rng.randint(1, 200)]),
            max_new_tokens=most,
            adapter_id=rng.choice(LATE) if self.has_late_adapters and rng.random() < 0.5 else rng.choice(LISTED),
            ignore_eos=not by_eos,
            true_output_tokens=rng.randint(1, most) if by_eos else None,
        )
        router = rng.choice(self.of("router"))
        request = self.ask(ask, router, rng.random(), number)
        if rng.random() < 0.15:
            self._later(rng.random() * rng.choice([0.05, 1.0]), self._cancel, request, number)
        elif not self.calm and rng.random() < 0.05:
            self._later(rng.random(), self._cut_client, request, number)

    def ask(self, ask: Ask, router: Process, way: float = 1.0, number: object = "probe") -> Request:
        """Ask a router; `way`: how the client reads."""
        slow = way < 0.1
        stub = router_pb2_grpc.RouterServiceStub(Channel(self.network, router.name, 2 if slow else 256))
        deadline = 0.5 if 0.1 <= way < 0.15 else None
        self.note("client asks", number, router.name, ask)

        def begin() -> Request:
            # A router that has just begun listens before it serves; a client waits for that.
            call = stub.Generate(ask.message(), timeout=deadline, wait_for_ready=True)
            request = Request(number, ask, self.settings, call, self.note)
            request.has_deadline = deadline is not None
            request.slow_seconds = self.rng.choice([0.05, 0.3, 5.0]) if slow else 0.0
            self.client.run(request.read())
            return request

        request: Request = self.client.call(begin)
        self.requests.append(request)
        return request

    def _cancel(self, request: Request, number: int) -> None:
        if not request.over:
            self.note("client cancels", number)
            request.cancelled = True
            request.call.cancel()

    def _cut_client(self, request: Request, number: int) -> None:
        self.note("a client's connection breaks", number)
        request.cut = True
        request.call.cut(self.rng.random(), self.rng.random())

    def _change_adapter(self) -> None:
        rng = self.rng
        router, name, rank = rng.choice(self.of("router")), rng.choice(LATE), rng.choice([0, 8, 16])
        self.note("client loads" if rank else "client unloads", name, rank, router.name)
        stub = router_pb2_grpc.RouterServiceStub(Channel(self.network, router.name))

        async def change() -> None:
            try:
                if rank:
                    adapter = types_pb2.Adapter(adapter_id=name, rank=rank)
                    await stub.LoadAdapter(router_pb2.LoadAdapterRequest(adapter=adapter), timeout=10.0)
                else:
                    await stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(adapter_id=name), timeout=10.0)
            except grpc.aio.AioRpcError as error:
                self.note("refused:", name, rank, error.code().name, error.details())

        self.client.run(change())

    # --- faults -----------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        rng = self.rng
        process = rng.choice(self.processes)
        kind = rng.choice(["cut", "cut", "cut", "kill", "kill", "drain", "stop", "clock", "wall"])
        if not process.runs and kind != "cut":
            return
        self.faults.append(kind)
        if kind == "cut":
            calls = self.network.between("Route", "Attach", "RegisterAdapter", "UnregisterAdapter")
            if calls:
                call = rng.choice(calls)
                self.note("breaks:", call.method.name, "of", "" if call.client is None else call.client.name)
                slow = rng.choice([0.001, 0.1, 3.0])
                call.cut(rng.random() * slow, rng.random() * slow)
            return
        self.note("fault:", kind, process.name)
        if kind == "kill":
            process.kill()
            self._later(rng.choice([0.01, 0.5, 2.0]) * rng.random(), self._begin_again, process)
        elif kind == "drain":
            process.terminate()
        elif kind == "stop":
            process.host.stop(rng.choice([0.2, 1.0, 4.0]) * rng.random())
        elif kind == "clock":
            process.host.jump(rng.choice([-10.0, -0.5, 0.5, 10.0]))
        else:
            process.host.jump_wall(rng.choice([-3600.0, 3600.0]))

    def _begin_again(self, process: Process) -> None:
        if not process.runs:
            self.note("begins:", process.name)
            process.begin()


class Run:
    """What a run came to.

    Attributes:
        wrong: everything that is; empty: nothing.
        timeline: what happened, a line each.
        digest: of all of it; the same in every process.
    """

    def __init__(self, wrong: list[str], timeline: list[str], title: str) -> None:
        self.wrong, self.timeline, self.title = wrong, timeline, title
        self.digest = hashlib.sha256("\n".join([*timeline, *wrong]).encode()).hexdigest()


def run(seed: int) -> Run:
    """Play the scenario of a seed.

    The garbage collector waits: when it comes by depends on what this process did before, and it closes the generators
    that it finds.
    """
    from tests.virtual.oracle import judge

    rng = random.Random(seed)
    logged: list[tuple[Host | None, str, str, dict[str, Any]]] = []
    scenario: Scenario | None = None

    def gather(_logger: Any, level: str, event: dict[str, Any]) -> str:
        host, text = HOST.get(), event.pop("event")
        if (error := event.pop("exc_info", None)) is not None:
            event["error"] = repr(sys.exc_info()[1] if error is True else error)
        logged.append((host, level, text, event))
        if scenario is not None and (host is None or host.alive):
            fields = {k: v for k, v in event.items() if k != "module"}
            scenario.note("" if host is None else host.name, text, fields)
        raise structlog.DropEvent

    before = structlog.get_config()
    every_level = structlog.make_filtering_bound_logger(logging.DEBUG)
    structlog.configure(processors=[gather], wrapper_class=every_level, cache_logger_on_first_use=False)
    gc.disable()
    try:
        with virtual_time(rng) as loop, pytest.MonkeyPatch.context() as patch:
            read_disk_once(patch)
            scenario = Scenario(seed, loop, rng)
            patch.setattr("grpc.aio.insecure_channel", scenario.network.channel)
            unhandled: list[str] = []

            def note_unhandled(_loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
                unhandled.append(f"{what['message']}: {what.get('exception')!r}")

            loop.set_exception_handler(note_unhandled)

            async def main() -> list[str]:
                assert scenario is not None
                await scenario.play()
                wrong = scenario.errors + await judge(scenario)
                for process in scenario.processes:
                    process.kill()
                scenario.client.kill()
                await asyncio.sleep(0.01)
                return wrong

            wrong = loop.run_until_complete(main())
            while tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(tasks))
    finally:
        gc.enable()
        structlog.configure(**before)
    for host, level, text, fields in logged:
        if level in ("error", "exception", "critical") and text != "refused":
            wrong.append(f"{'' if host is None else host.name} logged {text} {fields}")
    wrong += unhandled
    return Run(wrong, scenario.timeline, f"{scenario.way}, {len(scenario.processes)} processes")
