"""What clients see of each fault, and for how long: the table of docs/failures.md.

Streams run through a cluster of real processes, a fault happens, and every stream is read to its end. Its tokens must
be those of an undisturbed run, or it ends with a status. The seconds are the longest time in which a stream stood
still, or until it ended. The waits for a worker and for a scheduler are set to 6 s and the patience with readers to
3 s (`failure_site.OVERRIDES`); all else is as it ships.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from bench.failure_site import SMALL_WINDOW, Failure, Probe, Site, failure_site
from bench.line import Line
from bench.raising_policy import PROMPT_TOKENS as RAISES_AT
from lorrery.chassis.channel import open_channel
from lorrery.chassis.sections import TlsSettings
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2

PAUSE_SECONDS = 3.0
Act = Callable[[list[Probe]], Awaitable[None]]


async def measure(say: Callable[[str], None]) -> list[Failure]:
    """Let every fault happen once."""
    found: list[Failure] = []
    async with failure_site() as site:
        for scenario in SCENARIOS:
            await site.all_well()
            say(scenario.__name__.strip("_").replace("_", " "))
            found.append(await scenario(site))
    return found


async def _nothing(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        pass

    return await site.observe("none", act, settings="", expect=())


# --- workers ----------------------------------------------------------------------------------------------------------


async def _worker_killed(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        site.cluster.kill("worker-0")

    failure = await site.observe(
        "worker killed", act, settings="`scheduler.max_worker_losses`", expect=("worker_lost",)
    )
    await site.cluster.restart("worker-0")
    return failure


async def _worker_stopped(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        site.cluster.kill("worker-0", signal.SIGSTOP)

    failure = await site.observe(
        "worker stopped for good",
        act,
        settings="`scheduler.worker_timeout_seconds` 5",
        expect=("worker_given_up", "worker_lost"),
    )
    site.cluster.kill("worker-0", signal.SIGCONT)
    return failure


async def _worker_paused(site: Site) -> Failure:
    return await site.observe(
        f"worker stopped for {PAUSE_SECONDS:g} s",
        _pause(site, "worker-0"),
        settings="`scheduler.worker_timeout_seconds` 5",
        expect=("worker_given_up", "worker_lost"),
    )


async def _worker_drained(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        site.cluster.kill("worker-0", signal.SIGTERM)

    failure = await site.observe(
        "worker told to stop (SIGTERM)",
        act,
        settings="`worker.drain_seconds` 2",
        expect=("worker_draining", "drain_cut_short", "worker_left"),
    )
    await site.cluster.restart("worker-0")
    return failure


async def _all_workers_killed(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        for name in site.cluster.worker_names:
            site.cluster.kill(name)

    failure = await site.observe(
        "all workers killed",
        act,
        settings="`scheduler.worker_wait_seconds` 6 (30)",
        expect=("worker_lost", "request_refused"),
        what="until the error",
    )
    for name in site.cluster.worker_names:
        await site.cluster.restart(name)
    return failure


async def _pool_full(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        pass

    return await site.observe(
        "worker out of KV memory",
        act,
        settings="`scheduler.memory = paged`",
        expect=(),
        count=24,
    )


# --- schedulers and routers -------------------------------------------------------------------------------------------


async def _scheduler_killed(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        site.cluster.kill("scheduler")
        await site.cluster.restart("scheduler")

    return await site.observe(
        "scheduler killed, started again at once",
        act,
        settings="`router.resume_timeout_seconds` 6 (60)",
        expect=("shard_lost", "shard_connected"),
    )


async def _scheduler_gone(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        site.cluster.kill("scheduler")

    failure = await site.observe(
        "scheduler killed for good",
        act,
        settings="`router.resume_timeout_seconds` 6 (60)",
        expect=("shard_lost",),
        what="until the error",
    )
    await site.cluster.restart("scheduler")
    return failure


async def _scheduler_paused(site: Site) -> Failure:
    return await site.observe(
        f"scheduler stopped for {PAUSE_SECONDS:g} s", _pause(site, "scheduler"), settings="", expect=("shard_lost",)
    )


async def _router_killed(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        site.cluster.kill("router-1")

    failure = await site.observe(
        "router killed", act, settings="", expect=("router_disconnected",), what="until the error", router="router-1"
    )
    await site.cluster.restart("router-1")
    return failure


async def _router_drained(site: Site) -> Failure:
    async def act(probes: list[Probe]) -> None:
        site.cluster.kill("router-1", signal.SIGTERM)
        await asyncio.sleep(0.3)  # so that it has begun
        late = site.start(1, router="router-1")
        await late[0].read()
        probes += late

    failure = await site.observe(
        "router told to stop (SIGTERM), and a new call",
        act,
        settings="`router.drain_seconds` 2",
        expect=("draining", "drain_cut_short"),
        router="router-1",
        output_tokens=60,
    )
    await site.cluster.restart("router-1")
    return failure


async def _router_paused(site: Site) -> Failure:
    return await site.observe(
        f"router stopped for {PAUSE_SECONDS:g} s", _pause(site, "router"), settings="", expect=("shard_lost",)
    )


async def _host_paused(site: Site) -> Failure:
    return await site.observe(
        f"the whole machine paused for {PAUSE_SECONDS:g} s",
        _pause(site, *site.cluster.processes),
        settings="",
        expect=("worker_given_up", "shard_lost"),
    )


# --- the network ------------------------------------------------------------------------------------------------------


async def _worker_cut_off(site: Site) -> Failure:
    async with Line(site.cluster.scheduler_address) as line:
        await site.cluster.add("far", "worker", ["worker.name=far", f"worker.scheduler={line.address}"])
        await site.cluster.serving("far")

        async def act(_: list[Probe]) -> None:
            line.cut()

        failure = await site.observe(
            "network cut between worker and scheduler",
            act,
            settings="`scheduler.worker_timeout_seconds` 5",
            expect=("worker_given_up", "worker_lost"),
        )
        site.cluster.kill("far")
        await site.cluster.ended("far")
        del site.cluster.processes["far"]
    return failure


async def _router_cut_off(site: Site) -> Failure:
    return await _far_router(site, f"network between router and scheduler cut for {PAUSE_SECONDS:g} s", _cut)


async def _router_connection_dropped(site: Site) -> Failure:
    async def drop(line: Line) -> None:
        line.drop()

    return await _far_router(site, "connection of router and scheduler dropped", drop)


async def _cut(line: Line) -> None:
    line.cut()
    await asyncio.sleep(PAUSE_SECONDS)
    line.mend()


async def _far_router(site: Site, fault: str, act: Callable[[Line], Awaitable[None]]) -> Failure:
    async with Line(site.cluster.scheduler_address) as line:
        await site.cluster.add("far-router", "router", [f'router.schedulers=["{line.address}"]'])
        await site.cluster.serving("far-router")
        failure = await site.observe(
            fault,
            lambda _: act(line),
            settings="`router.resume_timeout_seconds` 6 (60)",
            expect=("shard_lost", "shard_connected"),
            router="far-router",
        )
        site.cluster.kill("far-router")
        await site.cluster.ended("far-router")
        del site.cluster.processes["far-router"]
    return failure


# --- clients ----------------------------------------------------------------------------------------------------------


async def _client_gone(site: Site) -> Failure:
    seconds = 0.0

    async def act(probes: list[Probe]) -> None:
        nonlocal seconds
        for probe in probes:
            probe.call.cancel()

        async def empty() -> bool:
            return await site.gauge("scheduler", "lorrery_scheduler_in_flight_requests") == 0

        seconds = await site.until("nothing in flight", empty)

    failure = await site.observe("client gone", act, settings="", expect=(), what="until the scheduler holds nothing")
    return replace(failure, seconds=seconds)


async def _slow_reader(site: Site) -> Failure:
    seconds = 0.0
    channel = open_channel(site.cluster.router_address, TlsSettings(), options=SMALL_WINDOW)

    async def act(probes: list[Probe]) -> None:
        nonlocal seconds
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        (slow,) = site.start(1, stub=stub, output_tokens=2000)
        await slow.read(3)
        before = await site.gauge("router", "lorrery_router_slow_readers_total")

        async def cut() -> bool:
            return await site.gauge("router", "lorrery_router_slow_readers_total") > before

        seconds = await site.until("the slow reader is cut off", cut)
        await slow.read()
        probes.append(slow)

    failure = await site.observe(
        "reader that stops reading, beside others",
        act,
        settings="`router.reader_timeout_seconds` 3 (60), `router.max_pending_tokens`",
        expect=(),
        what="until it is cut off",
    )
    await channel.close()
    return replace(failure, seconds=seconds)


# --- adapters and policies --------------------------------------------------------------------------------------------


async def _load(site: Site, rank: int) -> None:
    request = router_pb2.LoadAdapterRequest(adapter=types_pb2.Adapter(adapter_id="x", rank=rank))
    await site.stub("router").LoadAdapter(request, timeout=20)


async def _unload(site: Site) -> None:
    await site.stub("router").UnloadAdapter(router_pb2.UnloadAdapterRequest(adapter_id="x"), timeout=20)


async def _adapter_unloaded(site: Site) -> Failure:
    async def act(probes: list[Probe]) -> None:
        await _unload(site)
        late = site.start(1, adapter_id="x")
        await late[0].read()
        probes += late

    await _load(site, 8)
    return await site.observe(
        "adapter unloaded, and a new call", act, settings="", expect=("adapter_unloaded",), adapter_id="x"
    )


async def _adapter_changed(site: Site) -> Failure:
    async def act(_: list[Probe]) -> None:
        await _unload(site)
        await _load(site, 64)

    await _load(site, 8)
    failure = await site.observe(
        "adapter loaded again under another rank",
        act,
        settings="",
        expect=("adapter_unloaded", "adapter_loaded"),
        adapter_id="x",
    )
    await _unload(site)
    return failure


async def _adapter_does_not_load(site: Site) -> Failure:
    seconds = 0.0

    async def act(probes: list[Probe]) -> None:
        nonlocal seconds
        began = time.monotonic()
        late = site.start(1, adapter_id="broken")
        await late[0].read()
        seconds = time.monotonic() - began
        probes += late

    failure = await site.observe(
        "adapter that a worker cannot load, beside others",
        act,
        settings="",
        expect=("request_refused",),
        what="until the error",
    )
    return replace(failure, seconds=seconds)


async def _policy_raises(site: Site) -> Failure:
    seconds = 0.0

    async def act(probes: list[Probe]) -> None:
        nonlocal seconds
        began = time.monotonic()
        late = site.start(1, prompt_tokens=RAISES_AT)
        await late[0].read()
        seconds = time.monotonic() - began
        probes += late

    failure = await site.observe(
        "policy raises at a request, beside others", act, settings="", expect=("policy_raised",), what="until the error"
    )
    return replace(failure, seconds=seconds)


def _pause(site: Site, *names: str) -> Act:
    async def act(_: list[Probe]) -> None:
        for name in names:
            site.cluster.kill(name, signal.SIGSTOP)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(PAUSE_SECONDS)
        for name in names:
            site.cluster.kill(name, signal.SIGCONT)

    return act


SCENARIOS: tuple[Callable[[Site], Awaitable[Failure]], ...] = (
    _nothing,
    _worker_killed,
    _worker_stopped,
    _worker_paused,
    _worker_drained,
    _all_workers_killed,
    _pool_full,
    _scheduler_killed,
    _scheduler_gone,
    _scheduler_paused,
    _router_killed,
    _router_drained,
    _router_paused,
    _host_paused,
    _worker_cut_off,
    _router_cut_off,
    _router_connection_dropped,
    _client_gone,
    _slow_reader,
    _adapter_unloaded,
    _adapter_changed,
    _adapter_does_not_load,
    _policy_raises,
)
