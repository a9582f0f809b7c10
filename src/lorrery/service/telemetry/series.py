"""A service's Prometheus metrics, from one table that defines help texts, types, labels, buckets and the docs.

A service lists its `Series` and passes each to its `Exporter`, which returns the objects to count with. These are plain
numbers, for the event loop's thread only, at a tenth of the cost of the client library's counters with their locks; the
thread that serves Prometheus reads them. Nothing is computed before a scrape.

The client library's counters take a lock and cost one to two microseconds per value, too much for values per message or
step. `Histogram` keeps values and counts them in batches: sorted, so that each bucket costs one search. That makes 0.2
microseconds per value. Cumulative counts are computed when they are read.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

_COUNT_AFTER = 256
"""Values kept before they are counted."""


class Histogram:
    """The counts of one histogram, without locks: the event loop's thread writes, any thread may read.

    Args:
        bounds: upper bounds of the buckets, ascending; a last bucket without bound is added.

    Attributes:
        exemplars: by bucket number: the trace of a recent value in it, and the value.
    """

    __slots__ = ("_bounds", "_counted", "exemplars")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        # Uncounted values, the number of counted ones in each bucket, and their sum: one tuple, so that a reader in
        # another thread gets a consistent state. The list of values only grows, the others are never changed.
        self._counted: tuple[list[float], list[int], float] = [], [0] * (len(bounds) + 1), 0.0
        self.exemplars: dict[int, tuple[str, float]] = {}

    def observe(self, value: float) -> None:
        """Count a value."""
        values = self._counted[0]
        values.append(value)
        if len(values) >= _COUNT_AFTER:
            self._counted = [], *self._count(*self._counted)

    def observe_many(self, value: float, times: int) -> None:
        """Count `value`, `times` times over."""
        values, counts, total = self._counted
        counts = counts.copy()
        counts[bisect_left(self._bounds, value)] += times
        self._counted = values, counts, total + value * times

    def observe_each(self, values: Collection[float], times: int = 1) -> None:
        """Count each of some values, `times` times over."""
        if times == 1:
            uncounted = self._counted[0]
            uncounted.extend(values)
            if len(uncounted) >= _COUNT_AFTER:
                self._counted = [], *self._count(*self._counted)
            return
        uncounted, counts, total = self._counted
        counts = counts.copy()
        for value in values:
            counts[bisect_left(self._bounds, value)] += times
        self._counted = uncounted, counts, total + sum(values) * times

    def exemplify(self, value: float, trace_id: str) -> None:
        """Attach a trace to a value that was observed."""
        self.exemplars[bisect_left(self._bounds, value)] = trace_id, value

    def read(self) -> tuple[list[int], float]:
        """Return the cumulative counts up to each bound, the infinite one included, and the sum of all values."""
        counts, total = self._count(*self._counted)
        return list(accumulate(counts)), total

    def _count(self, values: list[float], counts: list[int], total: float) -> tuple[list[int], float]:
        """Return the counts and the sum with `values` added."""
        if not values:
            return counts, total
        values = sorted(values)
        counts, below = counts.copy(), 0
        for bucket, bound in enumerate(self._bounds):
            up_to = bisect_right(values, bound, below)
            counts[bucket] += up_to - below
            below = up_to
            if below == len(values):
                return counts, sum(values, total)
        counts[-1] += len(values) - below
        return counts, sum(values, total)


@dataclass(frozen=True, slots=True)
class Series:
    """One metric.

    Attributes:
        name: in full; ends in `_total` exactly for counters.
        unit: of its value, in words: "device seconds", "requests".
        help: one sentence, for Prometheus and the docs.
        labels: label names.
        buckets: upper bounds of a histogram, ascending; empty: not a histogram.
        more: additional text for the docs, in Markdown.
        is_summary: whether its values are counted and summed, without buckets.
    """

    name: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    more: str = ""
    is_summary: bool = False

    @property
    def type(self) -> str:
        """Prometheus's type of the metric."""
        if self.buckets or self.is_summary:
            return "summary" if self.is_summary else "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


def table(module: Mapping[str, object]) -> tuple[Series, ...]:
    """Return the series among a module's globals (`globals()`), in order."""
    return tuple(value for value in module.values() if isinstance(value, Series))


class Number:
    """The value of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`."""
        self.value += amount

    def set(self, value: float) -> None:
        """Set the value."""
        self.value = value


T = TypeVar("T", bound=Number | Histogram)


class Labelled(Generic[T]):
    """One number or histogram per combination of label values; callers must bound the number of combinations."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._by_values: dict[tuple[str, ...], T] = {}

    def labels(self, *values: str) -> T:
        """Return the entry for these label values, given in the order of the series' labels; created on first use."""
        one = self._by_values.get(values)
        if one is None:
            one = self._by_values[values] = self._make()
        return one

    def forget(self, *values: str) -> None:
        """Remove the entry for these label values, if any."""
        self._by_values.pop(values, None)

    def read(self) -> list[tuple[tuple[str, ...], T]]:
        """Return all entries; may be called from any thread."""
        return list(self._by_values.items())


Sample = tuple[tuple[str, ...], float | Number | Histogram]
"""Label values, and the value shown for them."""


