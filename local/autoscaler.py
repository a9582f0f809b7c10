"""Applies the autoscaler's rule to a local cluster: scrapes its workers, starts processes, and lets some drain.

The rule is the one that the simulator applies (`lorrery.autoscaler`), on what `/metrics` shows. Which process goes is
Kubernetes' choice: one that starts, or has ended and starts again, before one that serves; of these the youngest.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from lorrery.autoscaler.figures import Window
from lorrery.autoscaler.rule import Autoscaler
from lorrery.chassis.errors import LorreryError, SettingsError
from lorrery.local.cluster import START_SECONDS, LocalCluster
from lorrery.local.scrape import ClusterScraper

__all__ = ["LocalAutoscaler"]


class LocalAutoscaler:
    """See the module.

    Args:
        cluster: that serves; its processes are all alike.
        start_up_seconds: device seconds from a worker process's start to its first plan.
        say: gets a line for each thing that happens.

    Raises:
        SettingsError: workers do not show what the rule looks at.
    """

    def __init__(self, cluster: LocalCluster, start_up_seconds: float, say: Callable[[str], None]) -> None:
        settings = cluster.settings
        if not settings.metrics.vllm:
            raise SettingsError("metrics.vllm is false, and the autoscaler reads workers' series under vLLM's names")
        self._cluster, self._say = cluster, say
        self._own, self._time_scale = settings.autoscaler, settings.time_scale
        self._start_up_seconds = start_up_seconds
        self._gpus = settings.worker.gpus
        self._autoscaler = Autoscaler(self._own.rule(self._gpus))
        self._window = Window(self._own.window_seconds)
        self._scraper = ClusterScraper()
        self._ready: list[str] = list(cluster.worker_processes)  # oldest first
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._draining: list[str] = []
        self._began = time.monotonic()

    async def run(self) -> None:
        """Look, decide and scale, for ever."""
        own = self._own
        self._say(
            f"autoscaler: {own.metric}, target {own.target:g}; {own.min_replicas} to {own.max_replicas} workers;"
            f" a start takes {self._start_up_seconds:.1f} s"
        )
        number = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._look(tasks)
                number += 1
                due = self._began + number * own.sync_period_seconds * self._time_scale
                await asyncio.sleep(max(due - time.monotonic(), 0.0))

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        processes = self._cluster.processes
        self._draining = [name for name in self._draining if processes[name].exit_code is None]
        at_seconds = (time.monotonic() - self._began) / self._time_scale
        down = self._down()
        sample = await self._scraper.sample(
            at_seconds,
            self._addresses(name for name in self._ready if name not in down),
            self._addresses(self._draining),
            processes["scheduler"].metrics,
            num_starting=len(self._starting) + len(down),
            workers_per_process=self._gpus,
        )
        self._window.add(sample)
        readings = self._window.read_all(self._autoscaler.rule.targets)
        current = len(self._ready) + len(self._starting)
        decision = self._autoscaler.decide(at_seconds, current, len(self._ready) - len(self._down()), readings)
        if decision.replicas != current:
            self._say(f"autoscaler: {decision.why}: from {current} to {decision.replicas} workers")
        for _ in range(decision.replicas - current):
            name = await self._cluster.start_worker(self._start_up_seconds)
            self._starting[name] = tasks.create_task(self._until_it_serves(name), name=f"start {name}")
        for _ in range(current - decision.replicas):
            self._stop()

    def _down(self) -> list[str]:
        """Return those of the ready that have ended by themselves, and are about to start again."""
        return [name for name in self._ready if self._cluster.processes[name].exit_code is not None]

    def _addresses(self, names: Iterable[str]) -> dict[str, str]:
        processes = self._cluster.processes
        return {name: processes[name].metrics for name in names if processes[name].metrics}

    async def _until_it_serves(self, name: str) -> None:
        try:
            await self._cluster.listening(name)
            await self._cluster.serving(name, self._start_up_seconds * self._time_scale + START_SECONDS)
        except LorreryError as error:
            self._say(f"autoscaler: {name} did not start: {error}")
        else:
            self._ready.append(name)
            self._say(f"autoscaler: {name} serves; {len(self._ready)} workers")
        del self._starting[name]

    def _stop(self) -> None:
        if self._starting:
            name, start = self._starting.popitem()
            start.cancel()
        else:
            name = (self._down() or self._ready)[-1]
            self._ready.remove(name)
        self._draining.append(name)
        self._cluster.drain(name)
        self._say(f"autoscaler: {name} drains; {len(self._ready)} workers")
