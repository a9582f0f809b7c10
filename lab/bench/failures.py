"""Effect of each fault on clients, and its duration: the table of docs/failures.md.

Streams run through a cluster of real processes, a fault happens, and every stream is read to its end. Its tokens must
be those of an undisturbed run, or it ends with a status. The seconds are the longest pause of a stream, or the time
until it ended. The timeouts for a worker and for a scheduler are set to 6 s and that for readers to 3 s
(`failure_site.OVERRIDES`); all other settings are the shipped ones.
"""

from collections.abc import Awaitable, Callable

from lab.bench import failure_requests, failure_services
from lab.bench.failure_site import Failure, Probe, Site, failure_site


async def measure(say: Callable[[str], None]) -> list[Failure]:
    """Cause every fault once."""
    found: list[Failure] = []
    async with failure_site() as site:
        for scenario in SCENARIOS:
            await site.all_well()
            say(scenario.__name__.replace("_", " "))
            found.append(await scenario(site))
    return found


async def nothing_at_all(site: Site) -> Failure:
    """No fault, for comparison."""

    async def act(_: list[Probe]) -> None:
        pass

    return await site.observe("none", act, settings="", expect=())


SCENARIOS: tuple[Callable[[Site], Awaitable[Failure]], ...] = (
    nothing_at_all,
    failure_services.worker_killed,
    failure_services.worker_stopped,
    failure_services.worker_paused,
    failure_services.worker_drained,
    failure_services.all_workers_killed,
    failure_services.pool_full,
    failure_services.scheduler_killed,
    failure_services.scheduler_gone,
    failure_services.scheduler_paused,
    failure_services.router_killed,
    failure_services.router_drained,
    failure_services.router_paused,
    failure_services.host_paused,
    failure_services.worker_cut_off,
    failure_services.router_cut_off,
    failure_services.router_connection_dropped,
    failure_requests.client_gone,
    failure_requests.slow_reader,
    failure_requests.adapter_unloaded,
    failure_requests.adapter_changed,
    failure_requests.adapter_does_not_load,
    failure_requests.policy_raises,
)
