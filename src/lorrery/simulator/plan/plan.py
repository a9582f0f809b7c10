"""`lorrery.plan`, and the figures of `lorrery plan`: what a deployment can serve, and which cluster serves a rate.

One replica's figures are those of streams in a closed loop, simulated. With a rate, the cheapest cluster is sought.
"""

import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lorrery.service.errors import SettingsError
from lorrery.service.options import arguments_of
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.reading import key_of, leaves, override_of
from lorrery.service.settings.sections import MAX_ADAPTERS
from lorrery.simulator.arguments import read_overrides, read_table
from lorrery.simulator.interface import read_settings
from lorrery.simulator.plan.level import Level
from lorrery.simulator.plan.limits import bound_of, notes_on, only_kind, why_too_long
from lorrery.simulator.plan.options import Claim, PlanOptions
from lorrery.simulator.plan.search import Answer, Task, cheapest
from lorrery.simulator.plan.shapes import Shape, axes_of, capacity_of, shapes_of
from lorrery.simulator.plan.trials import Trial, load_of, serve, stream
from lorrery.simulator.result import data_frame
from lorrery.worker.build import beyond_profile, deployment_of
from lorrery.worker.device.capacity import Capacity, Workload
from lorrery.worker.device.catalogue.hardware import CatalogueError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ClaimAnswer", "Plan", "Point", "Search", "make_plan", "plan", "plan_registry", "registry_override"]

MOST_RATE = 1e6
"""Requests per second: a higher rate needs more replicas than a simulation can have."""
LEAST_REQUESTS, MOST_REQUESTS = 1_000, 60_000
"""Requests of a run; the most take some seconds."""
SPANS, LEAST_SPANS = 6, 3
"""A run lasts SPANS E2E times, long enough to show a growing queue, and LEAST_SPANS at least."""
LEAST_REPLICA_REQUESTS = 20
"""Requests of a run for each replica: with fewer, no replica has a queue."""
KV_SPACE = "KV space"
_REGISTRY, _FAMILY = "adapters.registry", "plan-r"

Watch = Callable[[str, bool], None]
"""Called with what was simulated, in words, and whether it kept the level."""


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


@dataclass(slots=True)
class Search:
    """The cheapest cluster for a rate.

    Attributes:
        num_requests: of each run.
        span_seconds: over which they arrive.
        not_shapes: combinations without a bound, and why.
        least: of all shapes the one whose bound is lowest; None: there is none.
        answer: what was found.
        notes: what it leaves out.
        command: repeats the run that decided it.
    """

    num_requests: int = 0
    span_seconds: float = 0.0
    not_shapes: list[str] = field(default_factory=list)
    least: Shape | None = None
    answer: Answer = field(default_factory=Answer)
    notes: list[str] = field(default_factory=list)
    command: str = ""


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
        overrides = {**overrides, **options.limits, _REGISTRY: plan_registry(options.work)}
    else:
        limits = (override_of(key, value) for key, value in options.limits.items())
        overrides = [*overrides, *limits, registry_override(options.work)]
    settings = only_kind(read_settings(options.settings, overrides))
    search = None if options.rate is None else Search()
    if search is not None:
        search_for(settings, options, search, given)
        if search.answer.shape is not None:
            settings = search.answer.shape.settings
    made = make_plan(settings, options)
    made.search = search
    return made


def make_plan(settings: Settings, options: PlanOptions) -> Plan:
    """Find what a worker of these settings can serve.

    Args:
        settings: of the cluster, in place of those in `options`; without groups of workers.
        options: checked.

    Raises:
        SettingsError: unknown names, or adapters that the cluster refuses.
    """
    work = options.work
    settings = changed(settings, {_REGISTRY: plan_registry(work)})
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


