"""Scrapes a local cluster's workers as Prometheus would, and sums the series into one sample for the autoscaler's rule.

A worker's counters begin at 0 with its process and end with it; their increases are summed over all workers, as by
`sum(increase(...))`.
"""

import asyncio
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from lorrery.scheduler.core.autoscaling import HISTOGRAMS, Sample

__all__ = ["ClusterScraper", "Series"]

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
