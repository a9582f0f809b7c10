"""What a service shows to Prometheus, from one table: the table makes help texts, types, labels, buckets and the docs.

A service lists its `Series`, and gives each of them to its `Exporter`, which hands out what to count with. That is
plain numbers, for the event loop's thread only, which costs a tenth of the client library's counters with their locks;
the thread that answers Prometheus reads them. Nothing is computed before somebody asks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lorrery.chassis.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Series:
    """One metric.

    Attributes:
        name: in full; that of a counter, and of no other, ends in `_total`.
        unit: of its value, in words: "device seconds", "requests".
        help: one sentence, as Prometheus and the docs have it.
        labels: names of its labels.
        buckets: upper bounds of a histogram, ascending; empty: it is none.
        more: what the docs say beyond `help`; Markdown.
    """

    name: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    more: str = ""

    @property
    def type(self) -> str:
        """As Prometheus calls it."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


def table(module: Mapping[str, object]) -> tuple[Series, ...]:
    """Return the series that a module's names (`globals()`) stand for, in order."""
    return tuple(value for value in module.values() if isinstance(value, Series))


class Number:
    """The value of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add to it."""
        self.value += amount

    def set(self, value: float) -> None:
        """Let it be this."""
        self.value = value


T = TypeVar("T", bound=Number | Histogram)


class Labelled(Generic[T]):
    """One number or histogram for each combination of values of labels; whoever asks for one bounds how many."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._by_values: dict[tuple[str, ...], T] = {}

    def labels(self, *values: str) -> T:
        """Return the one for these values, in the order of the series' labels."""
        one = self._by_values.get(values)
        if one is None:
            one = self._by_values[values] = self._make()
        return one

    def read(self) -> list[tuple[tuple[str, ...], T]]:
        """Return all there are; may be called by any thread."""
        return list(self._by_values.items())


Sample = tuple[tuple[str, ...], float | Number | Histogram]
"""Values of the labels, and what is shown for them."""


class Exporter(Collector):
    """Shows the series of one table, in its order.

    Args:
        registry: where.
        table: what.
        constant: labels that all of them have besides their own.
    """

    def __init__(
        self, registry: CollectorRegistry, table: Sequence[Series], constant: Mapping[str, str] | None = None
    ) -> None:
        self._readers: dict[Series, Callable[[], Iterable[Sample]] | None] = dict.fromkeys(table)
        self._constant = dict(constant or {})
        registry.register(self)

    def number(self, series: Series) -> Number:
        """Show a counter or gauge without labels; return what to count with."""
        number = Number()
        self.read(series, lambda: [((), number)])
        return number

    def numbers(self, series: Series, *known: str) -> Labelled[Number]:
        """Show a counter or gauge with labels; what is `known` of a single label is there from the start."""
        numbers = Labelled(Number)
        for value in known:
            numbers.labels(value)
        self.read(series, numbers.read)
        return numbers

    def histogram(self, series: Series) -> Histogram:
        """Show a histogram without labels; return what to count with."""
        histogram = Histogram(series.buckets)
        self.read(series, lambda: [((), histogram)])
        return histogram

    def histograms(self, series: Series, *known: str) -> Labelled[Histogram]:
        """Show a histogram with labels; what is `known` of a single label is there from the start."""
        histograms = Labelled(lambda: Histogram(series.buckets))
        for value in known:
            histograms.labels(value)
        self.read(series, histograms.read)
        return histograms

    def value(self, series: Series, read: Callable[[], float]) -> None:
        """Show what `read` returns at each scrape; called in another thread."""
        self.read(series, lambda: [((), read())])

    def read(self, series: Series, read: Callable[[], Iterable[Sample]]) -> None:
        """Show what `read` returns at each scrape, a value for each combination of labels; called in another thread."""
        assert series in self._readers, f"{series.name} is not in the table"
        self._readers[series] = read

    def collect(self) -> Iterator[Metric]:
        """Yield all series that have something to show."""
        for series, read in self._readers.items():
            if read is not None:
                yield family(series, read(), self._constant)


def family(series: Series, samples: Iterable[Sample], constant: Mapping[str, str] | None = None) -> Metric:
    """Return what the client library shows of a series."""
    names, values = [*series.labels, *(constant or {})], [*(constant or {}).values()]
    if series.type == "histogram":
        histogram = HistogramMetricFamily(series.name, series.help, labels=names)
        for labels, value in samples:
            assert isinstance(value, Histogram)
            buckets, total = value.read()
            histogram.add_metric([*labels, *values], buckets, total)
        return histogram
    kind = CounterMetricFamily if series.type == "counter" else GaugeMetricFamily
    plain = kind(series.name, series.help, labels=names)
    for labels, value in samples:
        assert not isinstance(value, Histogram)
        plain.add_metric([*labels, *values], value.value if isinstance(value, Number) else value)
    return plain
