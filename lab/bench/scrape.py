"""Reads a process's Prometheus endpoint, and takes the difference of two readings."""

import urllib.request
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


def fetch(address: str) -> str:
    """Return the text of HOST:PORT/metrics; blocks.

    Raises:
        OSError: it cannot be read.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape.

    Attributes:
        samples: value by (sample name, sorted labels).
    """

    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def parse(cls, text: str) -> "Reading":
        """Parse the text format."""
        samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return cls(samples)

    def since(self, before: "Reading") -> "Reading":
        """Return the growth of every sample."""
        return Reading({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})

    def plus(self, other: "Reading") -> "Reading":
        """Return the sums of this reading's samples and another's."""
        names = {**self.samples, **other.samples}
        return Reading({key: self.samples.get(key, 0.0) + other.samples.get(key, 0.0) for key in names})

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a name's samples that have these labels.

        Raises:
            LookupError: there is no such name.
        """
        wanted = labels.items()
        values = [value for (key, own), value in self.samples.items() if key == name and wanted <= dict(own).items()]
        if not values:
            raise LookupError(f"no sample {name} with {labels}")
        return sum(values)

    def quantile(self, name: str, q: float) -> float | None:
        """Return a histogram's quantile, interpolated in its bucket as Prometheus does; None if it is empty.

        In the last bucket, which has no upper bound, the answer is that bucket's lower bound.
        """
        by_bound: dict[float, float] = defaultdict(float)
        for (key, own), value in self.samples.items():
            if key == f"{name}_bucket":
                by_bound[float(dict(own)["le"])] += value
        bounds = sorted(by_bound)
        if not bounds or not by_bound[bounds[-1]]:
            return None
        rank = q * by_bound[bounds[-1]]
        lower, below = 0.0, 0.0
        for bound in bounds[:-1]:
            count = by_bound[bound]
            if count >= rank:
                return lower + (bound - lower) * (rank - below) / (count - below) if count > below else bound
            lower, below = bound, count
        return lower
