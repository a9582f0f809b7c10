"""Applies the autoscaler's rule to a local cluster: scrapes its workers, starts processes, and drains others.

The rule is the one that the simulator applies (`lorrery.scheduler.core.autoscaling`), to values from `/metrics`; each
group of workers has its own. The process to remove is chosen as by Kubernetes: one that is starting or restarting
before one that serves, and of these the youngest.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import count

from lorrery.scheduler.core.autoscaling import Autoscaler, Window
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.local.cluster import START_SECONDS, LocalCluster
from lorrery.service.local.scrape import ClusterScraper
from lorrery.service.settings.cluster import Settings

__all__ = ["LocalAutoscaler"]


class LocalAutoscaler:
    """See the module.

    Args:
        cluster: a serving cluster.
        kind: settings of the group of identical processes that it scales.
        names: of these processes, oldest first.
        group: index in `[[workers]]`; None: there are no groups.
        start_up_seconds: device seconds from a worker process's start to its first plan.
        say: called with a line for each event.

    Raises:
        SettingsError: workers do not show the series that the rule needs.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        kind: Settings,
        names: Iterable[str],
        group: int | None,
        start_up_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        if not kind.metrics.vllm:
            raise SettingsError("metrics.vllm is false, and the autoscaler reads workers' series under vLLM's names")
        self._cluster, self._group = cluster, group
        self._label = "autoscaler" if group is None else f"autoscaler of workers.{group} ({kind.worker.gpu})"
        self._show = say
        self._own, self._time_scale = kind.autoscaler, kind.time_scale
        self._start_up_seconds = start_up_seconds
        self._gpus = kind.worker.gpus
        self._autoscaler = Autoscaler(self._own.rule(self._gpus))
        self._window = Window(self._own.window_seconds, self._own.metrics_delay_seconds)
        self._scraper = ClusterScraper()
        self._ready: list[str] = list(names)  # oldest first
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._draining: list[str] = []
        self._deciding = asyncio.Lock()  # replacements count as no decision, and no decision is made during one
        self._tasks: asyncio.TaskGroup | None = None
        self._began = time.monotonic()

    async def run(self) -> None:
        """Scrape, decide and scale, for ever; if the rule is disabled, only replace lost processes."""
        own = self._own
        if not own.enabled:
            async with asyncio.TaskGroup() as self._tasks:
                await asyncio.Event().wait()
        self._say(
            f"{own.metric}, target {own.target:g}; {own.min_replicas} to {own.max_replicas} workers;"
            f" a start takes {self._start_up_seconds:.1f} s"
        )
        interval = own.scrape_interval_seconds
        async with asyncio.TaskGroup() as self._tasks:
            if interval:
                self._tasks.create_task(self._every(interval, interval / 2, self._scrape), name="scrape")
            await self._every(own.sync_period_seconds, 0.0, self._look)

    async def _every(self, period: float, first: float, do: Callable[[], Awaitable[None]]) -> None:
        """Call `do` periodically in device time, for ever."""
        for number in count():
            due = self._began + (first + number * period) * self._time_scale
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            await do()

    def _say(self, line: str) -> None:
        self._show(f"{self._label}: {line}")

    def has(self, name: str) -> bool:
        """Return whether a process belongs to this group and is not being removed."""
        return name in self._ready or name in self._starting

    async def replace(self, name: str) -> None:
        """Replace a killed process by one of the same name, as a Deployment would."""
        async with self._deciding:
            if name in self._starting:
                self._starting.pop(name).cancel()
            elif name in self._ready:
                self._ready.remove(name)
            else:
                return  # it is already being removed
            await self._cluster.ended(name)
            await self._start(name)

    @property
    def _now_seconds(self) -> float:
        return (time.monotonic() - self._began) / self._time_scale

    async def _scrape(self) -> None:
        processes = self._cluster.processes
        self._draining = [name for name in self._draining if processes[name].exit_code is None]
        down = self._down()
        sample = await self._scraper.sample(
            self._now_seconds,
            self._addresses(name for name in self._ready if name not in down),
            self._addresses(self._draining),
            processes["scheduler"].metrics,
            num_starting=len(self._starting) + len(down),
            workers_per_process=self._gpus,
        )
        self._window.add(sample)

    async def _look(self) -> None:
        if not self._own.scrape_interval_seconds:
            await self._scrape()
        async with self._deciding:
            await self._decide(self._now_seconds)

    async def _decide(self, at_seconds: float) -> None:
        self._window.pass_until(at_seconds)
        readings = self._window.read_all(self._autoscaler.rule.targets)
        current = len(self._ready) + len(self._starting)
        decision = self._autoscaler.decide(at_seconds, current, len(self._ready) - len(self._down()), readings)
        if decision.replicas != current:
            self._say(f"{decision.why}: from {current} to {decision.replicas} workers")
        for _ in range(decision.replicas - current):
            await self._start()
        for _ in range(current - decision.replicas):
            self._stop()

    def _down(self) -> list[str]:
        """Return the ready processes that have ended unexpectedly, and are about to be restarted."""
        return [name for name in self._ready if self._cluster.processes[name].exit_code is not None]

    def _addresses(self, names: Iterable[str]) -> dict[str, str]:
        processes = self._cluster.processes
        return {name: processes[name].metrics for name in names if processes[name].metrics}

    async def _start(self, name: str | None = None) -> None:
        assert self._tasks is not None, "it runs"
        name = await self._cluster.start_worker(self._start_up_seconds, self._group, name)
        self._starting[name] = self._tasks.create_task(self._until_it_serves(name), name=f"start {name}")

    async def _until_it_serves(self, name: str) -> None:
        """Wait until a process serves, however many restarts that takes; until then it counts as starting."""
        while True:
            process = self._cluster.processes[name]
            try:
                await self._cluster.listening(name)
                await self._cluster.serving(name, self._start_up_seconds * self._time_scale + START_SECONDS)
                break
            except LorreryError as error:
                self._say(f"{name} did not start: {error}")
                process.kill()  # if it still runs, so that its end is noticed: it is restarted, or the cluster ends
            await process.succeeded.wait()
        del self._starting[name]
        self._ready.append(name)
        self._say(f"{name} serves; {len(self._ready)} workers")

    def _stop(self) -> None:
        if self._starting:
            name, start = self._starting.popitem()
            start.cancel()
        else:
            name = (self._down() or self._ready)[-1]
            self._ready.remove(name)
        self._draining.append(name)
        self._cluster.drain(name)
        self._say(f"{name} drains; {len(self._ready)} workers")
