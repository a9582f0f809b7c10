"""Applies the autoscaler's rule to a local cluster: scrapes its workers, starts processes, and lets some drain.

The rule is the one that the simulator applies (`lorrery.autoscaler`), on what `/metrics` shows; each group of workers
has one of its own. Which process goes is Kubernetes' choice: one that starts, or has ended and starts again, before one
that serves; of these the youngest.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import count

from lorrery.autoscaler.figures import Window
from lorrery.autoscaler.rule import Autoscaler
from lorrery.chassis.errors import LorreryError, SettingsError
from lorrery.local.cluster import START_SECONDS, LocalCluster
from lorrery.local.scrape import ClusterScraper
from lorrery.settings import Settings

__all__ = ["LocalAutoscaler"]


class LocalAutoscaler:
    """See the module.

    Args:
        cluster: that serves.
        kind: settings of the group of processes that it scales, which are all alike.
        names: of these processes, oldest first.
        group: their number in `[[workers]]`; None: there are no groups.
        start_up_seconds: device seconds from a worker process's start to its first plan.
        say: gets a line for each thing that happens.

    Raises:
        SettingsError: workers do not show what the rule looks at.
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
        self._deciding = asyncio.Lock()  # a replacement is no decision, and none is made while it is under way
        self._tasks: asyncio.TaskGroup | None = None
        self._began = time.monotonic()

    async def run(self) -> None:
        """Scrape, look, decide and scale, for ever; where no rule is enabled, replace what is lost."""
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
        """Do something at device times, for ever."""
        for number in count():
            due = self._began + (first + number * period) * self._time_scale
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            await do()

    def _say(self, line: str) -> None:
        self._show(f"{self._label}: {line}")

    def has(self, name: str) -> bool:
        """Tell whether a process is one of these, and is to stay."""
        return name in self._ready or name in self._starting

    async def replace(self, name: str) -> None:
        """Start a process in the place of one that was killed, and of its name, as a Deployment would."""
        async with self._deciding:
            if name in self._starting:
                self._starting.pop(name).cancel()
            elif name in self._ready:
                self._ready.remove(name)
            else:
                return  # it was to go meanwhile
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
        """Return those of the ready that have ended by themselves, and are about to start again."""
        return [name for name in self._ready if self._cluster.processes[name].exit_code is not None]

    def _addresses(self, names: Iterable[str]) -> dict[str, str]:
        processes = self._cluster.processes
        return {name: processes[name].metrics for name in names if processes[name].metrics}

    async def _start(self, name: str | None = None) -> None:
        assert self._tasks is not None, "it runs"
        name = await self._cluster.start_worker(self._start_up_seconds, self._group, name)
        self._starting[name] = self._tasks.create_task(self._until_it_serves(name), name=f"start {name}")

    async def _until_it_serves(self, name: str) -> None:
        """Wait until a process serves, however often it has to start; as long it is asked for, and does not serve."""
        while True:
            process = self._cluster.processes[name]
            try:
                await self._cluster.listening(name)
                await self._cluster.serving(name, self._start_up_seconds * self._time_scale + START_SECONDS)
                break
            except LorreryError as error:
                self._say(f"{name} did not start: {error}")
                process.kill()  # if it still runs, so that its end is seen: it starts again, or all is over
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
