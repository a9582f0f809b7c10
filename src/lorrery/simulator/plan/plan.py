"""`lorrery.plan`, and the figures of `lorrery plan`: what a deployment can serve, and which cluster serves a rate.

One replica's figures are those of streams in a closed loop, simulated. With a rate, the cheapest cluster is sought.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lorrery.service.options import arguments_of
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.reading import key_of, leaves, override_of
from lorrery.simulator.arguments import read_overrides, read_table
from lorrery.simulator.interface import read_settings
from lorrery.simulator.plan.cluster import Search, Watch, around, search_for
from lorrery.simulator.plan.limits import bound_of, notes_on, only_kind, why_too_long
from lorrery.simulator.plan.options import Claim, PlanOptions
from lorrery.simulator.plan.shapes import capacity_of
from lorrery.simulator.plan.trials import REGISTRY, adapter_names, plan_registry, registry_override, stream
from lorrery.simulator.result import data_frame
from lorrery.worker.build import beyond_profile, deployment_of
from lorrery.worker.device.capacity import Capacity, Workload
from lorrery.worker.device.catalogue.hardware import CatalogueError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ClaimAnswer", "Plan", "Point", "make_plan", "plan"]

KV_SPACE = "KV space"


@dataclass(frozen=True, slots=True)
class Point:
    """A replica under `concurrency` streams in a closed loop; mean times in seconds, rates per second.

    Attributes:
        concurrency: streams.
        ttft: request to first token.
        itl: a decode step alone.
        tpot: from one token to the next, time for others' prompts included.
        e2e: request to last token.
        stream_tokens: per stream.
        total_tokens: of all streams.
        requests: of all streams.
        kv_ratio: share of the KV pool that they fill in the end.
        limit: the part that takes most of the time, or `KV_SPACE`.
        shares: of the time, by part.
        met: whether they keep the level.
    """

    concurrency: int
    ttft: float
    itl: float
    tpot: float
    e2e: float
    stream_tokens: float
    total_tokens: float
    requests: float
    kv_ratio: float
    limit: str
    shares: Mapping[str, float]
    met: bool


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """Whether a claim holds, in both readings: each stream gets the rate, or all streams together."""

    unqueued_ttft: float
    ttft_holds: bool
    stream_tokens: float
    stream_holds: bool
    total_streams: int | None
    total_itl: float | None


@dataclass
class Plan:
    """The figures of one deployment.

    Attributes:
        name: of the deployment.
        num_gpus: of one replica.
        refused: why there are no figures; None if there are.
        limit_name: the setting that limits the running sequences.
        points: one per concurrency.
        peak: the point with the most tokens per second.
        best: the point with the most streams within the service level; None if not even one is.
        held_back_by: what keeps `best` from more streams.
        notes: what the figures leave out, and why.
        search: the cheapest cluster for the rate.
        curve: value -> the cheapest cluster with it, where a curve was asked for.
        claim: whether a seller's claim holds.
        made_of: settings and workload.
    """

    name: str
    num_gpus: int
    refused: str | None = None
    limit_name: str = ""
    points: list[Point] = field(default_factory=list)
    peak: Point | None = None
    best: Point | None = None
    held_back_by: str = ""
    notes: list[str] = field(default_factory=list)
    search: Search | None = None
    curve: dict[str, Search] = field(default_factory=dict)
    claim: ClaimAnswer | None = None
    made_of: tuple[Settings, Workload] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def capacity(self) -> Capacity | None:
        """Memory, and the arithmetic of steps."""
        return None if self.made_of is None else capacity_of(*self.made_of)

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled state: step-time models cannot be pickled, and are made again."""
        return {name: value for name, value in vars(self).items() if name != "capacity"}

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All figures of `points` by name, each of shape (points,); times in seconds, rates per second."""
        names = [field.name for field in fields(Point) if field.name != "shares"]
        return {name: np.array([getattr(point, name) for point in self.points]) for name in names}

    def to_pandas(self) -> "pd.DataFrame":
        """Return the columns as a data frame, one row per concurrency.

        Raises:
            ImportError: pandas is not installed.
        """
        return data_frame(self.columns)

    @property
    def num_replicas(self) -> int | None:
        """Replicas of the cheapest cluster; None if no rate was given, or none keeps the level."""
        return None if self.search is None else self.search.answer.num_replicas or None


@arguments_of(PlanOptions)
def plan(options: PlanOptions) -> Plan:
    """Find what a worker can serve: memory, latency and throughput over concurrency; with a rate, the cheapest cluster.

    Raises:
        SettingsError: invalid settings or figures, several kinds of worker, or adapters that the cluster refuses.
    """
    options = read_table(options)
    overrides = read_overrides(options.overrides)
    given = [key if isinstance(overrides, Mapping) else key_of(key) for key in overrides]
    if isinstance(options.settings, Mapping):
        given += [".".join(key) for key, _ in leaves(options.settings)]
    if isinstance(overrides, Mapping):
        overrides = {**overrides, **options.limits, REGISTRY: plan_registry(options.work)}
    else:
        limits = (override_of(key, value) for key, value in options.limits.items())
        overrides = [*overrides, *limits, registry_override(options.work)]
    settings = only_kind(read_settings(options.settings, overrides))
    if options.curve:
        made = make_plan(settings, options)
        made.curve = dict(curve_of(settings, options, given))
        return made
    search = None if options.rate is None else Search()
    if search is not None:
        search_for(settings, options, search, given)
        if search.answer.shape is not None:
            settings = search.answer.shape.settings
            if options.around:
                around(search, options.jobs or 1)
    made = make_plan(settings, options)
    made.search = search
    return made


def curve_of(
    settings: Settings, options: PlanOptions, given: Iterable[str] = (), watch: Watch = lambda _what, _met: None
) -> Iterator[tuple[str, Search]]:
    """Yield each value of the curve with the cheapest cluster for it.

    Args:
        settings: of the cluster, without groups of workers.
        options: checked, with a rate and a curve.
        given: settings that the caller has chosen.
        watch: called after each run.

    Raises:
        SettingsError: unknown names, values that cannot be, or a rate that cannot be simulated.
    """
    for value, own in options.along_curve():
        search = Search()
        search_for(settings, own, search, given, watch)
        yield value, search


def make_plan(settings: Settings, options: PlanOptions) -> Plan:
    """Find what a worker of these settings can serve.

    Args:
        settings: of the cluster, in place of those in `options`; without groups of workers.
        options: checked.

    Raises:
        SettingsError: unknown names, or adapters that the cluster refuses.
    """
    work = options.work
    settings = changed(settings, {REGISTRY: plan_registry(work)})
    deployment = deployment_of(settings)
    name = f"{deployment.model.name} on {deployment.tensor_parallel} x {deployment.gpu.name}"
    result = Plan(name, deployment.tensor_parallel)
    too_long = why_too_long(settings, work)
    if too_long is not None:
        result.refused = f"{name}: {too_long}"
        return result
    try:
        capacity = capacity_of(settings, work)
    except CatalogueError as error:
        result.refused = str(error)
        return result
    result.made_of, result.limit_name = (settings, work), settings.scheduler.max_running_setting
    if capacity.running_streams < 1:
        result.refused = (
            f"{name}: the KV cache holds {capacity.kv_pool_tokens} tokens, less than one request's"
            f" {work.prompt_tokens + work.output_tokens}"
        )
        return result
    _Loops(settings, options, capacity).fill(result)
    if beyond := beyond_profile(capacity.step_time):
        result.notes.append(f"step times are extrapolated beyond worker.profile: {beyond}")
    return result


class _Loops:
    """The points of one deployment, each simulated once."""

    def __init__(self, settings: Settings, options: PlanOptions, capacity: Capacity) -> None:
        alone = {"autoscaler.enabled": False} if settings.is_autoscaled else {}
        self._settings = changed(settings, {"worker.gpus": 1, **alone})
        self._options, self._capacity = options, capacity
        self._found: dict[int, Point] = {}

    def fill(self, result: Plan) -> None:
        """Add the points, the largest number of streams within the level, and the answer to a claim."""
        options, most = self._options, self._capacity.running_streams
        own_limit = options.max_concurrency is not None
        asked = options.concurrency or _with_last(_doubling(most), most)
        result.points = [self.at(b) for b in asked if b <= most]
        result.notes = notes_on(
            self._capacity, [b for b in asked if b > most], self.at(most).requests, own_limit=own_limit
        )
        best = self._most_streams(most)
        if best:
            result.best = self.at(best)
            result.held_back_by = bound_of(self._capacity, best, own_limit=own_limit) or "the level"
        for streams in _with_last(_doubling(most), most):
            self.at(streams)
        result.peak = max(self._found.values(), key=lambda point: point.total_tokens)
        if options.claim is not None:
            result.claim = self._judged(options.claim, most)

    def at(self, streams: int) -> Point:
        """Return the figures of this many streams."""
        if streams not in self._found:
            self._found[streams] = self._point(streams)
        return self._found[streams]

    def _point(self, streams: int) -> Point:
        work, capacity = self._options.work, self._capacity
        times = stream(self._settings, work, streams, self._options.level, adapter_names(work))
        decoding = max(round(streams * (1 - times.ttft / times.e2e)), 1)
        shares = capacity.shares_of(times.ttft, times.tpot, decoding)
        full = streams + 1 > capacity.fitting_streams
        return Point(
            concurrency=streams,
            ttft=times.ttft,
            itl=capacity.itl(decoding),
            tpot=times.tpot,
            e2e=times.e2e,
            stream_tokens=work.output_tokens / times.e2e,
            total_tokens=streams * work.output_tokens / times.e2e,
            requests=streams / times.e2e,
            kv_ratio=streams * capacity.stream_kv_tokens / capacity.kv_pool_tokens,
            limit=KV_SPACE if full else max(shares, key=lambda part: shares[part]),
            shares=shares,
            met=times.met,
        )

    def _most_streams(self, most: int) -> int:
        """Return the largest number of streams that keeps the level; 0 if not even one does."""
        low, high = 0, 1
        while high < most and self.at(high).met:
            low, high = high, min(2 * high, most)
        if self.at(high).met:
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            if self.at(middle).met:
                low = middle
            else:
                high = middle
        return low

    def _judged(self, claim: Claim, most: int) -> ClaimAnswer:
        ttft, alone = self._capacity.unqueued_ttft(claim.prompt_tokens), self.at(1).stream_tokens
        enough = [b for b in _with_last(_doubling(most), most) if self.at(b).total_tokens >= claim.tokens_per_second]
        streams = None
        if enough:
            low, streams = enough[0] // 2, enough[0]
            while low + 1 < streams:
                middle = (low + streams) // 2
                if self.at(middle).total_tokens >= claim.tokens_per_second:
                    streams = middle
                else:
                    low = middle
        return ClaimAnswer(
            unqueued_ttft=ttft,
            ttft_holds=ttft < claim.ttft,
            stream_tokens=alone,
            stream_holds=alone >= claim.tokens_per_second,
            total_streams=streams,
            total_itl=None if streams is None else self.at(streams).itl,
        )


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`."""
    return [2**power for power in range(most.bit_length())]


def _with_last(streams: list[int], most: int) -> list[int]:
    return streams if streams[-1] == most else [*streams, most]
