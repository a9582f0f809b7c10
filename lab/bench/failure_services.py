"""Faults of services and of the network between them; each is one row of `lab.bench.failures`."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

from lab.bench.failure_site import Failure, Probe, Site
from lab.bench.line import Line

PAUSE_SECONDS = 3.0


# --- workers ----------------------------------------------------------------------------------------------------------


async def worker_killed(site: Site) -> Failure:
    """SIGKILL to one of two workers."""

    async def act(_: list[Probe]) -> None:
        site.cluster.kill("worker-0")

    failure = await site.observe(
        "worker killed", act, settings="`scheduler.max_worker_losses`", expect=("worker_lost",)
    )
    await site.cluster.restart("worker-0")
    return failure


async def worker_stopped(site: Site) -> Failure:
    """SIGSTOP to a worker, for longer than the timeout."""

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


async def worker_paused(site: Site) -> Failure:
    """SIGSTOP to a worker, for less than the timeout."""
    return await site.observe(
        f"worker stopped for {PAUSE_SECONDS:g} s",
        _pause(site, "worker-0"),
        settings="`scheduler.worker_timeout_seconds` 5",
        expect=("worker_given_up", "worker_lost"),
    )


async def worker_drained(site: Site) -> Failure:
    """SIGTERM to a worker whose sequences outlast its drain."""

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


async def all_workers_killed(site: Site) -> Failure:
    """SIGKILL to all workers; none returns in time."""

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


async def pool_full(site: Site) -> Failure:
    """More streams than the KV pools can hold until completion."""

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


async def scheduler_killed(site: Site) -> Failure:
    """SIGKILL to the scheduler, and an immediate restart."""

    async def act(_: list[Probe]) -> None:
        site.cluster.kill("scheduler")
        await site.cluster.restart("scheduler")

    return await site.observe(
        "scheduler killed, started again at once",
        act,
        settings="`router.resume_timeout_seconds` 6 (60)",
        expect=("shard_lost", "shard_connected"),
    )


async def scheduler_gone(site: Site) -> Failure:
    """SIGKILL to the only scheduler; it does not return in time."""

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


async def scheduler_paused(site: Site) -> Failure:
    """SIGSTOP to the scheduler, then SIGCONT."""
    return await site.observe(
        f"scheduler stopped for {PAUSE_SECONDS:g} s", _pause(site, "scheduler"), settings="", expect=("shard_lost",)
    )


async def router_killed(site: Site) -> Failure:
    """SIGKILL to the router that serves the streams."""

    async def act(_: list[Probe]) -> None:
        site.cluster.kill("router-1")

    failure = await site.observe(
        "router killed", act, settings="", expect=("router_disconnected",), what="until the error", router="router-1"
    )
    await site.cluster.restart("router-1")
    return failure


async def router_drained(site: Site) -> Failure:
    """SIGTERM to a router whose streams end within its drain time, and a late call."""

    async def act(probes: list[Probe]) -> None:
        site.cluster.kill("router-1", signal.SIGTERM)
        await asyncio.sleep(0.3)  # so that the drain has started
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


async def router_paused(site: Site) -> Failure:
    """SIGSTOP to the router, then SIGCONT."""
    return await site.observe(
        f"router stopped for {PAUSE_SECONDS:g} s", _pause(site, "router"), settings="", expect=("shard_lost",)
    )


async def host_paused(site: Site) -> Failure:
    """SIGSTOP to every process, then SIGCONT."""
    return await site.observe(
        f"the whole machine paused for {PAUSE_SECONDS:g} s",
        _pause(site, *site.cluster.processes),
        settings="",
        expect=("worker_given_up", "shard_lost"),
    )


# --- the network ------------------------------------------------------------------------------------------------------


async def worker_cut_off(site: Site) -> Failure:
    """No data passes between a worker and its scheduler any more, and no connection ends."""
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


async def router_cut_off(site: Site) -> Failure:
    """No data passes between a router and the scheduler for a while."""
    return await _far_router(site, f"network between router and scheduler cut for {PAUSE_SECONDS:g} s", _cut)


async def router_connection_dropped(site: Site) -> Failure:
    """The connection between a router and the scheduler ends."""

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


def _pause(site: Site, *names: str) -> Callable[[list[Probe]], Awaitable[None]]:
    async def act(_: list[Probe]) -> None:
        for name in names:
            site.cluster.kill(name, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_SECONDS)
        for name in names:
            site.cluster.kill(name, signal.SIGCONT)

    return act
