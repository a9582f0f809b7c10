"""Faults of clients, adapters and policies; each is one row of `lab.bench.failures`."""

import time
from dataclasses import replace

from lab.bench.failure_site import SMALL_WINDOW, Failure, Probe, Site
from lab.bench.raising_policy import PROMPT_TOKENS as RAISES_AT
from lorrery.chassis.channel import open_channel
from lorrery.chassis.sections import TlsSettings
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2

# --- clients ----------------------------------------------------------------------------------------------------------


async def client_gone(site: Site) -> Failure:
    """Clients cancel."""
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


async def slow_reader(site: Site) -> Failure:
    """A client with a small window stops reading."""
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


async def adapter_unloaded(site: Site) -> Failure:
    """An adapter is unloaded while in use, and then requested once more."""

    async def act(probes: list[Probe]) -> None:
        await _unload(site)
        late = site.start(1, adapter_id="x")
        await late[0].read()
        probes += late

    await _load(site, 8)
    return await site.observe(
        "adapter unloaded, and a new call", act, settings="", expect=("adapter_unloaded",), adapter_id="x"
    )


async def adapter_changed(site: Site) -> Failure:
    """An adapter is unloaded and loaded with another rank while in use."""

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


async def adapter_does_not_load(site: Site) -> Failure:
    """A request names an adapter that no worker can load."""
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


async def policy_raises(site: Site) -> Failure:
    """The policy raises at a request."""
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
