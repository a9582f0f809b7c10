"""Applies the autoscaler's rule to a local cluster: scrapes its workers, starts processes, and drains others.

The rule is the one that the simulator applies (`lorrery.scheduler.core.autoscaling`), to values from `/metrics`; each
group of workers has its own. The process to remove is chosen as by Kubernetes: one that is starting or restarting
before one that serves, and of these the youngest.

Workers are scraped as Prometheus would, and their series summed into one sample for the rule. A worker's counters begin
at 0 with its process and end with it; their increases are summed over all workers, as by `sum(increase(...))`.
"""

import asyncio
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import count

from prometheus_client.parser import text_string_to_metric_families

from lorrery.scheduler.core.autoscaling import HISTOGRAMS, Autoscaler, Sample, Window
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.local.cluster import START_SECONDS, LocalCluster
from lorrery.service.settings.cluster import Settings

Series = dict[str, float]
"""A process's series by name, summed over their labels; a bucket's bound is part of its name."""

_TIMEOUT_SECONDS = 5.0
_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_ENDED = "vllm:request_success_total"
_BY_THEMSELVES = ("stop", "length")
_UNPLACED = "lorrery_scheduler_unplaced_requests"


def read_series(text: str) -> Series:
    """Parse the series that the autoscaler needs from a `/metrics` page."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("vllm:") and family.name != _UNPLACED:
            continue
        for one in family.samples:
            if one.name == _ENDED and one.labels.get("finished_reason") not in _BY_THEMSELVES:
                continue
            name = f"{one.name}{{{one.labels['le']}}}" if "le" in one.labels else one.name
            found[name] = found.get(name, 0.0) + one.value
    return found


class ClusterScraper:
    """Sums the series of all processes, from scrape to scrape."""

    def __init__(self) -> None:
        self._last: dict[str, Series] = {}
        self._totals: Series = {}
        self._looked = False

    async def sample(
        self,
        at_seconds: float,
        serving: Mapping[str, str],
        leaving: Mapping[str, str],
        scheduler: str,
        *,
        num_starting: int,
        workers_per_process: int,
    ) -> Sample:
        """Scrape the workers, and return a sample. A worker that does not answer does not count as ready.

        Args:
            at_seconds: the current device time.
            serving: name of each serving worker process -> address of its metrics.
            leaving: the same for draining processes.
            scheduler: address of the scheduler's metrics.
            num_starting: number of processes that load their weights.
            workers_per_process: GPUs of each process, or groups of them.
        """
        addresses = {**serving, **leaving, "": scheduler}
        answers = await asyncio.gather(*(asyncio.to_thread(_get, address) for address in addresses.values()))
        seen = dict(zip(addresses, answers, strict=True))
        unplaced = seen.pop("").get(_UNPLACED, 0.0)
        self._add_up(seen)
        now = [seen[name] for name in serving if seen[name]]
        usage = sum(one.get("vllm:kv_cache_usage_perc", 0.0) for one in now) / workers_per_process
        buckets = {name: self._buckets(name) for name in HISTOGRAMS}
        return Sample(
            at_seconds=at_seconds,
            num_ready=len(now),
            num_starting=num_starting,
            num_draining=len(leaving),
            num_requests_waiting=round(sum(one.get("vllm:num_requests_waiting", 0.0) for one in now) + unplaced),
            num_requests_running=round(sum(one.get("vllm:num_requests_running", 0.0) for one in now)),
            kv_cache_usage_perc=usage,
            request_success=round(self._totals.get(_ENDED, 0.0)),
            prompt_tokens=round(self._totals.get(_COUNTERS[0], 0.0)),
            generation_tokens=round(self._totals.get(_COUNTERS[1], 0.0)),
            buckets=buckets,
        )

    def _add_up(self, seen: Mapping[str, Series]) -> None:
        for worker, series in seen.items():
            before = self._last.get(worker)
            for name, value in series.items():
                if not name.endswith("}") and name not in (*_COUNTERS, _ENDED):
                    continue
                # Counts from before the first scrape are ignored; a process that started later began at 0.
                since = 0.0 if before is None and self._looked else (before or series).get(name, 0.0)
                self._totals[name] = self._totals.get(name, 0.0) + (value - since if value >= since else value)
            if series:
                self._last[worker] = series
        for gone in self._last.keys() - seen.keys():
            del self._last[gone]
        self._looked = True

    def _buckets(self, name: str) -> tuple[list[float], list[int]]:
        """Return the bounds and counts of a histogram; one empty bucket if it has no value."""
        start = f"vllm:{name}_bucket{{"
        found = sorted(
            (float(key[len(start) : -1]), round(value)) for key, value in self._totals.items() if key.startswith(start)
        )
        bounds, counts = [bound for bound, _ in found], [count for _, count in found]
        return (bounds[:-1], counts) if counts else ([1.0], [0, 0])


def _get(address: str) -> Series:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
            return read_series(answer.read().decode())
    except OSError:
        return {}


class LocalAutoscaler:
    """Scales one group of a cluster's worker processes.

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