def search_for(
    settings: Settings,
    options: PlanOptions,
    search: Search,
    given: Iterable[str] = (),
    watch: Watch = lambda _what, _met: None,
    bounded: Callable[[Search], None] = lambda _search: None,
) -> None:
    """Search for the cheapest cluster that serves the rate.

    Args:
        settings: of the cluster, without groups of workers.
        options: checked.
        search: to fill, so that a caller who interrupts has the best so far.
        given: settings that the caller has chosen, which are not searched over.
        watch: called after each run.
        bounded: called when the bounds are known, before the first run.

    Raises:
        SettingsError: unknown names, or a rate that cannot be simulated.
    """
    rate, work, level = options.rate, options.work, options.level
    assert rate is not None
    assert isinstance(options.search, tuple)
    if rate > MOST_RATE:
        raise SettingsError(f"--rate is {rate:g} requests/s; at most {MOST_RATE:g} can be planned for")
    alone: dict[str, object] = {"worker.gpus": 1, _REGISTRY: plan_registry(work)}
    if settings.is_autoscaled:
        alone["autoscaler.enabled"] = False
        search.notes.append(
            "replicas are counted without the autoscaler: each run has a fixed number of them; `lorrery simulate"
            " --autoscale` shows what its rule does"
        )
    settings = changed(settings, alone)
    found = list(shapes_of(settings, work, level, rate, axes_of(settings, work, options.search, given)))
    shapes = [one for one in found if isinstance(one, Shape)]
    search.not_shapes = [one for one in found if isinstance(one, str)]
    if not shapes:
        return
    least = search.least = min(shapes, key=lambda one: (one.usd_per_hour or one.num_gpus) * one.least)
    search.num_requests = options.num_requests or _num_requests(rate, least.e2e)
    search.span_seconds = search.num_requests / rate
    if least.least > 1 and least.least * LEAST_REPLICA_REQUESTS > search.num_requests:
        raise SettingsError(
            f"--rate is {rate:g} requests/s, which takes some {least.least:,} replicas; in a run of"
            f" {search.num_requests:,} requests each gets fewer than {LEAST_REPLICA_REQUESTS}, too few to see a queue:"
            f" plan for a part of the rate and multiply, or take longer runs with --requests"
            f" {least.least * LEAST_REPLICA_REQUESTS}"
        )
    bounded(search)
    runs = _Runs(work, rate, search.num_requests, level)
    jobs = options.jobs or 1
    with runs.pool(jobs) as run_all:

        def watched(tasks: Sequence[Task]) -> Iterator[Trial]:
            for (shape, number, _, _), trial in zip(tasks, run_all(tasks), strict=True):
                yield trial
                watch(f"{number} x {shape.name}", trial.met)

        cheapest(shapes, level, watched, search.answer, num_seeds=options.seeds, at_once=jobs)


@dataclass(frozen=True, slots=True)
class _Runs:
    """What all runs of a search have in common; travels to processes."""

    work: Workload
    rate: float
    num_requests: int
    level: Level

    def run(self, task: Task) -> Trial:
        """Simulate one."""
        shape, number, seed, gives_up = task
        load = load_of(self.work, self.rate, self.num_requests, seed)
        return serve(shape.settings, load, self.level, number, gives_up=gives_up)

    @contextmanager
    def pool(self, jobs: int) -> Iterator[Callable[[Sequence[Task]], Iterator[Trial]]]:
        """Yield what runs tasks, in this process or several; leaving it ends these."""
        if jobs == 1:
            yield partial(map, self.run)
            return
        context = get_context("fork" if sys.platform == "linux" else "spawn")
        with ProcessPoolExecutor(jobs, context, _ignore_interrupts) as processes:
            try:
                yield partial(processes.map, self.run)
            finally:
                processes.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to all processes of a command, to the first one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _num_requests(rate: float, e2e: float) -> int:
    """Return the default number of requests of a run.

    Raises:
        SettingsError: more than can be simulated in reasonable time.
    """
    if LEAST_SPANS * rate * e2e > MOST_REQUESTS:
        part = math.floor(MOST_REQUESTS / (LEAST_SPANS * e2e) * 1000) / 1000
        raise SettingsError(
            f"--rate is {rate:g} requests/s of {e2e:.3g} s each; a run that shows a queue has"
            f" {math.ceil(LEAST_SPANS * rate * e2e):,} requests, and {MOST_REQUESTS:,} at most are simulated unasked:"
            f" plan for --rate {part:.6g} or less and multiply, or say how many with --requests"
        )
    return min(max(math.ceil(SPANS * rate * e2e), LEAST_REQUESTS), MOST_REQUESTS)


def plan_registry(work: Workload) -> list[dict[str, str | int]]:
    """Return the adapters of a plan as the settings' registry, one family for each rank.

    Raises:
        SettingsError: too many.
    """
    if work.num_adapters > MAX_ADAPTERS:
        raise SettingsError(f"--adapters is {work.num_adapters}; at most {MAX_ADAPTERS} can be planned for")
    return [{"id": f"{_FAMILY}{rank}", "rank": rank, "count": count} for rank, count in work.adapters_of_rank.items()]


def adapter_names(work: Workload) -> list[str]:
    """Return the ids of the registry's adapters, in its order."""
    return [f"{_FAMILY}{rank}-{index}" for rank, count in work.adapters_of_rank.items() for index in range(count)]


def registry_override(work: Workload) -> str:
    """Return the adapters of a plan as an argument of --set, in place of the settings' own.

    Settings are read with it: other options may not suit the adapters that it replaces.

    Raises:
        SettingsError: too many.
    """
    families = (
        f'{{ id = "{family["id"]}", rank = {family["rank"]}, count = {family["count"]} }}'
        for family in plan_registry(work)
    )
    return f"{_REGISTRY}=[{', '.join(families)}]"


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`."""
    return [2**power for power in range(most.bit_length())]


def _with_last(streams: list[int], most: int) -> list[int]:
    return streams if streams[-1] == most else [*streams, most]
