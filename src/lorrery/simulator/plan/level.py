"""A service level: bounds on what a run measures, of which only those count that were asked for.

    ttft_p95=1  tpot_mean=0.05  e2e_p99=30      seconds, at most; a percentile, or the mean
    goodput=0.99                                share of requests that keep every bound in seconds, at least
    tokens_per_second=300                       output tokens of all requests, at least

A request that fails, or is refused, keeps no bound in seconds. The p-th percentile is the smallest value that p % of
the requests do not exceed, so that a run is lost as soon as more than the rest do: `Judge` says so while it runs.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from lorrery.service.errors import SettingsError
from lorrery.simulator.arguments import read_positive, shown
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.vocabulary.units import LAST_SECONDS, PS_PER_SECOND

__all__ = ["DEFAULT", "Bound", "Judge", "Level", "parse_level", "read_level"]

GOODPUT, TOKENS = "goodput", "tokens_per_second"
_TIMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
_NAME: Final = re.compile(rf"({'|'.join(_TIMES)})_(?:mean|p(\d\d?(?:\.\d+)?))")
_KNOWN: Final = f"{', '.join(_TIMES)} with _mean or a percentile such as _p95; {GOODPUT}; {TOKENS}"
_OUTER = 0.1
"""Share of the ends at either edge of a run between which tokens per second are counted: in between it is at work."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound.

    Attributes:
        name: as it was asked for, `ttft_p95`.
        limit: seconds, share of requests or tokens per second.
        time: `ttft`, `tpot` or `e2e`; empty: no time.
        share: of the requests that must keep a percentile; None: no percentile.
    """

    name: str
    limit: float
    time: str = ""
    share: Fraction | None = None

    def holds(self, value: float) -> bool:
        """Return whether a measured value is within it."""
        return value <= self.limit if self.time else value >= self.limit

    def excess(self, value: float) -> float:
        """Return how far a value is from the limit, as a ratio: 1 at it, less within."""
        return value / self.limit if self.time else self.limit / max(value, 1e-9)

    def shown(self, value: float) -> str:
        """Return a value as text, with its unit."""
        if self.time:
            return f"{value * 1e3:,.{1 if value < 0.1 else 0}f} ms" if math.isfinite(value) else "-"
        return f"{value:.2%}" if self.name == GOODPUT else f"{value:,.0f}"

    def __str__(self) -> str:
        if not self.time:
            return f"{self.name.replace('_', ' ')} {self.limit:g}"
        limit = f"{self.limit:g} s" if self.limit >= 1 or self.time != "tpot" else f"{self.limit * 1e3:g} ms"
        return f"{_TIMES[self.time]} {self.name.partition('_')[2]} {limit}"


@dataclass(frozen=True, slots=True)
class Level:
    """Bounds, each of another name.

    Attributes:
        bounds: in the order in which they were given.
    """

    bounds: tuple[Bound, ...]

    def limit(self, time: str) -> float | None:
        """Return the narrowest bound on the mean or the middle and above of a time; None: none."""
        half = Fraction(1, 2)
        return min(
            (one.limit for one in self.bounds if one.time == time and (one.share is None or one.share >= half)),
            default=None,
        )

    def is_kept(self, request: SimulatedRequest) -> bool:
        """Return whether an ended request keeps every bound in seconds."""
        return self.are_kept(_times(request))

    def are_kept(self, times: Mapping[str, float]) -> bool:
        """Return whether the times of a request keep every bound in seconds."""
        return math.isfinite(times["e2e"]) and all(
            times[bound.time] <= bound.limit for bound in self.bounds if bound.time
        )

    def __str__(self) -> str:
        return ", ".join(map(str, self.bounds)) or "none"


def _times(request: SimulatedRequest) -> dict[str, float]:
    """Return the seconds of an ended request; infinite ones if it did not finish."""
    first_ps, end_ps = request.first_token_ps, request.last_token_ps or request.finished_ps
    if request.outcome != "finished" or first_ps is None or end_ps is None:
        return dict.fromkeys(_TIMES, math.inf)
    tokens = request.output_tokens
    return {
        "ttft": (first_ps - request.sent_ps) / PS_PER_SECOND,
        "tpot": (end_ps - first_ps) / PS_PER_SECOND / (tokens - 1) if tokens > 1 else 0.0,
        "e2e": (end_ps - request.sent_ps) / PS_PER_SECOND,
    }


def parse_level(text: str) -> tuple[str, float]:
    """Read NAME=VALUE.

    Raises:
        SettingsError: not of that form.
    """
    name, equals, value = text.partition("=")
    try:
        return name.strip(), float(value if equals else "")
    except ValueError:
        raise SettingsError(f"--slo {text}: expected NAME=VALUE, as in ttft_p95=1; known: {_KNOWN}") from None


def read_level(name: str, given: object) -> tuple[tuple[str, float], ...]:
    """Check bounds by name, from Python as a mapping.

    Raises:
        SettingsError: an unknown name, or a limit that cannot be.
    """
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise SettingsError(f"{name} is {shown(given)}; expected a mapping, such as {{'ttft_p95': 1.0}}")
    found: dict[str, float] = {}
    for key, value in pairs:
        if not isinstance(key, str) or not (_NAME.fullmatch(key) or key in (GOODPUT, TOKENS)):
            raise SettingsError(f"{name}: {shown(key)} is not known; known: {_KNOWN}")
        if key in found:
            raise SettingsError(f"{name}: {key} is given twice")
        limit = found[key] = read_positive(f"{name} {key}", value)
        if limit > (most := {GOODPUT: 1.0, TOKENS: math.inf}.get(key, LAST_SECONDS)):
            raise SettingsError(f"{name} {key} is {limit:g}; it must be at most {most:g}")
    return tuple(found.items())


def level_of(bounds: tuple[tuple[str, float], ...]) -> Level:
    """Return the level of checked bounds."""
    found = []
    for name, limit in bounds:
        time = _NAME.fullmatch(name)
        percentile = None if time is None or time[2] is None else Fraction(time[2]) / 100
        found.append(Bound(name, limit, "" if time is None else time[1], percentile))
    return Level(tuple(found))


DEFAULT: Final = (("ttft_p99", 1.0), ("tpot_p99", 0.05))
"""Where nothing is asked for."""


class Judge:
    """Holds a run's requests against a level, as they end.

    Args:
        level: asked for.
        num_requests: of the whole run.
    """

    def __init__(self, level: Level, num_requests: int) -> None:
        self.level = level
        self.num_failed = self.num_ended = 0
        self.failure = ""
        self.lost_first = False
        """Whether the first request failed, which came to an idle cluster."""
        self._num_requests = num_requests
        self._times: dict[str, list[float]] = {name: [] for name in _TIMES}
        self._ends: list[tuple[int, int]] = []
        self._allowed = [self._spare(bound) for bound in level.bounds]

    def add(self, request: SimulatedRequest) -> bool:
        """Count an ended request; return whether the run can still keep the level."""
        self.num_ended += 1
        times = _times(request)
        if math.isinf(times["e2e"]):
            self.num_failed += 1
            self.lost_first |= request.handle == 0
            self.failure = self.failure or request.detail or request.outcome or ""
        else:
            end_ps = request.last_token_ps or request.finished_ps
            assert end_ps is not None
            self._ends.append((end_ps, request.output_tokens))
        for name, seconds in times.items():
            self._times[name].append(seconds)
        kept = True
        for place, bound in enumerate(self.level.bounds):
            if (spare := self._allowed[place]) is None:
                continue
            late = times[bound.time] > bound.limit if bound.time else not self.level.are_kept(times)
            if late:
                spare -= 1
                self._allowed[place] = spare
            kept = kept and spare >= 0
        return kept

    def value(self, bound: Bound) -> float:
        """Return what was measured for a bound, over the requests so far."""
        if bound.name == GOODPUT:
            columns = [self._times[name] for name in _TIMES]
            good = sum(self.level.are_kept(dict(zip(_TIMES, row, strict=True))) for row in zip(*columns, strict=True))
            return good / max(self.num_ended, 1)
        if bound.name == TOKENS:
            return self.tokens_per_second
        seconds = np.array(self._times[bound.time])
        if not len(seconds):
            return math.inf
        if bound.share is None:
            return float(seconds.mean())
        rank = max(math.ceil(bound.share * len(seconds)), 1)
        return float(np.partition(seconds, rank - 1)[rank - 1])

    def mean(self, time: str) -> float:
        """Return the mean seconds of a time over the requests so far."""
        return float(np.mean(self._times[time]))

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, without the edges of the run."""
        ends = sorted(self._ends)
        edge = int(len(ends) * _OUTER)
        middle = ends[edge : len(ends) - edge]
        if len(middle) < 2 or middle[-1][0] == middle[0][0]:
            return 0.0
        return sum(tokens for _, tokens in middle[1:]) * PS_PER_SECOND / (middle[-1][0] - middle[0][0])

    def figures(self) -> dict[str, float]:
        """Return what was measured, by bound."""
        return {bound.name: self.value(bound) for bound in self.level.bounds}

    def _spare(self, bound: Bound) -> int | None:
        """Return how many requests may miss a bound; None: it depends on more than their number."""
        share = Fraction(str(bound.limit)) if bound.name == GOODPUT else bound.share
        if share is None:
            return None
        return self._num_requests - math.ceil(share * self._num_requests)