class Exporter(Collector):
    """Shows the series of one table, in its order.

    A process with several instances of one thing makes an exporter for each, with a different constant label; a
    `Registry` shows them as one.

    Args:
        registry: where it is registered.
        table: the series.
        constant: labels added to all series.

    Attributes:
        readers: function that returns each series' samples; None: not set yet.
    """

    def __init__(
        self, registry: CollectorRegistry, table: Sequence[Series], constant: Mapping[str, str] | None = None
    ) -> None:
        self.readers: dict[Series, Callable[[], Iterable[Sample]] | None] = dict.fromkeys(table)
        self.constant = dict(constant or {})
        self._all: list[Exporter] = [self]  # this one, and exporters joined to it
        registry.register(self)

    def joined(self, other: "Exporter") -> bool:
        """Show another exporter's series together with this one's if they are the same; return whether they are."""
        if self.readers.keys() != other.readers.keys():
            return False
        self._all.append(other)
        return True

    def number(self, series: Series) -> Number:
        """Show a counter or gauge without labels; return its number."""
        number = Number()
        self.read(series, lambda: [((), number)])
        return number

    def numbers(self, series: Series, *known: str) -> Labelled[Number]:
        """Show a counter or gauge with labels; `known` values of a single label are present from the start."""
        numbers = Labelled(Number)
        for value in known:
            numbers.labels(value)
        self.read(series, numbers.read)
        return numbers

    def histogram(self, series: Series) -> Histogram:
        """Show a histogram without labels; return it."""
        histogram = Histogram(series.buckets)
        self.read(series, lambda: [((), histogram)])
        return histogram

    def histograms(self, series: Series, *known: str) -> Labelled[Histogram]:
        """Show a histogram with labels; `known` values of a single label are present from the start."""
        histograms = Labelled(lambda: Histogram(series.buckets))
        for value in known:
            histograms.labels(value)
        self.read(series, histograms.read)
        return histograms

    def summaries(self, series: Series) -> Labelled[Histogram]:
        """Show a summary with labels: a histogram of one bucket, whose bound is not shown."""
        return self.histograms(series)

    def value(self, series: Series, read: Callable[[], float]) -> None:
        """Show what `read` returns at each scrape; `read` is called in another thread."""
        self.read(series, lambda: [((), read())])

    def read(self, series: Series, read: Callable[[], Iterable[Sample]]) -> None:
        """Show the samples that `read` returns at each scrape; `read` is called in another thread."""
        assert series in self.readers, f"{series.name} is not in the table"
        self.readers[series] = read

    def describe(self) -> Iterator[Metric]:
        """Yield all series empty; the registry takes their names from these."""
        for series in self.readers:
            yield family(series, (), self.constant)

    def collect(self) -> Iterator[Metric]:
        """Yield all series that have a reader, for the client library."""
        for series in self.readers:
            found = [family(series, read(), one.constant) for one in self._all if (read := one.readers[series])]
            if found:
                for more in found[1:]:
                    found[0].samples += more.samples
                yield found[0]


class Registry(CollectorRegistry):
    """A registry that shows exporters of the same series as one."""

    def __init__(self) -> None:
        super().__init__()
        self._exporters: list[Exporter] = []

    def register(self, collector: Collector) -> None:
        """Register a collector; an `Exporter` whose series are already shown by another one is joined to it."""
        if not isinstance(collector, Exporter):
            super().register(collector)
        elif not any(one.joined(collector) for one in self._exporters):
            super().register(collector)
            self._exporters.append(collector)


def family(series: Series, samples: Iterable[Sample], constant: Mapping[str, str] | None = None) -> Metric:
    """Return the client library's metric for a series; only OpenMetrics shows exemplars."""
    names, values = [*series.labels, *(constant or {})], [*(constant or {}).values()]
    if series.type == "histogram":
        histogram = HistogramMetricFamily(series.name, series.help, labels=names)
        bounds = (*map(str, map(float, series.buckets)), "+Inf")
        for labels, value in samples:
            assert isinstance(value, Histogram)
            counts, total = value.read()
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [*zip(bounds, counts, strict=True)]
            for number, (trace_id, observed) in list(value.exemplars.items()):
                buckets[number] = bounds[number], counts[number], Exemplar({"trace_id": trace_id}, observed)
            histogram.add_metric([*labels, *values], buckets, total)
        return histogram
    if series.is_summary:
        summary = SummaryMetricFamily(series.name, series.help, labels=names)
        for labels, value in samples:
            assert isinstance(value, Histogram)
            counts, total = value.read()
            summary.add_metric([*labels, *values], counts[-1], total)
        return summary
    kind = CounterMetricFamily if series.type == "counter" else GaugeMetricFamily
    plain = kind(series.name, series.help, labels=names)
    for labels, value in samples:
        assert not isinstance(value, Histogram)
        plain.add_metric([*labels, *values], value.value if isinstance(value, Number) else value)
    return plain


_SECONDS = 1.0


class Throughput:
    """The rate of a counter over the time since the last query, at least a second.

    Args:
        count: returns the current value of the counter.
    """

    def __init__(self, count: Callable[[], float]) -> None:
        self._count = count
        self._rate = 0.0
        self._last = (time.monotonic(), count())

    def per_second(self) -> float:
        """Return the rate; wall seconds."""
        now, count = time.monotonic(), self._count()
        at, counted = self._last
        if now - at >= _SECONDS:
            self._rate, self._last = (count - counted) / (now - at), (now, count)
        return self._rate
